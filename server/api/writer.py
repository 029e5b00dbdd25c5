"""What the responses of chat and completions share: token ids, log-probabilities of the prompt, and usage."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ..generation.output import Output, Prompt, PromptLogprobs, Usage, Writer
from ..http import sse
from .sampling import CompletionFields

R = TypeVar("R", bound=CompletionFields)


class CompletionsWriter(Writer[R]):
    """A Writer of a request that has the fields of `CompletionFields`."""

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | None) -> Any:
        """Return an event of a stream; it has `usage` if the request includes usage."""

    @abstractmethod
    def bare_text(self, output: Output) -> str | None:
        """Return the text of an output that has nothing else to report; None: it has."""

    @abstractmethod
    def text_chunk(self, choice: int, text: str) -> Any:
        """Return the chunk with a text and nothing else."""

    def events(self, output: Output, usage: Usage | None) -> bytes:
        text = self.bare_text(output) if usage is None and not self.tells_tokens else None
        if text is None:
            return super().events(output, usage)
        if not text:
            return b""
        before, after = self._around_text.get(output.choice) or self._add_around_text(output.choice)
        return before + sse.escaped(msgspec.json.encode(text)) + after

    @property
    @abstractmethod
    def has_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities of the completion."""

    @cached_property
    def tells_tokens(self) -> bool:
        """Whether chunks have more than text: token ids or log-probabilities."""
        return bool(self.request.return_token_ids) or self.has_logprobs

    @cached_property
    def _around_text(self) -> dict[int, tuple[bytes, bytes]]:
        """By choice: what stands before and after the text in an event that has nothing else.

        It is the same in nearly all events of a stream. To build and encode it each time took a fifth of the server's
        time.
        """
        return {}

    def _add_around_text(self, choice: int) -> tuple[bytes, bytes]:
        text = "\0"
        before, _, after = self.frame(self.text_chunk(choice, text)).rpartition(msgspec.json.encode(text))
        self._around_text[choice] = before, after
        return before, after

    def closing(self, usage: Usage) -> list[Any]:
        return [self.chunk([], usage)] if self.request.include_usage else []

    def prompt(self, choice: int) -> Prompt:
        return self.prompts[choice // self.request.num_choices]

    def token_ids(self, output: Output) -> tuple[int, ...] | UnsetType:
        return output.token_ids if self.request.return_token_ids else UNSET

    def prompt_token_ids(self, choice: int) -> tuple[int, ...] | UnsetType:
        return self.prompt(choice).ids if self.request.return_token_ids else UNSET

    def prompt_logprobs(self, output: Output) -> PromptLogprobs | UnsetType:
        scores = self.scores(self.prompt(output.choice), output.prompt_logprobs, self.request.prompt_logprobs)
        return UNSET if scores is None else scores
