"""Who may ask: API keys by role.

Every route states its role as a dependency: `user`, `metrics_reader` or `public`. build_app refuses to build an app
with a route that states none, so that a new route is closed until somebody decides.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.routing import BaseRoute
from starlette.types import Scope

from .admission import Caller
from .errors import unauthorized

if TYPE_CHECKING:
    from ..settings import Settings

Headers = Sequence[tuple[bytes, bytes]]


class Keys:
    """The keys of one server, and the callers that they belong to."""

    def __init__(self, settings: Settings) -> None:
        self._keys = {hash_key(key): key.encode() for key in settings.keys}
        self._weights = {hash_key(key): weight for key, weight in settings.keys.items()}
        self._metrics_key = settings.metrics_key.get_secret_value().encode() if settings.metrics_key else None
        self._secret = secrets.token_bytes(16)
        self.are_metrics_open = settings.public_metrics or not (self._keys or self._metrics_key)

    def identify(self, scope: Scope) -> Caller:
        """The caller behind a request; raises 401."""
        if not self._keys:
            return Caller(flow=address_of(scope))
        digest = self._digest(scope["headers"])
        if digest is None:
            raise unauthorized("This server needs an API key: Authorization: Bearer KEY, or x-api-key.")
        return Caller(digest, digest, self._weights[digest])

    def check_metrics_reader(self, headers: Headers) -> None:
        """Raise 401 unless the metrics may be read: with their own key or, where there is none, with an API key."""
        if self.are_metrics_open:
            return
        if self._metrics_key is not None:
            is_known = any([hmac.compare_digest(sent, self._metrics_key) for sent in sent_keys(headers)])
        else:
            is_known = self._digest(headers) is not None
        if not is_known:
            raise unauthorized(
                "The metrics of this server need a key, as Authorization: Bearer KEY or x-api-key (--public-metrics)."
            )

    def _digest(self, headers: Headers) -> str | None:
        """Hash of the key that a request offers, if it is one of ours."""
        found = None
        for sent in sent_keys(headers):
            for digest, key in self._keys.items():  # all of them: the time must not show which one nearly fits
                if hmac.compare_digest(sent, key):
                    found = digest
        return found

    def payer(self, caller: Caller) -> str:
        """Whose share what a caller stores counts against: "" for its key, else a name that hides its address."""
        if caller.key:
            return ""
        return hashlib.blake2b(caller.flow.encode(), key=self._secret, digest_size=8).hexdigest()

    def salt_for(self, caller: Caller, user_salt: str | None = None) -> str:
        """The cache_salt of a caller's requests: with several keys, none finds another's prefixes in the cache."""
        own = user_salt or ""
        return f"{caller.key}:{own}" if len(self._keys) > 1 else own


def hash_key(key: str) -> str:
    """Return a name for an API key from which the key cannot be found out."""
    return hashlib.sha256(b"pequod key\0" + key.encode()).hexdigest()[:16]


def address_of(scope: Scope) -> str:
    """The client's address; of IPv6 the network, for a client has all of its addresses. "" for a Unix socket."""
    host: str = (scope.get("client") or ("",))[0]
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


def sent_keys(headers: Headers) -> list[bytes]:
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
    caller: Caller = request.app.state.pequod.keys.identify(request.scope)
    request.state.caller = caller
    return caller


async def metrics_reader(request: Request) -> None:
    """Role: whoever may read the metrics."""
    request.app.state.pequod.keys.check_metrics_reader(request.scope["headers"])


async def public() -> None:
    """Role: anybody. A route that reveals nothing and starts no work."""


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
