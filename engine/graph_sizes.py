"""The sizes of the steps that are captured in CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import EngineConfig
    from .models import ModelSpec

# Larger steps of most models compute for longer than it takes to launch their kernels.
MAX_ROWS, MAX_TOKENS = 512, 1024
# Those of small models do not. In the time in which a slow host launches a layer a GPU multiplies about this often: 28
# layers of Qwen3-0.6B took it 12 ms with 2,048 tokens, and on a faster host 7 ms.
LAUNCHED, MOST_TOKENS, UNIT = 50_000_000_000, 8192, 512
# Rows whose logits stay in memory of their own. With more, the head computes for longer than its launches take.
MAX_DRAWS = 128
# Padding of a step with chunks of prompts, which costs computing time; decodes mostly wait for the weights.
PADDING, PADDING_SHARE = 64, 4


class Bucket(NamedTuple):
    """The size of a captured step, which also computes smaller ones."""

    tokens: int  # padding included
    has_chunks: bool  # rows of several tokens; without them each row has one token

    def suits(self, tokens: int) -> bool:
        """Return whether a step of this number of tokens, of the same kind, may be computed in this size."""
        padding = self.tokens - tokens
        return padding >= 0 and (not self.has_chunks or padding <= max(PADDING, tokens // PADDING_SHARE))


class Sizes(NamedTuple):
    """The buckets of an engine, largest first: a smaller graph fits into the memory that a larger one has left."""

    at_start: list[Bucket]
    later: list[Bucket]

    @property
    def largest(self) -> int:
        """The tokens of the largest bucket."""
        return max(bucket.tokens for bucket in self.all)

    @property
    def all(self) -> list[Bucket]:
        return [*self.at_start, *self.later]


def of(spec: ModelSpec, config: EngineConfig) -> Sizes:
    """Return the buckets of an engine of our own decoder with a resolved config."""
    assert spec.decoder is not None and config.max_seqs and config.max_batched_tokens
    layers = range(len(spec.decoder.shapes))
    numbers = sum(spec.decoder.multiplied_numbers(index) for index in layers) // len(layers)
    return sizes(config.max_seqs, config.max_batched_tokens, most_tokens(numbers))


def most_tokens(numbers: int) -> int:
    """Return the tokens of the largest step that is captured, if a layer multiplies each token by this many numbers."""
    return min(MOST_TOKENS, max(MAX_TOKENS, LAUNCHED // max(1, numbers) // UNIT * UNIT))


def sizes(max_seqs: int, max_batched_tokens: int, most: int = MAX_TOKENS) -> Sizes:
    """Return the buckets of an engine with these settings; `most`: see `most_tokens`.

    Those at start cover all sizes of decodes, with at most as much padding as rows, and the commonest ones of prompts.
    """
    rows, tokens = min(max_seqs, MAX_ROWS), min(max_batched_tokens, most)
    decodes = {1, 2, 4, *range(8, 256, 8), *range(256, MAX_ROWS + 1, 64)}
    chunks = {16, *range(32, 256, 32), *range(256, MAX_TOKENS, 64)}
    for first in (1024, 2048, 4096):
        chunks |= {*range(first, 2 * first + 1, first // 8)}
    found = {Bucket(size, False) for size in decodes if size < rows} | {Bucket(rows, False)}
    found |= {Bucket(size, True) for size in chunks if size < tokens} | {Bucket(tokens, True)}
    largest_first = sorted(found, reverse=True)
    at_start = [
        bucket
        for bucket in largest_first
        if bucket in (Bucket(rows, False), Bucket(tokens, True))
        or (_is_power_of_two(bucket.tokens) and bucket.tokens <= MAX_TOKENS)
    ]
    return Sizes(at_start, [bucket for bucket in largest_first if bucket not in at_start])


def draws(max_seqs: int, max_batched_tokens: int) -> list[int]:
    """Return the numbers of drawing rows for which head and draw are captured, ascending: at most twice as many as a
    step has, and the largest step that is captured has as many tokens."""
    most = min(max_seqs, max_batched_tokens, MAX_DRAWS)
    return [*(size for size in (1, 2, 4, *range(8, MAX_DRAWS, 8)) if size < most), most]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
