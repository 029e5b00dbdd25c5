"""Admission: limits on open work, the share of each caller, and the Retry-After of a refusal.

A caller above its share gets a 429; if the whole server is full, every caller gets a 503.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ..settings import Settings
from .errors import RETRY_S, ApiError, invalid, unavailable
from .shares import FairShares

# Prompt tokens of all open requests. A token costs about 36 bytes as a Python integer here and as many in the engine
# process: 4 M tokens are 300 MB, and more than a useful KV cache of one machine holds.
MAX_OPEN_TOKENS = 4 << 20
# Bytes of all bodies of open requests, as a multiple of the largest one.
MAX_OPEN_BODIES = 32
# Only bodies up to this size may use the last eighth of those bytes, so that ordinary requests, which are small, are
# read while others upload.
SMALL_BODY = 64 << 10
# Embedding inputs of all requests that are in the engine at a time, as a multiple of the sequences that it runs: the
# next ones are ready when a step ends, and a new request waits for these and not for thousands.
INPUTS_DEPTH = 2
# Inputs of all open embedding requests, eight times the largest request: their vectors are 200 MB of JSON.
MAX_OPEN_INPUTS = 1 << 14
# Until the engine reports its own number, the one for GPUs. Nothing is admitted before that.
DEFAULT_MAX_SEQS = 256
FINISHES = 64  # finished requests from which the throughput is computed
MAX_RETRY_S = 60  # in Retry-After of a full server

REASONS = ("loading", "draining", "failed", "queue", "prompt_tokens", "body_bytes", "share")


@dataclass(slots=True, eq=False)
class Caller:
    """The sender of a request."""

    key: str = ""  # a hash of the API key; "" if the server has no keys
    flow: str = ""  # the name that its shares are counted under: the key's hash or, without keys, the client's address
    weight: float = 1.0  # of its shares
    tickets: list[Ticket] = field(default_factory=list)

    def release(self) -> None:
        """Release the tickets of a request that has ended."""
        for ticket in self.tickets:
            ticket.release()

    def hand_over(self) -> list[Ticket]:
        """Detach the tickets, for work that outlives the request and then has to release them."""
        tickets, self.tickets = self.tickets, []
        return tickets


@dataclass(slots=True, eq=False)
class Ticket:
    """The capacity that an admitted request holds; released once, at the latest at the end of its HTTP request or of
    the background work that took it over."""

    limits: Limits
    caller: Caller
    choices: int
    prompt_tokens: int = 0
    inputs: int = 0  # of an embedding request
    num_bytes: int = 0  # of stored responses
    is_open: bool = True

    def add_prompt(self, tokens: int) -> None:
        """Count the prompt once its length is known. Raises 503 or 429 if it does not fit."""
        if self.is_open:
            self.limits.add_tokens(self.caller, tokens)
            self.prompt_tokens += tokens

    def add_bytes(self, num_bytes: int) -> None:
        """Count what is read of stored responses like bytes of the body. Raises 503 or 429 if it does not fit."""
        if self.is_open:
            self.limits.add_stored(self.caller, num_bytes)
            self.num_bytes += num_bytes

    def release(self) -> None:
        if self.is_open:
            self.is_open = False
            self.limits.release(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Limits:
    """Open work of one app, counted in choices (sequences), embedding inputs, prompt tokens and body bytes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_seqs = settings.max_num_seqs or DEFAULT_MAX_SEQS  # the engine's own number once it is ready
        self.max_queued = settings.max_num_queued_reqs
        self.max_body_bytes = settings.max_body_bytes
        self.choices = FairShares(self.max_queued)  # only the queue is shared; any caller may use all that runs
        self.tokens = FairShares(MAX_OPEN_TOKENS)
        self.inputs = FairShares(MAX_OPEN_INPUTS)
        self.bytes = FairShares(settings.max_body_bytes * MAX_OPEN_BODIES)
        self.busy_since = 0.0  # when open_choices last left 0
        self.draining = False
        self.rejections: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._clock = clock
        self._finished: deque[tuple[float, int]] = deque(maxlen=FINISHES)  # when, how many choices
        self._waiters: list[Callable[[], None]] = []

    @property
    def open_choices(self) -> int:
        return self.choices.open

    @property
    def max_choices(self) -> int:
        return self.max_seqs + self.max_queued

    @property
    def is_full(self) -> bool:
        return self.open_choices >= self.max_choices

    def admit(self, caller: Caller, choices: int, prompt_tokens: int = 0) -> Ticket:
        """Admit `choices` sequences and return a ticket, a context manager that releases them.

        Raises 503 or 429 with Retry-After if they do not fit now, and 400 if they never will. If the prompt has not
        been tokenized yet, count its tokens later with `Ticket.add_prompt`.
        """
        if self.draining:
            raise self.refuse("draining", "The server is shutting down.", RETRY_S)
        limit = self.max_seqs + FairShares(self.max_queued).share(caller.flow)  # without other callers
        if choices > limit:
            raise invalid(
                f"The request asks for {choices} completions; one caller may have at most {limit} at a time "
                "(--max-num-seqs, --max-num-queued-reqs).",
                "n",
            )
        if self.open_choices + choices > self.max_choices:
            raise self.refuse("queue", "The server's queue is full (--max-num-queued-reqs).")
        held = self.choices.of(caller.flow)
        if held + choices > self.max_seqs + self.choices.share(caller.flow, caller.weight):
            raise self.refuse_share(f"You have {held} completions open or queued")
        self.add_tokens(caller, prompt_tokens)
        if self.open_choices == 0:
            self.busy_since = self._clock()
        self.choices.acquire(caller.flow, choices, caller.weight)
        ticket = Ticket(self, caller, choices, prompt_tokens)
        caller.tickets.append(ticket)
        return ticket

    def admit_inputs(self, caller: Caller, inputs: int) -> Ticket:
        """Admit an embedding request as one sequence in the queue; its inputs then wait for `input_slots`."""
        self._check(self.inputs, caller, inputs, "queue", "inputs")
        ticket = self.admit(caller, 1)
        ticket.inputs = inputs
        self.inputs.acquire(caller.flow, inputs, caller.weight)
        return ticket

    @cached_property
    def input_slots(self) -> asyncio.Semaphore:
        """Bounds the inputs that are in the engine; created once the engine has reported how many sequences it runs."""
        return asyncio.Semaphore(INPUTS_DEPTH * self.max_seqs)

    def add_tokens(self, caller: Caller, tokens: int) -> None:
        """Count prompt tokens of a caller; raises 503 or 429."""
        self._check(self.tokens, caller, tokens, "prompt_tokens", "prompt tokens")
        self.tokens.acquire(caller.flow, tokens, caller.weight)

    def _check(self, shares: FairShares, caller: Caller, amount: int, reason: str, unit: str) -> None:
        """Raise 503 or 429 if an amount does not fit. The first one always fits: the engine has limits of its own."""
        held = shares.of(caller.flow)
        if shares.open and not shares.fits(amount):
            raise self.refuse(reason, f"The server holds as many {unit} as it can.")
        if held and held + amount > shares.share(caller.flow, caller.weight):
            raise self.refuse_share(f"You have {held} {unit} open")

    def release(self, ticket: Ticket) -> None:
        flow = ticket.caller.flow
        self.choices.release(flow, ticket.choices)
        self.tokens.release(flow, ticket.prompt_tokens)
        self.inputs.release(flow, ticket.inputs)
        self.bytes.release(flow, ticket.num_bytes)
        if ticket.choices:
            self._finished.append((self._clock(), ticket.choices))
        if self.open_choices == 0:
            waiters, self._waiters = self._waiters, []
            for wake in waiters:
                wake()

    def when_idle(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when no choice is open."""
        if self.open_choices == 0:
            wake()
        else:
            self._waiters.append(wake)

    def refuse(self, reason: str, message: str, retry_after: int | None = None) -> ApiError:
        """A 503, counted under its reason."""
        self.rejections[reason] += 1
        return unavailable(message, "queue_full" if reason == "queue" else reason, retry_after or self.retry_after())

    def refuse_share(self, holds: str) -> ApiError:
        """A 429: a caller has reached its share, and the rest is kept for others."""
        self.rejections["share"] += 1
        message, after = f"{holds}, which is your share of this server for now.", self.retry_after()
        return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=after)

    def retry_after(self) -> int:
        """Estimated seconds until the current queue is empty."""
        finished = [(when, choices) for when, choices in self._finished if when >= self.busy_since]
        if not finished:
            return RETRY_S  # no throughput is known yet
        start = finished[0][0] if len(finished) == FINISHES else self.busy_since
        rate = sum(choices for _, choices in finished) / max(self._clock() - start, 1e-3)
        backlog = max(1, self.open_choices - self.max_seqs)
        return min(MAX_RETRY_S, max(1, math.ceil(backlog / rate)))

    def check_body_size(self, num_bytes: int) -> None:
        """Raise 413 for a body that is too large."""
        if num_bytes > self.max_body_bytes:
            message = f"The body is larger than {self.max_body_bytes} bytes (--max-body-bytes)."
            raise ApiError(413, message, code="body_too_large")

    def hold_bytes(self, caller: Caller, num_bytes: int) -> Ticket:
        """Count bytes of stored responses until the ticket is released; raises 503 or 429."""
        ticket = Ticket(self, caller, choices=0)
        ticket.add_bytes(num_bytes)
        caller.tickets.append(ticket)
        return ticket

    def count_bytes(self, caller: Caller, num_bytes: int, so_far: int) -> None:
        """Count `num_bytes` more of a body of which `so_far` have been read; raises 413, 503 or 429."""
        size = so_far + num_bytes
        self.check_body_size(size)
        if not self.bytes.fits(num_bytes + self._reserve(size)):
            raise self.refuse("body_bytes", "The server is reading as many request bodies as it can.")
        held = self.bytes.of(caller.flow) + num_bytes
        if held > max(self.max_body_bytes, self.bytes.share(caller.flow, caller.weight)):
            raise self.refuse_share("You are sending several large bodies at a time")
        self.bytes.acquire(caller.flow, num_bytes, caller.weight)

    def add_stored(self, caller: Caller, num_bytes: int) -> None:
        """Count bytes of stored responses; raises 503 or 429. The first ones after a body always fit: what is stored
        has a limit of its own."""
        held = self.bytes.of(caller.flow)
        others = self.bytes.open - held
        if others and not self.bytes.fits(num_bytes + self._reserve(num_bytes)):
            raise self.refuse("body_bytes", "The server is reading as many stored responses as it can.")
        if held > self.max_body_bytes and held + num_bytes > self.bytes.share(caller.flow, caller.weight):
            raise self.refuse_share("You have several requests with long stored responses open")
        self.bytes.acquire(caller.flow, num_bytes, caller.weight)

    def _reserve(self, size: int) -> int:
        """Return the bytes that are kept for small bodies."""
        return 0 if size <= SMALL_BODY else self.bytes.total // 8
