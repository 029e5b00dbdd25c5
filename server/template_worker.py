"""Child program of rendering.py: renders chat templates within bounds that the kernel enforces.

It reads pickled messages from standard input, first the templates and then the requests, and writes a reply to each
request. It ends with its parent, at the end of its input.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import signal
import sys
from typing import Any

from .rendering import (
    EXHAUSTED,
    FAILED,
    MAX_BYTES,
    REFUSED,
    RENDERED,
    REPLY,
    TOO_LARGE,
    TemplateError,
)
from .templates import ChatTemplates


def main() -> None:
    # Ctrl-C and a supervisor's SIGTERM reach the whole group; requests are rendered until the server has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The default action ends the process, also where it never gets back from C code to Python.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with contextlib.suppress(ValueError, OSError):  # the limit is lower already, or this is macOS, which has none
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sources, special_tokens, seconds = pickle.load(requests)
    templates = ChatTemplates(sources, special_tokens)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            request = pickle.load(requests)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            kind, text = reply(templates, *request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            replies.write(REPLY.pack(kind, len(text)) + text)
            replies.flush()


def reply(templates: ChatTemplates, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the kind and the text of the reply to a request: a method of ChatTemplates and its arguments."""
    try:
        result = getattr(templates, method)(*args, **options)
        return RENDERED, result.encode() if isinstance(result, str) else b""
    except TemplateError as error:
        return REFUSED, str(error).encode(errors="replace")
    except UnicodeEncodeError:  # a lone surrogate, which only the template can have written
        return REFUSED, FAILED.encode()
    except MemoryError:
        return EXHAUSTED, TOO_LARGE.encode()


if __name__ == "__main__":
    main()
