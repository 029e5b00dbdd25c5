"""Where the server is, and what the calls of all clients ask it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import pathlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, TypeVar

import pydantic

from tests.live import PacedServer, Server, eventually

T = TypeVar("T")

KEY = "sk-whale"
MODEL = "builtin"
# What the built-in model is asked, and answers.
ANSWER = "12"
QUESTION = "What is 7 + 5?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
LONG = {"max_tokens": 1500, "messages": [{"role": "user", "content": "Tell me a sea story."}]}

# The marks of reasoning are read by the parser, whoever writes them.
THOUGHT, SAID = "A whale.", "Yes."
THINKS = {"structured_outputs": {"grammar": f'start: "<think>\\n{THOUGHT}\\n</think>\\n\\n{SAID}"'}}
# The model would end it; nothing else does within the limit.
ENDLESS = {"ignore_eos": True}


class Sighting(pydantic.BaseModel):
    """What was seen. Every field has few values: a model this small does not end a number or a text by itself."""

    is_whale: bool
    side: Literal["port", "starboard"]


def lookout(side: Literal["port", "starboard"], far: bool) -> str:
    """Looks out over one side of the ship.

    Args:
        side: The side of the ship.
        far: Whether to look far out.
    """
    return f"{'Far' if far else 'Close'} to {side} there is a whale."


LOOKOUT_SCHEMA = {
    "type": "object",
    "properties": {"side": {"type": "string", "enum": ["port", "starboard"]}, "far": {"type": "boolean"}},
    "required": ["side", "far"],
    "additionalProperties": False,
}


class Place:
    """A server that asks for a key; a second one thinks, and is full when it is wanted.

    `model`: what is served, by name or folder. What the built-in model says is known. Of any other model the form is
    checked: that there is an answer, that it follows its schema, that a call of a tool is parsed.
    """

    key = KEY

    def __init__(self, python: str | None = None, webui: pathlib.Path | None = None, model: str = MODEL) -> None:
        self._stack = contextlib.ExitStack()
        self.model = (pathlib.Path(model).resolve() if pathlib.Path(model).is_dir() else pathlib.PurePath(model)).name
        self.is_builtin = model == MODEL
        # A small model that must call a tool repeats the call until its context is full.
        self.one_call: dict[str, Any] = {} if self.is_builtin else {"parallel_tool_calls": False}
        named = () if self.is_builtin else (model, "--served-model-name", self.model)
        self._serve = *named, "--api-key", KEY
        self._once: dict[Any, Any] = {}
        self.python = python
        self.webui = webui
        # One loop for all calls: some clients keep connections for later ones.
        self.runner = self._stack.enter_context(asyncio.Runner())
        self.server = self._stack.enter_context(PacedServer(*self._serve, python=python))

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def once(self, kind: Callable[[Place], contextlib.AbstractContextManager[T]]) -> T:
        """Enter `kind(self)` at the first call and leave it with the place; a failure is raised again by every call."""
        if kind not in self._once:
            try:
                self._once[kind] = self._stack.enter_context(kind(self))
            except Exception as error:
                self._once[kind] = error
        made = self._once[kind]
        if isinstance(made, Exception):
            raise made
        return made

    def answers(self, text: str | None, answer: str = ANSWER) -> bool:
        """Whether a text answers the question."""
        return answer in (text or "") if self.is_builtin else bool((text or "").strip())

    def ends(self, reason: str | None, natural: str = "stop") -> bool:
        """Whether an answer ends with the reason `natural`, or with a model that is not built in at a limit."""
        limits = {"stop": "length", "end_turn": "max_tokens", "completed": "incomplete"}
        return reason == natural or (not self.is_builtin and reason == limits[natural])

    def goes_on(self, text: str | None, calls: object = None) -> bool:
        """Whether a model goes on as it should after the result of a tool: the built-in one with a text alone."""
        text = (text or "").strip()
        return bool(text) and not calls if self.is_builtin else bool(text or calls)

    @property
    def url(self) -> str:
        """The address for clients that add /v1 themselves."""
        return self.server.url

    @property
    def v1(self) -> str:
        return f"{self.server.url}/v1"

    @functools.cached_property
    def _small(self) -> PacedServer:
        flags = ("--reasoning-parser", "think", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
        return self._stack.enter_context(PacedServer(*self._serve, *flags, python=self.python))

    @property
    def thinker(self) -> Place:
        """The place where marks of reasoning are read; elsewhere they are text."""
        return self.at(self._small)

    def at(self, server: PacedServer) -> Place:
        """The same place with another server."""
        place = copy.copy(self)
        place.server = server
        return place

    @contextlib.contextmanager
    def hung_up(self) -> Iterator[None]:
        """The request inside is given up before its end, and the server stops working on it."""
        before = self._disconnects
        with self.server.paced():  # so that the end does not come first
            yield
            eventually(lambda: self._disconnects > before)
            eventually(lambda: self.server.metric("vllm:num_requests_running") == 0)

    async def give_up(self, asking: Coroutine[Any, Any, Any]) -> None:
        """Cancel what is asked for when the server works on it."""
        task = asyncio.ensure_future(asking)
        while self.server.metric("vllm:num_requests_running") == 0 and not task.done():
            await asyncio.sleep(0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @property
    def _disconnects(self) -> float:
        return self.server.metric("pequod:request_aborts_total", cause="disconnect")

    @contextlib.contextmanager
    def full(self) -> Iterator[str]:
        """The address of a server that is full until it has refused a request of whoever asks inside."""
        server = self._small
        # The first runs, the second waits, a third is refused.
        with contextlib.ExitStack() as stack:
            stack.enter_context(server.paced())  # so that neither of them ends before
            for count in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                stack.enter_context(occupied(server))
                eventually(lambda count=count: server.metric(count) == 1)
            before = refusals(server)

            def make_room() -> None:
                with contextlib.suppress(AssertionError):
                    eventually(lambda: refusals(server) > before)
                stack.close()

            room = threading.Thread(target=make_room)
            room.start()
            try:
                yield server.url
            finally:
                room.join()
            assert refusals(server) > before, "the server was never full"


def occupied(server: Server) -> socket.socket:
    """A connection with a long request on it; nobody reads the answer, and closing it ends the work."""
    body = json.dumps({**LONG, **ENDLESS, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def refusals(server: Server) -> float:
    """How many requests a server that is ready has refused with a 503, from some number on."""
    return server.metric("http_requests_total", status="503")


def raised(kind: type[Exception], ask: Callable[[], object]) -> Any:
    """The error that a call raises."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
