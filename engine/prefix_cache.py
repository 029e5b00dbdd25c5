"""PrefixCache: assigns blocks to sequences, and finds the blocks of a prefix that an earlier sequence has computed.

A full block is identified by the hash of its tokens, of everything else that determines its content, and of the hash of
the block before it, so equal hashes mean equal prefixes. The method is that of vLLM's automatic prefix caching.

Each of the CacheGroups has its own blocks, of which one with a window has those that later tokens attend to.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Ids

from .blocks import BlockPool
from .cache_groups import CacheGroups
from .sequence import Sequence
from .types import EngineRequest

NEVER = sys.maxsize


def extras(request: EngineRequest, index: int) -> tuple[str, ...]:
    """Return what determines the content of block `index` besides its tokens and the blocks before it.

    Each entry starts with its kind. The chain passes an entry on to all later blocks, so what applies to the whole
    sequence belongs to block 0, and an image to the first block that has one of its tokens.
    """
    return (f"salt:{request.cache_salt}",) if index == 0 and request.cache_salt else ()


def chain(parent: bytes, token_ids: Ids[int], extras: tuple[str, ...] = ()) -> bytes:
    """Return the hash of a full block: SHA-256, so that no user can construct a block that collides with another's."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + repr(extras).encode()).digest()


class PrefixCache:
    """Owner of all sequences' `block_ids`, `capacity`, `num_freed`, `hashes`, `num_published` and `publish_at`."""

    keeps_states = False  # whether a step that failed cannot be computed again from where it began

    def __init__(
        self,
        pool: BlockPool,
        is_enabled: bool = True,
        groups: CacheGroups | None = None,
        chunk: int = 1,  # maximum tokens of a sequence in a step
    ) -> None:
        self.pool = pool
        self.is_enabled = is_enabled  # whether prefixes are shared
        self.groups = groups or CacheGroups()
        self._has_groups = self.groups.windows != (None,)
        self._chunk = chunk
        self._num_groups = len(self.groups.windows)
        self._unbounded = [group for group, window in enumerate(self.groups.windows) if window is None]
        of_window: dict[int, list[int]] = {}
        for group, window in enumerate(self.groups.windows):
            if window is not None:
                of_window.setdefault(window, []).append(group)
        self._windows = list(of_window.items())  # each with its groups
        # Added to a block's hash: what groups store for the same tokens differs.
        self._suffixes = [bytes([group]) if group else b"" for group in range(self._num_groups)]
        self._filling: dict[bytes, int] = {}  # hash of a block that a running sequence will fill -> its id
        self._leaving: dict[int, list[list[int]]] = {}  # step in flight -> blocks to release when it is collected

    def block_hash(self, seq: Sequence, index: int) -> bytes:
        """Return the hash of a sequence's full block; each is computed once."""
        while len(seq.hashes) <= index:
            start = len(seq.hashes) * seq.block_size
            parent = seq.hashes[-1] if seq.hashes else b""
            tokens = seq.tokens[start : start + seq.block_size]
            seq.hashes.append(chain(parent, tokens, extras(seq.request, len(seq.hashes))))
        return seq.hashes[index]

    def match(self, seq: Sequence) -> list[int] | None:
        """Return the blocks of a sequence's longest cached prefix; None while another sequence fills the next one.

        A block that is before a group's window is -1.
        """
        if not self.is_enabled or seq.needs_all:
            return []
        count = self._num_found(seq)
        # A block that a window lacks ends the prefix there, or before it.
        while (missing := self._last_missing(seq, count)) is not None:
            count = missing
        if count < self._most(seq) and self.block_hash(seq, count) in self._filling:
            return None
        return self._hits(seq, count)

    @staticmethod
    def _most(seq: Sequence) -> int:
        """Return how many blocks a sequence can share. Its last token is computed, in a block that is its own."""
        return (len(seq.tokens) - 1) // seq.block_size

    def _num_found(self, seq: Sequence) -> int:
        """Return the number of a sequence's first blocks that are cached in all groups without a window."""
        count = self._most(seq)
        for group in self._unbounded:
            first = 0
            while (found := self._cached(seq, group, first, min(first + 64, count))) and None not in found:
                first += 64  # so that the hashes after the first missing block are not computed
            count = first + found.index(None) if found else count
        return count

    def _hits(self, seq: Sequence, count: int) -> list[int]:
        """Return the blocks of all groups for a sequence's first `count` blocks of tokens, as `match` does."""
        hits, num = [-1] * (count * self._num_groups), self._num_groups
        for groups, first in ((self._unbounded, 0), *self._firsts(count * seq.block_size, seq.block_size)):
            for group in groups:
                found = self._cached(seq, group, first, count)
                hits[first * num + group :: num] = [block for block in found if block is not None]
        return hits

    def _cached(self, seq: Sequence, group: int, first: int, end: int) -> list[int | None]:
        """Return a group's cached blocks for a sequence's blocks of tokens from `first` to `end`."""
        suffix, find = self._suffixes[group], self.pool.find
        if end:
            self.block_hash(seq, end - 1)
        return [find(block_hash + suffix) for block_hash in seq.hashes[first:end]]

    def _last_missing(self, seq: Sequence, count: int) -> int | None:
        """Return the last of a sequence's first `count` blocks that a token after them needs and that is not cached."""
        firsts = self._firsts(count * seq.block_size, seq.block_size)
        for index in range(count - 1, min((first for _, first in firsts), default=count) - 1, -1):
            for groups, first in firsts:
                if index >= first and any(None in self._cached(seq, group, index, index + 1) for group in groups):
                    return index
        return None

    def _firsts(self, position: int, block_size: int) -> list[tuple[list[int], int]]:
        """Return the groups of each window, and the first block that a token at this position attends to in them."""
        return [(groups, max(0, position - window + 1) // block_size) for window, groups in self._windows]

    def num_tokens(self, seq: Sequence, hits: list[int]) -> int:
        """Return the number of tokens in the blocks that `match` has returned."""
        return len(hits) // self._num_groups * seq.block_size

    def start(self, seq: Sequence, hits: list[int]) -> None:
        """Give a sequence the blocks that `match` has returned, and record which ones it will fill."""
        for block in hits:
            if block >= 0:
                self.pool.share(block)
        seq.capacity = self.num_tokens(seq, hits)
        # The runner's tables have valid ids alone.
        seq.block_ids = [max(0, block) for block in hits] if self._has_groups else hits
        seq.num_freed = [first for _, first in self._firsts(seq.capacity, seq.block_size)]
        seq.num_published = seq.capacity // seq.block_size
        if self.is_enabled:
            for index in range(seq.num_published, len(seq.tokens) // seq.block_size):
                self._filling.setdefault(self.block_hash(seq, index), seq.id)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its first `num_tokens` tokens; returns False if there are not enough now."""
        missing = seq.blocks_for(num_tokens)
        if not missing:
            return True
        blocks = self.pool.take(missing * self._num_groups)
        if blocks is None:
            return False
        seq.block_ids += blocks
        seq.capacity += missing * seq.block_size
        return True

    def lacking(self, seq: Sequence, num_tokens: int) -> int:
        """Return the number of blocks with which a running sequence could compute its first `num_tokens` tokens."""
        missing = seq.blocks_for(num_tokens)
        if not self._has_groups or not missing:
            return missing
        return self._lacking(seq.capacity // seq.block_size, missing, seq.num_freed, seq.block_size)

    def _lacking(self, num_blocks: int, missing: int, num_freed: Iterable[int], block_size: int) -> int:
        """Return the most blocks of all groups that a sequence with `num_blocks` takes beside those that it frees."""
        needed = missing * len(self._unbounded)
        for (window, groups), freed in zip(self._windows, num_freed, strict=True):
            held = num_blocks - freed
            bound = self.groups.most_blocks(window, block_size, self._chunk)
            needed += max(0, min(held + missing, bound) - held) * len(groups)
        return needed

    def fits(self, seq: Sequence, hits: list[int], reserved: int) -> bool:
        """Return whether all tokens of a waiting sequence could have blocks besides `reserved` other blocks.

        hits: its cached prefix, some of which may have to be taken from the blocks that are available.
        """
        idle_hits = sum(block >= 0 and not self.pool.references(block) for block in hits)
        num_hits = len(hits) // self._num_groups
        needed = seq.blocks_for(len(seq.tokens)) - num_hits
        if self._has_groups:
            num_freed = [first for _, first in self._firsts(num_hits * seq.block_size, seq.block_size)]
            needed = self._lacking(num_hits, needed, num_freed, seq.block_size)
        return self.pool.num_available >= needed + idle_hits + reserved

    def freed(self, seqs: Collection[Sequence], hits: list[int]) -> int:
        """Return the number of blocks that these sequences alone hold, without `hits`, which `fits` counts."""
        held = Counter(block for seq in seqs for block in self._held(seq))
        kept = set(hits)
        return sum(block not in kept and count == self.pool.references(block) for block, count in held.items())

    def prepare(self, chosen: Mapping[Sequence, int]) -> None:
        """Called before a step is launched, with the number of tokens of each sequence. See snapshots.py."""

    def publish(self, seq: Sequence) -> None:
        """Let other sequences find the blocks that are full, and free those before the windows of later tokens.

        The step that filled them has been collected.
        """
        seq.publish_at = NEVER
        if self.is_enabled:
            self._publish(seq, seq.num_computed // seq.block_size)
            seq.publish_at = (seq.num_published + 1) * seq.block_size
        if self._has_groups:
            self._free_unseen(seq)

    def _publish(self, seq: Sequence, num_full: int) -> None:
        for index in range(seq.num_published, num_full):
            block_hash = self.block_hash(seq, index)
            blocks = seq.block_ids[index * self._num_groups : (index + 1) * self._num_groups]
            for block, suffix in zip(blocks, self._suffixes, strict=True):
                self.pool.publish(block, block_hash + suffix)
            if self._filling.get(block_hash) == seq.id:
                del self._filling[block_hash]
            seq.num_published = index + 1

    def _free_unseen(self, seq: Sequence) -> None:
        # Tokens of steps in flight are not counted as computed, so these steps read none of the blocks.
        for number, (groups, first) in enumerate(self._firsts(seq.num_computed, seq.block_size)):
            freed = seq.num_freed[number]
            if first > freed:
                seq.num_freed[number] = first
                indices = (index * self._num_groups for index in range(freed, first))
                self.pool.release([seq.block_ids[index + group] for index in indices for group in groups])
            window, _ = self._windows[number]
            seq.publish_at = min(seq.publish_at, (seq.num_freed[number] + 1) * seq.block_size + window - 1)

    def _held(self, seq: Sequence) -> list[int]:
        """Return the blocks of a sequence that are not freed, in its order."""
        if not self._has_groups:
            return seq.block_ids
        first_held = [0] * self._num_groups
        for (_, groups), freed in zip(self._windows, seq.num_freed, strict=True):
            for group in groups:
                first_held[group] = freed
        places = (divmod(place, self._num_groups) for place in range(len(seq.block_ids)))
        pairs = zip(seq.block_ids, places, strict=True)
        return [block for block, (index, group) in pairs if index >= first_held[group]]

    def release(self, seq: Sequence, step: int | None = None) -> None:
        """Take all blocks from a sequence. Those that are published can be found until they are needed.

        step: the last step in flight, if the sequence is in one. The step may write to the blocks, so they stay held
        until it is `collected`.
        """
        if step is None:
            self.pool.release(self._held(seq))
        else:
            self._leaving.setdefault(step, []).append(self._held(seq))
        seq.block_ids, seq.num_freed, seq.capacity = [], [], 0
        for block_hash in seq.hashes[seq.num_published :]:
            if self._filling.get(block_hash) == seq.id:
                del self._filling[block_hash]
        seq.num_published = seq.publish_at = 0

    def collected(self, step: int) -> None:
        """Release the blocks that were held until a step was collected."""
        for blocks in self._leaving.pop(step, ()):
            self.pool.release(blocks)

    def check(self, running: Ids[Sequence]) -> None:
        """Raise AssertionError if the blocks of the running sequences do not add up."""
        self.pool.check()
        for seq in running:
            assert not self.is_enabled or seq.num_published == seq.num_computed // seq.block_size, "a block is hidden"
            firsts = self._firsts(seq.num_computed, seq.block_size)
            assert seq.num_freed == [first for _, first in firsts], "a block before a window is held"
        held = {block for seq in running for block in self._held(seq)}
        held.update(block for leavers in self._leaving.values() for blocks in leavers for block in blocks)
        assert len(held) == self.pool.num_held, "blocks are held by no sequence"
        assert set(self._filling.values()) <= {seq.id for seq in running}, "a block is being filled by no sequence"
