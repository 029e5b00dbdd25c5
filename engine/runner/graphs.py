"""Graphs: computes steps by replaying captures of their launches, which takes the host one call instead of hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..attention.gpu_plan import Plan
from ..attention.static_plans import StaticPlans
from ..graph_sizes import Bucket, Sizes
from ..memory import GraphReserve
from ..models import Forward, Model, ModelSpec
from ..models.decoder import Decoder
from ..models.executor import Executor
from ..models.gpu.executor import OnGPU
from .buffers import Buffers
from .cuda_graphs import GraphDevice
from .draw_graphs import DrawGraphs
from .group_tables import GroupTables
from .logits import LogitsBackend
from .state_inputs import StateInputs

log = logging.getLogger("pequod.engine")


def capturable(model: Model, cache: KVCache) -> Executor | str:
    """Return the executor whose launches can be captured with this cache, or why there is none."""
    if not cache.backend.capturable:
        return "the attention backend needs the host in each layer"
    found = next((each for each in model.executors if isinstance(each, OnGPU)), None)
    return "torch computes the layers" if found is None else found.obstacle or found


class TooLittleFree(Exception):
    """The device has too little free memory for the next capture."""


class Graphs:
    """An Executor for steps that fit into a captured bucket. Another executor's launches are captured.

    A step is padded to its bucket with tokens that store nothing and that no row attends to. Everything that a graph
    reads or writes keeps its address: the inputs in Buffers, the work items in StaticPlans, the segments of
    StateInputs, weights, caches, states, the attention's workspace and the result. A step's attention and norms have
    the same bits as without a graph; its matmuls have those of a step of the bucket's size, which are the same ones
    with `batch_invariant`.

    Capturing ends where the reserved memory is taken. That is counted in a way that other processes on the device do
    not change: by torch's allocator, and by a maximum for what the driver keeps of a graph. The device's free memory
    only decides whether the next capture is possible: it must leave what a launched step takes, whoever has the rest.
    """

    def __init__(
        self,
        executor: Executor,
        spec: ModelSpec,
        cache: KVCache,
        buffers: Buffers,
        *,
        sizes: Sizes,
        device: GraphDevice,
        max_len: int,
        reserve: GraphReserve,
        step_bytes: int,  # that a launched step takes at most
        others: GroupTables | None = None,  # if the layers are in several groups
        states: StateInputs | None = None,  # if there are layers that keep states
    ) -> None:
        assert spec.decoder is not None
        self._executor, self._cache, self._buffers, self._device = executor, cache, buffers, device
        self._others, self._states = others, states
        self._due = sizes.all
        self._num_at_start = len(sizes.at_start)
        self._captured: dict[Bucket, Callable[[], None]] = {}
        self._suitable: dict[tuple[int, bool], Bucket | None] = {}  # tokens and has_chunks -> `_bucket`
        self._reserve, self._step_bytes, self._bytes = reserve, step_bytes, 0
        self._expected = reserve.allocated + reserve.step_graph  # of the next capture
        inputs = buffers.padding(sizes.largest)
        meta = AttentionMeta(
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            max_query=len(inputs.ids),
            max_seq=max_len,  # for which the table of angles is made, so that it never grows
            query_start_list=[],
            seq_lens_list=[],
            others=() if others is None else others.padding(),
        )
        chunk_tokens = max(bucket.tokens for bucket in self._due if bucket.has_chunks)
        self._plans = StaticPlans(spec.layers, spec.dtype, meta, chunk_tokens, uniform=cache.backend.invariant)
        self._hidden = torch.zeros(
            len(inputs.ids), spec.decoder.hidden_size, dtype=spec.dtype, device=inputs.ids.device
        )
        self.draws: DrawGraphs | None = None  # what follows a replayed step
        self._draw_rows: list[int] = []
        self.problem = ""  # why no more steps are captured

    def add_draws(self, model: Decoder, rows: list[int], sampling: LogitsBackend | None, last: Tensor | None) -> None:
        """Have the norm, head and draw after replayed steps captured, too, for these numbers of rows."""
        logits_at = self._buffers.padding(rows[-1]).logits_at
        self._draw_rows = rows
        self.draws = model.captured_head = DrawGraphs(
            model, self._hidden, logits_at, rows=rows, sampling=sampling, last=last
        )

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def num_bytes(self) -> int:
        """The memory that all graphs take: what torch has allocated for them, and what the driver keeps at most."""
        return self._bytes

    def takes(self, forward: Forward) -> bool:
        """Return whether a graph computes this step: by its size, the addresses of its inputs, and the launches that
        were captured."""
        if forward.cache is not self._cache or not self._buffers.are_static(forward.ids):
            return False
        if self._bucket(forward) is None or not self._plans.takes(cast(Plan, forward.plan)):
            return False
        if self._states is not None and not (forward.states and self._states.are_static(forward.states)):
            return False
        return self._executor.takes(forward)

    def run(self, forward: Forward) -> Tensor:
        """See Executor. The result is valid until the next step."""
        bucket = self._bucket(forward)
        assert bucket is not None
        self._plans.load(cast(Plan, forward.plan), has_chunks=bucket.has_chunks)
        self._captured[bucket]()
        return self._hidden[: len(forward.ids)]

    def _bucket(self, forward: Forward) -> Bucket | None:
        """Return the smallest captured bucket for a step, or None."""
        size = tokens, has_chunks = len(forward.ids), forward.plan.meta.max_query > 1
        if size not in self._suitable:
            alike = (each for each in self._captured if each.has_chunks == has_chunks and each.suits(tokens))
            own = (each for each in alike if self._buffers.are_together(each.tokens, tokens))
            self._suitable[size] = min(own, default=None)
        return self._suitable[size]

    def capture_first(self) -> None:
        """Capture the buckets that are due at start. To be called between steps, as `capture_next`."""
        # What steps need without graphs, too, is allocated now, so that it is not counted as theirs: the attention's
        # workspace and the table of angles.
        largest = self._due[0]
        self._try(_name(largest), lambda: self._run_once(largest))
        for _ in range(self._num_at_start):
            self.capture_next()
        for rows in reversed(self._draw_rows):
            if not self.problem:
                self._try(f"the draw of {rows} rows", partial(self._capture_draw, rows))

    def capture_next(self) -> bool:
        """Capture the next bucket; returns whether there are more. After a failure there are none."""
        if self._due:
            bucket = self._due.pop(0)
            self._try(_name(bucket), lambda: self._capture(bucket))
        return bool(self._due)

    @torch.inference_mode()
    def _run_once(self, bucket: Bucket) -> None:
        self._work(bucket)()

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Call `work`; after an error no more steps are captured."""
        try:
            work()
        except TooLittleFree as error:
            self._stop(f"{what} was not captured: {error}")
        except Exception as error:  # whatever CUDA, Triton or torch raises: such steps are launched, as without graphs
            line = (str(error).strip().splitlines() or [""])[0][:200]
            self._stop(f"{what} could not be captured: {type(error).__name__}: {line}")

    @torch.inference_mode()
    def _capture(self, bucket: Bucket) -> None:
        before = self._bytes
        replay = self._measured(self._work(bucket))
        self._bytes += self._reserve.step_graph
        # The first one has most of the memory for intermediate results; each of the others takes about the same.
        self._expected = self._bytes - before if self._captured else self._reserve.step_graph
        self._captured[bucket] = replay
        self._suitable.clear()
        if self._bytes + self._expected > self._reserve.total and self._due:
            size = self._reserve.total >> 20
            self._stop(f"{len(self._captured)} graphs take the {size} MiB that are reserved for them")

    @torch.inference_mode()
    def _capture_draw(self, rows: int) -> None:
        assert self.draws is not None
        of_step, self._expected = self._expected, self._reserve.draw_graphs + rows * self._reserve.draw_row
        self.draws.capture(rows, self._measured)
        self._expected = of_step
        self._bytes += self._reserve.draw_graphs
        if self._bytes > self._reserve.total:
            self._stop(f"all graphs take more than the {self._reserve.total >> 20} MiB that are reserved for them")

    def _measured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work, and count the memory that torch takes for it. Raises TooLittleFree."""
        before, needed = self._device.memory(), self._expected + self._step_bytes
        if before.free < needed:
            raise TooLittleFree(
                f"{before.free >> 20} MiB of the GPU's memory are free, and its capture and a launched step need up to "
                f"{needed >> 20} MiB"
            )
        replay = self._device.capture(work)
        replay()  # the driver uploads a graph when it is first launched: memory that is short is noticed now
        self._bytes += max(0, self._device.memory().reserved - before.reserved)
        return replay

    def _work(self, bucket: Bucket) -> Callable[[], None]:
        """Return what computes a step of padding, and makes the inputs one."""
        inputs = self._buffers.padding(bucket.tokens)
        if self._others is not None:
            self._others.padding()
        self._plans.clear()
        plan = self._plans.plan(inputs.slot_mapping, has_chunks=bucket.has_chunks)
        states = None if self._states is None else self._states.padding(min(bucket.tokens, len(inputs.seq_lens)))
        forward = Forward(inputs.ids, inputs.positions, plan, self._cache, inputs.logits_at, states)
        result = self._hidden[: bucket.tokens]

        def work() -> None:
            # The executor's own result lies in the graphs' pool, where the next graph may overwrite it.
            result.copy_(self._executor.run(forward))

        return work

    def _stop(self, reason: str) -> None:
        self._due = []
        self.problem = f"other sizes of steps run without CUDA graphs: {reason}"
        log.warning("%s", self.problem)


def _name(bucket: Bucket) -> str:
    return f"a step of {bucket.tokens} tokens"
