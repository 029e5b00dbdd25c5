"""CacheGroups: layers that share the blocks of the KV cache, so that those with a sliding window can free theirs.

Layers with the same window are divided into groups of at most as many places as the cache has tensors. A layer uses the
tensor at its place in its group, and a block belongs to one group of one sequence: the pool stays one, and all blocks
have the same size. The method is that of vLLM's hybrid KV cache manager. Where a token takes less memory in some
layers, several of these share a place: each has a part of every block, and what their sizes leave of it is not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

# More groups need less memory in some models, and each takes time on the host in every step.
MAX_GROUPS = 8
# Limits on memory that no layer uses, as a share of what is used: of places without a layer, and within places. It is
# lost while sequences are shorter than the windows.
MAX_PADDING = 0.15
# A gain in memory for which groups are worth the time that they take.
MIN_GAIN = 0.1


class CacheGroups(Struct, frozen=True, array_like=True):
    """The windows of the groups of a model's layers, and the group of each layer."""

    windows: tuple[int | None, ...] = (None,)  # tokens that a group's layers attend to; None: all
    of_layer: tuple[int, ...] = (0,)  # layer -> its group
    parts: tuple[int, ...] = ()  # layer -> number of layers that share its place; empty: one each
    sizes: tuple[int, ...] = ()  # layer -> the memory that a token takes in it; empty: the same

    @classmethod
    def of(cls, windows: Sequence[int | None], max_len: int, sizes: Sequence[int] = ()) -> CacheGroups:
        """Return the groups of layers with these windows, for sequences of up to `max_len` tokens.

        sizes: the memory that a token takes in each layer; empty: the same. If that of one window differs, or if groups
        would save little or waste much, all layers are one group, with the widest of the windows.
        """
        # A window that no sequence leaves is none.
        windows = [None if window is None or window >= max_len else window for window in windows]
        counts = Counter(windows)
        widest = None if None in counts else max(filter(None, windows), default=None)
        whole = cls((widest,), (0,) * len(windows))
        sizes = sizes or [1] * len(windows)
        of_window = dict(zip(windows, sizes, strict=True))
        if len(counts) < 2 or any(of_window[window] != size for window, size in zip(windows, sizes, strict=True)):
            return whole
        length = {window: window or max_len for window in counts}
        best, least = whole, (1 - MIN_GAIN) * sum(sizes) * length[widest]
        # A place has one layer of the largest size, or that rounded up to a multiple of another layer's size.
        for place in sorted({-(-max(sizes) // size) * size for size in of_window.values()}):
            parts = {window: place // size for window, size in of_window.items()}
            needed = {window: -(-count // parts[window]) for window, count in counts.items()}  # places
            if sum(needed.values()) * place > (1 + MAX_PADDING) * sum(sizes):
                continue
            for size in range(max(needed.values()), 0, -1):
                places = {window: -(-count // size) * size for window, count in needed.items()}
                total = sum(places.values())
                memory = place * sum(number * length[window] for window, number in places.items())
                fits = total <= MAX_GROUPS * size and total <= (1 + MAX_PADDING) * sum(needed.values())
                if fits and memory < least:
                    best, least = cls._in_groups(windows, size, parts, of_window), memory
        return best

    @classmethod
    def _in_groups(
        cls,
        windows: Sequence[int | None],
        size: int,
        parts: Mapping[int | None, int],
        sizes: Mapping[int | None, int],
    ) -> CacheGroups:
        """Return groups of up to `size` places, in the order of their first layers."""
        of_window: list[int | None] = []
        of_layer: list[int] = []
        last: dict[int | None, tuple[int, int]] = {}  # window -> its last group, and the layers that this has
        for window in windows:
            most = size * parts[window]
            group, count = last.get(window, (0, most))
            if count == most:
                group, count = len(of_window), 0
                of_window.append(window)
            last[window] = group, count + 1
            of_layer.append(group)
        found = cls(tuple(of_window), tuple(of_layer))
        if len(set(sizes.values())) == 1:
            return found
        return structs.replace(
            found, parts=tuple(parts[window] for window in windows), sizes=tuple(sizes[window] for window in windows)
        )

    @property
    def places(self) -> list[int]:
        """The place of each layer in its group: the tensor of the cache that it uses."""
        return [place for place, _ in self._shares]

    @property
    def shares(self) -> list[tuple[int, int]]:
        """Of each layer, which part of its place it has: the number of parts, and the part's number."""
        parts = self.parts or (1,) * len(self.of_layer)
        return [(count, part) for count, (_, part) in zip(parts, self._shares, strict=True)]

    @property
    def _shares(self) -> list[tuple[int, int]]:
        counts: Counter[int] = Counter()
        found = []
        for group, parts in zip(self.of_layer, self.parts or (1,) * len(self.of_layer), strict=True):
            found.append(divmod(counts[group], parts))
            counts[group] += 1
        return found

    def block_bytes(self, block_size: int, bytes_per_token: int) -> int:
        """Return the size of a block; a token takes `bytes_per_token` in all layers together."""
        sizes = self.sizes or (1,) * len(self.of_layer)
        of_place: dict[int, int] = {}
        for place, (parts, _), size in zip(self.places, self.shares, sizes, strict=True):
            of_place[place] = max(of_place.get(place, 0), parts * size)
        return block_size * bytes_per_token * sum(of_place.values()) // sum(sizes)

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
