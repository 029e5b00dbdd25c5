"""What answers share: token usage, log-probabilities, the pieces of an answer, and who writes them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

from engine import TokenLogprob

from ..http import sse
from ..http.errors import ApiError
from ..http.openapi import JsonObject
from ..parsers import Part

Json = dict[str, Any]
R = TypeVar("R")  # the request model of an API
TokenText = Callable[[int], tuple[str, bytes]]  # a token's text, and its bytes

# JSON has no infinity. The probability is 0 in float32; clients know this number from OpenAI.
NO_CHANCE = -9999.0


class Output(NamedTuple):
    """What became certain about one choice: its text as far as it may be sent, and the tokens it has by now."""

    choice: int
    text: str = ""
    parts: tuple[Part, ...] = ()  # what the text means
    places: tuple[int, ...] = ()  # per token with a text: how many of `parts` were there with it and those before
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as token_ids when they were asked for
    offsets: tuple[int, ...] = ()  # per token: where its text begins in the whole output, in characters
    finish_reason: str | None = None  # stop | length | tool_calls; with it the choice is complete
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of all prompt tokens but the first; with a choice's first
    stop: str | None = None  # the stop string that ended the text; with finish_reason

    @staticmethod
    def join(outputs: list[Output]) -> Output:
        """One choice's outputs as if they had come at once."""
        places: list[int] = []
        num_parts = 0
        for output in outputs:
            places += [num_parts + place for place in output.places]
            num_parts += len(output.parts)
        return Output(
            choice=outputs[0].choice,
            text="".join(output.text for output in outputs),
            parts=tuple(part for output in outputs for part in output.parts),
            places=tuple(places),
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            logprobs=tuple(entry for output in outputs for entry in output.logprobs),
            offsets=tuple(offset for output in outputs for offset in output.offsets),
            finish_reason=outputs[-1].finish_reason,
            prompt_logprobs=outputs[0].prompt_logprobs,
            stop=outputs[-1].stop,
        )


class Prompt(NamedTuple):
    """One prompt of a request; `echo` is its text where the answer begins with it."""

    ids: tuple[int, ...]
    echo: str = ""
    offsets: tuple[int, ...] = ()  # per token: where its text begins in `echo`, when both are told
    left_out: str = ""  # the field of the request that could not be part of it, and need not


class Head(NamedTuple):
    """What all objects of one answer begin with."""

    id: str
    created: int  # seconds since the epoch
    model: str
    fingerprint: str
    request_id: str = ""
    defaults: Mapping[str, float | int] = MappingProxyType({})  # the model's sampling parameters


FinishReason = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]


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


class Writer(ABC, Generic[R]):
    """Writes the JSON objects of one answer. Each API has its own; `whole` and the chunks say the same."""

    def __init__(self, request: R, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        self.request = request
        self.head = head
        self.prompts = prompts
        self.token_text = token_text

    def entry(self, token_id: int, entry: TokenLogprob) -> Logprob:
        """A token of the completion with its log-probability and those of the most likely ones at its position."""
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        text, data = self.token_text(token_id)
        return Logprob(text, number(entry.logprob), list(data), [self._top(other, logprob) for other, logprob in top])

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        text, data = self.token_text(token_id)
        return TopLogprob(text, number(logprob), list(data))

    def scores(
        self, prompt: Prompt, entries: Sequence[TokenLogprob] | None, count: int | None
    ) -> PromptLogprobs | None:
        """A prompt's log-probabilities in vLLM's form; null for the first token, which nothing predicts.

        `count` most likely ones per token, -1: all of them; None: the request does not want any.
        """
        if entries is None or count is None:
            return None
        if count < 0:  # all of them
            count = max((len(entry.top_ids) for entry in entries), default=0)
        told: PromptLogprobs = [None]
        for token_id, entry in zip(prompt.ids[1:], entries, strict=True):
            ids = entry.top_ids
            places = {token_id: (entry.logprob, ids.index(token_id) + 1 if token_id in ids else entry.rank)}
            for place, (other, logprob) in enumerate(zip(ids[:count], entry.top_logprobs, strict=False), 1):
                places.setdefault(other, (logprob, place))
            told.append(
                {
                    str(each): PromptLogprob(number(p), place, self.token_text(each)[0])
                    for each, (p, place) in places.items()
                }
            )
        return told

    @abstractmethod
    def opening(self, usage: Usage | None) -> Sequence[JsonObject]:
        """Chunks before the first token; `usage` so far where every chunk is to tell it."""

    @abstractmethod
    def chunks(self, output: Output, usage: Usage | None) -> Sequence[JsonObject]:
        """Chunks of a stream; `usage` so far where every chunk is to tell it."""

    @abstractmethod
    def closing(self, usage: Usage) -> Sequence[JsonObject]:
        """Chunks after the last token of all choices."""

    def frame(self, event: Any) -> bytes:
        """A chunk as it is sent."""
        return sse.frame(msgspec.json.encode(event))

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """The last event of a stream that cannot go on: the status has gone, and a connection is never just cut."""
        return sse.frame(error.body())

    end: bytes = sse.DONE
    """What comes after the last event, also after a failure."""

    @abstractmethod
    def whole(self, outputs: list[Output], usage: Usage) -> JsonObject:
        """The answer in one object; one output per choice, in their order."""


def number(logprob: float) -> float:
    """A log-probability with 9 significant digits: enough to give a float32 back bit for bit."""
    return float(f"{logprob:.9g}") if math.isfinite(logprob) else NO_CHANCE
