"""Sampler: logits -> tokens for a whole step at once, each row with its own parameters.

A drawn token is a function of (logits, params, position) alone, to the last bit: not of its neighbours, of the
size of the batch or of the way through this code. Two things make it so. The uniform number comes from a
counter-based hash of (seed, position), so there is no random state to advance. And probabilities become
integers before anything is summed: weight = floor(2^44 * exp((logit - max) / temperature)), and integer sums do
not depend on their order. A token 2^44 times less likely than the best one is never drawn.

Order: penalties, bias, min_tokens mask, outside mask, temperature, top_k, top_p, min_p, draw. The filters are
thresholds on values, so that equal tokens share a fate whatever order they were found in: top_k keeps every token
that equals the k-th one, top_p every token as likely as the last one that it needs.

A bias of -100 or less means never; a token biased by +100 or more excludes every token that is not (OpenAI's "ban
or exclusive selection").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite, isnan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import NOTHING_LEFT, Entered
from ..kernels.library import Kernels
from ..types import SamplingParams, TokenLogprob

# Below this a temperature is greedy: (logit - max) / temperature would leave float32's range of useful values.
GREEDY = 1e-5
# 2^44 * 2^18 tokens (the widest vocabularies in use) stays below 2^62, so sums fit an int64.
ONE = 1 << 44
# Candidates looked at for top_p before a full sort: nearly always enough, at a tenth of the sort's price.
CANDIDATES = 1024
# Logits handled at once on a CPU in the passes over whole rows: 2 MiB of float32, about what a core's cache holds.
CPU_LOGITS = 1 << 19
# The draw looks for its token first among sums of so many tokens, then among the tokens of one such sum.
CHUNK = 128

NEVER, ONLY = -100.0, 100.0
NOT_FINITE, NOTHING = -1, -2  # in place of a token id
ERRORS = {
    NOT_FINITE: "the logits for this request, or what its penalties make of them, are not finite numbers",
    NOTHING: NOTHING_LEFT,
}

Ints = NDArray[np.int64]


def uniform(seeds: NDArray[np.uint64], positions: Ints) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position); both are hashed with splitmix64 (Steele, Lea, Flood 2014,
    "Fast splittable pseudorandom number generators"): the seed once, then the position-th step of its stream."""
    state = _mix(seeds) + np.uint64(0x9E3779B97F4A7C15) * (positions.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def problem(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be sampled with, in one sentence; None when they can."""
    numbers = (
        ("temperature", params.temperature, 0.0, None),
        ("top_p", params.top_p, 0.0, 1.0),
        ("min_p", params.min_p, 0.0, 1.0),
        ("presence_penalty", params.presence_penalty, None, None),
        ("frequency_penalty", params.frequency_penalty, None, None),
        ("repetition_penalty", params.repetition_penalty, 0.0, None),
    )
    for name, value, low, high in numbers:
        if not isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
            return f"{name} {value} is out of range"
    if params.repetition_penalty == 0.0:
        return "repetition_penalty must be above 0"
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            return f"logit_bias names token {token_id}, but token ids end at {vocab_size - 1}"
        if isnan(bias):
            return f"the logit_bias of token {token_id} is not a number"
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count < 0:
            return f"{name} {count} is out of range"
    for name, ids in (("allowed_ids", params.allowed_ids or ()), ("bad_words", chain.from_iterable(params.bad_words))):
        if not all(0 <= token_id < vocab_size for token_id in ids):
            return f"{name} names a token outside of the vocabulary of {vocab_size} tokens"
    if params.allowed_ids == ():
        return "allowed_ids allows no token"
    return None


@dataclass(slots=True, eq=False)
class History:
    """How often each token stands in a sequence; as sparse as the sequence is short."""

    prompt_len: int
    seen: int  # tokens counted so far
    index: dict[int, int]  # token id -> place in the columns
    ids: Ints
    counts: NDArray[np.float64]  # in the output alone; 0 for a token of the prompt
    tail: deque[int]  # the output's last tokens, as many as the longest bad word looks back

    @classmethod
    def of(cls, token_ids: Sequence[int], prompt_len: int, tail: int = 0) -> History:
        ids = np.unique(np.asarray(token_ids[:prompt_len], dtype=np.int64))
        index = {token_id: place for place, token_id in enumerate(ids.tolist())}
        seen = min(prompt_len, len(token_ids))
        history = cls(prompt_len, seen, index, ids, np.zeros(len(ids)), deque(maxlen=tail))
        history.add(token_ids[prompt_len:])
        return history

    @property
    def size(self) -> int:
        return len(self.index)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self.index.setdefault(token_id, len(self.index))
            if place >= len(self.ids):
                room = max(16, place)  # doubles, so that a long output costs no copy per token
                self.ids = np.concatenate([self.ids, np.zeros(room, np.int64)])
                self.counts = np.concatenate([self.counts, np.zeros(room)])
            self.ids[place] = token_id
            if self.seen >= self.prompt_len:
                self.counts[place] += 1
                self.tail.append(token_id)
            self.seen += 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for the rows asked about, by their place in the call."""

    token_ids: list[int]  # below 0 where the row failed
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Parameters in columns, one place per slot, written when a sequence enters and read at every step."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device, kernels: Kernels | None = None) -> None:
        if vocab_size * ONE >= 1 << 63:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too wide for integer weights")
        self.vocab_size = vocab_size
        self.device = device
        self._kernels = kernels
        self._prompt_len = np.zeros(max_seqs, np.int64)
        self._seed = np.zeros(max_seqs, np.uint64)
        self._temperature = np.zeros(max_seqs)
        self._top_k = np.zeros(max_seqs, np.int64)  # vocab_size: off
        self._top_p = np.ones(max_seqs)
        self._min_p = np.zeros(max_seqs)
        self._repetition = np.ones(max_seqs)
        self._presence = np.zeros(max_seqs)
        self._frequency = np.zeros(max_seqs)
        self._min_tokens = np.zeros(max_seqs, np.int64)
        self._logprobs = np.full(max_seqs, -1, np.int64)  # -1: none asked for
        self._stop_ids: list[Ints] = [np.empty(0, np.int64)] * max_seqs
        self._bias: dict[int, tuple[Ints, NDArray[np.float64]]] = {}  # slot -> token ids and what is added
        self._only: dict[int, Ints] = {}  # slot -> the only tokens that may be drawn
        self._allowed: dict[int, Ints] = {}  # slot -> token ids, where not all are
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._prompt_logprobs = np.full(max_seqs, -1, np.int64)  # -1: none asked for
        self._history: dict[int, History] = {}
        self.problems: dict[int, str] = {}  # slot -> why its parameters cannot be sampled with

    def add(self, slot: int, entered: Entered) -> None:
        """Take a sequence's parameters. Bad ones are told in `problems`, and the row draws as if it had none."""
        params = entered.params
        found = problem(params, self.vocab_size)
        if found is None and params.uses_history and not all(0 <= t < self.vocab_size for t in entered.token_ids):
            found = f"a token id is outside of the vocabulary of {self.vocab_size} tokens"
        if found is not None:
            self.problems[slot] = found
            params = SamplingParams(max_tokens=params.max_tokens)
        self._prompt_len[slot] = entered.prompt_len
        self._seed[slot] = params.seed & (1 << 64) - 1
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._min_tokens[slot] = min(params.min_tokens, 1 << 62)  # a wire's integer may be wider than a column
        self._logprobs[slot] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        self._prompt_logprobs[slot] = (
            -1 if params.prompt_logprobs is None else min(params.prompt_logprobs, self.vocab_size)
        )
        if params.allowed_ids is not None:
            self._allowed[slot] = np.unique(np.array(params.allowed_ids, np.int64))
        if params.bad_words:
            self._bad_words[slot] = tuple(word for word in params.bad_words if word)
        stop_ids = [t for t in params.stop_ids if 0 <= t < self.vocab_size]  # others cannot be drawn anyway
        self._stop_ids[slot] = np.array(stop_ids, np.int64)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            values = np.fromiter(params.logit_bias.values(), np.float64)
            only = ids[values >= ONLY]
            if len(only):
                self._only[slot] = only
            # An infinite bias has said all it can as never or only; added to a logit it would leave no number.
            self._bias[slot] = ids, np.where(values <= NEVER, -np.inf, np.minimum(values, np.finfo(np.float32).max / 4))
        if params.uses_history:
            longest = max((len(word) for word in params.bad_words), default=1)
            self._history[slot] = History.of(entered.token_ids, entered.prompt_len, max(0, longest - 1))

    def remove(self, slot: int) -> None:
        for table in (self._bias, self._only, self._allowed, self._bad_words, self._history, self.problems):
            table.pop(slot, None)

    def observe(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Count the tokens that the model is about to see at positions start, start + 1, …, each once."""
        history = self._history.get(slot)
        if history is not None:
            history.add([t for t in token_ids[max(0, history.seen - start) :] if 0 <= t < self.vocab_size])

    def sample(
        self, logits: Tensor, slots: Ints, lengths: Ints, masks: tuple[Ints, NDArray[np.int32]] | None = None
    ) -> Drawn:
        """Draw one token per row.

        logits: [rows, vocab] float32 or float64, overwritten. slots: [rows]. lengths: [rows] tokens before the drawn
        one. masks: the rows that have one, ascending, and [rows, ceil(vocab / 32)] bits, 0 where a token is forbidden.
        The only transfer to the host is the result.
        """
        positions = lengths - self._prompt_len[slots]
        asking = np.flatnonzero(self._logprobs[slots] >= 0)
        raw = _rows(logits, asking).log_softmax(dim=1) if len(asking) else None  # before anything is changed
        changes = masks is not None or self._has_changes(slots, positions)
        raw_top = logits.amax(dim=1) if changes else None
        if changes:
            self._change(logits, slots, positions)
        if masks is not None:
            self._mask(logits, *masks)
        top, ids = best(logits, self._kernels)
        drawing = np.flatnonzero(self._temperature[slots] >= GREEDY)
        if len(drawing):
            chosen = slots[drawing]
            drawn = self._draw(
                _rows(logits, drawing),
                _rows(top, drawing),
                chosen,
                self._device(uniform(self._seed[chosen], positions[drawing])),
            )
            ids = drawn if len(drawing) == len(slots) else ids.index_copy(0, self._device(drawing), drawn)
        ids = ids.masked_fill(~top.isfinite(), NOT_FINITE)
        if raw_top is not None:
            ids = ids.masked_fill(top == -torch.inf, NOTHING).masked_fill(~raw_top.isfinite(), NOT_FINITE)
        return self._collect(ids, raw, asking, slots)

    # -- the logits before temperature ------------------------------------------------------------------------

    def _has_changes(self, slots: Ints, positions: Ints) -> bool:
        tables = self._bias.keys() | self._history.keys() | self._allowed.keys()
        return not tables.isdisjoint(slots.tolist()) or bool((positions < self._min_tokens[slots]).any())

    def _change(self, x: Tensor, slots: Ints, positions: Ints) -> None:
        """Penalties, bias and the min_tokens mask, in place."""
        self._penalize(x, slots)
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in self._bias]
        if biased:
            columns = [self._bias[slot] for slot in slots[biased].tolist()]
            rows, ids = self._places(biased, [ids for ids, _ in columns])
            x[rows, ids] += self._device(np.concatenate([values for _, values in columns])).to(x.dtype)
        for table in (self._only, self._allowed):
            exclusive = [row for row, slot in enumerate(slots.tolist()) if slot in table]
            if exclusive:
                rows, ids = self._places(exclusive, [table[slot] for slot in slots[exclusive].tolist()])
                kept = x[rows, ids]
                x[self._device(np.array(exclusive))] = -torch.inf
                x[rows, ids] = kept
        banned = [(row, self._banned(slot)) for row, slot in enumerate(slots.tolist()) if slot in self._bad_words]
        if banned:
            rows, ids = self._places([row for row, _ in banned], [ids for _, ids in banned])
            x[rows, ids] = -torch.inf
        young = np.flatnonzero(positions < self._min_tokens[slots]).tolist()
        if young:
            rows, ids = self._places(young, [self._stop_ids[slot] for slot in slots[young].tolist()])
            x[rows, ids] = -torch.inf

    def _mask(self, x: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        """Forbid, in place, what these rows' masks forbid. The bits cross to the device as they are, 32 in a word."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.device)
        forbidden = (self._device(bits).unsqueeze(2) >> shifts).bitwise_and_(1).logical_not_().flatten(1)
        forbidden = forbidden[:, : self.vocab_size].bool()
        if len(rows) == len(x):
            x.masked_fill_(forbidden, -torch.inf)
        else:
            at = self._device(rows)
            x[at] = x[at].masked_fill_(forbidden, -torch.inf)

    def _banned(self, slot: int) -> Ints:
        """Tokens that would complete a bad word now."""
        tail = tuple(self._history[slot].tail)
        words = [word for word in self._bad_words[slot] if len(word) <= len(tail) + 1]
        return np.array([w[-1] for w in words if tail[len(tail) + 1 - len(w) :] == w[:-1]], np.int64)

    def score(self, logits: Tensor, slot: int, targets: list[int]) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's own tokens. logits: [targets, vocab], each row predicts its target."""
        count = int(self._prompt_logprobs[slot])
        if count < 0:
            return []  # its parameters cannot be sampled with: the row fails, see `problems`
        raw = logits.log_softmax(dim=1)
        own = raw.gather(1, self._device(np.array(targets, np.int64)).unsqueeze(1)).squeeze(1).tolist()
        values, ids = (each.tolist() for each in _most_likely(raw, count))
        return [TokenLogprob(o, tuple(i), tuple(v)) for o, i, v in zip(own, ids, values, strict=True)]

    def _penalize(self, x: Tensor, slots: Ints) -> None:
        """Repetition divides what is positive and multiplies what is not (Keskar et al. 2019, CTRL); frequency counts,
        presence is once. Same order and meaning as in transformers and vLLM."""
        found = [(row, self._history[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._history]
        if not found:
            return
        places = [row for row, _ in found]
        sizes = [history.size for _, history in found]
        rows, ids = self._places(places, [history.ids[: history.size] for _, history in found])
        counts = np.concatenate([history.counts[: history.size] for _, history in found])

        def column(values: NDArray[np.float64]) -> Tensor:
            return self._device(values).to(x.dtype)

        def of_rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.repeat(values[slots[places]], sizes)

        with np.errstate(over="ignore"):  # an absurd penalty is infinite
            frequency = of_rows(self._frequency) * counts
        logits = x[rows, ids]
        repetition = column(of_rows(self._repetition))
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits -= column(frequency)
        logits -= column(of_rows(self._presence) * (counts > 0))
        x[rows, ids] = logits

    # -- the draw ---------------------------------------------------------------------------------------------

    def _draw(self, x: Tensor, top: Tensor, slots: Ints, u: Tensor) -> Tensor:
        """Token ids [rows] by the inverse of the distribution function, in the order of the token ids."""
        filtered = (self._top_k[slots] < self.vocab_size) | (self._top_p[slots] < 1.0)
        narrow = np.flatnonzero(filtered)
        if len(narrow) == len(slots):
            return self._draw_narrow(x, top, slots, u)
        wide = np.flatnonzero(~filtered)
        if len(wide) == len(slots):
            return self._draw_wide(x, top, slots, u)
        ids = torch.empty(len(slots), dtype=torch.int64, device=x.device)
        for rows, draw in ((wide, self._draw_wide), (narrow, self._draw_narrow)):
            ids[self._device(rows)] = draw(_rows(x, rows), _rows(top, rows), slots[rows], _rows(u, rows))
        return ids

    def _draw_wide(self, x: Tensor, top: Tensor, slots: Ints, u: Tensor) -> Tensor:
        """Rows without top_k and top_p: every token takes part, nothing is sorted."""
        temperature = self._temperatures(slots, x)
        floor = self._floors(slots) if self._min_p[slots].any() else None
        ids = []
        for part in self._parts(len(slots)):
            weights = _weights(x[part], top[part], temperature[part])
            if floor is not None:
                weights = weights.where(weights >= floor[part].unsqueeze(1), 0)
            ids.append(_pick(weights, u[part]))
        return torch.cat(ids)

    def _draw_narrow(self, x: Tensor, top: Tensor, slots: Ints, u: Tensor, *, full: bool = False) -> Tensor:
        """Rows with top_k or top_p: draw among the likeliest tokens.

        Where those do not show the whole filtered set (the mass is not reached, or equals go on beyond them), the row
        is done again with all tokens sorted."""
        top_k = self._top_k[slots]
        has_k = top_k < self.vocab_size
        wanted = int(np.where(has_k, top_k, CANDIDATES).max()) + 1  # one more shows whether equals go on
        width = self.vocab_size if full else min(wanted, self.vocab_size)
        full = width == self.vocab_size
        temperature = self._temperatures(slots, x)
        values, ids = x.topk(width, dim=1)
        weights = _weights(values, top, temperature)

        # top_k, on the logits themselves: dividing by the temperature keeps their order.
        by_k = self._device(has_k)
        last_k = values.gather(1, self._device(np.minimum(top_k, width) - 1).unsqueeze(1))
        weights = weights.where((values >= last_k) | ~by_k.unsqueeze(1), 0)
        whole = (values[:, -1:] < last_k).squeeze(1)
        total = weights.sum(dim=1)
        if not full and not has_k.all():  # the mass of rows without top_k lies beyond the candidates too
            rows = np.flatnonzero(~has_k)
            mass = [
                _weights(_rows(x, rows[part]), _rows(top, rows[part]), _rows(temperature, rows[part])).sum(dim=1)
                for part in self._parts(len(rows))
            ]
            total = total.index_copy(0, self._device(rows), torch.cat(mass))

        # top_p: the smallest weight needed so that the tokens of at least that weight hold the mass.
        top_p = self._device(self._top_p[slots])
        need = (top_p * total.double()).ceil().long().minimum(total).clamp(min=1)
        place = torch.searchsorted(weights.cumsum(dim=1), need.unsqueeze(1))
        reached = (place < width).squeeze(1)
        floor = weights.gather(1, place.clamp(max=width - 1)).squeeze(1)
        floor = floor.where(top_p < 1.0, 1)
        if not full:
            whole = whole.where(by_k, reached & (weights[:, -1] < floor))
        floor = floor.maximum(self._floors(slots))
        weights = weights.where(weights >= floor.unsqueeze(1), 0)

        if full:  # back to the order of the token ids
            return _pick(torch.zeros_like(weights).scatter_(1, ids, weights), u)
        ids, order = ids.sort(dim=1)
        drawn = ids.gather(1, _pick(weights.gather(1, order), u).unsqueeze(1)).squeeze(1)
        again = (~whole).nonzero().squeeze(1).cpu().numpy()  # on CUDA the one wait besides the result
        for part in self._parts(len(again)):
            rows = again[part]
            drawn[self._device(rows)] = self._draw_narrow(
                _rows(x, rows), _rows(top, rows), slots[rows], _rows(u, rows), full=True
            )
        return drawn

    def _temperatures(self, slots: Ints, like: Tensor) -> Tensor:
        return self._device(self._temperature[slots]).to(like.dtype)

    def _floors(self, slots: Ints) -> Tensor:
        """min_p as a weight: the best token's is ONE. At least 1, so that a weight of 0 never counts as kept."""
        return self._device(np.maximum(np.ceil(self._min_p[slots] * ONE), 1).astype(np.int64))

    # -- the result -------------------------------------------------------------------------------------------

    def _collect(self, ids: Tensor, raw: Tensor | None, asking: Ints, slots: Ints) -> Drawn:
        """Everything to the host in one transfer: ids alone, or as float64 (exact to 2^53) beside the logprobs."""
        logprobs: dict[int, TokenLogprob] = {}
        if raw is None:
            token_ids = ids.tolist()
        else:
            count = int(self._logprobs[slots[asking]].max())
            rows = self._device(asking)
            own = raw.gather(1, ids[rows].clamp(min=0).unsqueeze(1))
            top_values, top_ids = _most_likely(raw, count)
            columns = torch.zeros(len(ids), 2 + 2 * count, dtype=torch.float64, device=ids.device)
            columns[:, 0] = ids
            columns[rows, 1:] = torch.cat([own.double(), top_values.double(), top_ids.double()], dim=1)
            host = columns.cpu().numpy()
            token_ids = host[:, 0].astype(np.int64).tolist()
            for row in asking.tolist():
                k = int(self._logprobs[slots[row]])
                logprobs[row] = TokenLogprob(
                    logprob=float(host[row, 1]),
                    top_ids=tuple(host[row, 2 + count : 2 + count + k].astype(np.int64).tolist()),
                    top_logprobs=tuple(host[row, 2 : 2 + k].tolist()),
                )
        errors = {row: ERRORS[token_id] for row, token_id in enumerate(token_ids) if token_id < 0}
        return Drawn(token_ids, {row: each for row, each in logprobs.items() if row not in errors}, errors)

    # -- small things -----------------------------------------------------------------------------------------

    def _device(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _places(self, rows: list[int], ids: list[Ints]) -> tuple[Tensor, Tensor]:
        """Index of several tokens in each of several rows."""
        lengths = [len(each) for each in ids]
        return self._device(np.repeat(np.array(rows, np.int64), lengths)), self._device(np.concatenate(ids))

    def _parts(self, rows: int) -> list[slice]:
        step = max(1, CPU_LOGITS // self.vocab_size) if self.device.type == "cpu" else max(1, rows)
        return [slice(start, start + step) for start in range(0, rows, step)]


def best(x: Tensor, kernels: Kernels | None) -> tuple[Tensor, Tensor]:
    """Each row's largest number and the lowest place of it; what is no number counts as the largest. x: [rows, n]"""
    if kernels is None or x.dtype != torch.float32:
        return x.max(dim=1)
    rows, size = x.shape
    x = x.contiguous()
    values, places = x.new_empty(rows), torch.empty(rows, dtype=torch.int64)
    pointers = values.data_ptr(), places.data_ptr()
    if kernels.best(x.data_ptr(), rows, size, *pointers, torch.get_num_threads()):
        raise MemoryError("no memory for the best of a vocabulary's pieces")
    return values, places


def _rows(x: Tensor, rows: Ints) -> Tensor:
    """x[rows] for ascending rows, without a copy when they are all of them."""
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))


def _weights(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities up to a factor, as integers: x, the result [rows, any] int64; top, temperature [rows]."""
    scaled = (x - top.unsqueeze(1)).div_(temperature.unsqueeze(1))
    return scaled.exp_().mul_(ONE).long()


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
