"""Who may ask, and how much at once: API keys by role, a bounded queue, and when to come back.

Every route states its role as a dependency: `user`, `metrics_reader` or `public`. build_app refuses to build an app
with a route that states none, so that a new route is closed until somebody decides.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.routing import BaseRoute

from .errors import ApiError, invalid, too_large, unauthorized, unavailable

if TYPE_CHECKING:
    from .settings import Settings

# Prompt tokens of all open requests. A token costs about 36 bytes of Python integer here and as much in the engine's
# process: 4 M tokens are 300 MB, and more than any KV cache that one machine holds at a useful size.
MAX_OPEN_TOKENS = 4 << 20
# Bytes of all bodies that are being read or worked on, as a multiple of the largest one.
MAX_OPEN_BODIES = 32
# Inputs of embeddings that the engine has at a time, those of all requests together, as multiples of what it runs: the
# next ones lie ready when a step ends, and whoever comes waits for these and not for thousands.
INPUTS_DEPTH = 2
# Inputs of all open requests for embeddings, eight of the largest: as JSON their vectors are 200 MB.
MAX_OPEN_INPUTS = 1 << 14
# Until the engine has told how many sequences it runs, as many as on a GPU: nothing is admitted before anyway.
DEFAULT_MAX_SEQS = 256
RETRY_MAX_S = 60
RETRY_UNKNOWN_S = 5  # nothing has finished yet, so that there is no throughput to divide by
FINISHES = 64  # remembered for the throughput

REASONS = ("loading", "draining", "failed", "queue", "prompt_tokens", "body_bytes")


@dataclass(slots=True, eq=False)
class Caller:
    """Who sends a request. `key` is a hash of the API key, "" when none is asked for."""

    key: str = ""
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
    """One admitted request's share of the limits; released once, at the latest when its HTTP request ends, or when the
    background work that took it over does."""

    limits: Limits
    choices: int
    prompt_tokens: int = 0
    inputs: int = 0  # of embeddings
    is_open: bool = True

    def add_prompt(self, tokens: int) -> None:
        """Count the prompt when its length is known; raises the 503 of a server that holds too many tokens."""
        if self.is_open:
            self.limits.add_tokens(tokens)
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
        self.max_open_bytes = settings.max_body_bytes * MAX_OPEN_BODIES
        self.open_choices = 0
        self.open_tokens = 0
        self.open_inputs = 0
        self.open_bytes = 0
        self.busy_since = 0.0  # when open_choices last left 0
        self.draining = False
        self.rejections: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._clock = clock
        self._finished: deque[tuple[float, int]] = deque(maxlen=FINISHES)  # when, how many choices
        self._keys = {hash_key(key): key.encode() for key in settings.keys}
        self._metrics_key = settings.metrics_key.get_secret_value().encode() if settings.metrics_key else None
        self._waiters: list[Callable[[], None]] = []

    # Keys

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """The caller behind a request's headers; raises 401."""
        if not self._keys:
            return Caller()
        found = None
        for sent in sent_keys(headers):
            for digest, key in self._keys.items():  # all of them: the time must not tell which one nearly fits
                if hmac.compare_digest(sent, key):
                    found = digest
        if found is None:
            raise unauthorized("This server needs an API key: Authorization: Bearer KEY, or x-api-key.")
        return Caller(found)

    def check_metrics_key(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise 401 unless the metrics may be read."""
        key = self._metrics_key
        if key is not None and not any([hmac.compare_digest(sent, key) for sent in sent_keys(headers)]):
            raise unauthorized("The metrics of this server need their key: Authorization: Bearer KEY, or x-api-key.")

    def salt_for(self, caller: Caller, user_salt: str | None = None) -> str:
        """The cache_salt of a caller's requests: with several keys, none finds another's prefixes in the cache."""
        own = user_salt or ""
        return f"{caller.key}:{own}" if len(self._keys) > 1 else own

    # Admission

    @property
    def max_choices(self) -> int:
        return self.max_seqs + self.max_queued

    @property
    def is_full(self) -> bool:
        return self.open_choices >= self.max_choices

    def admit(self, caller: Caller, choices: int, prompt_tokens: int = 0) -> Ticket:
        """Take `choices` sequences in, or raise 503 with the time to come back; `with` the ticket, or release it.

        Call it before the prompt is tokenized and tell the tokens with `Ticket.add_prompt`, or give both at once.
        """
        if self.draining:
            raise self.refuse("draining", "The server is shutting down.", RETRY_UNKNOWN_S)
        if choices > self.max_choices:
            raise invalid(
                f"The request asks for {choices} answers; this server holds at most {self.max_choices} at a time "
                "(--max-num-seqs, --max-num-queued-reqs).",
                "n",
            )
        if self.open_choices + choices > self.max_choices:
            raise self.refuse("queue", "The server's queue is full (--max-num-queued-reqs).")
        self.add_tokens(prompt_tokens)
        if self.open_choices == 0:
            self.busy_since = self._clock()
        self.open_choices += choices
        ticket = Ticket(self, choices, prompt_tokens)
        caller.tickets.append(ticket)
        return ticket

    def admit_inputs(self, caller: Caller, inputs: int) -> Ticket:
        """Take a request for embeddings in, as one place of the queue: its inputs wait for `input_places`."""
        if self.open_inputs and self.open_inputs + inputs > MAX_OPEN_INPUTS:
            raise self.refuse("queue", "The server holds as many inputs as it can.")
        ticket = self.admit(caller, 1)
        ticket.inputs = inputs
        self.open_inputs += inputs
        return ticket

    @cached_property
    def input_places(self) -> asyncio.Semaphore:
        """A place for each input that the engine may have; made when the engine has told how many sequences it runs."""
        return asyncio.Semaphore(INPUTS_DEPTH * self.max_seqs)

    def add_tokens(self, tokens: int) -> None:
        # A prompt that is alone always gets in: what it may hold is the engine's business.
        if self.open_tokens and self.open_tokens + tokens > MAX_OPEN_TOKENS:
            raise self.refuse("prompt_tokens", "The server holds as many prompt tokens as it can.")
        self.open_tokens += tokens

    def leave(self, ticket: Ticket) -> None:
        self.open_choices -= ticket.choices
        self.open_tokens -= ticket.prompt_tokens
        self.open_inputs -= ticket.inputs
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

    def retry_after(self) -> int:
        """Whole seconds until the queue that there is now has been worked off, as far as one can know."""
        since = [(when, choices) for when, choices in self._finished if when >= self.busy_since]
        if not since:
            return RETRY_UNKNOWN_S
        began = since[0][0] if len(since) == FINISHES else self.busy_since
        rate = sum(choices for _, choices in since) / max(self._clock() - began, 1e-3)
        backlog = max(1, self.open_choices - self.max_seqs)
        return min(RETRY_MAX_S, max(1, math.ceil(backlog / rate)))

    # Bodies

    def check_announced(self, num_bytes: int) -> None:
        """Refuse by Content-Length, before a byte is read: 413."""
        if num_bytes > self.max_body_bytes:
            raise too_large(f"The body is larger than {self.max_body_bytes} bytes (--max-body-bytes).")

    def count_bytes(self, num_bytes: int, so_far: int) -> None:
        """Take `num_bytes` more of a body of which `so_far` were read; raises 413 or 503."""
        self.check_announced(so_far + num_bytes)
        if self.open_bytes + num_bytes > self.max_open_bytes:
            raise self.refuse("body_bytes", "The server reads as many request bodies as it can.")
        self.open_bytes += num_bytes


def hash_key(key: str) -> str:
    """A name for a key that does not tell the key."""
    return hashlib.sha256(b"pequod key\0" + key.encode()).hexdigest()[:16]


def sent_keys(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """What a request offers as keys."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
    return keys


# The roles. Each is a dependency, and the route that depends on it has that role.


async def user(request: Request) -> Caller:
    """Role: whoever has an API key, or anybody when none is set."""
    caller: Caller = request.app.state.pequod.limits.identify(request.scope["headers"])
    request.state.caller = caller
    return caller


async def metrics_reader(request: Request) -> None:
    """Role: whoever has the metrics key, or anybody when none is set."""
    request.app.state.pequod.limits.check_metrics_key(request.scope["headers"])


async def public() -> None:
    """Role: anybody. A route that tells nothing and starts no work."""


UserDep = Annotated[Caller, Depends(user)]
ROLES: tuple[Callable[..., Any], ...] = (user, metrics_reader, public)


def roles(route: BaseRoute) -> set[str]:
    """Names of the roles that a route states, however deep among its dependencies."""

    def calls(dependant: Dependant) -> Iterator[Any]:
        yield dependant.call
        for below in dependant.dependencies:
            yield from calls(below)

    dependant = getattr(route, "dependant", None)
    if dependant is None:
        return set()
    found = set(calls(dependant))
    return {role.__name__ for role in ROLES if role in found}
