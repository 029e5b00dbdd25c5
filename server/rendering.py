"""Chat templates, rendered in a process of their own.

A template comes with the model, perhaps from a stranger. jinja's sandbox keeps it away from the system, but not from
memory and time: one filter or method can fill gigabytes, or search a text for hours inside of C code that nothing in
the same process can interrupt. So the kernel enforces the bounds. The child (template_worker.py) limits its own
address space, and an alarm ends it when a rendering takes too long; then the request fails, and the next one gets a
new child.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MAX_SECONDS = 5.0  # other prompts wait meanwhile; a chat of 4,096 messages with tools takes a tenth of a second
MAX_CHARACTERS = 8_000_000  # as long as the longest body that the server reads
# Of address space: what Python and jinja have, messages of the longest body, and a prompt of that length several times.
MAX_BYTES = 512 << 20
REPLY = struct.Struct("<cQ")  # a kind, and the bytes of the text that follows
MAX_REPLY = 4 * MAX_CHARACTERS  # in UTF-8
RENDERED, REFUSED, EXHAUSTED = b"r", b"e", b"m"  # the prompt; why there is none; memory has run out

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
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the child against `close`
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
        return self._child.pid if self._child else None

    def check(self) -> None:
        """Compile the default template; raises TemplateError when it is missing or broken."""
        self._ask("get")

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Return the prompt's text, as ChatTemplates.render does with these options; raises TemplateError."""
        return self._ask("render", messages, tools, **options)

    def start(self) -> None:
        """Start the process, so that the first request need not wait for it. Raises OSError."""
        if not self._sources:
            return
        with self._lock:
            if self._closed or (self._child is not None and self._child.poll() is None):
                return
            self._end()
            path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.getenv("PYTHONPATH")])])
            self._child = subprocess.Popen(
                [sys.executable, "-m", "server.template_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Nothing is imported from the working directory, which may be the model's folder.
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            )
        self._send((self._sources, self._special_tokens, self._max_seconds))

    def close(self) -> None:
        """End the process, and with it a rendering that is under way."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, method: str, *args: Any, **options: Any) -> str:
        if not self._sources:
            raise TemplateError(NO_TEMPLATE)
        self.start()
        self._send((method, args, options))
        kind, text = self._receive()
        if kind == RENDERED:
            return text
        if kind == EXHAUSTED:  # the rest of its memory may not do for the next request
            self._restart()
        raise TemplateError(text)

    def _send(self, message: Any) -> None:
        child = self._child
        if child is None or child.stdin is None:
            raise TemplateError(FAILED)
        try:
            child.stdin.write(pickle.dumps(message))
            child.stdin.flush()
        except (OSError, ValueError):  # it has died, or `close` came; the reply that is missing tells why
            return
        except RecursionError:
            raise TemplateError(FAILED) from None

    def _receive(self) -> tuple[bytes, str]:
        child = self._child
        if child is None or child.stdout is None:
            raise TemplateError(FAILED)
        with contextlib.suppress(OSError, ValueError, struct.error):
            kind, size = REPLY.unpack(child.stdout.read(REPLY.size))
            data = child.stdout.read(min(size, MAX_REPLY))
            if len(data) == size:
                return kind, data.decode()
        self._restart()
        raise TemplateError(TOO_SLOW if child.returncode == -signal.SIGALRM else FAILED)

    def _restart(self) -> None:
        with self._lock:
            self._end()
        self.start()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):  # what could not be sent
                if pipe is not None:
                    pipe.close()
