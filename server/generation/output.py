"""What the responses of all APIs share: outputs, token usage, log-probabilities, and the Writer of their objects."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from engine import TokenLogprob

from ..http import sse
from ..http.errors import ApiError
from ..http.openapi import JsonObject
from ..parsers.parts import Part

Json = dict[str, Any]
R = TypeVar("R")  # the request model of an API
TokenText = Callable[[int], tuple[str, bytes]]  # a token's text and its bytes

# JSON has no infinity. OpenAI sends this number for a probability that is 0 in float32.
NO_CHANCE = -9999.0


class Output(NamedTuple):
    """New tokens of one choice, and the text that may be sent with them."""

    choice: int
    text: str = ""
    parts: tuple[Part, ...] = ()  # of the message that the text is parsed into
    part_ends: tuple[int, ...] = ()  # per token with text: the number of `parts` up to and including its own
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token if requested
    offsets: tuple[int, ...] = ()  # per token: the index of its first character in the whole text
    finish_reason: str | None = None  # stop | length | tool_calls; in a choice's last output
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # from the second token on; in a choice's first output
    stop: str | int | None = None  # the stop string, or the token of stop_token_ids, that ended it; with finish_reason

    @staticmethod
    def join(outputs: list[Output]) -> Output:
        """Return the outputs of one choice as a single one."""
        part_ends: list[int] = []
        num_parts = 0
        for output in outputs:
            part_ends += [num_parts + end for end in output.part_ends]
            num_parts += len(output.parts)
        return Output(
            choice=outputs[0].choice,
            text="".join(output.text for output in outputs),
            parts=tuple(part for output in outputs for part in output.parts),
            part_ends=tuple(part_ends),
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            logprobs=tuple(entry for output in outputs for entry in output.logprobs),
            offsets=tuple(offset for output in outputs for offset in output.offsets),
            finish_reason=outputs[-1].finish_reason,
            prompt_logprobs=outputs[0].prompt_logprobs,
            stop=outputs[-1].stop,
        )


class Prompt(NamedTuple):
    """One prompt of a request; `echo` is its text if the completion begins with it."""

    ids: tuple[int, ...]
    echo: str = ""
    offsets: tuple[int, ...] = ()  # with `echo`, per token: the index of its first character there
    left_out: str = ""  # the field of the request that was omitted because it did not fit


class Head(NamedTuple):
    """The fields that all objects of one response begin with."""

    id: str
    created: int  # seconds since the epoch
    model: str
    fingerprint: str
    request_id: str = ""
    defaults: Mapping[str, float | int] = MappingProxyType({})  # the model's sampling parameters


FinishReason = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]
StopReason = str | int | None  # vLLM's: the stop string or stop token of the request that ended a choice


class PromptLogprob(JsonObject):
    """A token that is, or could have been, at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(JsonObject):
    """A token that could have been sampled."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(TopLogprob):
    """A token that was sampled, and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class PromptTokensDetails(JsonObject):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(JsonObject):
    """Details of the completion's tokens."""

    reasoning_tokens: int


class Usage(JsonObject):
    """The number of tokens of a request and its response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int) -> Usage:
    """Return a Usage with its total."""
    prompt, completion = PromptTokensDetails(cached_tokens), CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, prompt, completion)


@dataclass(eq=False)
class Writer(ABC, Generic[R]):
    """Builds the JSON objects of one response. Each API has its own; `whole` has the content of all chunks."""

    request: R
    head: Head
    prompts: list[Prompt]
    token_text: TokenText

    def entry(self, token_id: int, entry: TokenLogprob) -> Logprob:
        """Return a token of the completion with its log-probability and those of the most likely ones."""
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        text, data = self.token_text(token_id)
        return Logprob(text, number(entry.logprob), list(data), [self._top(other, logprob) for other, logprob in top])

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        text, data = self.token_text(token_id)
        return TopLogprob(text, number(logprob), list(data))

    def scores(
        self, prompt: Prompt, entries: Sequence[TokenLogprob] | None, count: int | None
    ) -> PromptLogprobs | None:
        """Return a prompt's log-probabilities in vLLM's form; null for the first token, which nothing predicts.

        `count`: the number of most likely tokens per position, -1 for all of them; None: not requested.
        """
        if entries is None or count is None:
            return None
        if count < 0:
            count = max((len(entry.top_ids) for entry in entries), default=0)
        scores: PromptLogprobs = [None]
        for token_id, entry in zip(prompt.ids[1:], entries, strict=True):
            ids = entry.top_ids
            ranked = {token_id: (entry.logprob, ids.index(token_id) + 1 if token_id in ids else entry.rank)}
            for rank, (other, logprob) in enumerate(zip(ids[:count], entry.top_logprobs, strict=False), 1):
                ranked.setdefault(other, (logprob, rank))
            scores.append(
                {str(id): PromptLogprob(number(p), rank, self.token_text(id)[0]) for id, (p, rank) in ranked.items()}
            )
        return scores

    @abstractmethod
    def opening(self, usage: Usage | None) -> Sequence[JsonObject]:
        """Return the chunks before the first token; `usage` so far, if every chunk is to report it."""

    @abstractmethod
    def chunks(self, output: Output, usage: Usage | None) -> Sequence[JsonObject]:
        """Return the chunks of an output; `usage` as in `opening`."""

    @abstractmethod
    def closing(self, usage: Usage) -> Sequence[JsonObject]:
        """Return the chunks after the last token of all choices."""

    def events(self, output: Output, usage: Usage | None) -> bytes:
        """Encode the chunks of an output."""
        return b"".join([self.frame(chunk) for chunk in self.chunks(output, usage)])

    def frame(self, event: Any) -> bytes:
        """Encode a chunk."""
        return sse.frame(msgspec.json.encode(event))

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """Encode the last event of a stream that fails after its status has been sent."""
        return sse.frame(error.body())

    end: ClassVar[bytes] = sse.DONE
    """Sent after the last event, also after a failure."""

    @abstractmethod
    def whole(self, outputs: list[Output], usage: Usage) -> JsonObject:
        """Return the response as one object; one output per choice, in their order."""


def number(logprob: float) -> float:
    """Round a log-probability to 9 significant digits, which preserve a float32 bit for bit."""
    return float(f"{logprob:.9g}") if math.isfinite(logprob) else NO_CHANCE
