"""The states of layers of linear attention in a fake runner: which tokens each of them has seen."""

from __future__ import annotations

from collections.abc import Callable

from engine.batch import Batch, Row

Seen = tuple[str, list[int]]  # the salt of a sequence, and its tokens so far


class FakeStates:
    """Keeps a state for each running sequence, and the snapshots; checks that each row continues from its own past."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.of: dict[int, Seen] = {}  # by sequence
        self.snapshots: dict[int, Seen] = {}
        self.restored = 0

    def compute(self, batch: Batch, seen: Callable[[Row], Seen]) -> None:
        """Advance the states by a step; `seen`: what a row's sequence is made of, with the row's tokens."""
        for seq_id in batch.left:
            self.of.pop(seq_id, None)
        for entered in batch.entered:
            assert entered.seq_id not in self.of, "a sequence entered twice"
        snapshots = [row.snapshots or (-1, ()) for row in batch.rows]
        read = {restored for restored, _ in snapshots if restored >= 0}
        written = [snapshot for _, saved in snapshots for _, snapshot in saved]
        assert len(set(written)) == len(written) and not read & set(written), "rows of a step share a snapshot"
        for row, (restored, saved) in zip(batch.rows, snapshots, strict=True):
            salt, tokens = seen(row)
            before = self.of.get(row.seq_id, ("", []))
            if restored >= 0:
                assert row.seq_id not in self.of, "a sequence is restored in the middle"
                before = self.snapshots[restored]
                self.restored += 1
            assert not row.start or before == (salt, tokens[: row.start]), "a row continues from another past"
            for end, snapshot in saved:
                assert row.start < end <= row.end and end % self.block_size == 0, "a snapshot is not of this row"
                self.snapshots[snapshot] = salt, tokens[:end]
            self.of[row.seq_id] = salt, tokens[: row.end]
