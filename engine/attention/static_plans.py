"""Plans of PagedGPU for steps that are captured once and replayed: the addresses of their tensors never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import gpu_plan
from .gpu_plan import ITEM, HostWork, Kind, Launches, Plan, Work, pinned
from .gpu_shapes import queries_of
from .layer import AttentionLayer
from .metadata import AttentionMeta, Tables
from .paged_gpu import has_large_memory


class StaticPlans:
    """The work items of the step that is replayed next, and plans that read them.

    A captured launch has a fixed number of programs, which share the items of any number of rows: the kernel reads the
    number of items. A row's items and their results are those of any other plan, to the last bit.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        meta: AttentionMeta,  # the tensors of the step's inputs, which keep their addresses
        max_chunk_tokens: int,  # of a step with rows of several tokens
        *,
        uniform: bool = False,  # see PagedGPU.invariant
    ) -> None:
        self._meta = meta
        # As many as one launch has, see Plan: a single row may have more than MAX_PARTS.
        of_one, of_all = (gpu_plan.most_parts(rows, meta.max_seq) for rows in (1, len(meta.seq_lens)))
        most = max(of_one, min(gpu_plan.MAX_PARTS, of_all))
        device = meta.block_table.device
        is_large = has_large_memory(device)
        queries = [queries_of(layer, dtype, uniform=uniform, is_large=is_large) for layer in layers]
        kinds = list(dict.fromkeys(zip((layer.window for layer in layers), queries, strict=True)))

        def tables(items: int) -> dict[Kind, Tensor]:
            return {kind: torch.zeros(items + 1, ITEM, dtype=torch.int32, device=device) for kind in kinds}

        self._decodes, self._chunks = tables(most), tables(max_chunk_tokens)
        self._written: dict[int, NDArray[np.int32]] = {}  # what the tables at these addresses hold
        self._max_parts = most

    def plan(self, slots: Tensor, *, has_chunks: bool) -> StaticPlan:
        """Return the plan of steps with these slots of tokens, padding included; without chunks each row has one token.

        There is nothing to attend to before `load`.
        """
        tokens = len(slots)
        count = min(self._max_parts, gpu_plan.most_parts(tokens, self._meta.max_seq))
        launches = {
            # The workspace for partial results must not grow later, so each launch reserves all of it.
            kind: Launches(
                [Work(table, count, self._max_parts)], [Work(self._chunks[kind], tokens, 0)] if has_chunks else []
            )
            for kind, table in self._decodes.items()
        }
        others = tuple(Tables(own[:tokens], table) for own, table in self._meta.others)
        meta = replace(self._meta, slot_mapping=slots, others=others)
        return StaticPlan(meta, launches)

    def takes(self, plan: Plan) -> bool:
        """Return whether a step has at most one launch for its decodes, as nearly all steps do."""
        return all(len(plan.on_host(kind)[0]) <= 1 for kind in self._decodes)

    def load(self, plan: Plan, *, has_chunks: bool) -> None:
        """Copy a step's work items to where the plans with or without chunks read them. Does not wait."""
        for kind, table in self._decodes.items():
            decodes, chunks = plan.on_host(kind)
            assert has_chunks or not chunks
            self._write(table, decodes, plan)
            if has_chunks:
                self._write(self._chunks[kind], chunks, plan)

    def clear(self) -> None:
        """Leave nothing to attend to: the items of the last step name tokens that a smaller one does not have."""
        self._written.clear()
        for table in (*self._decodes.values(), *self._chunks.values()):
            table[0].zero_()

    def _write(self, table: Tensor, works: list[HostWork], plan: Plan) -> None:
        """Write one launch, which may have no items. Those of most decode steps are those of the step before."""
        items, address = (works[0] if works else HostWork.empty(plan.meta)).table, table.data_ptr()
        before = self._written.get(address)
        if before is not None and np.array_equal(before, items):
            return
        self._written.pop(address, None)  # if the copy fails, the step is tried again
        # Stream order keeps the items of the step before until its kernels have read them.
        table[: len(items)].copy_(pinned(items, table.device), non_blocking=True)
        self._written[address] = items


class StaticPlan(Plan):
    """A plan whose launches are made in advance."""

    def __init__(self, meta: AttentionMeta, launches: dict[Kind, Launches]) -> None:
        super().__init__(meta)
        self._launches = launches
