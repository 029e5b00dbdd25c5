"""What requests for generated text share: how tokens are sampled, what ends the output, and its limits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from ..generation.request import UNLIMITED, ConversationPrompt, GenerationRequest, TextPrompts
from ..http.fields import LABEL, MAX_LABEL, Wire, clash
from . import notes
from .extensions import LlamaCppFields, VllmCommonFields, VllmFields

MAX_TEXT = 8_000_000  # characters; the longest body that the server reads by default
MAX_INT = 2**31 - 1
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_TEXT = 1024  # characters; as many may be withheld at the end of a stream
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MIN_PENALTY = 1e-9  # logits are divided by it, and must stay finite in float32
MAX_LOGPROBS = 20  # alternatives per token
MAX_ALLOWED = 4096  # 16 rows of it are as much work in a step as one row of logits
MAX_BAD_WORDS = 128  # each is compared with the end of the output before each token is sampled
MAX_BAD_WORD = 128  # characters
# Fields that have the same names in SamplingParams.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
)  # fmt: skip


def token_name(value: str) -> int:
    """Return the token id that a JSON name spells in plain decimal digits; raises for other spellings of numbers."""
    if not (value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_INT)) and str(int(value)) == value):
        raise clash("the names must be token ids")
    return int(value)


ModelName = Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, notes.MODEL]
Priority = Annotated[Annotated[int, Field(ge=-MAX_INT - 1, le=MAX_INT)] | None, notes.PRIORITY]
CacheSalt = Annotated[Annotated[str, Field(min_length=1, max_length=MAX_LABEL)] | None, notes.CACHE_SALT]
User = Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL, notes.ACCOUNTING]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenName = Annotated[TokenId, BeforeValidator(token_name)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_TEXT)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD, pattern=r"\S")]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]


def _some(value: int) -> int:
    if value == 0:
        raise clash("must be at least 1, or -1 for as many as fit")
    return value


Limit = Annotated[int, Field(ge=UNLIMITED, le=MAX_INT), AfterValidator(_some)]


def _not_empty(value: Any) -> Any:
    """Return the stop texts without the empty ones, which some clients send for none."""
    if isinstance(value, list):
        return [text for text in value if text != ""]
    return None if value == "" else value


Stop = Annotated[StopText | StopTexts | None, BeforeValidator(_not_empty)]


def same_as(field: str) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator that raises if another field has another value."""

    def check(value: Any, info: ValidationInfo) -> Any:
        other = info.data.get(field)
        if value is not None and other is not None and value != other:
            raise PydanticCustomError("clash", "must be the same as {field} where both are given", {"field": field})
        return value

    return check


def only_with(field: str) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator that raises unless another field is true."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value and not info.data.get(field):
            raise PydanticCustomError("clash", "must be absent unless {field} is true", {"field": field})
        return value

    return check


def listed(texts: str | list[str] | None) -> list[str]:
    """Return the texts of a field that has one or several."""
    return [texts] if isinstance(texts, str) else texts or []


class StreamOptions(Wire):
    """What a stream contains besides the output."""

    include_usage: bool | None = None
    """true: a last chunk has the token counts of the whole response; the others have `usage: null`."""
    continuous_usage_stats: bool | None = None
    """true: every chunk has the token counts so far; only with include_usage."""
    include_obfuscation: Annotated[bool | None, LABEL] = None
    """Accepted: chunks are never padded."""


class GenerationFields(VllmCommonFields):
    """A request for generated text: the fields that every such API has."""

    model: ModelName = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always selects the most likely token; 1 samples from the model's own distribution."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample among the most likely tokens that together have at least this probability; 0: the most likely one."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """Sample among this many most likely tokens; -1 and 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample among tokens at least this likely, as a share of the most likely one's probability."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once from the logit of each token that is in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from a token's logit for each time that it is in the output."""
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=2)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    repeat_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=2)] | None = None
    """repetition_penalty, under llama.cpp's name."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    """The same seed and request sample the same tokens; with n, each choice has a seed of its own derived from it."""
    logit_bias: (
        Annotated[dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    """Added to the logits of these token ids; -100 forbids a token, 100 forces it."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None = (
        None
    )
    """Only these tokens can be sampled."""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """Texts that are not generated, as the tokenizer encodes them at the start of a text and after a space."""
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Nothing ends the output before this many tokens."""
    ignore_eos: bool | None = None
    """true: the model's own end tokens do not end the output."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    """Tokens that end the output besides the model's own; they have no text."""
    include_stop_str_in_output: bool | None = None
    """true: the stop text that ended the output is part of it."""
    skip_special_tokens: bool | None = None
    """false: the text contains special tokens."""
    stream: bool | None = None
    """true: the response arrives in pieces, as server-sent events."""
    priority: Priority = None
    cache_salt: CacheSalt = None

    _one_penalty = field_validator("repeat_penalty")(same_as("repetition_penalty"))

    @property
    @abstractmethod
    def prompt_source(self) -> TextPrompts | ConversationPrompt:
        """The prompts, before they are token ids."""

    def resolve(self) -> GenerationRequest:
        """Return what the request asks for, in the one form that generation reads; each API adds its own fields."""
        sampling = {name: getattr(self, name) for name in SAMPLING}
        if self.repetition_penalty is None:
            sampling["repetition_penalty"] = self.repeat_penalty
        allowed = self.allowed_token_ids
        return GenerationRequest(
            model=self.model,
            prompt=self.prompt_source,
            min_tokens=self.min_tokens or 0,
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            sampling={name: value for name, value in sampling.items() if value is not None},
            seed=self.seed,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words=self.bad_words or [],
            skip_special_tokens=self.skip_special_tokens is not False,
            stream=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
        )


class CompletionFields(GenerationFields, VllmFields, LlamaCppFields):
    """Fields that only chat and completions have."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """The number of completions of each prompt."""
    max_tokens: Limit | None = None
    """The largest number of tokens of a completion; -1: as many as the context holds."""
    stop: Annotated[Stop, notes.STOP] = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    """The response has the log-probability of each prompt token, and of this many most likely ones at its position; -1:
    of all tokens, within the limit of one response."""

    return_token_ids: bool | None = None
    """true: the response has prompt_token_ids and, per choice, token_ids."""

    stream_options: Annotated[StreamOptions | None, notes.STREAM_OPTIONS] = None

    user: User = None

    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Accepted if it equals n; to choose among more completions, request them with logprobs."""

    _options_of_a_stream = field_validator("stream_options")(only_with("stream"))

    @field_validator("best_of")
    @classmethod
    def _as_many_as_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise clash("must equal n; to choose among more completions, ask for them with logprobs")
        return value

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def resolve(self) -> GenerationRequest:
        return replace(
            super().resolve(),
            num_choices=self.num_choices,
            limit=("max_tokens", self.max_tokens),
            stops=listed(self.stop),
            scoring=None if self.prompt_logprobs is None else ("prompt_logprobs", self.prompt_logprobs),
            continuous_usage=self.include_usage
            and bool(self.stream_options and self.stream_options.continuous_usage_stats),
        )
