"""RequestMiddleware: the outermost layer of the app, with everything that holds for every HTTP request.

A plain ASGI middleware: it passes messages on as they come, so that it does not delay a stream.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings import Settings
from .admission import Caller, Limits
from .auth import address_of
from .errors import ApiError, ErrorForm, from_exception
from .excerpt import SHOWN
from .refusals import log_refusal

HOST = re.compile(r"[a-z0-9._:-]+")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
# At least this much of a body must arrive in each interval: a slow line passes, a client that only trickles does not.
PROGRESS_S = 10.0
PROGRESS_BYTES = 64 << 10
MAX_HEAD = 64 << 10  # bytes of all headers; the parser itself has no limit
GONE = 499  # the status counted if the client disconnected before its response began

Headers = Sequence[tuple[bytes, bytes]]
Count = Callable[[str, str, int, float], None]  # a request by method, route, status and seconds


class RootPathMiddleware:
    """Serves under --root-path also if the proxy keeps it in the path, or without a proxy.

    uvicorn prepends the root path to every path, so that it then stands there twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root: str = scope.get("root_path", "")
        if scope["type"] == "http" and root and scope["path"] == root * 2:  # as people type it
            await RedirectResponse(f"{root}/")(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{root}{root}/"):
            scope["path"] = scope["path"][len(root) :]
            scope["raw_path"] = scope["raw_path"].replace(root.encode(), b"", 1)
        await self.app(scope, receive, send)


class OriginMiddleware(CORSMiddleware):
    """CORS for the allowed origins; RequestMiddleware refuses the preflights of others, as without this layer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope["headers"], b"origin") if scope["type"] == "http" else None
        if origin is not None and not self.is_allowed_origin(origin.decode("latin-1")):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class RequestMiddleware:
    """Checks Host, origin and body size, sets the request id, counts the request, and releases what it holds."""

    def __init__(
        self, app: ASGIApp, settings: Settings, limits: Limits, count: Count, error_forms: Sequence[ErrorForm] = ()
    ) -> None:
        self.app = app
        self.settings = settings
        self.limits = limits
        self.count = count
        self.error_forms = error_forms
        self.hosts = None if settings.hosts is None else {host.lower() for host in settings.hosts}
        self.allows_any_host = settings.allows_any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _RequestCycle(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)

    def allows(self, host: str | None) -> bool:
        """Whether requests with this Host are served; None: without a Host.

        DNS rebinding needs a name. Load balancers and probes send the server's address, or no Host at all.
        """
        if host is None or is_address(host):
            return True
        if self.hosts is not None:
            return host in self.hosts
        return self.allows_any_host or "." not in host.removesuffix(".")  # no name of the internet is without a dot

    def allows_origin(self, origin: bytes) -> bool:
        """Whether web pages of this origin may call the server."""
        allowed = self.settings.allowed_origins
        return "*" in allowed or origin.decode("latin-1") in allowed

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError for a request that is refused by its head alone."""
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD:
            raise head_too_large()
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1:
            raise ApiError(400, "The request has more than one Host header.", code="invalid_host")
        if not self.allows(host := bare_host(hosts[0]) if hosts else None):
            raise invalid_host(host, self.settings)
        if method == "OPTIONS" and header(headers, b"access-control-request-method") is not None:
            # OriginMiddleware answers those of the allowed origins.
            message = "Web pages of this origin may not call this server; its operator can allow it with "
            raise ApiError(403, f"{message}--allowed-origins.", code="origin_not_allowed")
        # A page of another origin may post forms and plain text to any address without a preflight, but not JSON.
        kind = (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()
        origin = header(headers, b"origin")
        # OpenAI's JavaScript library cancels a response with an empty POST, which has no type.
        may_lack_type = origin is None or (self.allows_origin(origin) and not has_body(headers))
        if method == "POST" and kind != b"application/json" and not may_lack_type:
            raise ApiError(415, "A web page must send Content-Type: application/json.", code="invalid_content_type")
        coding = (header(headers, b"content-encoding") or b"").strip().lower()
        if method == "POST" and coding not in (b"", b"identity"):
            message = "The body must not be compressed: send it without Content-Encoding."
            raise ApiError(415, message, code="invalid_content_encoding")
        length = header(headers, b"content-length") or b""
        if length.isdigit():
            self.limits.check_body_size(int(length))


class _RequestCycle:
    """One HTTP request and its response."""

    def __init__(self, middleware: RequestMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        self.middleware = middleware
        self.limits = middleware.limits
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        # HEAD is GET without the body, on every route.
        self.scope = {**scope, "method": "GET"} if self.method == "HEAD" else scope
        sent = header(scope["headers"], b"x-request-id")
        valid = sent is not None and REQUEST_ID.fullmatch(sent)
        self.id = sent if sent is not None and valid else b"req-" + secrets.token_hex(8).encode()
        self.form = next((form for form in middleware.error_forms if form.covers(scope)), None)
        self.scope.setdefault("state", {}).update(request_id=self.id.decode(), error_form=self.form)
        self.status: int | None = None
        self.started = time.monotonic()
        self.num_bytes = 0
        self.has_body = False  # all of it has been read
        self.interval = (self.started, 0)  # start of the interval that needs progress, and the bytes read by then

    async def run(self) -> None:
        try:
            self.middleware.check(self.method, self.scope["headers"])
            await self.middleware.app(self.scope, self._receive, self._send)
        except ClientDisconnect:
            self.status = self.status or GONE
        except Exception as error:
            failure = from_exception(error)
            # After the head nothing can be reported: the server closes the connection, and the client sees a
            # truncated response.
            if self.status is None:
                with suppress(OSError):
                    await failure.response(self.scope)(self.scope, self.receive, self._send)
        finally:
            caller = self._caller()
            self.limits.bytes.release(caller.flow, self.num_bytes)
            caller.release()
            if (refusal := self.scope["state"].get("refusal")) is not None:
                log_refusal(refusal, self.method, self.scope, self.id.decode())
            handler = getattr(self.scope.get("route"), "path", "unmatched")
            self.middleware.count(self.method, handler, self.status or GONE, time.monotonic() - self.started)

    async def _receive(self) -> Message:
        if self.has_body:
            return await self.receive()
        message = await self._receive_in_time()
        self.has_body = not message.get("more_body", False)  # also at a disconnect
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.limits.count_bytes(self._caller(), size, self.num_bytes)
            self.num_bytes += size
        return message

    async def _receive_in_time(self) -> Message:
        """Receive more of the body; raises 408 if too little of it has arrived in an interval."""
        while True:
            start, num_bytes = self.interval
            try:
                async with asyncio.timeout(start + PROGRESS_S - time.monotonic()):
                    return await self.receive()
            except TimeoutError:
                if self.num_bytes - num_bytes < PROGRESS_BYTES:
                    raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from None
                self.interval = time.monotonic(), self.num_bytes

    def _caller(self) -> Caller:
        """The sender of the request; its key is known after the route's role has been checked, before the body."""
        caller = self.scope["state"].get("caller")
        return caller if isinstance(caller, Caller) else Caller(flow=address_of(self.scope))

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], (b"x-request-id", self.id), (b"x-content-type-options", b"nosniff")]
            if self.form is not None:
                headers.append((self.form.id_header, self.id))
            if self.status in (408, 413, 431):  # the rest of the body is not read
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif self.method == "HEAD" and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self.send(message)


def invalid_host(host: str | None, settings: Settings) -> ApiError:
    """400: the Host header is not one of this server's."""
    name = host if host and HOST.fullmatch(host) and len(host) <= SHOWN else None
    subject = f"the host '{name}'" if name else "that Host header"
    if settings.allowed_hosts:
        remedy = "add it to --allowed-hosts"
    else:  # --allowed-hosts replaces the names that are accepted without it
        remedy = f"start it with --allowed-hosts {name or 'NAME'} and all other names that clients use"
        remedy += ", or with an API key" * (settings.hosts is None)
    return ApiError(400, f"This server does not accept {subject}; {remedy}.", code="invalid_host")


def head_too_large() -> ApiError:
    """431: more bytes of headers than MAX_HEAD."""
    return ApiError(431, f"The headers have more than {MAX_HEAD} bytes.", code="headers_too_large")


def is_address(host: str) -> bool:
    """Whether a bare host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def header(headers: Headers, name: bytes) -> bytes | None:
    """The value of a header, or the first of several."""
    return next((value for key, value in headers if key == name), None)


def has_body(headers: Headers) -> bool:
    """Whether a request with these headers has a body that is not empty."""
    length = (header(headers, b"content-length") or b"0").strip(b"0")
    return length != b"" or header(headers, b"transfer-encoding") is not None


def bare_host(host: bytes) -> str:
    """A Host header without its port."""
    text = re.sub(r":[0-9]*$", "", host.decode("latin-1").strip().lower())
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text
