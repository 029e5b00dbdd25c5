"""What the responses of chat and completions share: token ids, log-probabilities of the prompt, and usage."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from ..generation.output import Output, Prompt, PromptLogprobs, Usage, Writer
from .sampling import CompletionFields

R = TypeVar("R", bound=CompletionFields)


class CompletionsWriter(Writer[R]):
    """A Writer of a request that has the fields of `CompletionFields`."""

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | None) -> Any:
        """Return an event of a stream; it has `usage` if the request includes usage."""

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
