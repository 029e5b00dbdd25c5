"""API keys and the roles of routes.

Every route declares its role as a dependency: `user`, `metrics_reader` or `public`. build_app raises for a route
without one, so that no new route is open by accident.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.routing import BaseRoute
from starlette.types import Scope

from ..settings import Settings
from .admission import Caller
from .errors import unauthorized

Headers = Sequence[tuple[bytes, bytes]]

MAX_SENT_KEYS = 4  # of one request: clients send one, in one or both of the headers, and a proxy may add its own


class Keys:
    """The API keys of one server."""

    def __init__(self, settings: Settings) -> None:
        self._secret = secrets.token_bytes(16)
        self._keys = {self._lookup_hash(key.encode()): hash_key(key) for key in settings.keys}
        self._weights = {hash_key(key): weight for key, weight in settings.keys.items()}
        metrics_key = settings.metrics_key
        self._metrics_key = self._lookup_hash(metrics_key.get_secret_value().encode()) if metrics_key else None
        self.are_metrics_open = settings.public_metrics or not (self._keys or self._metrics_key)

    def identify(self, scope: Scope) -> Caller:
        """Return the sender of a request; raises 401."""
        if not self._keys:
            return Caller(flow=address_of(scope))
        digest = self._digest(scope["headers"])
        if digest is None:
            if any(sent_keys(scope["headers"])):  # an empty one is an unset variable of the client's
                raise unauthorized("The API key is not one of this server's keys.")
            raise unauthorized("This server requires an API key, as Authorization: Bearer KEY or x-api-key.")
        return Caller(digest, digest, self._weights[digest])

    def check_metrics_reader(self, headers: Headers) -> None:
        """Raise 401 for a request without the metrics key or, if there is none, without an API key."""
        if self.are_metrics_open:
            return
        if self._metrics_key is not None:
            is_valid = any(self._lookup_hash(sent) == self._metrics_key for sent in sent_keys(headers))
        else:
            is_valid = self._digest(headers) is not None
        if not is_valid and any(sent_keys(headers)):
            raise unauthorized("This key may not read the metrics (see --metrics-key and --public-metrics).")
        if not is_valid:
            raise unauthorized(
                "The metrics require a key, as Authorization: Bearer KEY or x-api-key (see --public-metrics)."
            )

    def _digest(self, headers: Headers) -> str | None:
        """The hash of the key that a request sends, if it is valid."""
        found = [self._keys.get(self._lookup_hash(sent)) for sent in sent_keys(headers)]
        return next((digest for digest in reversed(found) if digest is not None), None)

    def _lookup_hash(self, key: bytes) -> bytes:
        """Hash an API key for comparisons, whose duration reveals nothing as only this process knows the secret."""
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()

    def payer(self, caller: Caller) -> str:
        """The account for what a caller stores: "" with an API key, otherwise a hash of its address."""
        if caller.key:
            return ""
        return hashlib.blake2b(caller.flow.encode(), key=self._secret, digest_size=8).hexdigest()

    def salt_for(self, caller: Caller, user_salt: str | None = None) -> str:
        """The cache_salt of a caller's requests: with several keys, each has cached prefixes of its own."""
        own = user_salt or ""
        return f"{caller.key}:{own}" if len(self._keys) > 1 else own


def hash_key(key: str) -> str:
    """Hash an API key, for logs and records."""
    return hashlib.sha256(b"pequod key\0" + key.encode()).hexdigest()[:16]


def address_of(scope: Scope) -> str:
    """The client's IPv4 address or IPv6 /64 network, of which a client has all addresses; "" if unknown."""
    host: str = (scope.get("client") or ("",))[0]
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


def sent_keys(headers: Headers) -> list[bytes]:
    """The API keys that a request sends; raises 401 if there are more than MAX_SENT_KEYS."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
        if len(keys) > MAX_SENT_KEYS:
            raise unauthorized(f"The request sends more than {MAX_SENT_KEYS} API keys.")
    return keys


# The roles: a route has the role that it depends on.


async def user(request: Request) -> Caller:
    """Role: any caller with an API key, or any caller at all if the server has no keys."""
    caller: Caller = request.app.state.pequod.keys.identify(request.scope)
    request.state.caller = caller
    return caller


async def metrics_reader(request: Request) -> None:
    """Role: callers that may read the metrics."""
    request.app.state.pequod.keys.check_metrics_reader(request.scope["headers"])


async def public() -> None:
    """Role: any caller. For routes that reveal nothing and start no work."""


UserDep = Annotated[Caller, Depends(user)]
ROLES: tuple[Callable[..., Any], ...] = (user, metrics_reader, public)


def roles(route: BaseRoute) -> set[str]:
    """The names of the roles among the direct and indirect dependencies of a route."""

    def calls(dependant: Dependant) -> Iterator[Any]:
        yield dependant.call
        for dependency in dependant.dependencies:
            yield from calls(dependency)

    dependant = getattr(route, "dependant", None)
    found = set() if dependant is None else set(calls(dependant))
    return {role.__name__ for role in ROLES if role in found}
