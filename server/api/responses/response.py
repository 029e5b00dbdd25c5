"""Writes a response of the Responses API, whole or as the typed events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from ...generation.output import Json, Logprob, Output, Usage, Writer
from ...generation.request import UNLIMITED
from ...http import sse
from ...http.errors import ApiError
from ...parsers.parts import Arguments, Call, Content, Part, Reasoning
from ..custom_tools import input_of
from . import schema
from .items import ItemStatus
from .request import ResponsesRequest
from .tools import AnyTool, FlatFunction


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of an item: that of its response, and its index among the response's own items, input first."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:04x}"


def response_of(item: str) -> str:
    """Return the id of the response that an item of this id belongs to."""
    return "resp_" + item.partition("_")[2][:-4]


@dataclass(eq=False)
class ResponsesWriter(Writer[ResponsesRequest]):
    """Writes a ResponseObject or its events. `store` is called with the response whenever it has ended.

    The parts of a call arrive in order: the next item begins when the one before is complete.
    """

    end = b""  # the type of the last event shows that it is the last

    _: KW_ONLY
    store: Callable[[schema.ResponseObject], None]
    clock: Callable[[], float] = time.time
    _number: int = field(default=0, init=False)  # of the next event
    _items: list[schema.ResponseItem] = field(default_factory=list, init=False)
    _is_open: bool = field(default=False, init=False)  # the last item is not complete
    _arguments: str = field(default="", init=False)  # of the last call of a custom tool
    _held: list[Logprob] = field(default_factory=list, init=False)  # of tokens whose text is still withheld
    _ids: list[int] = field(default_factory=list, init=False)  # tokens
    _finish: str = field(default="stop", init=False)

    def __post_init__(self) -> None:
        self._first = len(self.request.given)  # the items' ids continue those of the input

    # Writer

    def opening(self, usage: Usage | None) -> list[schema.ResponseEvent]:
        response = self.response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def chunks(self, output: Output, usage: Usage | None) -> list[schema.ResponseEvent]:
        return list(self._read(output))

    def closing(self, usage: Usage) -> list[schema.ResponseEvent]:
        response = self._ended(usage)
        return [self._event(response.status, response=response)]

    def whole(self, outputs: list[Output], usage: Usage) -> schema.ResponseObject:
        for output in outputs:
            for _ in self._read(output):
                pass
        return self._ended(usage)

    def frame(self, event: schema.ResponseEvent) -> bytes:
        return sse.frame(msgspec.json.encode(event), event.type)

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        events = [
            schema.ResponseEvent(
                type="error", code=error.code, message=error.message, param=error.param, sequence_number=self._next()
            ),
            self._event("failed", response=self.failed(error, usage)),
        ]
        return b"".join(self.frame(event) for event in events)

    # The response

    def response(self, status: schema.Status, usage: Usage | None = None) -> schema.ResponseObject:
        """Return the response as it is now, with this status."""
        request, head = self.request, self.head
        format = request.text.format if request.text else None
        choice = request.tool_choice or "auto"
        return schema.ResponseObject(
            id=head.id,
            created_at=head.created,
            status=status,
            background=bool(request.background),
            frequency_penalty=request.frequency_penalty or 0.0,
            instructions=request.instructions,
            max_output_tokens=None if request.max_output_tokens == UNLIMITED else request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata or {},
            model=head.model,
            output=[copy(item) for item in self._items],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            presence_penalty=request.presence_penalty or 0.0,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning=schema.ReasoningEffort(request.reasoning.effort if request.reasoning else None),
            safety_identifier=request.safety_identifier,
            store=request.is_stored,
            temperature=self._chosen("temperature"),
            text={
                "format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"},
                "verbosity": (request.text.verbosity if request.text else None) or "medium",
            },
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool_as_json(tool) for tool in request.tools or ()],
            top_logprobs=request.top_logprobs or 0,
            top_p=self._chosen("top_p"),
            truncation=request.truncation or "disabled",
            usage=None if usage is None else response_usage(usage),
            user=request.user,
            prompt_token_ids=list(self.prompts[0].ids) if request.return_token_ids else UNSET,
            token_ids=list(self._ids) if request.return_token_ids else UNSET,
        )

    def keep(self, status: schema.Status) -> schema.ResponseObject:
        """Have the response kept as it is now, with this status."""
        return self._kept(self.response(status))

    def failed(self, error: ApiError, usage: Usage | None) -> schema.ResponseObject:
        """Return the response that could not be finished."""
        self._leave_open()
        response = self.response("failed", usage)
        response.error = schema.ResponseError(
            "invalid_prompt" if error.status == 400 else "server_error", error.message
        )
        return self._kept(response)

    def cancelled(self, usage: Usage | None) -> schema.ResponseObject:
        """Return the response as far as it was generated when it was cancelled."""
        self._leave_open()
        return self._kept(self.response("cancelled", usage))

    def _ended(self, usage: Usage) -> schema.ResponseObject:
        response = self.response("incomplete" if self._finish == "length" else "completed", usage)
        if self._finish == "length":
            response.incomplete_details = schema.IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(self.clock())
        return self._kept(response)

    def _kept(self, response: schema.ResponseObject) -> schema.ResponseObject:
        self.store(response)
        return response

    def _chosen(self, name: str) -> float:
        own = getattr(self.request, name)
        return float(own if own is not None else self.head.defaults.get(name, 1.0))

    # Items

    def _read(self, output: Output) -> Iterator[schema.ResponseEvent]:
        """Yield the events of an output token by token, so that nothing depends on how many arrived together."""
        self._ids += output.token_ids
        begin = 0
        for index, end in enumerate(output.part_ends):
            if self.request.num_logprobs is not None:
                self._held.append(self.entry(output.token_ids[index], output.logprobs[index]))
            yield from self._add(output.parts[begin:end])
            begin = end
        yield from self._add(output.parts[begin:])
        if output.finish_reason:
            self._finish = output.finish_reason
            if not self._items:  # without any text the output is an empty message
                yield from self._begin_message()
            yield from self._close("incomplete" if self._is_cut(output) else "completed")

    def _is_cut(self, output: Output) -> bool:
        """Return whether the last item was cut off. A call that the model has completed ends with `tool_calls`."""
        is_call = isinstance(self._items[-1], schema.ResponseCall | schema.ResponseCustomCall)
        return output.finish_reason == "length" or (output.finish_reason == "stop" and is_call)

    def _add(self, parts: tuple[Part, ...]) -> Iterator[schema.ResponseEvent]:
        if parts and not any(isinstance(part, Content) for part in parts):
            self._held = []  # only the text has log-probabilities
        for part in parts:
            match part:
                case Content():
                    yield from self._text(part.text)
                case Reasoning():
                    yield from self._thought(part.text)
                case Call():
                    yield from self._close()
                    yield from self._begin(self._call(part))
                case Arguments():
                    call = self._items[-1]
                    if isinstance(call, schema.ResponseCustomCall):
                        self._arguments += part.text
                        continue
                    assert isinstance(call, schema.ResponseCall)
                    call.arguments += part.text
                    yield self._of_item("function_call_arguments.delta", delta=part.text)

    def _call(self, part: Call) -> schema.ResponseCall | schema.ResponseCustomCall:
        """Return the item of a call that begins."""
        called = self.request.called(part.name)
        name = part.name if called is None else called.tool.name
        namespace = UNSET if called is None or called.namespace is None else called.namespace
        given: dict[str, Any] = {"status": "in_progress", "call_id": part.id, "name": name, "namespace": namespace}
        if called is not None and called.tool.type == "custom":
            self._arguments = ""
            return schema.ResponseCustomCall(id=self._new_id("ctc"), input="", **given)
        return schema.ResponseCall(id=self._new_id("fc"), arguments="", **given)

    def _text(self, text: str) -> Iterator[schema.ResponseEvent]:
        if not (self._is_open and isinstance(self._items[-1], schema.ResponseMessage)):
            yield from self._close()
            yield from self._begin_message()
            self._held = since(text, self._held)
        logprobs, self._held = self._held, []
        message = self._items[-1]
        assert isinstance(message, schema.ResponseMessage)
        message.content[0].text += text
        message.content[0].logprobs += logprobs
        yield self._of_part("output_text.delta", delta=text, logprobs=logprobs)

    def _thought(self, text: str) -> Iterator[schema.ResponseEvent]:
        if not (self._is_open and isinstance(self._items[-1], schema.ResponseReasoning)):
            yield from self._close()
            item = schema.ResponseReasoning(self._new_id("rs"), "in_progress", [], [])
            yield from self._begin(item)
            yield self._of_part("content_part.added", part=schema.ReasoningContent(""))
            item.content = [schema.ReasoningContent("")]
        thought = self._items[-1]
        assert isinstance(thought, schema.ResponseReasoning)
        thought.content[0].text += text
        yield self._of_part("reasoning_text.delta", delta=text)

    def _begin_message(self) -> Iterator[schema.ResponseEvent]:
        item = schema.ResponseMessage(self._new_id("msg"), "in_progress", "assistant", [])
        yield from self._begin(item)
        yield self._of_part("content_part.added", part=schema.ResponseText("", [], []))
        item.content = [schema.ResponseText("", [], [])]

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self.head.id, self._first + len(self._items))

    def _begin(self, item: schema.ResponseItem) -> Iterator[schema.ResponseEvent]:
        self._items.append(item)
        self._is_open = True
        # Events are encoded later than they are made.
        yield self._event("output_item.added", output_index=self._index, item=copy(item))

    def _close(self, status: ItemStatus = "completed") -> Iterator[schema.ResponseEvent]:
        """Complete the open item, if there is one."""
        if not self._is_open:
            return
        item = self._items[-1]
        match item:
            case schema.ResponseCall():
                yield self._of_item("function_call_arguments.done", arguments=item.arguments)
            case schema.ResponseCustomCall():
                self._set_input(item)
                yield self._of_item("custom_tool_call_input.delta", delta=item.input)
                yield self._of_item("custom_tool_call_input.done", input=item.input)
            case schema.ResponseMessage(content=[text]):
                yield self._of_part("output_text.done", text=text.text, logprobs=text.logprobs)
                yield self._of_part("content_part.done", part=text)
            case schema.ResponseReasoning(content=[thought]):
                yield self._of_part("reasoning_text.done", text=thought.text)
                yield self._of_part("content_part.done", part=thought)
        item.status = status
        self._is_open = False
        yield self._event("output_item.done", output_index=self._index, item=copy(item))

    def _leave_open(self) -> None:
        """Leave the open item incomplete."""
        if self._is_open:
            item = self._items[-1]
            if isinstance(item, schema.ResponseCustomCall):
                self._set_input(item)
            item.status = "incomplete"
            self._is_open = False

    def _set_input(self, call: schema.ResponseCustomCall) -> None:
        call.input = input_of(self._arguments)

    # Events

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _event(self, name: str, **fields: Any) -> schema.ResponseEvent:
        return schema.ResponseEvent(type=f"response.{name}", sequence_number=self._next(), **fields)

    def _of_item(self, name: str, **fields: Any) -> schema.ResponseEvent:
        return self._event(name, item_id=self._items[-1].id, output_index=self._index, **fields)

    def _of_part(self, name: str, **fields: Any) -> schema.ResponseEvent:
        return self._of_item(name, content_index=0, **fields)


def since(text: str, entries: list[Logprob]) -> list[Logprob]:
    """Return the entries from the token in which a text begins; before it are delimiters, which no part has.

    Returns all of them if the text differs from that of the tokens, as with bytes that are not UTF-8.
    """
    data, own = b"".join(bytes(entry.bytes) for entry in entries), text.encode()
    # A delimiter may contain the same characters: the last position counts.
    begin = 0 if data.startswith(own) else max(0, data.rfind(own))
    ends = itertools.accumulate(len(entry.bytes) for entry in entries)
    return [entry for entry, end in zip(entries, ends, strict=True) if end > begin]


def interrupted(response: bytes) -> bytes:
    """Return a stored response as failed, because the server's process ended before it was complete."""
    error = schema.ResponseError("server_error", "The server was restarted before the response was complete.")
    return msgspec.json.encode({**msgspec.json.decode(response), "status": "failed", "error": error})


def tool_as_json(tool: AnyTool) -> Json:
    if not isinstance(tool, FlatFunction):
        return tool.model_dump(exclude_none=True)
    return {"description": None, "type": tool.type, **tool.model_dump(), "strict": bool(tool.strict)}


def response_usage(usage: Usage) -> schema.ResponseUsage:
    """Return a Usage in the form of the Responses API."""
    return schema.ResponseUsage(
        usage.prompt_tokens,
        schema.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        usage.completion_tokens_details,
        usage.total_tokens,
    )
