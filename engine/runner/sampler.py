"""Sampler: samples a token for each row of a step, with the row's own parameters.

A sampled token is a function of (logits, params, position), to the last bit. It does not depend on the other rows, the
size of the batch or the path through this code, for two reasons. The random number is a counter-based hash of (seed,
position), so there is no random state. And probabilities are integers (logits.py), which the kernels and torch compute
alike.

Log-probabilities are those of the model's logits, or with `processed_logprobs` those that a token is sampled with.

Order: penalties, bias, only and allowed tokens, bad words, min_tokens mask, grammar's mask, temperature, top_k, top_p,
min_p, sampling.

A bias of -100 or less excludes a token; one of +100 or more excludes all tokens with a smaller bias (OpenAI's "ban or
exclusive selection").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, isnan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Entered, RowError
from ..types import SamplingParams
from .changes import Changes, Penalties, Tokens, on_device
from .draw_graphs import DrawGraphs
from .logits import ONE, ROW_PARAMS, Distribution, Ints, LogitsBackend, TorchLogits, rows_of
from .queued import NOT_FINITE, NOTHING, HostCopy, QueuedScores, QueuedTokens

# A lower temperature is greedy: (logit - max) / temperature would leave float32's range of useful values.
GREEDY = 1e-5
# The maximum temperature: all tokens are equally likely, and 1 / temperature is a normal float32.
HOTTEST = 1e30
NEVER, ONLY = -100.0, 100.0


# Constants of splitmix64: creating them for each step would take longer than most of its arithmetic.
SHIFTS = [np.array(bits, np.uint64) for bits in (30, 27, 31, 11)]
FACTORS = [np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)]


def uniform(streams: NDArray[np.uint64], positions: Ints) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each stream of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
    number generators") and position, which is an index into the stream. A seed's stream starts with `mixed(seed)`."""
    state = streams + FACTORS[2] * (positions + 1).view(np.uint64)
    return (mixed(state) >> SHIFTS[3]).astype(np.float64) * 2.0**-53


def mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's hash of numbers."""
    z = (z ^ (z >> SHIFTS[0])) * FACTORS[0]
    z = (z ^ (z >> SHIFTS[1])) * FACTORS[1]
    return z ^ (z >> SHIFTS[2])


def problem(params: SamplingParams, vocab_size: int) -> str | None:
    """Return why these parameters are invalid, in one sentence, or None."""
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
    """Counts the tokens of a sequence. The memory grows with the number of different tokens."""

    prompt_len: int
    seen: int  # tokens counted so far
    index: dict[int, int]  # token id -> index in the columns
    ids: Ints
    counts: NDArray[np.float64]  # in the output only; 0 for tokens that only the prompt has
    tail: deque[int]  # the output's last tokens, as many as the longest bad word needs

    @classmethod
    def of(cls, token_ids: Sequence[int], prompt_len: int, tail: int = 0) -> History:
        ids = np.unique(np.asarray(token_ids[:prompt_len], dtype=np.int64))
        index = {token_id: column for column, token_id in enumerate(ids.tolist())}
        seen = min(prompt_len, len(token_ids))
        history = cls(prompt_len, seen, index, ids, np.zeros(len(ids)), deque(maxlen=tail))
        history.add(token_ids[prompt_len:])
        return history

    @property
    def size(self) -> int:
        return len(self.index)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            column = self.index.setdefault(token_id, len(self.index))
            if column >= len(self.ids):
                more = max(16, column)  # double the size, so that a long output costs no copy per token
                self.ids = np.concatenate([self.ids, np.zeros(more, np.int64)])
                self.counts = np.concatenate([self.counts, np.zeros(more)])
            self.ids[column] = token_id
            if self.seen >= self.prompt_len:
                self.counts[column] += 1
                self.tail.append(token_id)
            self.seen += 1


class Sampler:
    """Holds the parameters of running sequences in columns, indexed by slot, and samples with them."""

    def __init__(
        self,
        max_seqs: int,
        vocab_size: int,
        device: torch.device,
        kernels: LogitsBackend | None = None,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        """`kernels` samples from float32 logits; None: torch does. `logprobs_mode`: see EngineConfig."""
        if vocab_size * ONE >= 1 << 63:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too wide for integer weights")
        self.vocab_size = vocab_size
        self.device = device
        self._reports_processed = logprobs_mode == "processed_logprobs"
        self._torch = TorchLogits(vocab_size, device)
        self._kernels = kernels
        self.draw_graphs: DrawGraphs | None = None  # draws from the logits of replayed steps
        self._prompt_len = np.zeros(max_seqs, np.int64)
        self._stream = np.zeros(max_seqs, np.uint64)  # of the seed, see `uniform`
        self._params = np.zeros(max_seqs, ROW_PARAMS)  # without random numbers
        self._repetition = np.ones(max_seqs)
        self._presence = np.zeros(max_seqs)
        self._frequency = np.zeros(max_seqs)
        self._stop_ids: list[Ints] = [np.empty(0, np.int64)] * max_seqs
        # What few requests have, by slot: looking for it in a column would take longer than all else that they lack.
        self._min_tokens: dict[int, int] = {}
        self._logprobs: dict[int, int] = {}  # how many of the most likely tokens, if they are requested
        self._bias: dict[int, tuple[Ints, NDArray[np.float64]]] = {}  # token ids and their biases
        self._only: dict[int, Ints] = {}  # the only tokens that may be sampled, by their bias
        self._allowed: dict[int, Ints] = {}  # the allowed token ids, if there is such a list
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._prompt_logprobs = np.full(max_seqs, -1, np.int64)  # -1: none requested
        self._history: dict[int, History] = {}
        self.problems: dict[int, RowError] = {}  # why its parameters are invalid

    def add(self, slot: int, entered: Entered) -> None:
        """Set the parameters of a slot. If they are invalid, `problems` has the reason, and the defaults are used."""
        params = entered.params
        reason = problem(params, self.vocab_size)
        if reason is None and params.uses_history and not all(0 <= t < self.vocab_size for t in entered.token_ids):
            reason = f"a token id is outside of the vocabulary of {self.vocab_size} tokens"
        if reason is not None:
            self.problems[slot] = RowError(reason)
            params = SamplingParams(max_tokens=params.max_tokens)
        self._prompt_len[slot] = entered.prompt_len
        self._stream[slot] = mixed(np.array([params.seed & (1 << 64) - 1], np.uint64))[0]
        temperature = min(params.temperature, HOTTEST) if params.temperature >= GREEDY else 0.0
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._params[slot] = temperature, params.top_p, params.min_p, 0.0, top_k
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        if params.min_tokens > 0:
            self._min_tokens[slot] = params.min_tokens
        if params.logprobs is not None:
            self._logprobs[slot] = min(params.logprobs, self.vocab_size)
        self._prompt_logprobs[slot] = (
            -1 if params.prompt_logprobs is None else min(params.prompt_logprobs, self.vocab_size)
        )
        if params.allowed_ids is not None:
            self._allowed[slot] = np.unique(np.array(params.allowed_ids, np.int64))
        if params.bad_words:
            self._bad_words[slot] = tuple(word for word in params.bad_words if word)
        stop_ids = [t for t in params.stop_ids if 0 <= t < self.vocab_size]  # others cannot be sampled
        self._stop_ids[slot] = np.array(stop_ids, np.int64)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            values = np.fromiter(params.logit_bias.values(), np.float64)
            only = ids[values >= ONLY]
            if len(only):
                self._only[slot] = only
            # An infinite bias only excludes tokens: added to a logit it would make NaN or infinity.
            self._bias[slot] = ids, np.where(values <= NEVER, -np.inf, np.minimum(values, np.finfo(np.float32).max / 4))
        if params.uses_history:
            longest = max((len(word) for word in params.bad_words), default=1)
            self._history[slot] = History.of(entered.token_ids, entered.prompt_len, max(0, longest - 1))

    def remove(self, slot: int) -> None:
        tables = self._bias, self._only, self._allowed, self._bad_words, self._history
        for table in (*tables, self._min_tokens, self._logprobs, self.problems):
            table.pop(slot, None)

    @property
    def has_histories(self) -> bool:
        return bool(self._history)

    def has_history(self, slot: int) -> bool:
        """Whether the tokens of the slot's sequence are counted."""
        return slot in self._history

    def observe(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Count the tokens at positions start, start + 1, …; those that were counted before are ignored."""
        history = self._history.get(slot)
        if history is not None:
            history.add([t for t in token_ids[max(0, history.seen - start) :] if 0 <= t < self.vocab_size])

    def sample(
        self, logits: Tensor, slots: Ints, lengths: Ints, masks: tuple[Ints, NDArray[np.int32]] | None = None
    ) -> QueuedTokens:
        """Sample one token per row.

        logits: [rows, vocab] float32 or float64, overwritten. slots: [rows]. lengths: [rows], the number of tokens
        before the sampled one. masks: the rows with a mask, ascending, and [rows, ceil(vocab / 32)] bits, 0: forbidden.
        Only the result is copied to the host, which does not wait for it here.
        """
        positions = lengths - self._prompt_len[slots]
        backend = self._backend(logits)
        changes = masks is not None or self._has_changes(slots, positions)
        counts = self._counts(slots)
        distribution: Distribution | None = None
        if counts and not self._reports_processed:  # before the logits are changed
            raw = rows_of(logits, np.array(list(counts)))
            raw = raw.clone() if changes and raw is logits else raw
            distribution = backend.distribution(raw, max(counts.values()))
        raw_top = backend.best(logits)[0] if changes else None
        if changes:
            backend.change(logits, self._changes(slots, positions))
        if masks is not None:
            backend.forbid(logits, *masks)
        params = self._params.take(slots)  # an index takes ten times as long as `take` for records
        if counts and self._reports_processed:
            reported = np.array(list(counts))
            processed = backend.processed(rows_of(logits, reported), params[reported])
            distribution = backend.distribution(processed, max(counts.values()))
        is_random = np.count_nonzero(params["temperature"])
        if is_random:
            params["u"] = uniform(self._stream[slots], positions)
        if self.draw_graphs is not None and self.draw_graphs.draws(logits):
            top, ids = self.draw_graphs.draw(params, slots)
        elif is_random:
            top, ids = backend.sample(logits, params)
        else:
            top, ids = backend.best(logits)
        if raw_top is not None:
            ids = ids.masked_fill(top == -torch.inf, NOTHING).masked_fill(~raw_top.isfinite(), NOT_FINITE)
        return self._queued(ids, distribution, counts)

    def _backend(self, logits: Tensor) -> LogitsBackend:
        return self._torch if self._kernels is None or logits.dtype != torch.float32 else self._kernels

    # -- the logits before temperature ------------------------------------------------------------------------

    def _has_changes(self, slots: Ints, positions: Ints) -> bool:
        tables = [table for table in (self._bias, self._history, self._allowed) if table]
        used = slots.tolist() if tables else ()
        return any(slot in table for table in tables for slot in used) or bool(self._young(slots, positions))

    def _young(self, slots: Ints, positions: Ints) -> list[int]:
        """Return the rows that may not sample a stop token yet."""
        least = self._min_tokens
        if not least:
            return []
        pairs = enumerate(zip(slots.tolist(), positions.tolist(), strict=True))
        return [row for row, (slot, position) in pairs if position < least.get(slot, 0)]

    def _changes(self, slots: Ints, positions: Ints) -> Changes:
        """Return the penalties, biases, allowed and excluded tokens of a step."""
        rows = list(enumerate(slots.tolist()))
        biased = [(row, *self._bias[slot]) for row, slot in rows if slot in self._bias]
        exclusive = []
        for table in (self._only, self._allowed):
            own = [row for row, slot in rows if slot in table]
            if own:
                exclusive.append(Tokens.of(own, [table[slot] for slot in slots[own].tolist()]))
        excluded = [(row, self._banned(slot)) for row, slot in rows if slot in self._bad_words]
        young = self._young(slots, positions)
        excluded += [(row, self._stop_ids[slot]) for row, slot in zip(young, slots[young].tolist(), strict=True)]
        biases = None
        if biased:
            own_rows, ids, values = zip(*biased, strict=True)
            biases = Tokens.of(own_rows, ids), np.concatenate(values)
        return Changes(
            penalized=self._penalized(slots),
            biased=biases,
            exclusive=tuple(exclusive),
            excluded=Tokens.of(*zip(*excluded, strict=True)) if excluded else None,
        )

    def _banned(self, slot: int) -> Ints:
        """Return the tokens that would complete a bad word."""
        tail = tuple(self._history[slot].tail)
        words = [word for word in self._bad_words[slot] if len(word) <= len(tail) + 1]
        return np.array([w[-1] for w in words if tail[len(tail) + 1 - len(w) :] == w[:-1]], np.int64)

    def score(self, logits: Tensor, slot: int, targets: Sequence[int]) -> QueuedScores | None:
        """Return the log-probabilities of a prompt's tokens, or None if the slot's parameters are invalid.

        logits: [targets, vocab], each row predicts its target.
        """
        count = int(self._prompt_logprobs[slot])
        if count < 0:
            return None
        distribution = self._backend(logits).distribution(logits, count)
        own = on_device(np.array(targets, np.int64), self.device)
        ranks = 1 + (logits > logits.gather(1, own[:, None])).sum(1)
        return QueuedScores(HostCopy(distribution.columns(own)), HostCopy(ranks), count)

    def _penalized(self, slots: Ints) -> tuple[Tokens, Penalties] | None:
        """Return the tokens that the rows contain, and their penalties."""
        penalized = [(row, self._history[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._history]
        if not penalized:
            return None
        own_rows = [row for row, _ in penalized]
        sizes = [history.size for _, history in penalized]
        counts = np.concatenate([history.counts[: history.size] for _, history in penalized])

        def of_rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.repeat(values[slots[own_rows]], sizes)

        with np.errstate(over="ignore"):  # a huge penalty becomes infinite
            frequency = of_rows(self._frequency) * counts
        penalties = Penalties(of_rows(self._repetition), frequency, of_rows(self._presence) * (counts > 0))
        return Tokens.of(own_rows, [history.ids[: history.size] for _, history in penalized]), penalties

    # -- the result -------------------------------------------------------------------------------------------

    def _counts(self, slots: Ints) -> dict[int, int]:
        """Return the rows with log-probabilities, ascending, and how many of the most likely tokens each reports."""
        used = slots.tolist() if self._logprobs else ()
        return {row: self._logprobs[slot] for row, slot in enumerate(used) if slot in self._logprobs}

    def _queued(self, ids: Tensor, distribution: Distribution | None, counts: dict[int, int]) -> QueuedTokens:
        """Queue one copy of the result to the host."""
        if distribution is None:
            return QueuedTokens(ids, HostCopy(ids), {})
        rows = on_device(np.array(list(counts)), self.device)
        entries = distribution.columns(ids[rows].clamp(min=0))
        columns = entries.new_zeros(len(ids), 1 + entries.shape[1])
        columns[:, 0] = ids
        columns[rows, 1:] = entries
        return QueuedTokens(ids, HostCopy(columns), counts)
