"""Chat templates, rendered in a process of their own.

A template comes with the model, perhaps from a stranger. jinja's sandbox keeps it away from the system, but not from
memory and time: one filter or method can fill gigabytes, or search a text for hours inside of C code that nothing in
the same process can interrupt. So the kernel enforces the bounds. The child (template_worker.py) limits its own
address space, and an alarm ends it when a rendering takes too long; then the request fails, and the next one gets a
new child.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import threading
from typing import Any

from engine import spawn

MAX_SECONDS = 5.0  # other prompts wait meanwhile; a chat of 4,096 messages with tools takes a tenth of a second
MAX_CHARACTERS = 8_000_000  # as long as the longest body that the server reads
# Of address space: what Python and jinja have, messages of the longest body, and a prompt of that length several times.
MAX_BYTES = 512 << 20
REQUEST = struct.Struct("<Q")  # bytes of the JSON that follows
REPLY = struct.Struct("<cQ")  # a kind, and the bytes of the text that follows
MAX_REPLY = 4 * MAX_CHARACTERS  # in UTF-8
RENDERED, REFUSED, EXHAUSTED = b"r", b"e", b"m"  # the prompt; why there is none; memory has run out

SWITCHES = ("enable_thinking", "thinking")  # what templates call the variable that turns thinking on or off

NO_TEMPLATE = (
    "This model has no chat template, so it cannot serve chat: use /v1/completions, or start the server with "
    "--chat-template FILE."
)
FAILED = "The model's chat template cannot render these messages."
TOO_SLOW = "The model's chat template takes too long on these messages."
TOO_LARGE = "The model's chat template needs too much memory for these messages."
TOO_LONG = "The prompt that the model's chat template makes of these messages is too long."

Message = dict[str, Any]


class TemplateError(Exception):
    """The messages cannot be rendered; the text is one sentence for the client."""


class Renderer:
    """A model's chat templates, with the process that renders them, which starts with the first use.

    Belongs to one thread at a time, but for `close`. `max_seconds`: for one rendering, compiling included.
    """

    def __init__(
        self, templates: dict[str, str], special_tokens: dict[str, str], *, max_seconds: float = MAX_SECONDS
    ) -> None:
        self._sources = templates
        self._special_tokens = special_tokens
        self._max_seconds = max_seconds
        self._child: _Child | None = None
        self._lock = threading.Lock()  # of the child, against `close`
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The text of all templates of the model; empty where it has none."""
        return "\n".join(self._sources.values())

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        child = self._child
        return child.process.pid if child else None

    def check(self) -> None:
        """Compile the default template; raises TemplateError when it is missing or broken."""
        self._ask("get")

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Return the prompt's text, as ChatTemplates.render does with these options; raises TemplateError."""
        return self._ask("render", messages, tools, **options)

    def start(self) -> None:
        """Start the process, so that the first request need not wait for it. Raises OSError."""
        if self._sources:
            self._running()

    def close(self) -> None:
        """End the process, and with it a rendering that is under way."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, method: str, *args: Any, **options: Any) -> str:
        if not self._sources:
            raise TemplateError(NO_TEMPLATE)
        for attempt in range(2):  # what has died once may have been killed; what dies twice dies of the template
            child = self._running()
            if child is None:
                raise TemplateError(FAILED)
            try:
                kind, text = child.ask((method, args, options))
                break
            except (OSError, EOFError, ValueError, RecursionError):  # it has died, or what came is no reply
                with self._lock:
                    self._end()
                if child.process.returncode == -signal.SIGALRM:  # the alarm that the child has set for itself
                    raise TemplateError(TOO_SLOW) from None
                if attempt:
                    raise TemplateError(FAILED) from None
        if kind == RENDERED:
            return text
        if kind == EXHAUSTED:  # the rest of its memory may not do for the next request
            with self._lock:
                self._end()
        raise TemplateError(text)

    def _running(self) -> _Child | None:
        """The process, started anew where there is none; None after `close`."""
        with self._lock:
            if self._child is not None and self._child.process.poll() is not None:
                self._end()
            if self._child is None and not self._closed:
                self._child = _Child((self._sources, self._special_tokens, self._max_seconds))
            return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A process of template_worker.py, and the socket to it."""

    def __init__(self, templates: Any) -> None:
        self._sock, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = spawn("server.tokenization.template_worker", theirs.fileno())
            self._replies = self._sock.makefile("rb")
            self._send(templates)
        except BaseException:
            self._sock.close()
            raise

    def ask(self, request: Any) -> tuple[bytes, str]:
        """Return the kind and the text of the reply. Raises OSError, EOFError or ValueError when there is none."""
        self._send(request)
        head = self._replies.read(REPLY.size)
        if len(head) < REPLY.size:
            raise EOFError
        kind, size = REPLY.unpack(head)
        data = self._replies.read(min(size, MAX_REPLY))
        if len(data) < size:
            raise EOFError
        return kind, data.decode()

    def _send(self, told: Any) -> None:
        text = json.dumps(told).encode()
        self._sock.sendall(REQUEST.pack(len(text)) + text)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._sock.close()
