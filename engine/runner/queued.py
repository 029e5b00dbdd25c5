"""Results of a step on their way from the device to the host, which waits when it reads them, and not before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import RowError
from ..types import ErrorCode, TokenLogprob

NOT_FINITE, NOTHING = -1, -2  # instead of a token id; the first comes from a LogitsBackend
ERRORS = {
    NOT_FINITE: RowError("the logits for this request, or what its penalties make of them, are not finite numbers"),
    NOTHING: RowError(
        "logit_bias, allowed_token_ids, bad_words, stop_token_ids, min_tokens and the grammar "
        "leave no token that could be sampled",
        ErrorCode.NO_TOKEN_LEFT,
    ),
}


class HostCopy:
    """A copy of a tensor, queued after what computes it."""

    def __init__(self, tensor: Tensor) -> None:
        # A copy on a CPU, too: the next step may overwrite the tensor.
        self._tensor = tensor.clone() if tensor.is_cpu else tensor.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def array(self) -> NDArray[Any]:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.numpy()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens. Rows are indices of the call's rows."""

    token_ids: list[int]  # negative if the row failed
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """Sampled tokens on their way to the host."""

    ids: Tensor  # [rows] int64 on the device, negative if the row failed
    _columns: HostCopy  # `ids`, or float64 (exact up to 2^53) with a row of Distribution.columns after each
    _counts: dict[int, int]  # row with logprobs -> how many of the most likely tokens it has

    def tokens(self) -> SampledTokens:
        """Wait for the tokens and return them."""
        host = self._columns.array()
        ids = host if host.ndim == 1 else host[:, 0].astype(np.int64)
        token_ids = ids.tolist()
        logprobs = {row: _entry(host[row, 1:], count) for row, count in self._counts.items() if token_ids[row] >= 0}
        failed = [row for row, token_id in enumerate(token_ids) if token_id < 0] if min(token_ids) < 0 else []
        errors = {row: ERRORS[token_ids[row]] for row in failed}
        return SampledTokens(token_ids, logprobs, errors)


@dataclass(frozen=True, slots=True)
class QueuedScores:
    """Log-probabilities of a prompt's tokens on their way to the host."""

    _columns: HostCopy  # as Distribution.columns
    _ranks: HostCopy
    _count: int  # of the most likely tokens

    def scores(self) -> list[TokenLogprob]:
        """Wait for the log-probabilities and return them."""
        pairs = zip(self._columns.array(), self._ranks.array().tolist(), strict=True)
        return [_entry(row, self._count, rank) for row, rank in pairs]


def _entry(columns: NDArray[np.float64], count: int, rank: int | None = None) -> TokenLogprob:
    """Convert a row of Distribution.columns, with its `count` most likely tokens."""
    values, ids = columns[1:].reshape(2, -1)[:, :count]
    return TokenLogprob(float(columns[0]), tuple(ids.astype(np.int64).tolist()), tuple(values.tolist()), rank)
