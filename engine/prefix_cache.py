"""PrefixCache: assigns blocks to sequences, and finds the blocks of a prefix that an earlier sequence has computed.

A full block is identified by the hash of its tokens, of everything else that determines its content, and of the hash of
the block before it, so equal hashes mean equal prefixes. The method is that of vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ids

from .blocks import BlockPool
from .sequence import Sequence
from .types import EngineRequest


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
    """Owner of the blocks of all sequences: their `block_ids`, `hashes` and `num_published`."""

    def __init__(self, pool: BlockPool, is_enabled: bool = True) -> None:
        self.pool = pool
        self.is_enabled = is_enabled  # whether prefixes are shared
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
        """Return the blocks of a sequence's longest cached prefix; None while another sequence fills the next one."""
        hits: list[int] = []
        if not self.is_enabled or seq.needs_all:
            return hits
        # The last token is left to compute, and in a block of its own: shared blocks are never written.
        for index in range((len(seq.tokens) - 1) // seq.block_size):
            block_hash = self.block_hash(seq, index)
            block = self.pool.find(block_hash)
            if block is None:
                return None if block_hash in self._filling else hits
            hits.append(block)
        return hits

    def start(self, seq: Sequence, hits: list[int]) -> None:
        """Give a sequence the blocks that `match` has returned, and record which ones it will fill."""
        for block in hits:
            self.pool.share(block)
        seq.block_ids = hits
        seq.num_published = len(hits)
        if self.is_enabled:
            for index in range(len(hits), len(seq.tokens) // seq.block_size):
                self._filling.setdefault(self.block_hash(seq, index), seq.id)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its first `num_tokens` tokens; returns False if there are not enough now."""
        missing = seq.blocks_for(num_tokens)
        if not missing:
            return True
        blocks = self.pool.take(missing)
        if blocks is None:
            return False
        seq.block_ids += blocks
        return True

    def fits(self, seq: Sequence, hits: list[int], reserved: int) -> bool:
        """Return whether all tokens of a waiting sequence could have blocks besides `reserved` other blocks.

        hits: its cached prefix, some of which may have to be taken from the blocks that are available.
        """
        idle_hits = sum(not self.pool.is_held(block) for block in hits)
        needed = seq.blocks_for(len(seq.tokens)) - len(hits)
        return self.pool.num_available >= needed + idle_hits + reserved

    def publish(self, seq: Sequence) -> None:
        """Let other sequences find the blocks that are full. Their step has been collected."""
        num_full = seq.num_computed // seq.block_size
        if num_full == seq.num_published or not self.is_enabled:
            return
        for index in range(seq.num_published, num_full):
            block_hash = self.block_hash(seq, index)
            self.pool.publish(seq.block_ids[index], block_hash)
            if self._filling.get(block_hash) == seq.id:
                del self._filling[block_hash]
            seq.num_published = index + 1

    def release(self, seq: Sequence, step: int | None = None) -> None:
        """Take all blocks from a sequence. Those that are published can be found until they are needed.

        step: the last step in flight, if the sequence is in one. The step may write to the blocks, so they stay held
        until it is `collected`.
        """
        if step is None:
            self.pool.release(seq.block_ids)
        else:
            self._leaving.setdefault(step, []).append(seq.block_ids)
        seq.block_ids = []
        for block_hash in seq.hashes[seq.num_published :]:
            if self._filling.get(block_hash) == seq.id:
                del self._filling[block_hash]
        seq.num_published = 0

    def collected(self, step: int) -> None:
        """Release the blocks that were held until a step was collected."""
        for blocks in self._leaving.pop(step, ()):
            self.pool.release(blocks)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError if the blocks of the running sequences do not add up."""
        self.pool.check()
        held = {block for seq in running for block in seq.block_ids}
        held.update(block for leavers in self._leaving.values() for blocks in leavers for block in blocks)
        assert len(held) == self.pool.num_held, "blocks are held by no sequence"
        assert set(self._filling.values()) <= {seq.id for seq in running}, "a block is being filled by no sequence"
