"""Renders chat templates in a process of their own.

A template is a program that comes with the model. jinja's sandbox keeps it from the system, but not from memory and
time: one filter can fill gigabytes, or search a text for hours in C code that nothing in the same process can
interrupt. So the kernel enforces the limits. The child (template_worker.py) limits its address space, and an alarm ends
it if rendering takes too long; then the request fails, and the next one gets a new child.
"""

from __future__ import annotations

import json
import signal
import threading
from multiprocessing.connection import Pipe
from typing import Any

from engine import spawn

MAX_SECONDS = 5.0  # other prompts wait meanwhile; a chat of 4,096 messages with tools takes a tenth of a second
MAX_CHARACTERS = 8_000_000  # as long as the longest body that the server reads
# Of address space: Python and jinja, messages of the longest body, and a few copies of a prompt of that length.
MAX_BYTES = 512 << 20
MAX_REPLY = 4 * MAX_CHARACTERS + 1  # in UTF-8, with its kind
# Kinds, each before a text: the prompt; an error; out of memory; a prompt that is too long.
RENDERED, REFUSED, EXHAUSTED, LONG = b"r", b"e", b"m", b"l"

SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on or off

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
    """The messages cannot be rendered; the message is one sentence for the client."""


class PromptTooLong(TemplateError):
    """The prompt that the template makes of the messages is too long."""

    def __init__(self) -> None:
        super().__init__(TOO_LONG)


class Renderer:
    """A model's chat templates and the process that renders them, started at the first use.

    Belongs to one thread at a time, except for `close`. `max_seconds`: for one prompt, including compilation.
    """

    def __init__(
        self, templates: dict[str, str], special_tokens: dict[str, str], *, max_seconds: float = MAX_SECONDS
    ) -> None:
        self._sources = templates
        self._special_tokens = special_tokens
        self._max_seconds = max_seconds
        self._child: _Child | None = None
        self._lock = threading.RLock()  # for the child, which `close` ends from another thread
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The text of all templates of the model; empty if it has none."""
        return "\n".join(self._sources.values())

    @property
    def pid(self) -> int | None:
        """The process id; None without a process."""
        child = self._child
        return child.process.pid if child else None

    def check(self) -> None:
        """Compile the default template; raises TemplateError."""
        self._ask("get")

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Render a prompt, with the options of ChatTemplates.render; raises TemplateError."""
        return self._ask("render", messages, tools, **options)

    def start(self) -> None:
        """Start the process, so that the first request need not wait for it. Raises OSError."""
        if self._sources:
            self._running()

    def close(self) -> None:
        """End the process, also during a request."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, method: str, *args: Any, **options: Any) -> str:
        if not self._sources:
            raise TemplateError(NO_TEMPLATE)
        for attempt in range(2):  # a first death may be a kill; the template causes a second one
            child = self._running()
            if child is None:
                raise TemplateError(FAILED)
            try:
                kind, text = child.ask((method, args, options))
                break
            except (OSError, EOFError, ValueError, RecursionError):  # it has died, or the reply is invalid
                self._end()
                if child.process.returncode == -signal.SIGALRM:  # the child's own alarm
                    raise TemplateError(TOO_SLOW) from None
                if attempt:
                    raise TemplateError(FAILED) from None
        if kind == RENDERED:
            return text
        if kind == LONG:
            raise PromptTooLong
        if kind == EXHAUSTED:  # its memory may not suffice for the next request
            self._end()
        raise TemplateError(text)

    def _running(self) -> _Child | None:
        """Return the process, starting it if there is none; None after `close`."""
        with self._lock:
            if self._child is not None and self._child.process.poll() is not None:
                self._end()
            if self._child is None and not self._closed:
                self._child = _Child((self._sources, self._special_tokens, self._max_seconds))
            return self._child

    def _end(self) -> None:
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.end()


class _Child:
    """A process of template_worker.py and the connection to it."""

    def __init__(self, templates: Any) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.process = spawn("server.tokenization.template_worker", theirs.fileno())
        self._send(templates)

    def ask(self, request: Any) -> tuple[bytes, str]:
        """Return the kind and text of the reply. Raises OSError, EOFError or ValueError without a valid one."""
        self._send(request)
        reply = self._connection.recv_bytes(MAX_REPLY)
        return reply[:1], reply[1:].decode()

    def _send(self, message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def end(self) -> None:
        # The connection, which another thread may be reading, is closed with the last reference to it.
        self.process.kill()
        self.process.wait()
