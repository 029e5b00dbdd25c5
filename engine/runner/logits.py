"""What a step wants of its logits, in torch: draws, log-probabilities, masks. On any device, and the oracle of the
kernels that do the same on a CPU (engine/kernels/logits.py).

A drawn token is a function of (logits, what is asked, the uniform number) alone. Probabilities become integers before
anything is summed: weight = floor(2^44 * e), e the float nearest to exp((logit - max) * (1 / temperature)), and
integer sums do not depend on their order. (Of float64 logits e is a float64.) A token 2^44 times less likely than the
best one is never drawn. The filters are thresholds on values, so that equal tokens share a fate whatever order they
were found in: top_k keeps every token that equals the k-th one, top_p every token as likely as the last one that it
needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# How each row is drawn; engine/kernels/logits.cpp has the same fields in the same order.
ASKED = np.dtype(
    [
        ("temperature", np.float64),  # 0: the likeliest token
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("u", np.float64),  # the uniform number, in [0, 1)
        ("top_k", np.int64),  # from the vocabulary's size on: off
    ]
)

# 2^44 * 2^18 tokens (the widest vocabularies in use) stays below 2^62, so sums fit an int64.
ONE = 1 << 44
# Candidates looked at for top_p before a full sort: nearly always enough, at a tenth of the sort's price.
CANDIDATES = 1024
# Logits handled at once on a CPU in the passes over whole rows: 2 MiB of float32, about what a core's cache holds.
CPU_LOGITS = 1 << 19
# The draw looks for its token first among sums of so many tokens, then among the tokens of one such sum.
CHUNK = 128


class Distribution(Protocol):
    """Rows' log-probabilities, of the logits as they were when it was made."""

    def columns(self, ids: Tensor) -> Tensor:
        """[rows, 1 + 2 * count] float64: the log-probability of one token of each row (ids: [rows]), the largest ones,
        equals by ascending id, and their ids."""
        ...


class Vocabulary(Protocol):
    """What the sampler needs: x is [rows, vocab] float32 or float64."""

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest number and the lowest place of it, -1 where that is infinite or no number (which counts
        as the largest)."""
        ...

    def draw(self, x: Tensor, asked: NDArray) -> tuple[Tensor, Tensor]:
        """Each row's largest number, and a place drawn as asked: [rows] of ASKED; -1 as of `best`."""
        ...

    def distribution(self, x: Tensor, count: int) -> Distribution: ...

    def forbid(self, x: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        """Make negative infinity, in place, of what these rows' bits ([rows, words]) forbid: 32 in a word, 0."""
        ...


@dataclass(frozen=True, slots=True)
class LogSoftmax:
    """Log-probabilities of all tokens: [rows, vocab]."""

    logprobs: Tensor
    count: int

    def columns(self, ids: Tensor) -> Tensor:
        own = self.logprobs.gather(1, ids.unsqueeze(1))
        values, places = _most_likely(self.logprobs, self.count)
        return torch.cat([own.double(), values.double(), places.double()], dim=1)


class TorchVocabulary:
    """In torch, on any device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top, places = x.max(dim=1)
        return top, places.masked_fill(~top.isfinite(), -1)

    def distribution(self, x: Tensor, count: int) -> LogSoftmax:
        return LogSoftmax(x.log_softmax(dim=1), count)

    def forbid(self, x: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        """The bits cross to the device as they are."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.device)
        forbidden = (self._device(bits).unsqueeze(2) >> shifts).bitwise_and_(1).logical_not_().flatten(1)
        forbidden = forbidden[:, : self.vocab_size].bool()
        if len(rows) == len(x):
            x.masked_fill_(forbidden, -torch.inf)
        else:
            at = self._device(rows)
            x[at] = x[at].masked_fill_(forbidden, -torch.inf)

    def draw(self, x: Tensor, asked: NDArray) -> tuple[Tensor, Tensor]:
        top, places = self.best(x)
        drawing = np.flatnonzero(asked["temperature"] > 0)
        if len(drawing):
            drawn = self._draw(rows_of(x, drawing), rows_of(top, drawing), asked[drawing])
            drawn = places.index_copy(0, self._device(drawing), drawn)
            places = drawn.where(places >= 0, -1)
        return top, places

    def _draw(self, x: Tensor, top: Tensor, asked: NDArray) -> Tensor:
        """Places [rows] by the inverse of the distribution function, in the order of the token ids."""
        filtered = (asked["top_k"] < self.vocab_size) | (asked["top_p"] < 1.0)
        narrow = np.flatnonzero(filtered)
        if len(narrow) == len(asked):
            return self._draw_narrow(x, top, asked)
        wide = np.flatnonzero(~filtered)
        if len(wide) == len(asked):
            return self._draw_wide(x, top, asked)
        ids = torch.empty(len(asked), dtype=torch.int64, device=x.device)
        for rows, draw in ((wide, self._draw_wide), (narrow, self._draw_narrow)):
            ids[self._device(rows)] = draw(rows_of(x, rows), rows_of(top, rows), asked[rows])
        return ids

    def _draw_wide(self, x: Tensor, top: Tensor, asked: NDArray) -> Tensor:
        """Rows without top_k and top_p: every token takes part, nothing is sorted."""
        coldness = self._coldness(asked, x)
        floor = self._floors(asked) if asked["min_p"].any() else None
        u = self._device(asked["u"])
        ids = []
        for part in self._parts(len(asked)):
            weights = _weights(x[part], top[part], coldness[part])
            if floor is not None:
                weights = weights.where(weights >= floor[part].unsqueeze(1), 0)
            ids.append(_pick(weights, u[part]))
        return torch.cat(ids)

    def _draw_narrow(self, x: Tensor, top: Tensor, asked: NDArray, *, full: bool = False) -> Tensor:
        """Rows with top_k or top_p: draw among the likeliest tokens.

        Where those do not show the whole filtered set (the mass is not reached, or equals go on beyond them), the row
        is done again with all tokens sorted."""
        top_k = asked["top_k"]
        has_k = top_k < self.vocab_size
        wanted = int(np.where(has_k, top_k, CANDIDATES).max()) + 1  # one more shows whether equals go on
        width = self.vocab_size if full else min(wanted, self.vocab_size)
        full = width == self.vocab_size
        coldness, u = self._coldness(asked, x), self._device(asked["u"])
        values, ids = x.topk(width, dim=1)
        weights = _weights(values, top, coldness)

        # top_k, on the logits themselves: the temperature keeps their order.
        by_k = self._device(has_k)
        last_k = values.gather(1, self._device(np.minimum(top_k, width) - 1).unsqueeze(1))
        weights = weights.where((values >= last_k) | ~by_k.unsqueeze(1), 0)
        whole = (values[:, -1:] < last_k).squeeze(1)
        total = weights.sum(dim=1)
        if not full and not has_k.all():  # the mass of rows without top_k lies beyond the candidates too
            rows = np.flatnonzero(~has_k)
            mass = [
                _weights(rows_of(x, rows[part]), rows_of(top, rows[part]), rows_of(coldness, rows[part])).sum(dim=1)
                for part in self._parts(len(rows))
            ]
            total = total.index_copy(0, self._device(rows), torch.cat(mass))

        # top_p: the smallest weight needed so that the tokens of at least that weight hold the mass.
        top_p = self._device(asked["top_p"])
        need = (top_p * total.double()).ceil().long().minimum(total).clamp(min=1)
        place = torch.searchsorted(weights.cumsum(dim=1), need.unsqueeze(1))
        reached = (place < width).squeeze(1)
        floor = weights.gather(1, place.clamp(max=width - 1)).squeeze(1)
        floor = floor.where(top_p < 1.0, 1)
        if not full:
            whole = whole.where(by_k, reached & (weights[:, -1] < floor))
        floor = floor.maximum(self._floors(asked))
        weights = weights.where(weights >= floor.unsqueeze(1), 0)

        if full:  # back to the order of the token ids
            return _pick(torch.zeros_like(weights).scatter_(1, ids, weights), u)
        ids, order = ids.sort(dim=1)
        drawn = ids.gather(1, _pick(weights.gather(1, order), u).unsqueeze(1)).squeeze(1)
        again = (~whole).nonzero().squeeze(1).cpu().numpy()  # on CUDA the one wait besides the result
        for part in self._parts(len(again)):
            rows = again[part]
            drawn[self._device(rows)] = self._draw_narrow(rows_of(x, rows), rows_of(top, rows), asked[rows], full=True)
        return drawn

    def _coldness(self, asked: NDArray, like: Tensor) -> Tensor:
        return self._device(1.0 / asked["temperature"]).to(like.dtype)

    def _floors(self, asked: NDArray) -> Tensor:
        """min_p as a weight: the best token's is ONE. At least 1, so that a weight of 0 never counts as kept."""
        return self._device(np.maximum(np.ceil(asked["min_p"] * ONE), 1).astype(np.int64))

    def _device(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _parts(self, rows: int) -> list[slice]:
        step = max(1, CPU_LOGITS // self.vocab_size) if self.device.type == "cpu" else max(1, rows)
        return [slice(start, start + step) for start in range(0, rows, step)]


def rows_of(x: Tensor, rows: Ints) -> Tensor:
    """x[rows] for ascending rows, without a copy when they are all of them."""
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))


def _weights(x: Tensor, top: Tensor, coldness: Tensor) -> Tensor:
    """Probabilities up to a factor, as integers: x, the result [rows, any] int64; top, 1 / temperature [rows]."""
    scaled = (x - top.unsqueeze(1)).mul_(coldness.unsqueeze(1))
    return scaled.double().exp_().to(x.dtype).mul_(ONE).long()


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """The first place in each row where the sum of weights passes u * total: [rows] int64.

    Rows with nothing to draw (their logits were no numbers) get some place in range; the caller marks them."""
    rows, width = weights.shape
    spare = -width % CHUNK
    chunks = (torch.nn.functional.pad(weights, (0, spare)) if spare else weights).view(rows, -1, CHUNK)
    sums = chunks.sum(dim=2)
    upto = sums.cumsum(dim=1)
    total = upto[:, -1]
    target = (u * total.double()).long().minimum(total - 1).unsqueeze(1)
    chunk = torch.searchsorted(upto, target, right=True).clamp(max=chunks.shape[1] - 1)
    target = target - (upto - sums).gather(1, chunk)
    inside = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, CHUNK)).squeeze(1).cumsum(dim=1)
    place = torch.searchsorted(inside, target, right=True).clamp(max=CHUNK - 1)
    return (chunk * CHUNK + place).squeeze(1).clamp(max=width - 1)


def _most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their ids, equals by ascending id: both [rows, count].

    topk promises no order among equals, and logits of a 16-bit model are full of them."""
    rows, width = logprobs.shape
    if count == 0:
        return logprobs.new_empty(rows, 0), torch.empty(rows, 0, dtype=torch.int64, device=logprobs.device)
    values, ids = logprobs.topk(min(count + 1, width), dim=1)
    if count < width:
        edge = values[:, count - 1]
        for row in (edge == values[:, count]).nonzero().squeeze(1).tolist():
            above = ids[row, :count][values[row, :count] > edge[row]]
            equals = (logprobs[row] == edge[row]).nonzero().squeeze(1)
            ids[row, :count] = torch.cat([above, equals])[:count]
            values[row, :count] = logprobs[row, ids[row, :count]]
    ids, order = ids[:, :count].sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
