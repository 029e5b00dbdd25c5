"""SnapshotCache: a PrefixCache for models with layers of linear attention.

Such a layer keeps one state for each sequence, and every token changes it. Cached blocks of other layers are of no use
without the state at their end. So copies of states are kept, snapshots: a sequence continues from the longest cached
prefix at whose end there is one. They are taken where they are most likely to be needed again, as in Pan et al. 2024,
"Marconi: Prefix Caching for the Era of Hybrid LLMs": at the end of a prompt, and where a prompt branches off from
cached or running ones. As an output grows, its last snapshot moves with it: the next turn of a chat begins there.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from .blocks import BlockPool
from .cache_groups import CacheGroups
from .config import EngineConfig
from .prefix_cache import PrefixCache
from .sequence import Sequence

OUTPUT_TOKENS = 64  # of an output, from one snapshot to the next


@dataclass(slots=True)
class _Taking:
    """The snapshots of a running sequence."""

    due: list[int]  # numbers of tokens, ascending, at which one will be taken; the ends of blocks
    restored: int = -1  # the one that it continues from, until its first row is launched
    inflight: list[tuple[int, int]] = field(default_factory=list)  # those that steps in flight take, and the snapshots
    of_output: bytes = b""  # the hash of the last block of the output at whose end one was taken


class SnapshotCache(PrefixCache):
    """Owner of all snapshots, and of the sequences' `snapshots`.

    A snapshot is an index in [0, count). It is **free**, **taken** (a step in flight writes it) or **published**: it
    has the hash of the block at whose end it was taken, and can be found until it is the least recently used one and
    another is needed. Steps run in order, so one that is read in a step can be written in the next.
    """

    keeps_states = True

    def __init__(
        self,
        pool: BlockPool,
        is_enabled: bool = True,
        groups: CacheGroups | None = None,
        chunk: int = 1,
        *,
        count: int = 0,
    ) -> None:
        """`count`: the number of snapshots; with none, sequences share no prefixes."""
        super().__init__(pool, is_enabled and count > 0, groups, chunk)
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[bytes, int] = {}  # hash of a block -> the snapshot at its end; the least recently used is first
        self._pinned: Counter[int] = Counter()  # snapshots that a sequence will continue from in its first step
        self._taking: dict[int, _Taking] = {}  # id of a running sequence -> its snapshots
        self._running: dict[int, Sequence] = {}

    def match(self, seq: Sequence) -> list[int] | None:
        """Return the blocks of the longest cached prefix with a snapshot at its end; None while another sequence
        computes a longer one, and will take a snapshot."""
        if not self.is_enabled or seq.needs_all:
            return []
        found = self._num_found(seq)
        if self._awaits(seq, found):
            return None
        while found and self.block_hash(seq, found - 1) not in self._of:
            found -= 1
        blocks = [self.pool.find(self.block_hash(seq, index)) for index in range(found)]
        return [block for block in blocks if block is not None]

    def _num_found(self, seq: Sequence) -> int:
        """Return the number of a sequence's first blocks that are cached."""
        most, found = self._most(seq), 0
        while found < most and self.pool.find(self.block_hash(seq, found)) is not None:
            found += 1
        return found

    @staticmethod
    def _most(seq: Sequence) -> int:
        """Return the number of blocks that a sequence can share: its last token is left to compute."""
        return (len(seq.tokens) - 1) // seq.block_size

    def _awaits(self, seq: Sequence, found: int) -> bool:
        """Return whether a sequence waits for one that fills its next block. That one is to take a snapshot where the
        two branch, unless it has computed more already."""
        most, end = self._most(seq), found
        filler = self._filling.get(self.block_hash(seq, found)) if found < most else None
        if filler is None:
            return False
        while end < most and self._filling.get(self.block_hash(seq, end)) == filler:
            end += 1
        position, taking, other = end * seq.block_size, self._taking[filler], self._running[filler]
        if position in taking.due or any(position == taken for taken, _ in taking.inflight):
            return True
        if position <= other.start:
            return False
        insort(taking.due, position)
        return True

    def start(self, seq: Sequence, hits: list[int]) -> None:
        super().start(seq, hits)
        self._running[seq.id] = seq
        taking = self._taking[seq.id] = _Taking([])
        if not self.is_enabled:
            return
        if hits:
            block_hash = self.block_hash(seq, len(hits) - 1)
            taking.restored = self._of[block_hash] = self._of.pop(block_hash)  # now the most recently used
            self._pinned[taking.restored] += 1
        places = {blocks * seq.block_size for blocks in (self._num_found(seq), self._most(seq))}
        taking.due = sorted(place for place in places if place > seq.capacity)

    def prepare(self, chosen: Mapping[Sequence, int]) -> None:
        """Assign snapshots to the sequences of the next step, of which each computes this many tokens."""
        if not self.is_enabled:
            return
        for seq, count in chosen.items():
            taking = self._taking[seq.id]
            end = seq.start + count
            if not taking.due and end > seq.prompt_len:
                step = max(1, OUTPUT_TOKENS // seq.block_size) * seq.block_size
                taking.due.append(-(-end // step) * step)
            saved = []
            while taking.due and taking.due[0] <= end:
                place = taking.due.pop(0)
                if (snapshot := self._take()) is not None:
                    saved.append((place, snapshot))
            taking.inflight += saved
            seq.snapshots = (taking.restored, saved) if saved or taking.restored >= 0 else None
        # From here on a snapshot that this step reads can be assigned again: to a later step.
        for seq in chosen:
            self._unpin(self._taking[seq.id])

    def _take(self) -> int | None:
        """Return a free snapshot, or the least recently used one, which then cannot be found; None: all are in use."""
        if self._free:
            return self._free.pop()
        found = next((block_hash for block_hash, each in self._of.items() if not self._pinned[each]), None)
        return None if found is None else self._of.pop(found)

    def _unpin(self, taking: _Taking) -> None:
        if taking.restored >= 0:
            self._pinned[taking.restored] -= 1
            self._pinned += Counter()  # drops zeros
            taking.restored = -1

    def publish(self, seq: Sequence) -> None:
        super().publish(seq)
        taking = self._taking[seq.id]
        while taking.inflight and taking.inflight[0][0] <= seq.num_computed:
            place, snapshot = taking.inflight.pop(0)
            block_hash = self.block_hash(seq, place // seq.block_size - 1)
            if block_hash in self._of:
                self._free.append(snapshot)
                continue
            self._of[block_hash] = snapshot
            if place > seq.prompt_len:
                self._drop(taking.of_output)
                taking.of_output = block_hash

    def _drop(self, block_hash: bytes) -> None:
        """Free the snapshot at the end of a block, unless a sequence is about to continue from it."""
        if block_hash in self._of and not self._pinned[self._of[block_hash]]:
            self._free.append(self._of.pop(block_hash))

    def release(self, seq: Sequence, step: int | None = None) -> None:
        super().release(seq, step)
        del self._running[seq.id]
        # A step in flight may write to these; the next step that is assigned one writes to it after that.
        taking = self._taking.pop(seq.id)
        self._free += [snapshot for _, snapshot in taking.inflight]
        self._unpin(taking)
        seq.snapshots = None

    def check(self, running: Ids[Sequence]) -> None:
        super().check(running)
        taken = [snapshot for taking in self._taking.values() for _, snapshot in taking.inflight]
        everything = [*self._free, *self._of.values(), *taken]
        assert sorted(everything) == list(range(self.count)), "a snapshot is in no list or in two"
        assert self._taking.keys() == {seq.id for seq in running}, "a sequence that does not run takes snapshots"
        pinned = Counter(taking.restored for taking in self._taking.values() if taking.restored >= 0)
        assert pinned == self._pinned, "a snapshot is pinned for no sequence"


def cache_for(pool: BlockPool, config: EngineConfig, groups: CacheGroups, *, has_states: bool) -> PrefixCache:
    """Return the prefix cache for a resolved config. has_states: whether the model has layers of linear attention."""
    settings = pool, config.prefix_caching, groups, config.max_batched_tokens or 1
    return SnapshotCache(*settings, count=config.num_snapshots or 0) if has_states else PrefixCache(*settings)
