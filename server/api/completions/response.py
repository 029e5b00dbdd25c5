"""Responses of completions: the continuations of prompts, whole or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from engine import TokenLogprob

from ...generation.output import FinishReason, Output, PromptLogprobs, StopReason, Usage, number
from ...http.openapi import JsonObject
from ..writer import CompletionsWriter
from .request import CompletionRequest


class CompletionLogprobs(JsonObject):
    """Columns with one element per token, including the one that ended the completion; null for a prompt's first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(JsonObject):
    """One continuation of one prompt, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(JsonObject):
    """All continuations, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionWriter(CompletionsWriter[CompletionRequest]):
    """Writes a Completion, whole or in chunks. Choices are numbered prompt by prompt."""

    def opening(self, usage: Usage | None) -> list[Completion]:
        """The prompts, if the completion begins with them and they need not wait for their log-probabilities."""
        if self.request.is_scored or not (self.request.echo or self.request.return_token_ids):
            return []
        return [self.chunk([self._beginning(i)], usage) for i in range(len(self.prompts) * self.request.num_choices)]

    def chunks(self, output: Output, usage: Usage | None) -> list[Completion]:
        """The text in one chunk and the end in another; before them the prompt if it was scored."""
        chunks = []
        if output.prompt_logprobs is not None:
            scored = Output(output.choice, prompt_logprobs=output.prompt_logprobs)
            beginning = self._beginning(output.choice)
            beginning.logprobs = self._logprobs(scored) if self.request.echo else None
            beginning.prompt_logprobs = self.prompt_logprobs(scored)
            chunks.append(self.chunk([beginning], usage))
            output = output._replace(prompt_logprobs=None)
        if output.text or (output.token_ids and (output.logprobs or self.request.return_token_ids)):
            choice = CompletionChoice(output.choice, output.text, self._logprobs(output))
            choice.token_ids = self.token_ids(output)
            chunks.append(self.chunk([choice], usage))
        if output.finish_reason:
            ending = CompletionChoice(output.choice, "", None, output.finish_reason, output.stop)
            chunks.append(self.chunk([ending], usage))
        return chunks

    @property
    def has_logprobs(self) -> bool:
        return self.request.logprobs is not None

    def bare_text(self, output: Output) -> str | None:
        return output.text if output.finish_reason is None and output.prompt_logprobs is None else None

    def text_chunk(self, choice: int, text: str) -> Completion:
        return self.chunk([CompletionChoice(choice, text)], None)

    def whole(self, outputs: list[Output], usage: Usage) -> Completion:
        choices = [
            CompletionChoice(
                output.choice,
                self.prompt(output.choice).echo + output.text,
                self._logprobs(output),
                output.finish_reason,
                output.stop,
                self.prompt_logprobs(output),
                self.prompt_token_ids(output.choice),
                self.token_ids(output),
            )
            for output in outputs
        ]
        return self._completion(choices, usage)

    def chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return self._completion(choices, usage if self.request.include_usage else UNSET)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        head = self.head
        return Completion(head.id, "text_completion", head.created, head.model, head.fingerprint, choices, usage)

    def _beginning(self, index: int) -> CompletionChoice:
        return CompletionChoice(index, self.prompt(index).echo, prompt_token_ids=self.prompt_token_ids(index))

    def _logprobs(self, output: Output) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        prompt = self.prompt(output.choice)
        start = len(prompt.echo)
        columns = CompletionLogprobs([], [], [], [])
        if self.request.echo and output.prompt_logprobs is not None:
            self._add(columns, prompt.ids, (None, *output.prompt_logprobs), prompt.offsets)
        self._add(columns, output.token_ids, output.logprobs, [start + offset for offset in output.offsets])
        return columns

    def _add(
        self,
        columns: CompletionLogprobs,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        offsets: Sequence[int],
    ) -> None:
        """Append these tokens; None is the entry of a token that nothing predicts."""
        count = self.request.logprobs or 0
        for token_id, entry in zip(token_ids, entries, strict=True):
            columns.tokens.append(self.token_text(token_id)[0])
            columns.token_logprobs.append(None if entry is None else number(entry.logprob))
            if entry is None:
                columns.top_logprobs.append(None)
                continue
            # The sampled token is always among them, so there is one more if it is not likely.
            likely = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
            texts: dict[str, float] = {}
            for other, logprob in (*likely, (token_id, entry.logprob)):
                texts.setdefault(self.token_text(other)[0], number(logprob))
            columns.top_logprobs.append(texts)
        columns.text_offset += offsets
