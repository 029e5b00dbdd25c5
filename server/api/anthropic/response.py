"""Messages in Anthropic's form, as they go out: blocks of thinking, text and tool use, whole or as typed events."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from ...generation.output import Head, Json, Output, Prompt, TokenText, Writer, usage
from ...http import sse
from ...http.errors import ApiError
from ...http.fields import Wire
from ...parsers import Arguments, Call, Content, Part, Reasoning
from .errors import envelope
from .request import MessagesRequest

Block = tuple[str, int]  # which block a part belongs to: its type, and of calls the number
NO_BLOCK: Block = ("", 0)
LONE = re.compile("[\ud800-\udfff]")  # halves of letters: JSON's escapes can say them, UTF-8 cannot


class MessagesWriter(Writer):
    """message, and the events that make it.

    A call whose arguments are no JSON object is not to be run. The whole answer has it as text; a stream has begun its
    block before that can be known and tells the arguments as they are. Either way it is no reason for `tool_use`.
    """

    end = b""

    def __init__(self, request: MessagesRequest, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        super().__init__(head, prompts, token_text)
        self.request = request
        self._last: Output | None = None  # the output that ended the answer
        self._block = NO_BLOCK  # the open one
        self._index = -1  # its place in the content
        self._arguments: list[str] = []  # of the open block's call
        self._has_calls = False  # there is a call that can be run

    def opening(self, usage_so_far: Json | None) -> list[Json]:
        """The message without content. What the cache saved is not known yet: the end corrects the usage."""
        told = usage_so_far or usage(len(self.prompts[0].ids), 0, 0, 0)
        return [{"type": "message_start", "message": self._message([], None, told)}, {"type": "ping"}]

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        events = [event for block, run in self._runs(output.parts) for event in self._adding(block, run)]
        if output.finish_reason:
            events += self._closed()
            self._last = output
        return events

    def closing(self, usage: Json) -> list[Json]:
        assert self._last is not None
        told = self._usage(usage)
        ending = self._ending(self._last, told)
        return [{"type": "message_delta", "delta": ending, "usage": told}, {"type": "message_stop"}]

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        [output] = outputs
        runs = [list(run) for _, run in self._runs(output.parts)]
        is_cut = output.finish_reason == "length"
        content = [self._whole_block(run, is_cut and run is runs[-1]) for run in runs]
        return self._message(content, output, usage)

    def frame(self, event: Json) -> bytes:
        return sse.frame(msgspec.json.encode(event), event["type"])

    def failure(self, error: ApiError, usage: Json) -> bytes:
        return sse.frame(envelope(error, self.head.request_id), "error")

    def _runs(self, parts: Iterable[Part]) -> Iterator[tuple[Block, Iterator[Part]]]:
        """The parts of each block."""
        told = (part for part in parts if isinstance(part, Call) or part.text)
        return itertools.groupby(told, block_of)

    def _adding(self, block: Block, run: Iterable[Part]) -> Iterator[Json]:
        """Events for more of a block, which may be a new one."""
        if block != self._block:
            yield from self._closed()
        for part in run:
            if block != self._block:
                self._block, self._index, self._arguments = block, self._index + 1, []
                yield {"type": "content_block_start", "index": self._index, "content_block": begun(part)}
            if (delta := self._delta(part)) is not None:
                yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> Iterator[Json]:
        """Events for the end of the open block, if there is one."""
        kind, _ = self._block
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": self._index, "delta": signature}
        if kind == "tool_use" and parsed("".join(self._arguments)) is not None:
            self._has_calls = True
        if kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._block = NO_BLOCK

    def _delta(self, part: Part) -> Json | None:
        match part:
            case Content(text):
                return {"type": "text_delta", "text": text}
            case Reasoning(text):
                return {"type": "thinking_delta", "thinking": text} if self.request.tells_thinking else None
            case Arguments(_, text):
                self._arguments.append(text)
                return {"type": "input_json_delta", "partial_json": text}
        return None

    def _whole_block(self, run: list[Part], is_cut: bool) -> Json:
        first = run[0]
        text = "".join(part.text for part in run if not isinstance(part, Call))
        if isinstance(first, Content):
            return begun(first) | {"text": text}
        if isinstance(first, Reasoning):
            return begun(first) | {"thinking": text if self.request.tells_thinking else ""}
        value = parsed(text)
        if value is None and not is_cut:
            return {"type": "text", "text": as_text(first, text)}
        self._has_calls |= value is not None
        return begun(first) | {"input": value or {}}

    def _message(self, content: list[Json], output: Output | None, usage: Json) -> Json:
        told = self._usage(usage)
        ending = {"stop_reason": None, "stop_sequence": None} if output is None else self._ending(output, told)
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": content,
            **ending,
            "usage": told,
        }

    def _ending(self, output: Output, told: Json) -> Json:
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[output.finish_reason or "stop"]
        if reason == "tool_use" and not self._has_calls:
            reason = "end_turn"
        if reason == "max_tokens" and told["output_tokens"] < self.request.max_tokens:
            reason = "model_context_window_exceeded"  # the context held less than was asked for
        if reason == "end_turn" and output.stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": output.stop if reason == "stop_sequence" else None}

    def _usage(self, usage: Json) -> Json:
        """Anthropic counts what was found in the cache beside the input, not in it."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "service_tier": "standard",
        }


def block_of(part: Part) -> Block:
    """The block that a part belongs to: neighbours of the same are one."""
    if isinstance(part, Content):
        return "text", 0
    return ("thinking", 0) if isinstance(part, Reasoning) else ("tool_use", part.index)


def begun(part: Part) -> Json:
    """The block that a part begins, still empty."""
    match part:
        case Content():
            return {"type": "text", "text": ""}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Call(_, id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": {}}
    raise AssertionError("arguments come behind their call")


def parsed(arguments: str) -> Json | None:
    """A call's input, {} where it has no arguments at all; None: it is no JSON object.

    Half of a letter, which only an escape can write, becomes U+FFFD.
    """
    try:
        text = json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
        value = from_json(LONE.sub("\ufffd", text), allow_inf_nan=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_text(part: Part, arguments: str) -> str:
    """A call that cannot be made, as most models write one."""
    assert isinstance(part, Call)
    return f'{{"name": {json.dumps(part.name)}, "arguments": {arguments}}}'


class MessagesText(Wire):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class MessagesThinking(Wire):
    """What the model thought before it went on; nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessagesToolUse(Wire):
    """A call that the client is to make. Where the answer was cut within the call the input is {}."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesOutputDetails(Wire):
    """What is known about the answer's tokens."""

    thinking_tokens: int


class MessagesUsage(Wire):
    """What an answer cost, in tokens; the prompt has input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessagesOutputDetails
    service_tier: Literal["standard"]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesAnswer(Wire):
    """The answer in one object."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesText | MessagesThinking | MessagesToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(Wire):
    """How many tokens the prompt of a message has."""

    input_tokens: int


class MessagesProblem(Wire):
    """What went wrong."""

    type: str
    message: str
    param: str | None
    code: str | None
    details: dict[str, Any] | None = None
    """What clients go by where the field is one that they can do without."""


class MessagesError(Wire):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesProblem
    request_id: str


class MessagesEvent(BaseModel):
    """One event of a stream; what else it holds is told by its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
