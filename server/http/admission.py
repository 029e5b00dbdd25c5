"""Admission: how much work is taken in at once, how much of it may be one caller's, and when to come back.

Above a caller's share the response is 429; when the whole server is full, 503.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from . import retry
from .errors import ApiError, invalid, over_share, too_large, unavailable
from .shares import Shared

if TYPE_CHECKING:
    from ..settings import Settings

# Prompt tokens of all open requests. A token costs about 36 bytes of Python integer here and as much in the engine's
# process: 4 M tokens are 300 MB, and more than any KV cache that one machine holds at a useful size.
MAX_OPEN_TOKENS = 4 << 20
# Bytes of all bodies that are being read or worked on, as a multiple of the largest one.
MAX_OPEN_BODIES = 32
# Bodies up to this size may use the last eighth of those bytes, which larger ones leave free: ordinary requests are
# small, and get through while others upload.
SMALL_BODY = 64 << 10
# Inputs of embeddings that the engine has at a time, those of all requests together, as multiples of what it runs: the
# next ones lie ready when a step ends, and whoever comes waits for these and not for thousands.
INPUTS_DEPTH = 2
# Inputs of all open requests for embeddings, eight of the largest: as JSON their vectors are 200 MB.
MAX_OPEN_INPUTS = 1 << 14
# Until the engine has told how many sequences it runs, as many as on a GPU: nothing is admitted before anyway.
DEFAULT_MAX_SEQS = 256
FINISHES = 64  # remembered for the throughput

REASONS = ("loading", "draining", "failed", "queue", "prompt_tokens", "body_bytes", "share")


@dataclass(slots=True, eq=False)
class Caller:
    """Who sends a request."""

    key: str = ""  # a hash of the API key; "" when none is asked for
    flow: str = ""  # whose shares it counts against: the key's or, without keys, the client address's
    weight: float = 1.0  # of its shares
    tickets: list[Ticket] = field(default_factory=list)

    def leave(self) -> None:
        """The request has ended, however it did: give back what it still holds."""
        for ticket in self.tickets:
            ticket.release()

    def hand_over(self) -> list[Ticket]:
        """What the request holds, for work that goes on without it: whoever takes the tickets releases them."""
        tickets, self.tickets = self.tickets, []
        return tickets


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request's part of the limits; released once, at the latest when its HTTP request ends, or when the
    background work that took it over does."""

    limits: Limits
    caller: Caller
    choices: int
    prompt_tokens: int = 0
    inputs: int = 0  # of embeddings
    is_open: bool = True

    def add_prompt(self, tokens: int) -> None:
        """Count the prompt when its length is known; raises 503 or 429 for more tokens than are held at a time."""
        if self.is_open:
            self.limits.add_tokens(self.caller, tokens)
            self.prompt_tokens += tokens

    def release(self) -> None:
        if self.is_open:
            self.is_open = False
            self.limits.leave(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Limits:
    """Open work of one app, counted in choices (sequences), inputs of embeddings, prompt tokens and body bytes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_seqs = settings.max_num_seqs or DEFAULT_MAX_SEQS  # the engine's own number once it is ready
        self.max_queued = settings.max_num_queued_reqs
        self.max_body_bytes = settings.max_body_bytes
        self.choices = Shared(self.max_queued)  # the share is of the queue; whatever can run at once is anybody's
        self.tokens = Shared(MAX_OPEN_TOKENS)
        self.inputs = Shared(MAX_OPEN_INPUTS)
        self.bytes = Shared(settings.max_body_bytes * MAX_OPEN_BODIES)
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
    def open_tokens(self) -> int:
        return self.tokens.open

    @property
    def open_inputs(self) -> int:
        return self.inputs.open

    @property
    def open_bytes(self) -> int:
        return self.bytes.open

    # Admission

    @property
    def max_choices(self) -> int:
        return self.max_seqs + self.max_queued

    @property
    def is_full(self) -> bool:
        return self.open_choices >= self.max_choices

    def most_choices(self, caller: Caller) -> int:
        """Sequences that a caller may have open while the others have what they have now."""
        return self.max_seqs + self.choices.share(caller.flow, caller.weight)

    def admit(self, caller: Caller, choices: int, prompt_tokens: int = 0) -> Ticket:
        """Take `choices` sequences in; `with` the ticket, or release it.

        Raises 503 or 429, with the time to come back, when they do not fit now, and 400 when they never will. Call it
        before the prompt is tokenized and tell the tokens with `Ticket.add_prompt`, or give both at once.
        """
        if self.draining:
            raise self.refuse("draining", "The server is shutting down.", retry.DRAINING_S)
        most = self.max_seqs + Shared(self.max_queued).share(caller.flow)  # of a caller who is alone
        if choices > most:
            raise invalid(
                f"The request asks for {choices} completions; one caller may have at most {most} at a time "
                "(--max-num-seqs, --max-num-queued-reqs).",
                "n",
            )
        if self.open_choices + choices > self.max_choices:
            raise self.refuse("queue", "The server's queue is full (--max-num-queued-reqs).")
        if self.choices.of(caller.flow) + choices > self.most_choices(caller):
            raise self.refuse_share(f"You have {self.choices.of(caller.flow)} completions open or queued")
        self.add_tokens(caller, prompt_tokens)
        if self.open_choices == 0:
            self.busy_since = self._clock()
        self.choices.take(caller.flow, choices, caller.weight)
        ticket = Ticket(self, caller, choices, prompt_tokens)
        caller.tickets.append(ticket)
        return ticket

    def admit_inputs(self, caller: Caller, inputs: int) -> Ticket:
        """Take a request for embeddings in, as one place of the queue: its inputs wait for `input_places`."""
        held = self.inputs.of(caller.flow)
        if self.open_inputs and not self.inputs.has_room(inputs):
            raise self.refuse("queue", "The server holds as many inputs as it can.")
        if held and held + inputs > self.inputs.share(caller.flow, caller.weight):
            raise self.refuse_share(f"You have {held} inputs open")
        ticket = self.admit(caller, 1)
        ticket.inputs = inputs
        self.inputs.take(caller.flow, inputs, caller.weight)
        return ticket

    @cached_property
    def input_places(self) -> asyncio.Semaphore:
        """A place for each input that the engine may have; made when the engine has told how many sequences it runs."""
        return asyncio.Semaphore(INPUTS_DEPTH * self.max_seqs)

    def add_tokens(self, caller: Caller, tokens: int) -> None:
        # A prompt that is alone always gets in: what it may hold is the engine's business.
        held = self.tokens.of(caller.flow)
        if self.open_tokens and not self.tokens.has_room(tokens):
            raise self.refuse("prompt_tokens", "The server holds as many prompt tokens as it can.")
        if held and held + tokens > self.tokens.share(caller.flow, caller.weight):
            raise self.refuse_share(f"You have {held} prompt tokens open")
        self.tokens.take(caller.flow, tokens, caller.weight)

    def leave(self, ticket: Ticket) -> None:
        flow = ticket.caller.flow
        self.choices.give_back(flow, ticket.choices)
        self.tokens.give_back(flow, ticket.prompt_tokens)
        self.inputs.give_back(flow, ticket.inputs)
        self._finished.append((self._clock(), ticket.choices))
        if self.open_choices == 0:
            waiters, self._waiters = self._waiters, []
            for wake in waiters:
                wake()

    def when_idle(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, as soon as no choice is open."""
        if self.open_choices == 0:
            wake()
        else:
            self._waiters.append(wake)

    def refuse(self, reason: str, message: str, retry_after: int | None = None) -> ApiError:
        """A 503, counted under its reason."""
        self.rejections[reason] += 1
        code = {"queue": "queue_full"}.get(reason, reason)
        return unavailable(message, code, retry_after or self.retry_after())

    def refuse_share(self, holds: str) -> ApiError:
        """A 429: a caller holds so much that the rest is kept for others."""
        self.rejections["share"] += 1
        return over_share(f"{holds}, which is your share of this server for now.", self.retry_after())

    def retry_after(self) -> int:
        """Whole seconds until the queue that there is now has been worked off, as far as one can know."""
        since = [(when, choices) for when, choices in self._finished if when >= self.busy_since]
        if not since:
            return retry.UNKNOWN_S
        began = since[0][0] if len(since) == FINISHES else self.busy_since
        rate = sum(choices for _, choices in since) / max(self._clock() - began, 1e-3)
        backlog = max(1, self.open_choices - self.max_seqs)
        return min(retry.MAX_S, max(1, math.ceil(backlog / rate)))

    # Bodies

    def check_announced(self, num_bytes: int) -> None:
        """Refuse by Content-Length, before a byte is read: 413."""
        if num_bytes > self.max_body_bytes:
            raise too_large(f"The body is larger than {self.max_body_bytes} bytes (--max-body-bytes).")

    def count_bytes(self, caller: Caller, num_bytes: int, so_far: int) -> None:
        """Take `num_bytes` more of a body of which `so_far` were read; raises 413, 503 or 429."""
        size = so_far + num_bytes
        self.check_announced(size)
        reserve = 0 if size <= SMALL_BODY else self.bytes.total // 8
        if not self.bytes.has_room(num_bytes + reserve):
            raise self.refuse("body_bytes", "The server reads as many request bodies as it can.")
        held = self.bytes.of(caller.flow) + num_bytes
        if held > max(self.max_body_bytes, self.bytes.share(caller.flow, caller.weight)):
            raise self.refuse_share("You are sending several large bodies at a time")
        self.bytes.take(caller.flow, num_bytes, caller.weight)
