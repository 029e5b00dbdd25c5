"""Draws that are replayed from graphs, in Triton's interpreter with a recorder instead of CUDA; test_graphs.py runs
this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_draws.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Entered
from engine.kernels.gpu import logits as kernels
from engine.kernels.gpu import shortlist
from engine.models.decoder import Decoder
from engine.runner import draw_graphs, triton_logits
from engine.runner.draw_graphs import NUM_FIELDS, DrawGraphs
from engine.runner.queued import SampledTokens
from engine.runner.sampler import Sampler
from engine.runner.triton_logits import FIELDS, TritonLogits
from engine.types import SamplingParams
from tests.engine.interpreter import prepare
from tests.engine.recorder import Recorder
from tests.engine.test_sampler import random_history, random_params

prepare()
CPU = torch.device("cpu")
VOCAB, HIDDEN, TOKENS, SLOTS = 90, 8, 12, 7
BUCKETS = [1, 2, 5]


class Engine:
    """The static memory of an engine, and a head of random weights."""

    def __init__(self, recorder: Recorder | None) -> None:
        weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))
        self.head = weight
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.logits_at = torch.zeros(TOKENS, dtype=torch.int64)
        self.last = torch.full((SLOTS + 1,), -5)
        backend = TritonLogits(VOCAB, CPU)
        self.sampler = Sampler(SLOTS, VOCAB, CPU, backend)
        self.graphs: DrawGraphs | None = None
        if recorder is not None:
            model = SimpleNamespace(project=self.project, spec=SimpleNamespace(vocab_size=VOCAB))
            self.graphs = self.sampler.draw_graphs = DrawGraphs(
                cast(Decoder, model), self.hidden, self.logits_at, rows=BUCKETS, sampling=backend, last=self.last
            )
            with torch.inference_mode():
                for rows in reversed(BUCKETS):
                    self.graphs.capture(rows, recorder.capture)
            assert self.last[:SLOTS].eq(-5).all(), "padding writes no slot"

    def project(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(2) * self.head).sum(1)  # the same bits for any number of rows

    @torch.inference_mode()
    def tokens(self, asked: list[SamplingParams], places: list[int], seed: int, masked: bool) -> SampledTokens:
        """Draw a token for a row of each of these parameters, from the hidden states at these places."""
        rng, bits = random.Random(seed), np.random.default_rng(seed).integers(-(2**31), 2**31, (1, 3))
        slots = np.array(rng.sample(range(SLOTS), len(asked)), np.int64)
        lengths = []
        for slot, params in zip(slots.tolist(), asked, strict=True):
            history = random_history(rng, VOCAB)
            self.sampler.add(slot, Entered(slot, params, 3, history if params.uses_history else []))
            lengths.append(len(history))
        self.logits_at.zero_()
        self.logits_at[: len(places)] = torch.tensor(places)
        at = self.logits_at[: len(places)]
        if self.graphs is not None and self.graphs.has_logits(self.hidden, at):
            logits = self.graphs.logits(len(at))
        else:
            logits = self.project(self.hidden[at])
        masks = (np.array([0]), bits.astype(np.int32)) if masked else None
        before = self.last.clone()
        queued = self.sampler.sample(logits, slots, np.array(lengths), masks)
        if self.graphs is not None and self.graphs.draws(logits):
            others = np.setdiff1d(np.arange(SLOTS), slots)
            assert self.last[others].equal(before[others])
            failed = queued.ids < 0  # nobody reads their next step
            assert (self.last[slots] == queued.ids)[~failed].all() and (self.last >= -5).all()
        for slot in slots.tolist():
            self.sampler.remove(slot)
        self.logits_at.fill_(1 << 40)  # nothing reads the results of a step in its inputs
        return queued.tokens()


@pytest.fixture
def recorder(monkeypatch) -> Iterator[Recorder]:
    monkeypatch.setattr(triton_logits, "TILE", 64)
    monkeypatch.setattr(triton_logits, "TILES", 1)  # two parts
    recorder = Recorder()
    with recorder.kernels(kernels, shortlist):
        yield recorder


def test_replayed_draws_equal_launched_ones_for_random_parameters(recorder):
    """Padded with 0 to all but one row; with penalties, biases, masks and log-probabilities between the graphs."""
    rng = random.Random(1)
    replayed, launched = Engine(recorder), Engine(None)
    kinds = set()
    for seed, rows in enumerate([1, 2, 3, 4, 5, 5, 3, 1]):
        asked = [random_params(rng, VOCAB) for _ in range(rows)]
        if seed == 2:
            asked = [SamplingParams(max_tokens=9, temperature=0.0)] * rows
        if seed == 3:
            asked = [SamplingParams(max_tokens=9, temperature=place / 2, seed=place) for place in range(rows)]
        places = sorted(rng.sample(range(TOKENS), rows))
        before = len(recorder.replayed)
        found = replayed.tokens(asked, places, seed, masked=seed % 3 == 0)
        tapes = recorder.replayed[before:]
        assert len(tapes) == 2, "the head, and the draw"
        kinds.add(("weigh" in tapes[1].names, "count_digit" in tapes[1].names))
        assert found == launched.tokens(asked, places, seed, masked=seed % 3 == 0)
    assert kinds == {(False, False), (True, False), (True, True)}


def test_the_inputs_of_a_draw_are_copied_if_they_are_new(recorder, monkeypatch):
    graphs = Engine(recorder).graphs
    assert graphs is not None
    fields, slots = np.zeros(2, FIELDS), np.array([1, 3])
    graphs._load(2, fields, slots)
    loaded = graphs._packet.clone()
    graphs._packet.fill_(9)
    graphs._load(2, fields, slots)
    assert (graphs._packet == 9).all()
    for changed in ((fields, np.array([3, 1])), (np.ones(2, FIELDS), slots)):
        graphs._load(2, *changed)
        used = graphs._packet[: 2 * (NUM_FIELDS + 1)]
        assert not used.equal(loaded[: len(used)]) and not (used == 9).any()
    graphs._load(2, fields, slots)
    assert graphs._packet[: len(used)].equal(loaded[: len(used)])

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    others = np.ones(2, FIELDS)
    with monkeypatch.context() as patch:
        patch.setattr(draw_graphs, "on_device", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            graphs._load(2, others, slots)
    graphs._load(2, others, slots)  # the step is tried again
    assert not graphs._packet[: len(used)].equal(loaded[: len(used)])


def test_more_rows_than_are_captured_and_other_memory_are_launched(recorder):
    engine = Engine(recorder)
    at, graphs = engine.logits_at, engine.graphs
    assert graphs is not None and graphs.has_logits(engine.hidden, at[:5])
    assert not graphs.has_logits(engine.hidden, at[:6]) and not graphs.has_logits(engine.hidden, at[:0])
    assert not graphs.has_logits(engine.hidden.clone(), at[:2]) and not graphs.has_logits(engine.hidden, at[:2].clone())
    logits = graphs.logits(2)
    assert graphs.draws(logits) and not graphs.draws(logits.clone()) and not graphs.draws(logits[1:])
    before, asked = len(recorder.replayed), [SamplingParams(max_tokens=9, seed=3)] * 6
    assert engine.tokens(asked, list(range(6)), 1, masked=False) == Engine(None).tokens(asked, list(range(6)), 1, False)
    assert len(recorder.replayed) == before


def test_without_our_kernels_the_logits_alone_are_captured(recorder):
    engine = Engine(None)
    model: Any = SimpleNamespace(project=engine.project, spec=SimpleNamespace(vocab_size=VOCAB))
    graphs = DrawGraphs(model, engine.hidden, engine.logits_at, rows=[2], sampling=None, last=None)
    with torch.inference_mode():
        graphs.capture(2, recorder.capture)
        assert len(recorder.tapes) == 1
        logits = graphs.logits(1)
    assert logits.equal(engine.project(engine.hidden[:1])) and not graphs.draws(logits)
