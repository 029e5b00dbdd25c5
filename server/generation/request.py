"""GenerationRequest: what a request for text asks for, whichever API it came by, worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine import SamplingParams

from ..grammar.schemas import Grammar
from .output import Json

if TYPE_CHECKING:
    from ..tokenization.encoder import RenderOptions

UNLIMITED = -1  # of an output, where clients send a number in any case: as many tokens as fit
LEAST_TOP_P = 1e-12  # what 0 means: no second token is needed for it


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Json  # the JSON schema of its arguments, an object
    strict: bool  # arguments must follow the schema also where the model is free to call
    field: str  # of the request: where the schema stands

    @property
    def as_json(self) -> Json:
        """As chat templates read it."""
        told = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **told, "parameters": self.parameters}}


class Calling(NamedTuple):
    """How the answer may use tools."""

    tools: tuple[Tool, ...]
    is_required: bool = False  # the answer is at least one call
    is_parallel: bool = True  # there may be several calls
    told: tuple[Tool, ...] = ()  # what the prompt tells of, where that is more than may be called

    @property
    def in_prompt(self) -> tuple[Tool, ...]:
        return self.told or self.tools


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Prompts that are texts or token ids, each by itself."""

    prompts: list[str] | list[list[int]]
    add_special: bool  # a text gets the tokens that the tokenizer puts around one
    skip_special: bool  # the text of token ids is without special tokens
    echo: bool  # the answer begins with the prompt


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """Messages that the chat template writes as a prompt; the answer is a message."""

    turns: list[Json]  # as chat templates read them, in the form of chat completions
    render_options: RenderOptions  # what else the template is told
    calling: Calling | None  # the tools that the answer may call; None: none
    thinks: bool | None  # whether the model is to think before it answers; None: as its template has it
    # The field that bounds the reasoning, and its most tokens, -1: as many as the model wants; None: no word.
    thinking_budget: tuple[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for generated text. Sampling values that are None are the model's defaults."""

    model: str | None
    prompt: TextPrompts | ConversationPrompt
    prompt_field: str  # of the client's request, as all fields named here
    num_choices: int  # answers to each prompt
    # What ends the answer, and bounds it: the field of the limit and its value; -1: as many tokens as fit.
    limit: tuple[str, int | None]
    min_tokens: int
    stop_field: str
    stops: list[str]
    include_stop: bool
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    # How tokens are sampled.
    grammar: Grammar | None  # what the answer must look like; None: it may be any text
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: list[str]
    # What is reported.
    num_logprobs: int | None  # alternatives per token; None: no log-probabilities at all
    scoring: tuple[str, int] | None  # the field that asks for the prompt's log-probabilities; for how many alternatives
    only_scores: bool  # the answer has no token of its own
    skip_special_tokens: bool
    stream: bool
    continuous_usage: bool  # every chunk tells the usage so far
    # How it is scheduled.
    priority: int
    cache_salt: str | None

    @property
    def num_prompts(self) -> int:
        """How many prompts the request brings; each is answered `num_choices` times."""
        return len(self.prompt.prompts) if isinstance(self.prompt, TextPrompts) else 1

    def params(
        self,
        defaults: Mapping[str, float | int],
        *,
        max_tokens: int,
        seed: int,
        eos_ids: tuple[int, ...],
        grammar: Grammar | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        scores: bool = False,
        vocab_size: int = 0,
    ) -> SamplingParams:
        """How the engine is to sample; where the request is silent, the model's `defaults` speak, then OpenAI's.

        `grammar` as the server has checked it, `bad_words` as tokens; `scores`: this choice asks for the prompt's
        log-probabilities, if the request does.
        """

        def chosen(name: str, own: float | None, default: float) -> float:
            return own if own is not None else defaults.get(name, default)

        ends = (() if self.ignore_eos else eos_ids) + self.stop_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=float(chosen("temperature", self.temperature, 1.0)),
            top_k=max(0, int(chosen("top_k", self.top_k, 0))),
            top_p=max(float(chosen("top_p", self.top_p, 1.0)), LEAST_TOP_P),
            min_p=float(chosen("min_p", self.min_p, 0.0)),
            repetition_penalty=float(chosen("repetition_penalty", self.repetition_penalty, 1.0)),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_ids=tuple(dict.fromkeys(ends)),
            logprobs=self.num_logprobs,
            grammar=grammar.pair if grammar else None,
            prompt_logprobs=self._scored(vocab_size) if scores else None,
            allowed_ids=self.allowed_token_ids,
            bad_words=bad_words,
        )

    def _scored(self, vocab_size: int) -> int | None:
        """Alternatives of each prompt token whose log-probabilities are wanted; None: not even its own."""
        if self.scoring is None:
            return None
        return vocab_size if self.scoring[1] < 0 else self.scoring[1]
