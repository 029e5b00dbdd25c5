"""Responses on the wire: the response object, whole or as the typed events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ...generation.output import Head, Json, Output, Prompt, TokenText, Writer
from ...generation.request import UNLIMITED
from ...http import sse
from ...http.errors import ApiError
from ...parsers import Arguments, Call, Content, Part, Reasoning
from .request import ResponsesRequest
from .tools import AnyTool, FlatAllowed, FlatFunction, FlatNamed

Keep = Callable[[Json], None]
# OpenAI's account of what was put into a cache because the request asked for it; here no request has to ask.
NO_WRITES = {"cache_write_tokens": 0}


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an item: that of its response, and its place among the response's own items, input first."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:04x}"


def response_of(item: str) -> str:
    """The id of the response that an item of this id belongs to."""
    return "resp_" + item.partition("_")[2][:-4]


class ResponsesWriter(Writer):
    """The response and its events. `keep` is told the response whenever it has come to its end.

    The parts of a call come one after the other: the next item begins when the one before is complete.
    """

    end = b""  # the last event says by its type that it is the last

    def __init__(
        self,
        request: ResponsesRequest,
        head: Head,
        prompts: list[Prompt],
        token_text: TokenText,
        *,
        keep: Keep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(head, prompts, token_text)
        self.request = request
        self._keep = keep
        self._clock = clock
        self._number = 0  # of the next event
        self._items: list[Json] = []
        self._is_open = False  # the last item goes on
        self._held: list[Json] = []  # log-probabilities of tokens whose text has not come
        self._ids: list[int] = []  # tokens
        self._finish = "stop"
        self._first = len(request.given)  # the items' ids go on after the input's

    # Writer

    def opening(self, usage: Json | None) -> list[Json]:
        response = self.response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        return list(self._read(output))

    def closing(self, usage: Json) -> list[Json]:
        response = self._ended(usage)
        return [self._event(response["status"], response=response)]

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        for output in outputs:
            for _ in self._read(output):
                pass
        return self._ended(usage)

    def frame(self, event: Json) -> bytes:
        return sse.frame(msgspec.json.encode(event), event["type"])

    def failure(self, error: ApiError, usage: Json) -> bytes:
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        events = [{**told, "sequence_number": self._next()}]
        events.append(self._event("failed", response=self.failed(error, usage)))
        return b"".join(self.frame(event) for event in events)

    # The response

    def response(self, status: str, usage: Json | None = None) -> Json:
        """The response as it is now, with this status."""
        request, head = self.request, self.head
        own = request.text.format if request.text else None
        told: Json = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": bool(request.background),
            "completed_at": None,
            "error": None,
            "frequency_penalty": request.frequency_penalty or 0.0,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": None if request.max_output_tokens == UNLIMITED else request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": head.model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": request.presence_penalty or 0.0,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.is_stored,
            "temperature": self._chosen("temperature"),
            "text": {
                "format": own.model_dump(by_alias=True, exclude_none=True) if own else {"type": "text"},
                "verbosity": (request.text.verbosity if request.text else None) or "medium",
            },
            "tool_choice": told_choice(request.tool_choice),
            "tools": [told_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._chosen("top_p"),
            "truncation": request.truncation or "disabled",
            "usage": None if usage is None else response_usage(usage),
            "user": request.user,
        }
        if request.return_token_ids:
            told |= {"prompt_token_ids": list(self.prompts[0].ids), "token_ids": list(self._ids)}
        return told

    def keep(self, status: str) -> Json:
        """Have the response kept as it is now, with this status."""
        return self._kept(self.response(status))

    def failed(self, error: ApiError, usage: Json | None) -> Json:
        """The response that could not be finished."""
        self._leave_open()
        code = "invalid_prompt" if error.status == 400 else "server_error"
        return self._kept(self.response("failed", usage) | {"error": {"code": code, "message": error.message}})

    def cancelled(self, usage: Json | None) -> Json:
        """The response that nobody wants any more, as far as it came."""
        self._leave_open()
        return self._kept(self.response("cancelled", usage))

    def _ended(self, usage: Json) -> Json:
        if self._finish == "length":
            cut = {"incomplete_details": {"reason": "max_output_tokens"}}
            return self._kept(self.response("incomplete", usage) | cut)
        return self._kept(self.response("completed", usage) | {"completed_at": int(self._clock())})

    def _kept(self, response: Json) -> Json:
        self._keep(response)
        return response

    def _chosen(self, name: str) -> float:
        own = getattr(self.request, name)
        return float(own if own is not None else self.head.defaults.get(name, 1.0))

    # Items

    def _read(self, output: Output) -> Iterator[Json]:
        """The events of an output, token by token, so that nothing depends on how many came together."""
        self._ids += output.token_ids
        begin = 0
        for index, end in enumerate(output.places):
            if self.request.num_logprobs is not None:
                self._held.append(self.entry(output.token_ids[index], output.logprobs[index]))
            yield from self._said(output.parts[begin:end])
            begin = end
        yield from self._said(output.parts[begin:])
        if output.finish_reason:
            self._finish = output.finish_reason
            if not self._items:  # an answer without a word is an empty message
                yield from self._begin("msg", {"type": "message", "role": "assistant", "content": []})
            yield from self._close("incomplete" if output.finish_reason == "length" else "completed")

    def _said(self, parts: tuple[Part, ...]) -> Iterator[Json]:
        if parts and not any(isinstance(part, Content) for part in parts):
            self._held = []  # log-probabilities are those of the text
        for part in parts:
            match part:
                case Content():
                    yield from self._text(part.text)
                case Reasoning():
                    yield from self._thought(part.text)
                case Call():
                    yield from self._close()
                    call = {
                        "type": "function_call",
                        "call_id": part.id,
                        **self.request.called(part.name),
                        "arguments": "",
                    }
                    yield from self._begin("fc", call)
                case Arguments():
                    self._items[-1]["arguments"] += part.text
                    yield self._of_item("function_call_arguments.delta", delta=part.text)

    def _text(self, text: str) -> Iterator[Json]:
        if not self._goes_on("message"):
            yield from self._close()
            yield from self._begin("msg", {"type": "message", "role": "assistant", "content": []})
            self._held = since(text, self._held)
        logprobs, self._held = self._held, []
        part = self._items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._of_part("output_text.delta", delta=text, logprobs=logprobs)

    def _thought(self, text: str) -> Iterator[Json]:
        if not self._goes_on("reasoning"):
            yield from self._close()
            yield from self._begin("rs", {"type": "reasoning", "summary": [], "content": []})
        self._items[-1]["content"][0]["text"] += text
        yield self._of_part("reasoning_text.delta", delta=text)

    def _goes_on(self, kind: str) -> bool:
        return self._is_open and self._items[-1]["type"] == kind

    def _begin(self, prefix: str, item: Json) -> Iterator[Json]:
        """The next item, and its one part of content where it has one."""
        index = self._first + len(self._items)
        self._items.append({"id": item_id(prefix, self.head.id, index), "status": "in_progress", **item})
        self._is_open = True
        yield self._event("output_item.added", output_index=self._index, item=item_copy(self._items[-1]))
        if "content" in item:
            yield self._of_part("content_part.added", part=empty_part(prefix))
            self._items[-1]["content"] = [empty_part(prefix)]

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """The end of the item that is open, if one is."""
        if not self._is_open:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._of_item("function_call_arguments.done", arguments=item["arguments"])
        else:
            [part] = item["content"]
            if part["type"] == "output_text":
                yield self._of_part("output_text.done", text=part["text"], logprobs=part["logprobs"])
            else:
                yield self._of_part("reasoning_text.done", text=part["text"])
            yield self._of_part("content_part.done", part=part)
        item["status"] = status
        self._is_open = False
        yield self._event("output_item.done", output_index=self._index, item=item_copy(item))

    def _leave_open(self) -> None:
        """What has been begun will not be finished."""
        if self._is_open:
            self._items[-1]["status"] = "incomplete"
            self._is_open = False

    # Events

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _event(self, name: str, **told: Any) -> Json:
        return {"type": f"response.{name}", "sequence_number": self._next(), **told}

    def _of_item(self, name: str, **told: Any) -> Json:
        return self._event(name, item_id=self._items[-1]["id"], output_index=self._index, **told)

    def _of_part(self, name: str, **told: Any) -> Json:
        return self._of_item(name, content_index=0, **told)


def since(text: str, entries: list[Json]) -> list[Json]:
    """The entries of the tokens from the one on in which a text begins; before it are marks, which no part tells.

    All of them where the text is not theirs letter by letter, as with bytes that are no UTF-8.
    """
    data, own = b"".join(bytes(entry["bytes"]) for entry in entries), text.encode()
    # Behind a mark the same letters may stand in the mark too: the last place counts.
    begin = 0 if data.startswith(own) else max(0, data.rfind(own))
    ends = itertools.accumulate(len(entry["bytes"]) for entry in entries)
    return [entry for entry, end in zip(entries, ends, strict=True) if end > begin]


def empty_part(prefix: str) -> Json:
    """The content of an item of which no text has come."""
    if prefix == "msg":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


def interrupted(response: bytes) -> bytes:
    """A stored response whose work ended with the server's process."""
    error = {"code": "server_error", "message": "The server was restarted before the response was complete."}
    return msgspec.json.encode({**msgspec.json.decode(response), "status": "failed", "error": error})


def item_copy(item: Json) -> Json:
    """An item as it is now: events are written later than they are made."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}


def told_choice(choice: str | FlatNamed | FlatAllowed | None) -> Any:
    """How the response tells its tool_choice."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump()


def told_tool(tool: AnyTool) -> Json:
    """How the response tells a tool."""
    if not isinstance(tool, FlatFunction):
        return tool.model_dump(exclude_none=True)
    return {"description": None, **tool.model_dump(), "strict": bool(tool.strict)}


def response_usage(usage: Json) -> Json:
    """A Usage in the form of the Responses API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | NO_WRITES,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
