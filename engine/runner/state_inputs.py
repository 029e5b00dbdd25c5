"""StateInputs: the states of sequences, for models whose layers keep states, and which of them a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from ..batch import Row
from ..config import EngineConfig
from ..models import ModelSpec
from ..models.mixers.states import LayerStates, Segments, States

SEGMENTS_PER_ROW = 4  # for which there is memory, on average: most rows have one segment


class StateInputs:
    """The states of all layers: one for each slot of a running sequence, then the snapshots. Owned by the runner.

    As in Buffers, the addresses of the segments' tensors never change, and a step's segments are valid until the next
    step.
    """

    def __init__(self, spec: ModelSpec, *, max_seqs: int, num_snapshots: int, device: torch.device) -> None:
        self._max_seqs, self._device = max_seqs, device
        count = max_seqs + num_snapshots
        self.layers = [LayerStates.allocate(shape, count, spec.dtype, device) for shape in spec.mixers]
        self._max_segments = SEGMENTS_PER_ROW * max_seqs
        # The first segments of rows, then of each segment the first token, the source and the target.
        sizes = max_seqs + 1, self._max_segments + 1, self._max_segments, self._max_segments
        self._starts = list(accumulate(sizes, initial=0))
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(self._starts[-1], dtype=torch.int32, pin_memory=on_gpu)
        self._tensor = self._host.to(device) if on_gpu else self._host
        self._copied = torch.cuda.Event() if on_gpu else None

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
        if sum(map(len, segments)) > self._max_segments:
            return States(self.layers, Segments.of(segments, self._device))
        return States(self.layers, self._load(segments))

    def padding(self, rows: int) -> States:
        """Return the states and the segments of a step in which this many rows have none. To be called between
        steps."""
        self._load([])
        # The tensors have their whole length, though a step of padding has no segments: empty ones have no address.
        row_start, begin, source, target = (self._tensor[first:end] for first, end in pairwise(self._starts))
        return States(self.layers, Segments(row_start[: rows + 1], begin, source, target, [0], [], []))

    def are_static(self, states: States) -> bool:
        """Return whether a step's segments lie where those of `padding` do."""
        return states.segments.row_start.data_ptr() == self._tensor.data_ptr()

    def _load(self, rows: Sequence[Sequence[tuple[int, int, int]]]) -> Segments:
        """Copy the segments of rows to the device. The rows after them, up to the most, have none."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy reads the host's memory until then
        host, lists = self._host.numpy(), Segments.lists(rows)
        host[: self._max_seqs + 1] = lists[0][-1]
        for first, numbers in zip(self._starts, lists, strict=False):
            host[first : first + len(numbers)] = numbers
        if self._copied is not None:
            self._tensor.copy_(self._host, non_blocking=True)
            self._copied.record()
        placed = zip(self._starts, lists, strict=False)
        row_start, begin, source, target = (self._tensor[first : first + len(numbers)] for first, numbers in placed)
        return Segments(row_start, begin, source, target, *lists[1:])

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
