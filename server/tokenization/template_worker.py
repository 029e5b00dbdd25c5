"""`python -m server.tokenization.template_worker FD PARENT`: renders chat templates within limits of the kernel.

Started by Renderer, which sends the templates and then requests over the connection, as JSON. Each gets a reply.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from multiprocessing.connection import Connection
from typing import Any

from engine import begin_child

from .chat_template import ChatTemplates
from .renderer import EXHAUSTED, FAILED, LONG, MAX_BYTES, REFUSED, RENDERED, TOO_LARGE, PromptTooLong, TemplateError


def main() -> None:
    # Signals to the process group are ignored: requests need templates until the server has drained.
    fd, _ = begin_child(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # The default action ends the process even if C code never returns to Python.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with contextlib.suppress(ValueError, OSError):  # the limit is lower already, or the system is macOS
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

    with Connection(fd) as server, contextlib.suppress(EOFError, OSError):  # the server has ended
        sources, special_tokens, seconds = json.loads(server.recv_bytes())
        templates = ChatTemplates(sources, special_tokens)
        while True:
            request = json.loads(server.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, seconds)
            result = reply(templates, *request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            server.send_bytes(result)


def reply(templates: ChatTemplates, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> bytes:
    """Return the kind and text of the reply to a request, which is a method of ChatTemplates and its arguments."""
    try:
        result = getattr(templates, method)(*args, **options)
        return RENDERED + (result.encode() if isinstance(result, str) else b"")
    except PromptTooLong:
        return LONG
    except TemplateError as error:
        return REFUSED + str(error).encode(errors="replace")
    except UnicodeEncodeError:  # a lone surrogate, which only the template can have written
        return REFUSED + FAILED.encode()
    except MemoryError:
        return EXHAUSTED + TOO_LARGE.encode()
    except Exception:  # its text and traceback may contain what users wrote
        return REFUSED + FAILED.encode()


if __name__ == "__main__":
    main()
