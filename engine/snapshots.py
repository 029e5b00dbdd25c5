"""SnapshotCache: a PrefixCache for models with layers that keep states (vLLM: mamba, or hybrid, models).

Such a layer keeps one state for each sequence, and every token changes it. Cached blocks of other layers are of no use
without the state at their end. So copies of states are kept, snapshots: a sequence continues from the longest cached
prefix at whose end there is one. They are taken where they are most likely to be needed again, as in Pan et al. 2024,
"Marconi: Prefix Caching for the Era of Hybrid LLMs": at the end of a prompt, and where a prompt branches off from
cached or running ones. A last snapshot moves along with a sequence. While its prompt is computed in parts, it is at the
end of the last part, so that a preemption loses little; while its output grows, at the last multiple of SPACING tokens,
so that the next turn of a chat can continue there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from .blocks import BlockPool
from .cache_groups import CacheGroups
from .config import EngineConfig
from .prefix_cache import PrefixCache
from .sequence import Sequence

# Tokens: where prompts branch off, and in an output, a snapshot that is closer to the one before is not worth its
# memory, nor waiting for it. At the end of a prompt it need only be a block further.
SPACING = 64


@dataclass(slots=True)
class _Pending:
    """The snapshots that a running sequence will take, and those that steps in flight take for it."""

    due: list[int] = field(default_factory=list)  # numbers of tokens, ascending, at the ends of blocks
    restored: int = -1  # the one that it continues from, until its first row is launched
    inflight: list[tuple[int, int, bool]] = field(default_factory=list)  # tokens, snapshot, and whether it moves along
    moving: tuple[bytes, int] = b"", -1  # the published one that moves along, and the hash of the block at its end


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
        spacing: int = SPACING,
    ) -> None:
        """`count`: the number of snapshots; with none, sequences share no prefixes. `spacing`: see SPACING."""
        super().__init__(pool, is_enabled and count > 0, groups, chunk)
        assert self._unbounded, "no model has both layers that keep states and attention with windows alone"
        self.count, self._spacing = count, spacing
        self._free = list(range(count - 1, -1, -1))
        self._published: dict[bytes, int] = {}  # by the hash of the block; the least recently used is first
        self._pinned: set[int] = set()  # those that sequences continue from whose first row is not launched yet
        self._pending: dict[int, _Pending] = {}  # by the id of a running sequence
        self._running: dict[int, Sequence] = {}
        self._matched = 0, 0  # the last sequence that `match` was called for, and the number of its cached blocks
        self._expected: dict[bytes, int] = {}  # hash of a block at whose end a running sequence will take one -> its id

    def match(self, seq: Sequence) -> list[int] | None:
        """Return the blocks of the longest cached prefix with a snapshot at its end; None while another sequence
        computes a longer one, and will take a snapshot, which this call may ask for."""
        if not self.is_enabled or seq.needs_all:
            return []
        found = self._num_found(seq)
        self._matched = seq.id, found
        kept = found
        while kept and self.block_hash(seq, kept - 1) not in self._published:
            kept -= 1
        usable = kept
        while usable and not self._can_continue(seq, usable):
            usable -= 1
        # A running sequence computes the blocks again that a window before a snapshot lacks.
        if (kept - usable) * seq.block_size >= self._spacing and self.block_hash(seq, kept - 1) in self._filling:
            return None
        return None if self._awaits(seq, found, usable) else self._hits(seq, usable)

    def _can_continue(self, seq: Sequence, count: int) -> bool:
        """Return whether there is a snapshot after `count` blocks, and all blocks in windows that end there are
        cached."""
        return self.block_hash(seq, count - 1) in self._published and self._last_missing(seq, count) is None

    def _awaits(self, seq: Sequence, found: int, usable: int) -> bool:
        """Return whether a sequence whose first `found` blocks are cached, `usable` of them up to a snapshot, waits for
        another one: at their end, if one is expected there, or where it parts from a sequence that fills its next
        block, if that one has not passed this place. It must save SPACING tokens."""
        most, least, end = self._most(seq), usable * seq.block_size + self._spacing, found  # blocks, tokens, blocks
        filler = self._filling.get(self.block_hash(seq, found)) if found < most else None
        while filler is not None and end < most and self._filling.get(self.block_hash(seq, end)) == filler:
            end += 1
        if end * seq.block_size < least:
            return False
        block_hash = self.block_hash(seq, end - 1)
        if filler is None or block_hash in self._expected:
            return block_hash in self._expected
        if end * seq.block_size <= self._running[filler].start:
            return False
        self._expect(self._running[filler], end * seq.block_size, block_hash)
        return True

    def _expect(self, seq: Sequence, position: int, block_hash: bytes) -> None:
        """Have a running sequence take a snapshot, unless there is one or another sequence will take it."""
        published = self._published.get(block_hash, -1)
        stays = published >= 0 and all(other.moving[1] != published for other in self._pending.values())
        if not stays and block_hash not in self._expected:
            self._expected[block_hash] = seq.id
            insort(self._pending[seq.id].due, position)

    def start(self, seq: Sequence, hits: list[int]) -> None:
        super().start(seq, hits)
        self._running[seq.id] = seq
        pending = self._pending[seq.id] = _Pending()
        if not self.is_enabled:
            return
        if hits:
            block_hash = self.block_hash(seq, seq.capacity // seq.block_size - 1)
            pending.restored = self._published[block_hash] = self._published.pop(block_hash)  # the most recently used
            for other in self._pending.values():
                if other.moving[1] == pending.restored:  # it is of use where it is
                    other.moving = b"", -1
        matched, found = self._matched
        found = found if matched == seq.id else self._num_found(seq)
        for blocks, least in ((found, self._spacing), (self._most(seq), seq.block_size)):
            if blocks * seq.block_size >= seq.capacity + least:
                self._expect(seq, blocks * seq.block_size, self.block_hash(seq, blocks - 1))

    def prepare(self, chosen: Mapping[Sequence, int]) -> None:
        """Assign snapshots to the sequences of the next step, of which each computes this many tokens: the one that its
        row continues from, -1: none, and the ends of blocks in its row, with those that are written there."""
        if not self.is_enabled:
            return
        self._pinned = {pending.restored for pending in self._pending.values() if pending.restored >= 0}
        for seq, count in chosen.items():
            pending = self._pending[seq.id]
            taken = self._kept(seq, pending, seq.start + count)
            position = self._last(seq, seq.start + count)
            has_moved = position > (taken[-1][0] if taken else seq.start)
            if has_moved and (snapshot := self._take(pending)) is not None:
                pending.inflight.append((position, snapshot, True))
                taken.append((position, snapshot))
            seq.snapshots = (pending.restored, taken) if taken or pending.restored >= 0 else None
            pending.restored = -1
        self._pinned.clear()  # those of this step can be assigned again from here on: to later steps

    def _kept(self, seq: Sequence, pending: _Pending, end: int) -> list[tuple[int, int]]:
        """Return the positions up to `end` where a snapshot is due, and the snapshots."""
        taken = []
        while pending.due and pending.due[0] <= end:
            position = pending.due.pop(0)
            snapshot = self._take()
            if snapshot is None:
                del self._expected[self.block_hash(seq, position // seq.block_size - 1)]
            else:
                pending.inflight.append((position, snapshot, False))
                taken.append((position, snapshot))
        return taken

    def _last(self, seq: Sequence, end: int) -> int:
        """Return where the one that moves along is to be when the tokens up to `end` have been computed; 0: nowhere,
        since there is another one at the end of the prompt."""
        unit = max(1, self._spacing // seq.block_size) * seq.block_size if end > seq.prompt_len else seq.block_size
        return 0 if end == seq.prompt_len else end // unit * unit

    def _take(self, pending: _Pending | None = None) -> int | None:
        """Return a free snapshot, or that of `pending` that moves along, or the least recently used one. A published
        one can then not be found any more. None: all are in use."""
        if self._free:
            return self._free.pop()
        if pending is not None and self._is_own(pending) and pending.moving[1] not in self._pinned:
            return self._published.pop(pending.moving[0])
        found = next((block_hash for block_hash, each in self._published.items() if each not in self._pinned), None)
        return None if found is None else self._published.pop(found)

    def _is_own(self, pending: _Pending) -> bool:
        """Return whether the snapshot that moves along is still published."""
        return self._published.get(pending.moving[0]) == pending.moving[1]

    def publish(self, seq: Sequence) -> None:
        super().publish(seq)
        pending = self._pending[seq.id]
        while pending.inflight and pending.inflight[0][0] <= seq.num_computed:
            position, snapshot, is_moving = pending.inflight.pop(0)
            block_hash = self.block_hash(seq, position // seq.block_size - 1)
            if not is_moving:
                del self._expected[block_hash]
            if self._is_own(pending) and pending.moving[0] != block_hash:
                self._free.append(self._published.pop(pending.moving[0]))
            pending.moving = b"", -1
            # Another sequence's moving one would vanish with its next step, so one that is to stay replaces it.
            if block_hash in self._published and not is_moving:
                self._free.append(self._published.pop(block_hash))
            if block_hash in self._published:
                self._free.append(snapshot)
                continue
            self._published[block_hash] = snapshot
            if is_moving:
                pending.moving = block_hash, snapshot

    def release(self, seq: Sequence, step: int | None = None) -> None:
        super().release(seq, step)
        del self._running[seq.id]
        pending = self._pending.pop(seq.id)
        # A step in flight may write to these; the next step that is assigned one writes to it after that.
        self._free += [snapshot for _, snapshot, _ in pending.inflight]
        positions = [*pending.due, *(position for position, _, is_moving in pending.inflight if not is_moving)]
        for position in positions:
            del self._expected[self.block_hash(seq, position // seq.block_size - 1)]
        seq.snapshots = None

    def check(self, running: Ids[Sequence]) -> None:
        super().check(running)
        taken = [snapshot for pending in self._pending.values() for _, snapshot, _ in pending.inflight]
        everything = [*self._free, *self._published.values(), *taken]
        assert sorted(everything) == list(range(self.count)), "a snapshot is in no list or in two"
        assert self._pending.keys() == {seq.id for seq in running}, "a sequence that does not run takes snapshots"
        assert set(self._expected.values()) <= self._pending.keys(), "a snapshot is expected of no sequence"
        assert not self._pinned, "one is pinned between steps"


def cache_for(pool: BlockPool, config: EngineConfig, groups: CacheGroups, *, has_states: bool) -> PrefixCache:
    """Return the prefix cache for a resolved config. has_states: whether the model has layers that keep states."""
    settings = pool, config.prefix_caching, groups, config.max_batched_tokens or 1
    return SnapshotCache(*settings, count=config.num_snapshots or 0) if has_states else PrefixCache(*settings)
