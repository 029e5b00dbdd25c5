"""StateInputs: the segments of steps, in memory that captured steps read again."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Row
from engine.config import EngineConfig
from engine.models.mixers.states import Segments
from engine.runner.state_inputs import SEGMENTS_PER_ROW, StateInputs
from tests.engine.test_mixers import spec_of

CPU = torch.device("cpu")
MAX_SEQS, SNAPSHOTS = 4, 6


@pytest.fixture
def inputs() -> StateInputs:
    config = EngineConfig(model="", max_seqs=MAX_SEQS, num_snapshots=SNAPSHOTS)
    found = StateInputs.of(spec_of("qwen3_5_text"), config, CPU)
    assert found is not None
    return found


def row(start: int, count: int, snapshots: tuple[int, list[tuple[int, int]]] | None = None) -> Row:
    return Row(1, start, [7] * count, [], 1, snapshots=snapshots)


def test_a_step_has_the_segments_of_its_rows(inputs):
    """A new row, one that continues, and one that restores snapshot 2, and takes 0 and 1 on its way."""
    states = inputs.prepare([row(0, 3), row(5, 1), row(8, 9, (2, [(12, 0), (16, 1)]))], [3, 0, 1])
    segments = states.segments
    assert segments.row_start.tolist() == [0, 1, 2, 5]
    assert segments.begin.tolist() == segments.begin_list == [0, 3, 4, 8, 12, 13]
    assert segments.source.tolist() == segments.source_list == [-1, 0, 6, 4, 5]
    assert segments.target.tolist() == segments.target_list == [3, 0, 4, 5, 1]
    assert inputs.are_static(states) and states.layers is inputs.layers


def test_what_a_captured_step_reads_is_that_of_the_last_step_and_rows_after_its_own_have_no_segments(inputs):
    captured = inputs.padding(MAX_SEQS).segments
    assert captured.row_start.tolist() == [0] * (MAX_SEQS + 1)
    assert all(len(each) for each in (captured.begin, captured.source, captured.target)), "they have an address"
    inputs.prepare([row(0, 2), row(4, 1), row(9, 1)], [0, 1, 2])
    assert captured.row_start.tolist() == [0, 1, 2, 3, 3]
    inputs.prepare([row(6, 1)], [1])
    assert captured.row_start.tolist() == [0, 1, 1, 1, 1]
    assert (captured.begin[:2].tolist(), captured.source[0].item(), captured.target[0].item()) == ([0, 1], 1, 1)
    inputs.padding(1)
    assert captured.row_start.tolist() == [0] * (MAX_SEQS + 1)


def test_a_step_with_more_segments_than_fit_has_memory_of_its_own(inputs):
    taken = [(position, position % SNAPSHOTS) for position in range(1, SEGMENTS_PER_ROW * MAX_SEQS + 1)]
    rows, slots = [row(0, len(taken) + 1, (-1, taken))], [2]
    states = inputs.prepare(rows, slots)
    assert not inputs.are_static(states)
    assert len(states.segments.source) == len(taken) + 1 == SEGMENTS_PER_ROW * MAX_SEQS + 1
    fits = inputs.prepare([row(0, len(taken), (-1, taken[:-1]))], slots)
    assert inputs.are_static(fits) and len(fits.segments.source) == len(taken)
    assert torch.equal(fits.segments.target[:-1], states.segments.target[:-2])
    assert isinstance(states.segments, Segments)
