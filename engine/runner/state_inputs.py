"""StateInputs: the states of sequences, for models whose layers keep states, and which of them a step uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import Row
from ..config import EngineConfig
from ..models import ModelSpec
from ..models.states import LayerStates, Segments, States


class StateInputs:
    """The states of all layers: one for each slot of a running sequence, then the snapshots. Owned by the runner."""

    def __init__(self, spec: ModelSpec, *, max_seqs: int, num_snapshots: int, device: torch.device) -> None:
        self._max_seqs, self._device = max_seqs, device
        count = max_seqs + num_snapshots
        self.layers = [LayerStates.allocate(shape, count, spec.dtype, device) for shape in spec.mixers]

    @classmethod
    def of(cls, spec: ModelSpec, config: EngineConfig, device: torch.device) -> StateInputs | None:
        """Return the states of a resolved config; None: the model has none."""
        assert config.max_seqs
        if not spec.mixers:
            return None
        return cls(spec, max_seqs=config.max_seqs, num_snapshots=config.num_snapshots or 0, device=device)

    def prepare(self, rows: Sequence[Row], slots: Sequence[int]) -> States:
        """Return the states and the segments of a step with these rows, whose sequences have these slots."""
        segments = [self._segments(row, slot) for row, slot in zip(rows, slots, strict=True)]
        return States(self.layers, Segments.of(segments, self._device))

    def _segments(self, row: Row, slot: int) -> list[tuple[int, int, int]]:
        """Return the number of tokens, the source and the target of each segment of a row."""
        source = slot if row.start else -1
        if row.snapshots is None:
            return [(len(row.token_ids), source, slot)]
        restored, saved = row.snapshots
        source = source if restored < 0 else self._max_seqs + restored
        found, at = [], row.start
        for end, snapshot in saved:
            target = self._max_seqs + snapshot
            found.append((end - at, source, target))
            source, at = target, end
        return [*found, (row.end - at, source, slot)]
