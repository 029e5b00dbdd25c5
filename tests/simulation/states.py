"""The states of layers in a fake runner: which tokens each of them has seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from engine.batch import Batch, Row
from engine.runner.state_inputs import StateInputs

Seen = tuple[str, list[int]]  # the salt of a sequence, and its tokens so far


class FakeStates:
    """Keeps what each state has seen, by the segments of a real runner; checks that each row continues from its own
    past."""

    def __init__(self, block_size: int, max_seqs: int, num_snapshots: int) -> None:
        self.block_size = block_size
        spec: Any = SimpleNamespace(mixers=[])
        self.inputs = StateInputs(spec, max_seqs=max_seqs, num_snapshots=num_snapshots, device=torch.device("cpu"))
        self.free = list(range(max_seqs))
        self.slots: dict[int, int] = {}  # by sequence
        self.states: dict[int, Seen] = {}
        self.restored = 0

    def compute(self, batch: Batch, seen: Callable[[Row], Seen]) -> None:
        """Advance the states by a step; `seen`: what a row's sequence is made of, with the row's tokens."""
        for seq_id in batch.left:
            self.free.append(self.slots.pop(seq_id))
        for entered in batch.entered:
            assert entered.seq_id not in self.slots, "a sequence entered twice"
            self.slots[entered.seq_id] = self.free.pop()
        slots = [self.slots[row.seq_id] for row in batch.rows]
        segments = self.inputs.prepare(batch.rows, slots).segments
        before = dict(self.states)
        written: dict[int, int] = {}  # state -> the index of the row that writes it
        starts, each = segments.row_start.tolist(), list(segments.each)
        for index, row in enumerate(batch.rows):
            salt, tokens = seen(row)
            length = row.start
            for first, end, source, target in each[starts[index] : starts[index + 1]]:
                assert written.setdefault(target, index) == index, "two rows of a step write a state"
                read = self.states if written.get(source) == index else before
                past = read.get(source, ("", [])) if source >= 0 else (salt, [])
                assert past == (salt, tokens[:length]), "a row continues from another past"
                length += end - first
                self.states[target] = salt, tokens[:length]
            assert length == row.end, "a row has other tokens than its segments"
            assert self.states[slots[index]] == (salt, tokens[:length]), "the row's slot does not hold its state"
            for position, _ in row.snapshots[1] if row.snapshots else ():
                assert row.start < position <= row.end and position % self.block_size == 0, "it is not of this row"
            self.restored += row.snapshots is not None and row.snapshots[0] >= 0
        sources = [source for _, _, source, _ in each]
        for index in range(len(batch.rows)):
            for source in sources[starts[index] : starts[index + 1]]:
                assert written.get(source, index) == index, "a row reads a state that another one writes"
