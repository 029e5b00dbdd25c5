"""Sampler: logits -> tokens for a whole step at once, each row with its own parameters.

A drawn token is a function of (logits, params, position) alone, to the last bit: not of its neighbours, of the
size of the batch or of the way through this code. Two things make it so. The uniform number comes from a
counter-based hash of (seed, position), so there is no random state to advance. And probabilities are integers
(logits.py), which the kernels and torch compute alike.

Order: penalties, bias, min_tokens mask, outside mask, temperature, top_k, top_p, min_p, draw.

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

from ..batch import Entered, RowError
from ..kernels.library import Kernels
from ..kernels.logits import NativeVocabulary
from ..types import ErrorCode, SamplingParams, TokenLogprob
from .logits import ASKED, ONE, Distribution, Ints, TorchVocabulary, Vocabulary, rows_of

# Below this a temperature is greedy: (logit - max) / temperature would leave float32's range of useful values.
GREEDY = 1e-5
# Above this it is this: all tokens are alike, and 1 / temperature a normal float32.
HOTTEST = 1e30
NEVER, ONLY = -100.0, 100.0
NOT_FINITE, NOTHING = -1, -2  # in place of a token id; the first is a vocabulary's
ERRORS = {
    NOT_FINITE: RowError("the logits for this request, or what its penalties make of them, are not finite numbers"),
    NOTHING: RowError(
        "logit_bias, allowed_ids, bad_words, min_tokens and the grammar leave no token that could be drawn",
        ErrorCode.NO_TOKEN_LEFT,
    ),
}


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
    errors: dict[int, RowError] = field(default_factory=dict)


class Sampler:
    """Parameters in columns, one place per slot, written when a sequence enters and read at every step."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device, kernels: Kernels | None = None) -> None:
        if vocab_size * ONE >= 1 << 63:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too wide for integer weights")
        self.vocab_size = vocab_size
        self.device = device
        self._torch = TorchVocabulary(vocab_size, device)
        self._native = NativeVocabulary(kernels) if kernels is not None else None
        self._prompt_len = np.zeros(max_seqs, np.int64)
        self._seed = np.zeros(max_seqs, np.uint64)
        self._asked = np.zeros(max_seqs, ASKED)  # without uniform numbers
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
        self.problems: dict[int, RowError] = {}  # slot -> why its parameters cannot be sampled with

    def add(self, slot: int, entered: Entered) -> None:
        """Take a sequence's parameters. Bad ones are told in `problems`, and the row draws as if it had none."""
        params = entered.params
        found = problem(params, self.vocab_size)
        if found is None and params.uses_history and not all(0 <= t < self.vocab_size for t in entered.token_ids):
            found = f"a token id is outside of the vocabulary of {self.vocab_size} tokens"
        if found is not None:
            self.problems[slot] = RowError(found)
            params = SamplingParams(max_tokens=params.max_tokens)
        self._prompt_len[slot] = entered.prompt_len
        self._seed[slot] = params.seed & (1 << 64) - 1
        temperature = min(params.temperature, HOTTEST) if params.temperature >= GREEDY else 0.0
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._asked[slot] = temperature, params.top_p, params.min_p, 0.0, top_k
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
        vocabulary = self._vocabulary(logits)
        changes = masks is not None or self._has_changes(slots, positions)
        asking = np.flatnonzero(self._logprobs[slots] >= 0)
        told: Distribution | None = None
        if len(asking):  # before anything is changed
            raw = rows_of(logits, asking)
            raw = raw.clone() if changes and raw is logits else raw
            told = vocabulary.distribution(raw, int(self._logprobs[slots[asking]].max()))
        raw_top = vocabulary.best(logits)[0] if changes else None
        if changes:
            self._change(logits, slots, positions)
        if masks is not None:
            vocabulary.forbid(logits, *masks)
        asked = self._asked[slots]
        if asked["temperature"].any():
            asked["u"] = uniform(self._seed[slots], positions)
            top, ids = vocabulary.draw(logits, asked)
        else:
            top, ids = vocabulary.best(logits)
        if raw_top is not None:
            ids = ids.masked_fill(top == -torch.inf, NOTHING).masked_fill(~raw_top.isfinite(), NOT_FINITE)
        return self._collect(ids, told, asking, slots)

    def _vocabulary(self, logits: Tensor) -> Vocabulary:
        return self._torch if self._native is None or logits.dtype != torch.float32 else self._native

    # -- the logits before temperature ------------------------------------------------------------------------

    def _has_changes(self, slots: Ints, positions: Ints) -> bool:
        tables = self._bias, self._history, self._allowed
        there = slots.tolist() if any(tables) else ()
        return any(slot in table for table in tables for slot in there) or bool(
            (positions < self._min_tokens[slots]).any()
        )

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
        distribution = self._vocabulary(logits).distribution(logits, count)
        own = self._device(np.array(targets, np.int64))
        columns = distribution.columns(own).cpu().numpy()
        ranks = 1 + (logits > logits.gather(1, own[:, None])).sum(1)
        return [_entry(row, count, rank) for row, rank in zip(columns, ranks.tolist(), strict=True)]

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

    # -- the result -------------------------------------------------------------------------------------------

    def _collect(self, ids: Tensor, told: Distribution | None, asking: Ints, slots: Ints) -> Drawn:
        """Everything to the host in one transfer: ids alone, or as float64 (exact to 2^53) beside the logprobs."""
        logprobs: dict[int, TokenLogprob] = {}
        if told is None:
            token_ids = ids.tolist()
        else:
            rows = self._device(asking)
            found = told.columns(ids[rows].clamp(min=0))
            columns = found.new_zeros(len(ids), 1 + found.shape[1])
            columns[:, 0] = ids
            columns[rows, 1:] = found
            host = columns.cpu().numpy()
            token_ids = host[:, 0].astype(np.int64).tolist()
            for row in asking.tolist():
                logprobs[row] = _entry(host[row, 1:], int(self._logprobs[slots[row]]))
        errors = {row: ERRORS[token_id] for row, token_id in enumerate(token_ids) if token_id < 0}
        return Drawn(token_ids, {row: each for row, each in logprobs.items() if row not in errors}, errors)

    # -- small things -----------------------------------------------------------------------------------------

    def _device(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _places(self, rows: list[int], ids: list[Ints]) -> tuple[Tensor, Tensor]:
        """Index of several tokens in each of several rows."""
        lengths = [len(each) for each in ids]
        return self._device(np.repeat(np.array(rows, np.int64), lengths)), self._device(np.concatenate(ids))


def _entry(columns: NDArray[np.float64], count: int, rank: int | None = None) -> TokenLogprob:
    """One row of Distribution.columns, of which the `count` largest are wanted."""
    values, ids = columns[1:].reshape(2, -1)[:, :count]
    return TokenLogprob(float(columns[0]), tuple(ids.astype(np.int64).tolist()), tuple(values.tolist()), rank)
