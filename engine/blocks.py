"""BlockPool: which blocks of the KV cache are in use, and which hold a prefix worth keeping.

A block is an index in [0, total). It is **held** (it has references), **cached** (it has none, but its content is
identified by a hash and can be used again) or **free**. free + cached + held == total, always. The method of paging is
from Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

from collections.abc import Sequence as Ids


class BlockPool:
    """Free list, reference counts and the table of block hashes. Its one owner is the scheduler's PrefixCache."""

    __slots__ = ("_block_of", "_cached", "_free", "_hash_of", "_refs", "num_held", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: a recently used block may still be in a CPU's cache
        self._cached: dict[int, None] = {}  # in order of release: the first is the least recently used
        self._refs = [0] * total
        self.num_held = 0  # counted by references alone, so that check() finds a lost block
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
        """The number of blocks that `take` can return: free ones, then cached ones, whose content is lost."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None if there are not enough now."""
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
        """Return the block with this content, held or cached, or None."""
        return self._block_of.get(block_hash)

    def references(self, block: int) -> int:
        return self._refs[block]

    def share(self, block: int) -> None:
        """Add a reference to a block that `find` has returned."""
        if self._refs[block] == 0:
            del self._cached[block]
            self.num_held += 1
        self._refs[block] += 1

    def publish(self, block: int, block_hash: bytes) -> None:
        """Record the content of a held, full block. If several have the same content, the first can be found."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Ids[int]) -> None:
        """Drop one reference to each block of a sequence, listed in the sequence's order."""
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
        """Free all cached blocks; returns their number. Held blocks keep their content."""
        count = len(self._cached)
        for block in self._cached:
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)
        self._cached.clear()
        return count

    def check(self) -> None:
        """Raise AssertionError if a block is in no list or in two, or if the table of hashes is inconsistent."""
        held = {b for b, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two lists"
        assert len(free) + len(cached) + len(held) == self.total, "a block is in no list"
        assert len(held) == self.num_held, "the number of held blocks is wrong"
        assert {self._block_of[h] for h in self._hash_of.values()} == set(self._hash_of), (
            "the table of hashes is inconsistent"
        )
        assert len(self._block_of) == len(self._hash_of), "the table of hashes is inconsistent"
        assert cached <= set(self._hash_of), "a cached block has no content"
        assert not free & set(self._hash_of), "a free block has content"
