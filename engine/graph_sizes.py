"""The sizes of the steps that are captured in CUDA graphs."""

from __future__ import annotations

from typing import NamedTuple

# Larger steps compute for longer than it takes to launch their kernels.
MAX_ROWS, MAX_TOKENS = 512, 1024
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


def sizes(max_seqs: int, max_batched_tokens: int) -> Sizes:
    """Return the buckets of an engine with these settings.

    Those at start cover all sizes of decodes, with at most as much padding as rows, and the commonest ones of prompts.
    """
    rows, tokens = min(max_seqs, MAX_ROWS), min(max_batched_tokens, MAX_TOKENS)
    decodes = {1, 2, 4, *range(8, 256, 8), *range(256, MAX_ROWS + 1, 64)}
    chunks = {16, *range(32, 256, 32), *range(256, MAX_TOKENS + 1, 64)}
    found = {Bucket(size, False) for size in decodes if size < rows} | {Bucket(rows, False)}
    found |= {Bucket(size, True) for size in chunks if size < tokens} | {Bucket(tokens, True)}
    largest_first = sorted(found, reverse=True)
    at_start = [
        bucket
        for bucket in largest_first
        if _is_power_of_two(bucket.tokens) or bucket in (Bucket(rows, False), Bucket(tokens, True))
    ]
    return Sizes(at_start, [bucket for bucket in largest_first if bucket not in at_start])


def draws(max_seqs: int, max_batched_tokens: int) -> list[int]:
    """Return the numbers of drawing rows for which head and draw are captured, ascending: at most twice as many as a
    step has, and the largest step that is captured has as many tokens."""
    most = min(max_seqs, max_batched_tokens, MAX_DRAWS)
    return [*(size for size in (1, 2, 4, *range(8, MAX_DRAWS, 8)) if size < most), most]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
