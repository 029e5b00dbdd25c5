"""Responses of chat completions: the assistant's next message, whole or as the chunks of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import UNSET, UnsetType

from ...generation.output import FinishReason, Logprob, Output, PromptLogprobs, StopReason, Usage
from ...http.openapi import JsonObject
from ...parsers.parts import Arguments, Call, Content, Part, Reasoning, join
from ..writer import CompletionsWriter
from .request import ChatRequest


class ChatLogprobs(JsonObject):
    """One entry per token, including the one that ended the completion."""

    content: list[Logprob] | None
    refusal: None = None


class FunctionCall(JsonObject):
    """The name of a function and its arguments as JSON text."""

    name: str
    arguments: str


class MessageCall(JsonObject):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(JsonObject):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as reasoning_content, which some clients read under this name."""
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(JsonObject, kw_only=True):
    """One of n completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(JsonObject, kw_only=True):
    """All choices in one object."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


class DeltaFunction(JsonObject):
    """The first piece of a call has its name; every piece may have more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class DeltaCall(JsonObject, kw_only=True):
    """What a chunk adds to call number `index`."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: DeltaFunction


class Delta(JsonObject):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as reasoning_content, which some clients read under this name."""
    tool_calls: list[DeltaCall] | UnsetType = UNSET


class ChunkChoice(JsonObject):
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletionChunk(JsonObject, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatWriter(CompletionsWriter[ChatRequest]):
    """Writes a ChatCompletion or its chunks."""

    def opening(self, usage: Usage | None) -> list[ChatCompletionChunk]:
        """The role of each choice, in its first delta."""
        role = Delta("assistant", "", None)
        chunks = [self.chunk([ChunkChoice(i, role)], usage) for i in range(self.request.num_choices)]
        chunks[0].prompt_token_ids = self.prompt_token_ids(0)
        return chunks

    def chunks(self, output: Output, usage: Usage | None) -> list[ChatCompletionChunk]:
        """The text in one chunk and the end in another, as OpenAI has it."""
        deltas = list(self._deltas(output.parts))
        has_tokens = output.token_ids and (output.logprobs or self.request.return_token_ids)
        if not deltas and (has_tokens or self.prompt_logprobs(output)):
            deltas = [Delta(content="")]
        chunks = [self.chunk([ChunkChoice(output.choice, delta)], usage) for delta in deltas]
        if chunks:  # what is reported about the tokens goes with the first
            choice = chunks[0].choices[0]
            choice.logprobs, choice.token_ids = self._logprobs(output), self.token_ids(output)
            chunks[0].prompt_logprobs = self.prompt_logprobs(output)
        if output.finish_reason:
            ending = ChunkChoice(output.choice, Delta(), None, output.finish_reason, output.stop)
            chunks.append(self.chunk([ending], usage))
        return chunks

    @property
    def has_logprobs(self) -> bool:
        return self.request.num_logprobs is not None

    def bare_text(self, output: Output) -> str | None:
        if output.finish_reason is not None or output.prompt_logprobs is not None:
            return None
        texts = [part.text for part in output.parts if isinstance(part, Content)]
        return "".join(texts) if len(texts) == len(output.parts) else None

    def text_chunk(self, choice: int, text: str) -> ChatCompletionChunk:
        return self.chunk([ChunkChoice(choice, Delta(content=text))], None)

    def whole(self, outputs: list[Output], usage: Usage) -> ChatCompletion:
        head = self.head
        return ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[self._choice(output) for output in outputs],
            service_tier=self._service_tier(),
            usage=usage,
            prompt_logprobs=self.prompt_logprobs(outputs[0]),
            prompt_token_ids=self.prompt_token_ids(0),
            metadata=UNSET if self.request.metadata is None else self.request.metadata,
        )

    def chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        head = self.head
        return ChatCompletionChunk(
            id=head.id,
            object="chat.completion.chunk",
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            service_tier=self._service_tier(),
            usage=usage if self.request.include_usage else UNSET,
        )

    def prompt_logprobs(self, output: Output) -> PromptLogprobs | UnsetType:
        """Only the first choice has them."""
        return UNSET if output.choice or output.prompt_logprobs is None else super().prompt_logprobs(output)

    def _service_tier(self) -> Literal["default"] | UnsetType:
        return UNSET if self.request.service_tier is None else "default"

    def _choice(self, output: Output) -> ChatChoice:
        assert output.finish_reason is not None
        return ChatChoice(
            index=output.choice,
            message=self._message(output.parts),
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop,
            token_ids=self.token_ids(output),
        )

    def _message(self, parts: Iterable[Part]) -> ChatMessage:
        content, reasoning, calls = join(parts)
        message = ChatMessage("assistant", content if content or not calls else None)
        if reasoning and self.request.tells_reasoning:
            message.reasoning_content = message.reasoning = reasoning
        if calls:
            message.tool_calls = [
                MessageCall(id, "function", FunctionCall(name, arguments)) for id, name, arguments in calls
            ]
        return message

    def _deltas(self, parts: Iterable[Part]) -> Iterator[Delta]:
        """One delta per run of parts of one kind or call: many clients read one kind, and the first call, of each."""
        for (kind, _), run in itertools.groupby(parts, _field):
            if kind == "tool_calls":
                yield Delta(tool_calls=[call_delta([part for part in run if isinstance(part, Call | Arguments)])])
                continue
            text = "".join(part.text for part in run if isinstance(part, Content | Reasoning))
            if kind == "content":
                yield Delta(content=text)
            elif self.request.tells_reasoning:
                yield Delta(reasoning_content=text, reasoning=text)

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if self.request.num_logprobs is None:
            return None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return ChatLogprobs([self.entry(token, entry) for token, entry in pairs])


def _field(part: Part) -> tuple[str, int]:
    """The field of a message that a part belongs to, and the index of its call."""
    if isinstance(part, Content | Reasoning):
        return "content" if isinstance(part, Content) else "reasoning", 0
    return "tool_calls", part.index


def call_delta(run: list[Call | Arguments]) -> DeltaCall:
    """Return a run of parts of one call as one entry: some SDKs make a call of each entry of a delta."""
    first = run[0]
    arguments = "".join(part.text for part in run if isinstance(part, Arguments))
    if isinstance(first, Call):
        return DeltaCall(index=first.index, id=first.id, type="function", function=DeltaFunction(first.name, arguments))
    return DeltaCall(index=first.index, function=DeltaFunction(arguments=arguments))
