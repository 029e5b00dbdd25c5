"""GenerationRequest: a request for text, resolved once from the request model of any API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct, field

from engine import SamplingParams

from ..grammar.schemas import Grammar
from ..tokenization.encoder import RenderOptions
from .output import Json

UNLIMITED = -1  # a limit of the output, for clients that always send one: as many tokens as fit
MIN_TOP_P = 1e-12  # replaces 0: only the most likely token is left
ALL_TOKENS = -1  # as a number of alternatives


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Json  # the JSON schema of its arguments, an object
    strict: bool  # arguments must follow the schema even if the model need not call
    field: str  # of the request that contains the schema
    shown: Json | None = None  # the schema in the prompt, if it is another one

    @property
    def as_json(self) -> Json:
        """The tool in the form that chat templates expect."""
        description = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **description, "parameters": self.shown or self.parameters},
        }


class Calling(NamedTuple):
    """The tools that the completion may call."""

    tools: tuple[Tool, ...]
    is_required: bool = False  # the completion has at least one call
    is_parallel: bool = True  # there may be several calls
    described: tuple[Tool, ...] = ()  # those in the prompt, if they are not those that may be called

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar has to make calls follow the schemas of their tools."""
        return self.is_required or any(tool.strict for tool in self.tools)

    @property
    def in_prompt(self) -> tuple[Tool, ...]:
        return self.described or self.tools


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Independent prompts, each a text or token ids."""

    prompts: list[str] | list[list[int]]
    add_special: bool  # add the tokens that the tokenizer puts around a text
    skip_special: bool  # leave special tokens out of the text of token ids
    echo: bool  # the completion begins with the prompt
    suffix: str = ""  # text that the completion goes before; empty: none


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """Messages that the chat template renders as a prompt; the completion is a message."""

    turns: list[Json]  # in the form of chat completions, which chat templates expect
    render_options: RenderOptions  # other variables of the template
    calling: Calling | None  # None: no tools
    thinks: bool | None  # whether the model is to reason first; None: as its template has it
    # The field that limits the reasoning, and its value in tokens, -1: no limit; None: not specified.
    thinking_budget: tuple[str, int] | None
    references: int = 0  # characters of the turns that are definitions of tools, written for references to them


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """A request for generated text. A Struct, because the API's classes build it step by step by `replace`."""

    model: str | None
    prompt: TextPrompts | ConversationPrompt
    prompt_field: str = "prompt"  # of the client's request, like all fields named here
    num_choices: int = 1  # completions of each prompt
    # The end of the completion. `limit`: the field and its value in tokens; None or -1: as many as fit.
    limit: tuple[str, int | None] = ("max_tokens", None)
    min_tokens: int
    stops: list[str] = field(default_factory=list)
    include_stop: bool
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    # Sampling.
    grammar: Grammar | None = None  # that the content must follow; None: any text
    sampling: dict[str, float]  # fields of SamplingParams; what is absent has the model's default
    seed: int | None
    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: list[str]
    # The contents of the response.
    num_logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    # The field that requests the prompt's log-probabilities, and the alternatives per token.
    scoring: tuple[str, int] | None = None
    only_scores: bool = False  # the completion has no tokens
    skip_special_tokens: bool
    stream: bool
    continuous_usage: bool = False  # every chunk reports the usage so far
    # Scheduling.
    priority: int
    cache_salt: str | None

    @property
    def num_prompts(self) -> int:
        return len(self.prompt.prompts) if isinstance(self.prompt, TextPrompts) else 1

    @property
    def fills_gap(self) -> bool:
        """Whether the completion goes before a suffix."""
        return isinstance(self.prompt, TextPrompts) and self.prompt.suffix != ""

    def num_scores(self, vocab_size: int) -> int | None:
        """Return the number of alternatives per prompt token; None: no log-probabilities of the prompt."""
        if self.scoring is None:
            return None
        return vocab_size if self.scoring[1] == ALL_TOKENS else self.scoring[1]

    def params(
        self,
        defaults: Mapping[str, float | int],
        *,
        max_tokens: int,
        seed: int,
        eos_ids: tuple[int, ...],
        grammar: Grammar | None,
        bad_words: tuple[tuple[int, ...], ...],
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Return the engine's parameters. What the request omits has the model's `defaults`, then the engine's."""
        sampling: dict[str, Any] = {**defaults, **self.sampling}
        if "top_k" in sampling:
            sampling["top_k"] = max(0, sampling["top_k"])
        if "top_p" in sampling:
            sampling["top_p"] = max(sampling["top_p"], MIN_TOP_P)
        ends = (() if self.ignore_eos else eos_ids) + self.stop_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_ids=tuple(dict.fromkeys(ends)),
            logprobs=self.num_logprobs,
            grammar=(grammar.kind, grammar.text) if grammar else None,
            prompt_logprobs=prompt_logprobs,
            allowed_ids=self.allowed_token_ids,
            bad_words=bad_words,
            **sampling,
        )
