"""Responses of messages in Anthropic's form: blocks of thinking, text and tool use, whole or as typed events."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from ...generation.output import Json, Output, Usage, Writer, usage
from ...http import sse
from ...http.errors import ApiError
from ...http.fields import Wire
from ...http.openapi import JsonObject
from ...parsers.parts import Arguments, Call, Content, Part, Reasoning
from .errors import MessagesProblem, envelope
from .request import MessagesRequest

Block = tuple[str, int]  # which block a part belongs to: its type, and of calls the number
NO_BLOCK: Block = ("", 0)
LONE = re.compile("[\ud800-\udfff]")  # surrogates: JSON can escape them, UTF-8 cannot encode them
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
STOP_REASONS: dict[str | None, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesText(JsonObject, tag_field="type", tag="text"):
    """Text."""

    text: str


class MessagesThinking(JsonObject, tag_field="type", tag="thinking"):
    """The model's reasoning, without a signature."""

    thinking: str
    signature: Literal[""] = ""


class MessagesToolUse(JsonObject, tag_field="type", tag="tool_use"):
    """A call that the client is to make; the input is {} if the output was cut off within the call."""

    id: str
    name: str
    input: dict[str, Any]


MessagesBlock = MessagesText | MessagesThinking | MessagesToolUse


class MessagesOutputDetails(JsonObject):
    """Details of the output's tokens."""

    thinking_tokens: int


class MessagesUsage(JsonObject):
    """The number of tokens; those of the prompt are input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessagesOutputDetails
    service_tier: Literal["standard"] = "standard"


class Message(JsonObject):
    """The message in one object."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesDelta(JsonObject):
    """What an event adds to a block, or the end of the message; its type decides which of the fields it has."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: Literal[""] | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessagesEvent(JsonObject):
    """One event of a stream; its type decides which of the fields it has."""

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
    index: int | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    content_block: MessagesBlock | UnsetType = UNSET
    delta: MessagesDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET
    error: MessagesProblem | UnsetType = UNSET
    request_id: str | UnsetType = UNSET


class TokenCount(Wire):
    """The number of tokens of a prompt."""

    input_tokens: int


@dataclass(eq=False)
class MessagesWriter(Writer[MessagesRequest]):
    """Writes a Message or its events.

    A call whose arguments are not a JSON object must not be run. A whole message has it as text; a stream has already
    begun its block when that becomes known, and sends the arguments as they are. In neither case is it a reason for the
    stop_reason `tool_use`.
    """

    end = b""

    _last: Output | None = field(default=None, init=False)  # the output that ended the message
    _block: Block = field(default=NO_BLOCK, init=False)  # the open one
    _index: int = field(default=-1, init=False)  # of the open block in the content
    _arguments: list[str] = field(default_factory=list, init=False)  # of the open block's call
    _has_calls: bool = field(default=False, init=False)  # there is a call that can be run

    def opening(self, usage_so_far: Usage | None) -> list[MessagesEvent]:
        """The message without content. The cache hits are not known yet: the end corrects the usage."""
        message = self._message([], None, usage_so_far or usage(len(self.prompts[0].ids), 0, 0, 0))
        return [MessagesEvent("message_start", message=message), MessagesEvent("ping")]

    def chunks(self, output: Output, usage: Usage | None) -> list[MessagesEvent]:
        events = [event for block, run in runs(output.parts) for event in self._add(block, run)]
        if output.finish_reason:
            events += self._close()
            self._last = output
        return events

    def closing(self, usage: Usage) -> list[MessagesEvent]:
        reason, stop = self._ending(self._last, usage)
        ending = MessagesDelta(stop_reason=reason, stop_sequence=stop)
        return [
            MessagesEvent("message_delta", delta=ending, usage=messages_usage(usage)),
            MessagesEvent("message_stop"),
        ]

    def whole(self, outputs: list[Output], usage: Usage) -> Message:
        [output] = outputs
        blocks = [list(run) for _, run in runs(output.parts)]
        is_cut = output.finish_reason == "length" or output.stop is not None
        content = [self._whole_block(run, is_cut and run is blocks[-1]) for run in blocks]
        return self._message(content, output, usage)

    def frame(self, event: MessagesEvent) -> bytes:
        return sse.frame(msgspec.json.encode(event), event.type)

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        return sse.frame(envelope(error, self.head.request_id), "error")

    def _add(self, block: Block, run: Iterable[Part]) -> Iterator[MessagesEvent]:
        """Yield the events for more of a block, which may be a new one."""
        if block != self._block:
            yield from self._close()
        for part in run:
            if block != self._block:
                self._block, self._index, self._arguments = block, self._index + 1, []
                yield MessagesEvent("content_block_start", self._index, content_block=begin(part))
            if (delta := self._delta(part)) is not None:
                yield MessagesEvent("content_block_delta", self._index, delta=delta)

    def _close(self) -> Iterator[MessagesEvent]:
        """Yield the events for the end of the open block, if there is one."""
        kind, _ = self._block
        if kind == "thinking":
            signature = MessagesDelta("signature_delta", signature="")
            yield MessagesEvent("content_block_delta", self._index, delta=signature)
        if kind == "tool_use" and parse("".join(self._arguments)) is not None:
            self._has_calls = True
        if kind:
            yield MessagesEvent("content_block_stop", self._index)
        self._block = NO_BLOCK

    def _delta(self, part: Part) -> MessagesDelta | None:
        match part:
            case Content(text):
                return MessagesDelta("text_delta", text)
            case Reasoning(text):
                return MessagesDelta("thinking_delta", thinking=text) if self.request.tells_thinking else None
            case Arguments(_, text):
                self._arguments.append(text)
                return MessagesDelta("input_json_delta", partial_json=text)
        return None

    def _whole_block(self, run: list[Part], is_cut: bool) -> MessagesBlock:
        text = "".join(part.text for part in run if not isinstance(part, Call))
        block = begin(run[0])
        match block:
            case MessagesText():
                block.text = text
            case MessagesThinking():
                block.thinking = text if self.request.tells_thinking else ""
            case MessagesToolUse():
                value = parse(text)
                if value is None and not is_cut:  # as most models write a call
                    return MessagesText(f'{{"name": {json.dumps(block.name)}, "arguments": {text}}}')
                self._has_calls |= value is not None
                block.input = value or {}
        return block

    def _message(self, content: list[MessagesBlock], output: Output | None, usage: Usage) -> Message:
        head = self.head
        reason, stop = self._ending(output, usage)
        return Message(head.id, "message", "assistant", head.model, content, reason, stop, messages_usage(usage))

    def _ending(self, output: Output | None, usage: Usage) -> tuple[StopReason | None, str | None]:
        """Return the stop_reason and the stop_sequence."""
        if output is None:
            return None, None
        reason = STOP_REASONS[output.finish_reason]
        if reason == "tool_use" and not self._has_calls:
            reason = "end_turn"
        if reason == "max_tokens" and usage.completion_tokens < self.request.max_tokens:
            reason = "model_context_window_exceeded"  # the context had fewer tokens left than requested
        if reason == "end_turn" and isinstance(output.stop, str):
            return "stop_sequence", output.stop
        return reason, None


def messages_usage(usage: Usage) -> MessagesUsage:
    """Return a Usage in Anthropic's form, whose input tokens do not include cache hits."""
    cached = usage.prompt_tokens_details.cached_tokens
    details = MessagesOutputDetails(usage.completion_tokens_details.reasoning_tokens)
    return MessagesUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens, details)


def runs(parts: Iterable[Part]) -> Iterator[tuple[Block, Iterator[Part]]]:
    """Group the parts by block."""
    return itertools.groupby((part for part in parts if isinstance(part, Call) or part.text), block_of)


def block_of(part: Part) -> Block:
    """Return the block that a part belongs to; neighbours with the same block share it."""
    if isinstance(part, Content):
        return "text", 0
    return ("thinking", 0) if isinstance(part, Reasoning) else ("tool_use", part.index)


def begin(part: Part) -> MessagesBlock:
    """Return the empty block that a part begins."""
    match part:
        case Content():
            return MessagesText("")
        case Reasoning():
            return MessagesThinking("")
        case Call(_, id, name):
            return MessagesToolUse(id, name, {})
    raise AssertionError("arguments come after their call")


def parse(arguments: str) -> Json | None:
    """Return a call's input, {} if it has no arguments; None: it is not a JSON object.

    A lone surrogate, which only an escape can write, becomes U+FFFD.
    """
    try:
        text = json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
        value = from_json(LONE.sub("\ufffd", text), allow_inf_nan=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
