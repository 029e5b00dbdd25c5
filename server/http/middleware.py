"""Door: the outermost layer of the app. What is true for every HTTP request happens here and nowhere else.

A plain ASGI layer: it hands messages on as they come, so that a stream passes through it token by token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .admission import Caller, Limits
from .auth import address_of
from .errors import ApiError, ErrorForm, from_exception

if TYPE_CHECKING:
    from ..settings import Settings

LABEL = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
# Of a body at least this much must come in each stretch of this length: slow lines pass, a trickle does not.
PROGRESS_S = 10.0
PROGRESS_BYTES = 64 << 10
MAX_HEAD = 64 << 10  # bytes of all headers; the parser itself has no limit
GONE = 499  # what is counted for a client that left before its answer began

Headers = Sequence[tuple[bytes, bytes]]
Count = Callable[[str, str, int, float], None]  # a request by method, route, status and seconds


class Door:
    """Checks Host, origin and body size, names the request, counts it, and cleans up behind it."""

    def __init__(
        self, app: ASGIApp, settings: Settings, limits: Limits, count: Count, error_forms: Sequence[ErrorForm] = ()
    ) -> None:
        self.app = app
        self.limits = limits
        self.count = count
        self.error_forms = error_forms
        self.hosts = None if settings.hosts is None else {host.lower() for host in settings.hosts}
        self.allows_any_host = settings.allows_any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Visit(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)

    def answers_under(self, host: str | None) -> bool:
        """Whether requests that name this host are served; None: they name none."""
        if self.hosts is not None:
            return host in self.hosts
        return self.allows_any_host or host is None or is_own_name(host)

    def check(self, method: str, headers: Headers) -> None:
        """Refuse a request by its head alone."""
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD:
            raise head_too_large()
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1:
            raise ApiError(400, "The request has more than one Host.", code="invalid_host")
        if not self.answers_under(bare_host(hosts[0]) if hosts else None):
            raise ApiError(400, "This server does not answer under that Host (--allowed-hosts).", code="invalid_host")
        # A page of another origin can post forms and plain text to any address without asking; JSON it cannot.
        kind = (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()
        if method == "POST" and header(headers, b"origin") is not None and kind != b"application/json":
            raise ApiError(415, "A web page must send Content-Type: application/json.", code="invalid_content_type")
        length = header(headers, b"content-length") or b""
        if length.isdigit():
            self.limits.check_announced(int(length))


class _Visit:
    """One HTTP request on its way in and its answer on the way out."""

    def __init__(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        self.door = door
        self.limits = door.limits
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        # HEAD is GET without the body, on every route.
        self.scope = {**scope, "method": "GET"} if self.method == "HEAD" else scope
        sent = header(scope["headers"], b"x-request-id")
        self.label = sent if sent is not None and LABEL.fullmatch(sent) else b"req-" + secrets.token_hex(8).encode()
        self.form = next((form for form in door.error_forms if form.covers(scope)), None)
        self.scope.setdefault("state", {}).update(request_id=self.label.decode(), error_form=self.form)
        self.status: int | None = None
        self.began = time.monotonic()
        self.num_bytes = 0
        self.is_whole = False  # all of the body was read
        self.stretch = (self.began, 0)  # when the stretch in which there must be progress began, and the bytes then

    async def run(self) -> None:
        try:
            self.door.check(self.method, self.scope["headers"])
            await self.door.app(self.scope, self._receive, self._send)
        except ClientDisconnect:
            self.status = self.status or GONE
        except Exception as error:
            answer = from_exception(error)
            # Once the head has gone nothing can be said any more: the server closes the connection, and the client
            # sees an answer that is cut.
            if self.status is None:
                with suppress(OSError):
                    await answer.response(self.scope)(self.scope, self.receive, self._send)
        finally:
            caller = self._caller()
            self.limits.bytes.give_back(caller.flow, self.num_bytes)
            caller.leave()
            handler = getattr(self.scope.get("route"), "path", "unmatched")
            seconds = time.monotonic() - self.began
            self.door.count(self.method, handler, self.status or GONE, seconds)

    async def _receive(self) -> Message:
        if self.is_whole:
            return await self.receive()
        message = await self._receive_in_time()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.limits.count_bytes(self._caller(), size, self.num_bytes)
            self.num_bytes += size
            self.is_whole = not message.get("more_body", False)
        else:
            self.is_whole = True
        return message

    async def _receive_in_time(self) -> Message:
        """More of the body; raises 408 when too little of it has come for a while."""
        while True:
            since, then = self.stretch
            try:
                async with asyncio.timeout(since + PROGRESS_S - time.monotonic()):
                    return await self.receive()
            except TimeoutError:
                if self.num_bytes - then < PROGRESS_BYTES:
                    raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from None
                self.stretch = time.monotonic(), self.num_bytes

    def _caller(self) -> Caller:
        """Who sends the request: known once the route's role has been checked, and before a body is read."""
        caller = self.scope["state"].get("caller")
        return caller if isinstance(caller, Caller) else Caller(flow=address_of(self.scope))

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], (b"x-request-id", self.label), (b"x-content-type-options", b"nosniff")]
            if self.form is not None:
                headers.append((self.form.id_header, self.label))
            if self.status in (408, 413, 431):  # the rest of the body is not read
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif self.method == "HEAD" and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self.send(message)


def head_too_large() -> ApiError:
    """431: more bytes of headers than MAX_HEAD."""
    return ApiError(431, f"The headers have more than {MAX_HEAD} bytes.", code="headers_too_large")


def is_own_name(host: str) -> bool:
    """Whether no stranger's page can have this name: it is an IP address, or has no dot as names on the internet do."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host.removesuffix(".")
    return True


def header(headers: Headers, name: bytes) -> bytes | None:
    """The value of a header; of several the first."""
    return next((value for key, value in headers if key == name), None)


def bare_host(host: bytes) -> str:
    """A Host header without its port."""
    text = re.sub(r":[0-9]*$", "", host.decode("latin-1").strip().lower())
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text
