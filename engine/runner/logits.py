"""Operations on a step's logits in torch, on any device: sampling, log-probabilities and masks.

engine/kernels/logits.py computes the same with kernels on a CPU, and triton_logits.py on a GPU; this module is their
oracle.

A sampled token depends only on the logits, the row's parameters and its random number. Probabilities are converted to
integers before they are summed, because integer sums do not depend on the order: weight = floor(2^44 * e), where e is
exp((logit - max) * (1 / temperature)), rounded to float32 (for float64 logits to float64). A token that is 2^44 times
less likely than the best one is never sampled. The filters are thresholds on values, so equal tokens are kept or
removed together: top_k keeps every token that equals the k-th one, and top_p every token as likely as the last one that
it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .changes import Changes, Ints, on_device

# A row's sampling parameters; `Params` in engine/kernels/logits.cpp has the same fields in the same order.
ROW_PARAMS = np.dtype(
    [
        ("temperature", np.float64),  # 0: greedy
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("u", np.float64),  # the random number, uniform in [0, 1)
        ("top_k", np.int64),  # off if it is at least the vocabulary's size
    ]
)

# The weight of the most likely token. With the largest vocabularies in use, 2^18 tokens, sums stay below 2^62.
ONE = 1 << 44
# Most likely tokens that top_p tries before a full sort: nearly always enough, in a tenth of the time.
CANDIDATES = 1024
# Logits that operations on whole rows process at once on a CPU: 2 MiB of float32, about the size of a core's cache.
CPU_LOGITS = 1 << 19
# Sampling first selects a chunk of this number of tokens by the chunks' sums, and then a token in it.
CHUNK = 128


class Distribution(Protocol):
    """The log-probabilities of some rows."""

    def columns(self, ids: Tensor) -> Tensor:
        """Return [rows, 1 + 2 * count] float64: the log-probability of one token of each row (ids: [rows]), the `count`
        largest ones, equals by ascending id, and the ids of these."""
        ...


class LogitsBackend(Protocol):
    """Operations on logits, x: [rows, vocab] float32 or float64."""

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest number, NaN before others, and its lowest index; -1 if it is infinite or NaN."""
        ...

    def sample(self, x: Tensor, params: NDArray) -> tuple[Tensor, Tensor]:
        """Return each row's largest number, and a sampled index; -1 as for `best`. params: [rows] of ROW_PARAMS."""
        ...

    def processed(self, x: Tensor, params: NDArray) -> Tensor:
        """Return the logits of the distribution that `sample` samples from: divided by the temperature (greedy: 1), and
        negative infinity for tokens that top_k, top_p or min_p remove. A new tensor, [rows, vocab]."""
        ...

    def distribution(self, x: Tensor, count: int) -> Distribution:
        """Return the log-probabilities, with the `count` largest. x must not change until the last use."""
        ...

    def change(self, x: Tensor, changes: Changes) -> None:
        """Change logits in place."""
        ...

    def forbid(self, x: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        """Set the logits that masks forbid to negative infinity, in place. rows: indices of x; bits: [rows, words], 32
        tokens per word, 1: allowed."""
        ...


@dataclass(frozen=True, slots=True)
class LogSoftmax:
    """Log-probabilities of all tokens: [rows, vocab]."""

    logprobs: Tensor
    count: int

    def columns(self, ids: Tensor) -> Tensor:
        own = self.logprobs.gather(1, ids.unsqueeze(1))
        values, top_ids = _most_likely(self.logprobs, self.count)
        return torch.cat([own.double(), values.double(), top_ids.double()], dim=1)


class TorchLogits:
    """Operations on logits in torch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top, ids = x.max(dim=1)
        return top, ids.masked_fill(~top.isfinite(), -1)

    def distribution(self, x: Tensor, count: int) -> LogSoftmax:
        return LogSoftmax(x.log_softmax(dim=1), count)

    def change(self, x: Tensor, changes: Changes) -> None:
        changes.apply(x)

    def forbid(self, x: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        """See LogitsBackend. The bits are copied to the device packed."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.device)
        forbidden = (self._device(bits).unsqueeze(2) >> shifts).bitwise_and_(1).logical_not_().flatten(1)
        forbidden = forbidden[:, : self.vocab_size].bool()
        if len(rows) == len(x):
            x.masked_fill_(forbidden, -torch.inf)
        else:
            at = self._device(rows)
            x[at] = x[at].masked_fill_(forbidden, -torch.inf)

    def sample(self, x: Tensor, params: NDArray) -> tuple[Tensor, Tensor]:
        top, ids = self.best(x)
        random = np.flatnonzero(params["temperature"] > 0)
        if len(random):
            sampled = self._sample(rows_of(x, random), rows_of(top, random), params[random])
            sampled = ids.index_copy(0, self._device(random), sampled)
            ids = sampled.where(ids >= 0, -1)
        return top, ids

    def processed(self, x: Tensor, params: NDArray) -> Tensor:
        random = np.flatnonzero((params["temperature"] > 0) & self.best(x)[0].isfinite().cpu().numpy())
        out, params = x.clone(), params[random]
        if not len(random):
            return out
        values, ids = rows_of(x, random).sort(dim=1, descending=True)
        coldness = self._coldness(params, x)
        weights = _weights(values, values[:, 0], coldness)
        last_k = values.gather(1, self._device(np.minimum(params["top_k"], self.vocab_size) - 1).unsqueeze(1))
        weights = weights.where(values >= last_k, 0)
        floor = self._lowest(weights, weights.sum(dim=1), params)[0].maximum(self._floors(params))
        # Without these filters unlikely tokens stay, although their weight is 0.
        floor = floor.where(self._device((params["top_p"] < 1.0) | (params["min_p"] > 0.0)), 0)
        scaled = (values - values[:, :1]).mul_(coldness.unsqueeze(1))
        scaled.masked_fill_((values < last_k) | (weights < floor.unsqueeze(1)), -torch.inf)
        out[self._device(random)] = torch.empty_like(scaled).scatter_(1, ids, scaled)
        return out

    def _sample(self, x: Tensor, top: Tensor, params: NDArray) -> Tensor:
        """Return token ids [rows], by the inverse of the distribution function over ascending ids."""
        is_filtered = (params["top_k"] < self.vocab_size) | (params["top_p"] < 1.0)
        filtered = np.flatnonzero(is_filtered)
        if len(filtered) == len(params):
            return self._sample_filtered(x, top, params)
        plain = np.flatnonzero(~is_filtered)
        if len(plain) == len(params):
            return self._sample_plain(x, top, params)
        ids = torch.empty(len(params), dtype=torch.int64, device=x.device)
        for rows, sample in ((plain, self._sample_plain), (filtered, self._sample_filtered)):
            ids[self._device(rows)] = sample(rows_of(x, rows), rows_of(top, rows), params[rows])
        return ids

    def _sample_plain(self, x: Tensor, top: Tensor, params: NDArray) -> Tensor:
        """Sample rows without top_k and top_p, which needs no sorting."""
        coldness = self._coldness(params, x)
        floor = self._floors(params) if params["min_p"].any() else None
        u = self._device(params["u"])
        ids = []
        for part in self._parts(len(params)):
            weights = _weights(x[part], top[part], coldness[part])
            if floor is not None:
                weights = weights.where(weights >= floor[part].unsqueeze(1), 0)
            ids.append(_pick(weights, u[part]))
        return torch.cat(ids)

    def _sample_filtered(self, x: Tensor, top: Tensor, params: NDArray, *, full: bool = False) -> Tensor:
        """Sample rows with top_k or top_p, from the most likely tokens.

        If these may not contain all tokens that pass the filters (their mass is below top_p, or the next token may
        equal the last one), the row is sampled again with all tokens sorted.
        """
        top_k = params["top_k"]
        has_k = top_k < self.vocab_size
        needed = int(np.where(has_k, top_k, CANDIDATES).max()) + 1  # one more shows whether the next token is equal
        width = self.vocab_size if full else min(needed, self.vocab_size)
        full = width == self.vocab_size
        coldness, u = self._coldness(params, x), self._device(params["u"])
        values, ids = x.topk(width, dim=1)
        weights = _weights(values, top, coldness)

        # top_k, on the logits: the temperature does not change their order.
        by_k = self._device(has_k)
        last_k = values.gather(1, self._device(np.minimum(top_k, width) - 1).unsqueeze(1))
        weights = weights.where((values >= last_k) | ~by_k.unsqueeze(1), 0)
        complete = (values[:, -1:] < last_k).squeeze(1)
        total = weights.sum(dim=1)
        if not full and not has_k.all():  # without top_k the total includes the other tokens
            rows = np.flatnonzero(~has_k)
            mass = [
                _weights(rows_of(x, rows[part]), rows_of(top, rows[part]), rows_of(coldness, rows[part])).sum(dim=1)
                for part in self._parts(len(rows))
            ]
            total = total.index_copy(0, self._device(rows), torch.cat(mass))

        floor, reached = self._lowest(weights, total, params)
        if not full:
            complete = complete.where(by_k, reached & (weights[:, -1] < floor))
        floor = floor.maximum(self._floors(params))
        weights = weights.where(weights >= floor.unsqueeze(1), 0)

        if full:  # restore the order of the token ids
            return _pick(torch.zeros_like(weights).scatter_(1, ids, weights), u)
        ids, order = ids.sort(dim=1)
        sampled = ids.gather(1, _pick(weights.gather(1, order), u).unsqueeze(1)).squeeze(1)
        again = (~complete).nonzero().squeeze(1).cpu().numpy()  # on CUDA the only synchronization beside the result
        for part in self._parts(len(again)):
            rows = again[part]
            again_x, again_top = rows_of(x, rows), rows_of(top, rows)
            sampled[self._device(rows)] = self._sample_filtered(again_x, again_top, params[rows], full=True)
        return sampled

    def _lowest(self, weights: Tensor, total: Tensor, params: NDArray) -> tuple[Tensor, Tensor]:
        """Return top_p as a weight, the largest such that the tokens of at least this weight have the mass, and whether
        `weights`, [rows, n] in descending order, have it: both [rows]."""
        width = weights.shape[1]
        top_p = self._device(params["top_p"])
        need = (top_p * total.double()).ceil().long().minimum(total).clamp(min=1)
        last_p = torch.searchsorted(weights.cumsum(dim=1), need.unsqueeze(1))
        floor = weights.gather(1, last_p.clamp(max=width - 1)).squeeze(1)
        return floor.where(top_p < 1.0, 1), (last_p < width).squeeze(1)

    def _coldness(self, params: NDArray, like: Tensor) -> Tensor:
        return self._device(1.0 / params["temperature"]).to(like.dtype)

    def _floors(self, params: NDArray) -> Tensor:
        """Return min_p as a weight: that of the best token is ONE. At least 1, so that weights of 0 are never kept."""
        return self._device(np.maximum(np.ceil(params["min_p"] * ONE), 1).astype(np.int64))

    def _device(self, array: NDArray) -> Tensor:
        return on_device(array, self.device)

    def _parts(self, rows: int) -> list[slice]:
        step = max(1, CPU_LOGITS // self.vocab_size) if self.device.type == "cpu" else max(1, rows)
        return [slice(start, start + step) for start in range(0, rows, step)]


def rows_of(x: Tensor, rows: Ints) -> Tensor:
    """Return x[rows] for ascending rows, without a copy if they are all rows."""
    return x if len(rows) == len(x) else x.index_select(0, on_device(rows, x.device))


def _weights(x: Tensor, top: Tensor, coldness: Tensor) -> Tensor:
    """Return unnormalized probabilities, [rows, n] int64. x: [rows, n]; top, coldness (1 / temperature): [rows]."""
    scaled = (x - top.unsqueeze(1)).mul_(coldness.unsqueeze(1))
    return scaled.double().exp_().to(x.dtype).mul_(ONE).long()


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first index in each row at which the cumulative weight exceeds u * total: [rows] int64.

    For rows whose weights are all 0, because of NaN, it is an arbitrary valid index; the caller replaces it.
    """
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
    index = torch.searchsorted(inside, target, right=True).clamp(max=CHUNK - 1)
    return (chunk * CHUNK + index).squeeze(1).clamp(max=width - 1)


def _most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's `count` largest numbers and their ids, equals by ascending id: both [rows, count].

    topk returns equals in any order, and logits of 16-bit models have many.
    """
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
