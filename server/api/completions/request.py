"""Completions on the wire: prompts as text or token ids in, their continuations out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from engine import TokenLogprob

from ...generation.output import Head, Json, Output, Prompt, PromptLogprobs, TokenText, Usage, Writer, number
from ...generation.request import UNLIMITED, TextPrompts
from ...http.fields import Refused, Wire, refused
from ..response_format import Structured
from ..sampling import MAX_INT, MAX_LOGPROBS, Text, TokenId

MAX_PROMPTS = 256  # of one request: as many as wait in the default queue
MAX_PROMPT_IDS = 1 << 20  # tokens; a bound for the parser, the model's own is far below
DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def form(value: Any) -> str:
    """Which form a prompt has, by its first element: trying all of them would cost an error per token."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "id_lists" if isinstance(first, list) else "ids"


def listed(value: Any) -> list[str] | list[list[int]]:
    """The prompts of a value of any form, each by itself."""
    return [value] if form(value) in ("text", "ids") else value


class CompletionRequest(Structured):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "builtin", "prompt": "The sea is", "max_tokens": 16},
                {
                    "model": "builtin",
                    "prompt": [[11, 12], [13]],
                    "temperature": 0,
                    "n": 2,
                    "stop": ["."],
                    "logprobs": 2,
                },
            ]
        }
    )

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[IdLists, Tag("id_lists")],
        Discriminator(form),
    ]

    """A text, token ids, or a list of either; each is answered n times."""

    max_tokens: Annotated[int, Field(ge=UNLIMITED, le=MAX_INT)] | None = None
    """The most tokens of a completion; absent: 16; more than fit, and -1: as many as fit. 0 goes with echo: the prompt
    is scored and nothing is added."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The answer has the log-probability of each token, and of this many most likely ones in its place."""
    echo: bool | None = None
    """The answer begins with the prompt; with logprobs, these begin with the prompt's."""
    add_special_tokens: bool | None = None
    """false: a prompt that is a text does not get the tokens that the tokenizer puts around one."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "prompt_embeds": refused(),
        "suffix": refused(""),
        "thinking_token_budget": refused(-1),
    }

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each by itself."""
        return listed(self.prompt)

    @property
    def prompt_source(self) -> TextPrompts:
        return TextPrompts(
            self.prompts,
            add_special=self.add_special_tokens is not False,
            skip_special=self.skip_special_tokens is not False,
            echo=bool(self.echo),
        )

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scoring(self) -> tuple[str, int] | None:
        own = super().scoring
        if not self.echo or self.logprobs is None or (own is not None and not 0 <= own[1] < self.logprobs):
            return own
        return "logprobs", self.logprobs

    @property
    def only_scores(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


class CompletionWriter(Writer):
    """text_completion, whole and in chunks. Choices are numbered prompt by prompt."""

    def __init__(self, request: CompletionRequest, head: Head, prompts: list[Prompt], token_text: TokenText) -> None:
        super().__init__(head, prompts, token_text)
        self.request = request

    def opening(self, usage: Json | None) -> list[Json]:
        """The prompts, where the answer begins with them and they need not wait for their log-probabilities."""
        if self.request.scoring is not None or not (self.request.echo or self.request.return_token_ids):
            return []
        return [self._chunk([self._beginning(i)], usage) for i in range(self._num_choices)]

    def chunks(self, output: Output, usage: Json | None) -> list[Json]:
        """The text in one chunk, the end in one of its own; before them the prompt where it was scored."""
        chunks = []
        if output.prompt_logprobs is not None:
            scored = Output(output.choice, prompt_logprobs=output.prompt_logprobs)
            columns = self._logprobs(scored) if self.request.echo else {}
            told = self._beginning(output.choice) | columns | self._prompt_logprobs(scored)
            chunks.append(self._chunk([told], usage))
            output = output._replace(prompt_logprobs=None)
        if output.text or (output.token_ids and (output.logprobs or self.request.return_token_ids)):
            choice = self._choice(output.choice, output.text) | self._logprobs(output) | self._ids(output)
            chunks.append(self._chunk([choice], usage))
        if output.finish_reason:
            chunks.append(self._chunk([self._choice(output.choice, "", output.finish_reason)], usage))
        return chunks

    def closing(self, usage: Json) -> list[Json]:
        return [self._chunk([], usage)] if self.request.include_usage else []

    def whole(self, outputs: list[Output], usage: Json) -> Json:
        choices = [
            self._choice(output.choice, self._echo(output.choice) + output.text, output.finish_reason)
            | self._logprobs(output)
            | self._prompt_logprobs(output)
            | self._prompt_ids(output.choice)
            | self._ids(output)
            for output in outputs
        ]
        return self._object(choices) | {"usage": usage}

    @property
    def _num_choices(self) -> int:
        return len(self.prompts) * self.request.num_choices

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.request.num_choices]

    def _object(self, choices: list[Json]) -> Json:
        head = self.head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = self._object(choices)
        if self.request.include_usage:
            chunk["usage"] = usage
        return chunk

    def _choice(self, index: int, text: str, finish_reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _beginning(self, index: int) -> Json:
        return self._choice(index, self._echo(index)) | self._prompt_ids(index)

    def _echo(self, index: int) -> str:
        return self._prompt(index).echo

    def _prompt_ids(self, index: int) -> Json:
        return {"prompt_token_ids": self._prompt(index).ids} if self.request.return_token_ids else {}

    def _ids(self, output: Output) -> Json:
        return {"token_ids": output.token_ids} if self.request.return_token_ids else {}

    def _prompt_logprobs(self, output: Output) -> Json:
        told = self.scores(self._prompt(output.choice), output.prompt_logprobs, self.request.prompt_logprobs)
        return {} if told is None else {"prompt_logprobs": told}

    def _logprobs(self, output: Output) -> Json:
        if self.request.logprobs is None:
            return {}
        prompt = self._prompt(output.choice)
        start = len(prompt.echo)
        columns = self._columns(output.token_ids, output.logprobs, [start + offset for offset in output.offsets])
        if self.request.echo and output.prompt_logprobs is not None:
            first = self._columns(prompt.ids, (None, *output.prompt_logprobs), prompt.offsets)
            columns = {name: [*first[name], *column] for name, column in columns.items()}
        return {"logprobs": columns}

    def _columns(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> dict[str, Sequence[Any]]:
        """CompletionLogprobs of these tokens; None is the entry of a token that nothing predicts."""
        count = self.request.logprobs or 0
        top: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            if entry is None:
                top.append(None)
                continue
            # The drawn token is always among them, so that there is one more where it is not likely.
            likely = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
            texts: dict[str, float] = {}
            for other, logprob in (*likely, (token_id, entry.logprob)):
                texts.setdefault(self.token_text(other)[0], number(logprob))
            top.append(texts)
        return {
            "tokens": [self.token_text(token_id)[0] for token_id in token_ids],
            "token_logprobs": [None if entry is None else number(entry.logprob) for entry in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class CompletionLogprobs(Wire):
    """Columns with one element per token, the one that ended the answer included; null for a prompt's first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Wire):
    """One continuation of one prompt, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(Wire):
    """The answer in one object, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
