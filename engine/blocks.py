"""BlockPool: the blocks of the KV cache, who holds them, and which hold a prefix worth keeping.

A block is an index in [0, total). It is **held** (references > 0), **cached** (no reference, but its content
is known by a hash and may be taken again) or **free**. free + cached + held == total, always. The method of
paging is from Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention".
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Ids


def root_hash(*extras: str) -> bytes:
    """Where a hash chain starts: everything but tokens that decides what a block holds, each with its tag."""
    return hashlib.sha256("\0".join(extras).encode()).digest()


def chain(parent: bytes, token_ids: Ids[int]) -> bytes:
    """Hash of a full block: SHA-256, so that one user cannot build a block that collides with another's."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Free list, reference counts and the prefix table. One owner: the Scheduler."""

    __slots__ = ("_block_of", "_cached", "_free", "_hash_of", "_refs", "num_held", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: a block used a moment ago may still be in a CPU's cache
        self._cached: dict[int, None] = {}  # in order of release, so the first is the least recently used
        self._refs = [0] * total
        self.num_held = 0  # counted by references alone, so that a lost block shows in the sum of the three
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free ones, then cached ones at the price of their content."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when there are not as many now."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                del self._block_of[self._hash_of.pop(block)]
            self._refs[block] = 1
            blocks.append(block)
        self.num_held += count
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or cached."""
        return self._block_of.get(block_hash)

    def is_held(self, block: int) -> bool:
        return self._refs[block] > 0

    def share(self, block: int) -> None:
        """One more reference to a block that `find` gave."""
        if self._refs[block] == 0:
            del self._cached[block]
            self.num_held += 1
        self._refs[block] += 1

    def publish(self, block: int, block_hash: bytes) -> None:
        """Tell what a held, full block contains. The first block with a content stays the one that is found."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Ids[int]) -> None:
        """Give one reference back for each block of a sequence, given in the sequence's order."""
        # Back to front: a prompt's tail is its least shareable part, so it is evicted first.
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise AssertionError(f"block {block} released more often than taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.num_held -= 1
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> int:
        """Drop the content of every cached block; gives their number. Held blocks keep theirs."""
        count = len(self._cached)
        for block in self._cached:
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)
        self._cached.clear()
        return count

    def check(self) -> None:
        """Raise AssertionError when a block is in no list or in two, or the prefix table is torn."""
        held = {b for b, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two lists"
        assert len(free) + len(cached) + len(held) == self.total, "a block is in no list"
        assert len(held) == self.num_held, "the number of held blocks is wrong"
        assert {self._block_of[h] for h in self._hash_of.values()} == set(self._hash_of), "the prefix table is torn"
        assert len(self._block_of) == len(self._hash_of), "the prefix table is torn"
        assert cached <= set(self._hash_of), "a cached block has no content"
        assert not free & set(self._hash_of), "a free block has content"
