"""What the APIs share: kinds of fields, sampling fields, token usage, log-probabilities, and the pieces of an answer.

A request model is the one table of its fields. Each field is of one of three kinds, told by its annotation: `LABEL`
(accepted, without influence on the tokens), `Refused` (known, and only its default passes), or neither: it has its
effect. `kinds` reads the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, LiteralString, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from pydantic_core.core_schema import ValidationInfo

from engine import SamplingParams, TokenLogprob

from ..schemas import Grammar

Json = dict[str, Any]
TokenText = Callable[[int], tuple[str, bytes]]  # a token's text, and its bytes

MAX_TEXT = 8_000_000  # characters; the longest body that the server reads by default
MAX_INT = 2**31 - 1
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_TEXT = 1024  # characters; as much may be held back at the end of a stream
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_LABEL = 512  # characters
MIN_PENALTY = 1e-9  # logits are divided by it, and must stay finite in float32
# JSON has no infinity. The probability is 0 in float32; clients know this number from OpenAI.
NO_CHANCE = -9999.0


class Wire(BaseModel):
    """A JSON object, taken literally: no unknown keys, "5" is not 5, true is not 1, NaN is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class _Label:
    """Marks a field that is accepted, and echoed where OpenAI does so, but decides nothing."""


LABEL = _Label()


# Compared by identity: typing keeps one Annotated of equal marks, and (1,) equals (True,).
@dataclass(frozen=True, eq=False)
class Refused:
    """Marks a field that is known but not supported: null and `defaults`, which ask for nothing, count as absent."""

    defaults: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.defaults], "description": "Not supported: only what asks for nothing is accepted."}

    def _check(self, value: Any) -> None:
        # True equals 1 in Python, and nowhere else.
        if value is not None and not any(type(value) is type(own) and value == own for own in self.defaults):
            raise PydanticCustomError("unsupported", "this server does not support it yet")


def refused(*defaults: Any) -> Refused:
    return Refused(defaults)


def kinds(model: type[BaseModel]) -> dict[str, Literal["effect", "label", "refused"]]:
    """Every field of a request and what becomes of it."""

    def kind(metadata: Iterable[object]) -> Literal["effect", "label", "refused"]:
        marks = [mark for mark in metadata if isinstance(mark, _Label | Refused)]
        if not marks:
            return "effect"
        return "label" if isinstance(marks[0], _Label) else "refused"

    return {field.alias or name: kind(field.metadata) for name, field in model.model_fields.items()}


def clash(message: LiteralString) -> PydanticCustomError:
    """A field that does not go together with another; raised by the validator of the later one."""
    return PydanticCustomError("clash", message)


def token_name(value: str) -> int:
    """A token id that is a JSON name: its decimal digits as they stand, and nothing that Python would read as them."""
    if not (value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_INT)) and str(int(value)) == value):
        raise clash("the names must be token ids")
    return int(value)


class OneError:
    """Marks a union of plain types: what fits none of them is one error, not one for each."""

    def __init__(self, message: LiteralString) -> None:
        self.message = message

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "union"
        return {**schema, "custom_error_type": "union_type", "custom_error_message": self.message}


TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenName = Annotated[TokenId, BeforeValidator(token_name)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_TEXT)]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]


class StreamOptions(Wire):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, LABEL] = None


class Sampling(Wire):
    """Fields that chat and completions share."""

    model: Annotated[str, Field(max_length=MAX_LABEL)] | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: (
        Annotated[dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None

    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    priority: Annotated[int, Field(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_LABEL)] | None = None

    user: Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL] = None

    allowed_token_ids: Annotated[Any, refused()] = None
    bad_words: Annotated[Any, refused([])] = None
    best_of: Annotated[Any, refused(1)] = None
    early_stopping: Annotated[Any, refused(False)] = None
    guided_choice: Annotated[Any, refused()] = None
    guided_grammar: Annotated[Any, refused()] = None
    guided_json: Annotated[Any, refused()] = None
    guided_regex: Annotated[Any, refused()] = None
    length_penalty: Annotated[Any, refused(1, 1.0)] = None
    logits_processors: Annotated[Any, refused([])] = None
    prompt_logprobs: Annotated[Any, refused()] = None
    spaces_between_special_tokens: Annotated[Any, refused(True)] = None
    truncate_prompt_tokens: Annotated[Any, refused()] = None
    use_beam_search: Annotated[Any, refused(False)] = None

    @field_validator("stream_options")
    @classmethod
    def _options_of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise clash("must be absent unless stream is true")
        return value

    @property
    def prompt_field(self) -> str:
        """The field that the prompts come from."""
        return "prompt"

    @property
    def num_prompts(self) -> int:
        """How many prompts the request brings; each is answered `num_choices` times."""
        return 1

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are told per token; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must look like; None: it may be any text."""
        return None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params(
        self, defaults: dict[str, float | int], *, max_tokens: int, seed: int, eos_ids: tuple[int, ...]
    ) -> SamplingParams:
        """How the engine is to draw; where the request is silent, the model's `defaults` speak, then OpenAI's."""

        def chosen(name: str, default: float) -> float:
            own = getattr(self, name)
            return own if own is not None else defaults.get(name, default)

        ends = (() if self.ignore_eos else eos_ids) + tuple(self.stop_token_ids or ())
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=float(chosen("temperature", 1.0)),
            top_k=max(0, int(chosen("top_k", 0))),
            top_p=float(chosen("top_p", 1.0)),
            min_p=float(chosen("min_p", 0.0)),
            repetition_penalty=float(chosen("repetition_penalty", 1.0)),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            min_tokens=self.min_tokens or 0,
            stop_ids=tuple(dict.fromkeys(ends)),
            logprobs=self.num_logprobs,
            grammar=self.grammar.pair if self.grammar else None,
        )


class Output(NamedTuple):
    """What became certain about one choice: its text as far as it may be sent, and the tokens it has by now."""

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as token_ids when they were asked for
    offsets: tuple[int, ...] = ()  # per token: where its text begins in the whole output, in characters
    finish_reason: str | None = None  # stop | length; with it the choice is complete

    @staticmethod
    def join(outputs: list[Output]) -> Output:
        """One choice's outputs as if they had come at once."""
        return Output(
            choice=outputs[0].choice,
            text="".join(output.text for output in outputs),
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            logprobs=tuple(entry for output in outputs for entry in output.logprobs),
            offsets=tuple(offset for output in outputs for offset in output.offsets),
            finish_reason=outputs[-1].finish_reason,
        )


class Prompt(NamedTuple):
    """One prompt of a request; `echo` is its text where the answer begins with it."""

    ids: tuple[int, ...]
    echo: str = ""


class Head(NamedTuple):
    """What all objects of one answer begin with."""

    id: str
    created: int  # seconds since the epoch
    model: str
    fingerprint: str


class Writer:
    """Writes the JSON objects of one answer. Each API has its own; `whole` and the chunks say the same."""

    def __init__(self, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        self.head = head
        self.prompts = prompts
        self.token_text = token_text

    def opening(self, usage: Json | None) -> list[Json]:
        """Chunks before the first token; `usage` so far where every chunk is to tell it."""
        raise NotImplementedError

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        """Chunks of a stream; `usage` so far where every chunk is to tell it."""
        raise NotImplementedError

    def closing(self, usage: Json) -> list[Json]:
        """Chunks after the last token of all choices."""
        raise NotImplementedError

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        """The answer in one object; one output per choice, in their order."""
        raise NotImplementedError


class PromptTokensDetails(Wire):
    """What is known about the prompt's tokens."""

    cached_tokens: int


class Usage(Wire):
    """What an answer cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """A Usage as JSON."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def number(logprob: float) -> float:
    """A log-probability with 9 significant digits: enough to give a float32 back bit for bit."""
    return float(f"{logprob:.9g}") if math.isfinite(logprob) else NO_CHANCE
