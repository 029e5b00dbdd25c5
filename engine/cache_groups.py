"""CacheGroups: layers that share the blocks of the KV cache, so that those with a sliding window can free theirs.

Layers with the same window are divided into groups of at most as many layers as the cache has tensors. A layer uses the
tensor at its place in its group, and a block belongs to one group of one sequence: the pool stays one, and all blocks
have the same size. The method is that of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

# More groups need less memory in some models, and each takes time on the host in every step.
MAX_GROUPS = 8
# Places that no layer uses waste memory while sequences are shorter than the windows.
MAX_PADDING = 0.15
# A gain in memory for which groups are worth the time that they take.
MIN_GAIN = 0.1


class CacheGroups(Struct, frozen=True, array_like=True):
    """The windows of the groups of a model's layers, and the group of each layer."""

    windows: tuple[int | None, ...] = (None,)  # tokens that a group's layers attend to; None: all
    of_layer: tuple[int, ...] = (0,)  # layer -> its group

    @classmethod
    def of(cls, windows: Sequence[int | None], max_len: int, *, uniform: bool = True) -> CacheGroups:
        """Return the groups of layers with these windows, for sequences of up to `max_len` tokens.

        uniform: whether a token takes as much memory in each layer. If not, or if groups would save little, all layers
        are one group, with the widest of the windows.
        """
        # A window that no sequence leaves is none.
        windows = [None if window is None or window >= max_len else window for window in windows]
        counts = Counter(windows)
        widest = None if None in counts else max(filter(None, windows), default=None)
        whole = cls((widest,), (0,) * len(windows))
        if len(counts) < 2 or not uniform:
            return whole
        length = {window: window or max_len for window in counts}
        best, least = 0, (1 - MIN_GAIN) * len(windows) * length[widest]
        for size in range(max(counts.values()), 0, -1):
            places = {window: -(-count // size) * size for window, count in counts.items()}
            total = sum(places.values())
            tokens = sum(number * length[window] for window, number in places.items())
            fits = total <= MAX_GROUPS * size and total <= (1 + MAX_PADDING) * len(windows)
            if fits and tokens < least:
                best, least = size, tokens
        return cls._in_groups(windows, best) if best else whole

    @classmethod
    def _in_groups(cls, windows: Sequence[int | None], size: int) -> CacheGroups:
        """Return groups of up to `size` layers, in the order of their first layers."""
        of_window: list[int | None] = []
        of_layer: list[int] = []
        last: dict[int | None, tuple[int, int]] = {}  # window -> its last group, and the layers that this has
        for window in windows:
            group, count = last.get(window, (0, size))
            if count == size:
                group, count = len(of_window), 0
                of_window.append(window)
            last[window] = group, count + 1
            of_layer.append(group)
        return cls(tuple(of_window), tuple(of_layer))

    @property
    def places(self) -> list[int]:
        """The index of each layer in its group: the tensor of the cache that it uses."""
        counts: Counter[int] = Counter()
        found = []
        for group in self.of_layer:
            found.append(counts[group])
            counts[group] += 1
        return found

    def block_bytes(self, block_size: int, bytes_per_token: int) -> int:
        """Return the size of a block; a token takes `bytes_per_token` in all layers together."""
        return block_size * bytes_per_token * (max(self.places) + 1) // len(self.of_layer)

    def most_blocks(self, window: int, block_size: int, chunk: int) -> int:
        """Return the maximum number of blocks that a sequence holds in a group with a window.

        It computes up to `chunk` tokens in a step, which attend to `window` - 1 tokens before the first of them.
        """
        return (window + chunk - 3) // block_size + 2 if window + chunk > 2 else 1

    def blocks_for(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Return the number of blocks with which a sequence of `num_tokens` tokens can be computed."""
        blocks = -(-num_tokens // block_size)
        return sum(
            blocks if window is None else min(blocks, self.most_blocks(window, block_size, chunk))
            for window in self.windows
        )

    def num_tokens(self, num_blocks: int, block_size: int, chunk: int, max_len: int) -> int:
        """Return the number of tokens of sequences of `max_len` tokens that `num_blocks` blocks are enough for."""
        if self.windows == (None,):
            return num_blocks * block_size
        return num_blocks * max_len // self.blocks_for(max_len, block_size, chunk)

    def longest(self, num_blocks: int, block_size: int, chunk: int) -> int | None:
        """Return the maximum length of a sequence that `num_blocks` blocks are enough for; None: any."""
        bounds = [self.most_blocks(window, block_size, chunk) for window in self.windows if window is not None]
        unbounded = len(self.windows) - len(bounds)
        # While the sequence grows, the groups with the shortest windows reach their bounds first.
        growing = len(self.windows)
        for bound in sorted(bounds):
            if growing * bound > num_blocks:
                return num_blocks // growing * block_size
            growing, num_blocks = growing - 1, num_blocks - bound
        return num_blocks // unbounded * block_size if unbounded else None
