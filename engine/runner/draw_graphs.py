"""DrawGraphs: replays the final norm, the head and the draw from captures, by the number of drawing rows."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.decoder import Decoder
from .changes import Ints, on_device
from .logits import LogitsBackend
from .triton_logits import FIELDS, TritonLogits, fields_of

Work = Callable[[], None]
NUM_FIELDS = FIELDS.itemsize // 8


class Kind(Enum):
    """What a captured draw computes."""

    GREEDY, RANDOM, FILTERED = range(3)


class DrawGraphs:
    """What follows a replayed step: a graph computes the logits, and another one draws from them.

    The first one reads a step's hidden states where its graph has left them. Log-probabilities, penalties, biases and
    masks, whose number follows the requests, are launched between the two: they read and change the logits in place. So
    one rule decides for each graph: it computes whatever lies at the address that it was captured with. The draw is
    captured if Triton kernels draw: for greedy rows alone, for rows without top_k and top_p, and for any rows, of which
    those without a filter pass through the filters' kernels unchanged.

    Padding computes logits of the step's first token, is drawn greedily, and is written to slot `max_seqs`, which is
    nobody's.
    """

    def __init__(
        self,
        model: Decoder,
        hidden: Tensor,  # [tokens, hidden_size], where graphs leave the hidden states of a step
        logits_at: Tensor,  # [rows or more], the input of each step
        *,
        rows: list[int],  # the captured numbers of rows, ascending
        sampling: LogitsBackend | None,
        last: Tensor | None,  # [max_seqs + 1], see Runner
    ) -> None:
        device, largest = hidden.device, rows[-1]
        self._model, self._hidden, self._logits_at = model, hidden, logits_at
        self._sampling = sampling if isinstance(sampling, TritonLogits) else None
        self._last = last
        self._logits = torch.zeros(largest, model.spec.vocab_size, device=device)
        self._tops = torch.zeros(largest, device=device)
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        # The parameters of all rows, then their slots: a step copies them at once.
        self._packet = torch.zeros(largest * (NUM_FIELDS + 1), dtype=torch.int64, device=device)
        self._loaded = np.zeros(0, np.int64)  # what the packet holds
        self._heads: dict[int, Work] = {}
        self._draws: dict[int, dict[Kind, Work]] = {}

    def capture(self, rows: int, capture: Callable[[Work], Work]) -> None:
        """Capture the graphs of this number of rows."""
        self._heads[rows] = capture(partial(self._head, rows))
        if self._sampling is not None:
            self._load(rows, np.zeros(rows, FIELDS), np.zeros(0, np.int64))
            self._draws[rows] = {kind: capture(partial(self._draw, rows, kind)) for kind in Kind}

    # -- the logits ---------------------------------------------------------------------------------------------------

    def has_logits(self, hidden: Tensor, logits_at: Tensor) -> bool:
        """Return whether a graph computes the logits of these tokens of a step."""
        is_static = hidden.data_ptr() == self._hidden.data_ptr() and logits_at.data_ptr() == self._logits_at.data_ptr()
        return is_static and 0 < len(logits_at) <= max(self._heads, default=0)

    def logits(self, rows: int) -> Tensor:
        """Return the step's logits, [rows, vocab_size] float32, valid until the next step."""
        self._heads[_bucket(self._heads, rows)]()
        return self._logits[:rows]

    def _head(self, rows: int) -> None:
        self._logits[:rows].copy_(self._model.project(self._hidden.index_select(0, self._logits_at[:rows])))

    # -- the draw -----------------------------------------------------------------------------------------------------

    def draws(self, logits: Tensor) -> bool:
        """Return whether a graph draws from these logits. It also writes the tokens to `last`."""
        return logits.data_ptr() == self._logits.data_ptr() and 0 < len(logits) <= max(self._draws, default=0)

    def draw(self, params: NDArray, slots: Ints) -> tuple[Tensor, Tensor]:
        """Draw from the logits of the step, see LogitsBackend.sample. The result is valid until the next step."""
        rows = len(params)
        bucket = _bucket(self._draws, rows)
        assert self._sampling is not None
        fields = fields_of(params, self._sampling.vocab_size)
        self._load(bucket, fields, slots)
        self._draws[bucket][_kind(fields)]()
        return self._tops[:rows], self._ids[:rows]

    def _load(self, bucket: int, fields: NDArray, slots: Ints) -> None:
        """Copy the inputs of a draw to the device, if they are new. Does not wait."""
        packet = np.zeros(bucket * (NUM_FIELDS + 1), np.int64)
        packet[: len(fields) * NUM_FIELDS] = fields.view(np.int64)
        own = packet[bucket * NUM_FIELDS :]
        own[: len(slots)] = slots
        own[len(slots) :] = 0 if self._last is None else len(self._last) - 1
        if np.array_equal(packet, self._loaded):  # as in most steps of the same greedy rows
            return
        self._loaded = np.zeros(0, np.int64)  # if the copy fails, the step is tried again
        # Stream order keeps the inputs of the step before until its kernels have read them.
        self._packet[: len(packet)].copy_(on_device(packet, self._packet.device))
        self._loaded = packet

    def _draw(self, rows: int, kind: Kind) -> None:
        assert self._sampling is not None
        logits = self._logits[:rows]
        fields, slots = self._packet[: rows * (NUM_FIELDS + 1)].split([rows * NUM_FIELDS, rows])
        if kind is Kind.GREEDY:
            tops, ids = self._sampling.best(logits)
        else:
            is_filtered = kind is Kind.FILTERED
            tops, ids = self._sampling.draw(logits, fields, has_k=is_filtered, has_p=is_filtered)
        self._tops[:rows].copy_(tops)
        self._ids[:rows].copy_(ids)
        if self._last is not None:  # a row that failed has a negative id
            self._last.index_copy_(0, slots, ids.clamp(min=0))


def _kind(fields: NDArray) -> Kind:
    """Return the kind of a draw with these parameters of its rows."""
    if not fields["coldness"].any():
        return Kind.GREEDY
    return Kind.FILTERED if fields["top_k"].any() or (fields["top_p"] < 1.0).any() else Kind.RANDOM


def _bucket(captured: dict[int, Work] | dict[int, dict[Kind, Work]], rows: int) -> int:
    return min(size for size in captured if size >= rows)
