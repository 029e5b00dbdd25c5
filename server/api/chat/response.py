"""Writes a chat completion: the assistant's next message, whole or as the chunks of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ...generation.output import Output, PromptLogprobs, Usage
from ...parsers.parts import Arguments, Call, Content, Part, Reasoning, join
from ..custom_tools import input_of
from ..tools import CustomTool
from ..writer import CompletionsWriter
from .request import ChatRequest
from .schema import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    CustomCall,
    Delta,
    DeltaCall,
    DeltaCustom,
    DeltaFunction,
    FunctionCall,
    MessageCall,
    MessageCustomCall,
)


class Input(Struct, frozen=True):
    """The input of a custom tool's call that is complete or cut off, in the place of its arguments."""

    index: int
    text: str


class OpenCall(Struct, frozen=True):
    """The call of a custom tool that is not complete, and its arguments so far."""

    index: int
    arguments: list[str]


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
        deltas = list(self._deltas(self._with_inputs(output)))
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
        if output.finish_reason is not None or output.prompt_logprobs is not None or output.choice in self._open_calls:
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
                MessageCustomCall(id, CustomCall(name, input_of(arguments)))
                if name in self._custom_names
                else MessageCall(id, FunctionCall(name, arguments))
                for id, name, arguments in calls
            ]
        return message

    @cached_property
    def _custom_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.request.tools or () if isinstance(tool, CustomTool))

    @cached_property
    def _open_calls(self) -> dict[int, OpenCall]:
        """By choice: its call of a custom tool that is not complete."""
        return {}

    def _with_inputs(self, output: Output) -> Iterator[Part | Input]:
        """Yield the parts of an output with the inputs of custom tools instead of their arguments.

        An input is a string in JSON, which is decoded once, when the next part or the end shows that it is complete.
        """
        for part in output.parts:
            call = self._open_calls.get(output.choice)
            if call is not None and isinstance(part, Arguments):
                call.arguments.append(part.text)
                continue
            yield from self._close_call(output.choice)
            if isinstance(part, Call) and part.name in self._custom_names:
                self._open_calls[output.choice] = OpenCall(part.index, [])
            yield part
        if output.finish_reason:
            yield from self._close_call(output.choice)

    def _close_call(self, choice: int) -> Iterator[Input]:
        call = self._open_calls.pop(choice, None)
        if call is not None:
            yield Input(call.index, input_of("".join(call.arguments)))

    def _deltas(self, parts: Iterable[Part | Input]) -> Iterator[Delta]:
        """One delta per run of parts of one kind or call: many clients read one kind, and the first call, of each."""
        for (kind, _), run in itertools.groupby(parts, _field):
            if kind == "tool_calls":
                pieces = [part for part in run if isinstance(part, Call | Arguments | Input)]
                yield Delta(tool_calls=[self._call_delta(pieces)])
                continue
            text = "".join(part.text for part in run if isinstance(part, Content | Reasoning))
            if kind == "content":
                yield Delta(content=text)
            elif self.request.tells_reasoning:
                yield Delta(reasoning_content=text, reasoning=text)

    def _call_delta(self, run: list[Call | Arguments | Input]) -> DeltaCall:
        """Return a run of pieces of one call as one entry: some SDKs make a call of each entry of a delta."""
        first = run[0]
        delta = DeltaCall(index=first.index)
        name: str | UnsetType = UNSET
        text = "".join(part.text for part in run if not isinstance(part, Call))
        is_custom = isinstance(run[-1], Input)
        if isinstance(first, Call):
            delta.id, name = first.id, first.name
            is_custom = name in self._custom_names
            delta.type = "custom" if is_custom else "function"
        if is_custom:
            delta.custom = DeltaCustom(name, text)
        else:
            delta.function = DeltaFunction(name, text)
        return delta

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if self.request.num_logprobs is None:
            return None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return ChatLogprobs([self.entry(token, entry) for token, entry in pairs])


def _field(part: Part | Input) -> tuple[str, int]:
    """The field of a message that a part belongs to, and the index of its call."""
    if isinstance(part, Content | Reasoning):
        return "content" if isinstance(part, Content) else "reasoning", 0
    return "tool_calls", part.index
