"""Pooler: converts what a prompt ends with to a vector: hidden states to one of length 1, or selected logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Embedded, Entered, Row, RowError
from ..types import Pooling
from .changes import on_device
from .queued import HostCopy

NOT_FINITE = RowError("the hidden states for this request are not finite numbers, or are all zero")
NO_HIDDEN = RowError("this model has no hidden states to pool")
NO_LOGITS = RowError("the logits for this request are not finite numbers")


class QueuedPooling(Protocol):
    """Results of complete prompts on their way to the host."""

    def outcomes(self) -> dict[int, Embedded | RowError]:
        """Wait for the results; returns the outcomes of their rows."""
        ...


@dataclass(frozen=True, slots=True)
class QueuedVectors:
    """The sums of complete prompts on their way to the host."""

    _rows: dict[int, int | None]  # row index -> leading dimensions to keep, None: all
    _vectors: HostCopy | None  # [rows, hidden] float64; None: the model has no hidden states

    def outcomes(self) -> dict[int, Embedded | RowError]:
        """See QueuedPooling."""
        if self._vectors is None:
            return dict.fromkeys(self._rows, NO_HIDDEN)
        outcomes: dict[int, Embedded | RowError] = {}
        for (row, dimensions), vector in zip(self._rows.items(), self._vectors.array(), strict=True):
            embedding = unit(vector[:dimensions])
            outcomes[row] = NOT_FINITE if embedding is None else Embedded(embedding)
        return outcomes


@dataclass(frozen=True, slots=True)
class QueuedLogits:
    """Logits of complete prompts on their way to the host."""

    _counts: dict[int, int]  # row index -> the number of its logits
    _logits: HostCopy  # those of all rows, one after the other

    def outcomes(self) -> dict[int, Embedded | RowError]:
        """See QueuedPooling."""
        outcomes: dict[int, Embedded | RowError] = {}
        parts = np.split(self._logits.array(), np.cumsum([*self._counts.values()])[:-1])
        for row, part in zip(self._counts, parts, strict=True):
            outcomes[row] = Embedded(part.astype("<f4").tobytes()) if np.isfinite(part).all() else NO_LOGITS
        return outcomes


class Pooler:
    """Sums the hidden states of prompts over their chunks, by slot. Owned by the runner.

    Normalized to length 1, the sum equals the mean. Sums are float64, so that the float32 result does not depend on how
    a prompt was divided into chunks.
    """

    def __init__(self) -> None:
        self._pooling: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}  # slot -> [hidden] float64, of the tokens before the next row

    def add(self, slot: int, entered: Entered) -> None:
        """Start the sum of a sequence, if its prompt is pooled."""
        if entered.params.pooling is not None:
            self._pooling[slot] = entered.params.pooling

    def remove(self, slot: int) -> None:
        self._pooling.pop(slot, None)
        self._sums.pop(slot, None)

    def select(self, logits: Tensor, places: dict[int, int], slots: NDArray[np.int64]) -> QueuedLogits:
        """Return the logits of the tokens that complete prompts ask for.

        logits: [logits, vocab]. places: row -> the index of its logits. slots: [rows].
        """
        token_ids = {row: self._pooling[int(slots[row])].token_ids for row in places}
        counts = {row: len(ids) for row, ids in token_ids.items()}
        at = np.repeat(np.array([*places.values()], np.int64), [*counts.values()])
        ids = np.concatenate([np.array(ids, np.int64) for ids in token_ids.values()])
        return QueuedLogits(counts, HostCopy(logits[on_device(at, logits.device), on_device(ids, logits.device)]))

    def pool(
        self, hidden: Tensor | None, places: dict[int, slice], slots: NDArray[np.int64], rows: list[Row]
    ) -> list[QueuedPooling]:
        """Add a step's hidden states to the sums; returns those of the rows that complete their prompts, if any do.

        hidden: [states, hidden], None: the model returns none. places: row -> its states among them. slots: [rows].
        When this raises, as for lack of memory, no sum has changed and the step can be computed again.
        """
        if hidden is None:
            return [QueuedVectors(dict.fromkeys(places), None)]
        sums: dict[int, Tensor] = {}
        ready: dict[int, Tensor] = {}
        for index, place in places.items():
            row, slot = rows[index], int(slots[index])
            states = hidden[place].sum(dim=0, dtype=torch.float64)
            if row.start and slot in self._sums:  # at 0 the prompt starts, perhaps again after a preemption
                states += self._sums[slot]
            (ready if row.embeds else sums)[index] = states
        vectors = HostCopy(torch.stack(list(ready.values()))) if ready else None
        self._sums.update({int(slots[index]): states for index, states in sums.items()})
        if vectors is None:
            return []
        return [QueuedVectors({index: self._pooling[int(slots[index])].dimensions for index in ready}, vectors)]


def unit(vector: NDArray[np.float64]) -> bytes | None:
    """Return the vector scaled to length 1, in the format of TokenDelta.embedding; None if that is not possible."""
    length = np.sqrt(vector @ vector)
    return (vector / length).astype("<f4").tobytes() if np.isfinite(length) and length > 0 else None
