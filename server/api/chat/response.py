"""Chat completions on the wire: the assistant's next message, whole or as the chunks of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from ...generation.output import Head, Json, Output, Prompt, PromptLogprobs, TokenText, Usage, Writer
from ...http.fields import Wire
from ...parsers import Arguments, Call, Content, Part, Reasoning, join
from .request import CalledFunction, ChatRequest


class ChatWriter(Writer):
    """chat.completion and chat.completion.chunk."""

    def __init__(self, request: ChatRequest, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        super().__init__(head, prompts, token_text)
        self.request = request

    def opening(self, usage: Json | None) -> list[Json]:
        """The role, for each choice: it stands in the first delta."""
        role = {"role": "assistant", "content": "", "refusal": None}
        chunks = [self._chunk([self._choice(i, role)], usage) for i in range(self.request.num_choices)]
        if self.request.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.prompts[0].ids
        return chunks

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        """The text in one chunk, the end in one of its own, as OpenAI has it."""
        deltas = list(self._deltas(output.parts))
        is_told = output.token_ids and (output.logprobs or self.request.return_token_ids)
        if not deltas and (is_told or self._prompt_logprobs(output)):
            deltas = [{"content": ""}]
        chunks = [self._chunk([self._choice(output.choice, delta)], usage) for delta in deltas]
        if chunks:  # what is told about the tokens goes with the first
            chunks[0]["choices"][0] |= self._logprobs(output) | self._ids(output)
            chunks[0] |= self._prompt_logprobs(output)
        if output.finish_reason:
            chunks.append(self._chunk([self._choice(output.choice, {}, output.finish_reason)], usage))
        return chunks

    def closing(self, usage: Json) -> list[Json]:
        return [self._chunk([], usage)] if self.request.include_usage else []

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        choices = [
            {
                "index": output.choice,
                "message": self._message(output.parts),
                "logprobs": None,
                "finish_reason": output.finish_reason,
            }
            | self._logprobs(output)
            | self._ids(output)
            for output in outputs
        ]
        answer = self._object("chat.completion", choices) | {"usage": usage} | self._prompt_logprobs(outputs[0])
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self.prompts[0].ids
        if self.request.metadata is not None:
            answer["metadata"] = self.request.metadata
        return answer

    def _message(self, parts: Iterable[Part]) -> Json:
        content, reasoning, calls = join(parts)
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if reasoning and self.request.tells_reasoning:
            message |= told_reasoning(reasoning)
        if calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ]
        return message

    def _deltas(self, parts: Iterable[Part]) -> Iterator[Json]:
        """What each run of parts of one kind adds to the message: many clients look for one kind in a delta."""
        for kind, run in itertools.groupby(parts, _kind):
            if kind == "tool_calls":
                yield {"tool_calls": [call_delta(part) for part in run if isinstance(part, Call | Arguments)]}
            elif kind == "content":
                yield {"content": "".join(part.text for part in run if isinstance(part, Content))}
            elif self.request.tells_reasoning:
                yield told_reasoning("".join(part.text for part in run if isinstance(part, Reasoning)))

    def _object(self, kind: str, choices: list[Json]) -> Json:
        head = self.head
        answer: Json = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
        }
        if self.request.service_tier is not None:
            answer["service_tier"] = "default"
        return answer

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = self._object("chat.completion.chunk", choices)
        if self.request.include_usage:
            chunk["usage"] = usage
        return chunk

    def _choice(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _ids(self, output: Output) -> Json:
        return {"token_ids": output.token_ids} if self.request.return_token_ids else {}

    def _prompt_logprobs(self, output: Output) -> Json:
        """The prompt is told once, with the first choice."""
        told = self.scores(self.prompts[0], output.prompt_logprobs, self.request.prompt_logprobs)
        return {} if told is None or output.choice else {"prompt_logprobs": told}

    def _logprobs(self, output: Output) -> Json:
        if self.request.num_logprobs is None:
            return {}
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return {"logprobs": {"content": [self.entry(token, entry) for token, entry in pairs], "refusal": None}}


def _kind(part: Part) -> str:
    """The field of a message that a part belongs to."""
    if isinstance(part, Content):
        return "content"
    return "reasoning" if isinstance(part, Reasoning) else "tool_calls"


def told_reasoning(text: str) -> Json:
    """Reasoning under both names that clients read it by."""
    return {"reasoning_content": text, "reasoning": text}


def call_delta(part: Call | Arguments) -> Json:
    """A DeltaCall as JSON."""
    if isinstance(part, Arguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": ""}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


class TopLogprob(Wire):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token that was drawn, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Wire):
    """One entry per token, the one that ended the answer included."""

    content: list[ChatLogprob] | None
    refusal: None = None


class AnswerCall(Wire):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Wire):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(Wire):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatAnswer(Wire):
    """The answer in one object."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] | None = None
    metadata: dict[str, str] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class DeltaFunction(Wire):
    """The name comes with the first piece of a call, its arguments piece by piece."""

    name: str | None = None
    arguments: str | None = None


class DeltaCall(Wire):
    """What a chunk adds to call number `index`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction


class Delta(Wire):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same
    tool_calls: list[DeltaCall] | None = None


class ChunkChoice(Wire):
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatChunk(Wire):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    service_tier: Literal["default"] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
