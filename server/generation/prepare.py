"""Checks a request, encodes its prompts and creates the engine's requests, before anything is sent to the client."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request

from engine import EngineInfo, EngineRequest, SamplingParams

from ..grammar.schemas import Grammar
from ..http.admission import Caller, Ticket
from ..http.disconnect import while_connected
from ..http.errors import CONTEXT_CODE, deadline, invalid
from ..loading import LoadedModel
from ..parsers.parts import Plain
from ..state import AppState
from ..tokenization.detokenizer import Detokenizer, last_with_text
from ..tokenization.encoder import Prompts, TextTooLong
from ..tokenization.generic_tools import FORMAT as GENERIC
from ..tokenization.generic_tools import renders_tools
from ..tokenization.infill import ends_of, with_gap
from ..tokenization.renderer import PromptTooLong, TemplateError
from ..tokenization.reranker import NO_CHAT
from ..tokenization.stop_matcher import StopString
from .choices import Choice, Due, Scores
from .output import Json, Prompt
from .output_constraint import Shape, check_accepts_grammars, hidden_ids, output_shape
from .prompt_limits import check_bad_words, check_prompts, max_completion
from .request import ConversationPrompt, GenerationRequest, TextPrompts, Tool

T = TypeVar("T")

DEADLINE_HEADER = "X-Deadline-Ms"
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
NEVER = -100  # a logit_bias that excludes a token


class Prepared(NamedTuple):
    """The results of `prepare`."""

    prompts: list[Prompt]
    shape: Shape | None  # of a conversation
    grammar: Grammar | None  # of the whole text
    max_tokens: list[int]  # of each prompt's completions
    bad_words: tuple[tuple[int, ...], ...]


async def prepare(
    app: AppState, model: LoadedModel, caller: Caller, request: GenerationRequest, ticket: Ticket
) -> Prepared:
    """Check the grammar and encode the prompts; raises the 400, 429 or 503 that ends the request here."""
    info, grammar = model.info, request.grammar
    if grammar is not None:
        check_accepts_grammars(model, request, grammar.field)
        grammar = await app.grammars.check(grammar, caller.flow)
    prompts = await encoded(info, encode(model, caller, request.prompt), request.prompt_field)
    shape = None
    if isinstance(request.prompt, ConversationPrompt):
        shape = await output_shape(
            app.grammars, model, caller, request, conversation=request.prompt, grammar=grammar, prompt=prompts[0]
        )
    max_tokens = [max_completion(info, request, prompt.ids) for prompt in prompts]
    check_prompts(request, prompts, info.vocab_size)
    # For each choice, since the engine has them for each.
    ticket.add_prompt(sum(len(prompt.ids) for prompt in prompts) * request.num_choices)
    bad_words = await encode_bad_words(model, caller, request)
    return Prepared(prompts, shape, shape.grammar if shape else grammar, max_tokens, bad_words)


# Checks


def time_limit(app: AppState, request: Request) -> Due | None:
    """Return the earlier of the client's deadline and --request-timeout. Raises 400."""
    now = time.monotonic()
    limits = []
    if app.settings.request_timeout is not None:
        limits.append(Due(now + app.settings.request_timeout, "timeout"))
    if (header := request.headers.get(DEADLINE_HEADER)) is not None:
        if not (header.isascii() and header.isdigit() and len(header) <= 12 and 1 <= int(header) <= MAX_DEADLINE_MS):
            message = f"{DEADLINE_HEADER} must be a whole number of milliseconds in 1..{MAX_DEADLINE_MS}."
            raise invalid(message, DEADLINE_HEADER)
        limits.append(Due(now + int(header) / 1000, "deadline"))
    return min(limits, default=None)


async def in_time(due: Due | None, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work before generation; raises 504 when its time has passed, and stops if the client disconnects."""
    try:
        async with asyncio.timeout(due and due.left_s):
            return await while_connected(request, work)
    except TimeoutError:
        raise deadline() from None


def check_fields(app: AppState, info: EngineInfo, request: GenerationRequest) -> None:
    """Raise 400 for values that depend on the model's vocabulary or on the server's settings."""
    check_priority(app, request.priority)
    check_token_ids(info, request.stop_token_ids, "stop_token_ids")
    check_token_ids(info, tuple(request.logit_bias), "logit_bias")
    check_token_ids(info, request.allowed_token_ids or (), "allowed_token_ids")
    field, limit = request.limit
    if limit == 0 and not request.only_scores:
        raise invalid(f"Invalid '{field}': 0 is for scoring a prompt, with echo.", field)


def check_priority(app: AppState, priority: int | None) -> None:
    """Raise 400 for a priority that the scheduling policy ignores."""
    if priority and app.settings.scheduling_policy != "priority":
        raise invalid("Invalid 'priority': the server does not run with --scheduling-policy priority.", "priority")


def check_token_ids(info: EngineInfo, ids: Sequence[int], param: str) -> None:
    """Raise 400 unless the model has all of these tokens."""
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        raise invalid(f"Invalid '{param}': token ids must be in 0..{info.vocab_size - 1}.", param)


async def encoded(info: EngineInfo, encoding: Awaitable[list[Prompt]], param: str) -> list[Prompt]:
    """Return the prompts of the field `param`; raises 400 for what the tokenizer, the template or the model refuses."""
    with refusals(param):
        prompts = await encoding
    if not all(prompt.ids for prompt in prompts):
        raise invalid(f"Invalid '{param}': the prompt has no tokens.", param)
    if missing := next((token for prompt in prompts for token in prompt.ids if token >= info.vocab_size), None):
        raise invalid(f"Invalid '{param}': the tokenizer makes token {missing} of it, which the model lacks.", param)
    return prompts


@contextmanager
def refusals(param: str) -> Iterator[None]:
    """Turn what the tokenizer or the template refuses into a 400 for the field `param`."""
    try:
        yield
    except TemplateError as error:
        code = CONTEXT_CODE if isinstance(error, PromptTooLong) else "invalid_value"
        raise invalid(str(error), param, code) from None
    except TextTooLong as error:
        raise invalid(str(error), param, CONTEXT_CODE) from None


async def encode_bad_words(
    model: LoadedModel, caller: Caller, request: GenerationRequest
) -> tuple[tuple[int, ...], ...]:
    """Return the bad words as tokens; raises 400 for too many, and if they and other fields exclude every token."""
    words: list[tuple[int, ...]] = []
    if request.bad_words:
        known = range(model.info.vocab_size)  # no other token is ever sampled
        spellings = await model.prompts.encode_words(request.bad_words, caller=caller.flow)
        words = [word for word in spellings if all(id in known for id in word)]
        check_bad_words(request, words)
    if request.allowed_token_ids is not None:
        ends = request.stop_token_ids if request.min_tokens else ()
        never = [id for id, bias in request.logit_bias.items() if bias <= NEVER]
        if not {*request.allowed_token_ids} - {word[0] for word in words if len(word) == 1} - {*ends} - {*never}:
            raise invalid("Invalid 'allowed_token_ids': other fields forbid all of them.", "allowed_token_ids")
    return tuple(words)


# Choices


def make_choices(
    app: AppState, model: LoadedModel, caller: Caller, request: GenerationRequest, prepared: Prepared
) -> list[Choice]:
    """Return the choices with their engine requests, prompt by prompt; those of one prompt share its scores."""
    grammar, shape = prepared.grammar, prepared.shape
    num_scores = request.num_scores(model.info.vocab_size)
    hidden: frozenset[int] = frozenset()
    if request.skip_special_tokens:
        hidden = hidden_ids(model, shape.formats) if shape else model.tokenizer.special_ids
    compile_s = grammar.compile_s if grammar else 0.0
    # As in vLLM, the model's own end is not reported. With ignore_eos it ends a text only if the request names it.
    ends = ends_of(model.tokenizer) if request.fills_gap else model.tokenizer.eos_ids
    eos_ids = () if request.ignore_eos else ends
    reported_ids = frozenset(request.stop_token_ids).difference(eos_ids)
    stops = [StopString(stop) for stop in request.stops]
    choices: list[Choice] = []
    for prompt, max_tokens in zip(prepared.prompts, prepared.max_tokens, strict=True):
        seed = app.new_seed() if request.seed is None else request.seed % 2**64
        scores = None if request.scoring is None else Scores()
        context = last_with_text(model.tokenizer, prompt.ids, hidden)
        for i in range(request.num_choices):
            params = request.params(
                model.default_sampling,
                max_tokens=max(1, max_tokens),
                seed=seed if request.num_choices == 1 else seed_of_choice(seed, i),
                eos_ids=ends,
                grammar=grammar,
                bad_words=prepared.bad_words,
                prompt_logprobs=num_scores if i == 0 else None,
            )
            stream = Detokenizer(
                model.tokenizer,
                stops,
                include_stop=request.include_stop,
                may_resume=shape is not None and shape.enforces_calls,
                hidden=hidden,
                context=context,
                strip=grammar is None,
                min_tokens=request.min_tokens,
            )
            choice = Choice(
                len(choices),
                engine_request(app, caller, request, prompt, params, compile_s=compile_s),
                stream,
                grammar.field if grammar else "",
                parser=shape.parser() if shape else Plain(),
                scores=scores,
                only_scores=request.only_scores,
                is_json=request.grammar is not None and request.grammar.kind == "json_schema",
                calling=shape.calling if shape else None,
                enforces_calls=shape is not None and shape.enforces_calls,
                reported_ids=reported_ids,
            )
            choices.append(choice)
    return choices


class Scheduled(Protocol):
    """The fields of a request that say when its prompts run and which cached prefixes they share."""

    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...


def engine_request(
    app: AppState, caller: Caller, request: Scheduled, prompt: Prompt, params: SamplingParams, *, compile_s: float = 0.0
) -> EngineRequest:
    """Return a new engine request; `compile_s` is the CPU time that compiling its grammar takes."""
    return EngineRequest(
        id=app.new_id(),
        prompt_ids=prompt.ids,
        params=params,
        priority=request.priority or 0,
        cache_salt=app.keys.salt_for(caller, request.cache_salt),
        flow=caller.flow,
        weight=caller.weight,
        compile_s=compile_s,
    )


def seed_of_choice(seed: int, index: int) -> int:
    """Return the seed of choice `index` of several; equal in every run and on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


# Prompts


async def encode(model: LoadedModel, caller: Caller, prompt: TextPrompts | ConversationPrompt) -> list[Prompt]:
    """Encode the prompts; raises TemplateError, TextTooLong, ApiError."""
    if isinstance(prompt, ConversationPrompt):
        return await encode_conversation(model, caller, prompt)
    return [await encode_text(model, caller, each, prompt) for each in prompt.prompts]


async def encode_text(model: LoadedModel, caller: Caller, prompt: str | list[int], source: TextPrompts) -> Prompt:
    """Encode a text, or check token ids; with the text if the completion begins with the prompt."""
    text = ""
    offsets: list[int] = []
    if isinstance(prompt, str):
        if source.suffix:
            prompt = with_gap(model.tokenizer, prompt, source.suffix)
        if source.echo:
            text = prompt
            ids, offsets = await model.prompts.encode_with_offsets(prompt, source.add_special, caller=caller.flow)
        else:
            ids = await model.prompts.encode(prompt, source.add_special, caller=caller.flow)
    else:
        check_token_ids(model.info, prompt, "prompt")
        ids = prompt
        if source.echo:
            text, offsets = await model.prompts.decode_with_offsets(ids, source.skip_special, caller=caller.flow)
    return Prompt(tuple(ids), text, tuple(offsets))


async def encode_conversation(
    model: LoadedModel, caller: Caller, conversation: ConversationPrompt, *, fits: bool = True
) -> list[Prompt]:
    """Encode a conversation as the model's chat template renders it; `fits`: it must fit the context."""
    prompts, calling = model.prompts, conversation.calling
    if conversation.references > (most := prompts.max_characters(fits)):
        message = f"The definitions of tools, one for each tool_reference, have more than the {most} characters"
        raise TextTooLong(f"{message} that can fit.")
    if model.reranker is not None and not model.reranker.chats:
        raise TemplateError(NO_CHAT)
    if calling is not None:
        check_accepts_tools(model)
    tools = as_tools(calling.in_prompt if calling else ())
    render = partial(prompts.chat, conversation.turns, caller=caller.flow, fits=fits, **conversation.render_options)
    ids: list[int] = []
    error: TextTooLong | None = None
    try:
        ids = await render(tools)
    except TextTooLong as raised:
        error = raised
    is_long = error is not None or (fits and prompts.max_len is not None and len(ids) >= prompts.max_len)
    if is_long and calling is not None and not calling.is_required and not await fit_alone(prompts, caller, tools):
        # Some chat interfaces send more tools with every message than a small model's context holds. The model may
        # respond without them. If the conversation itself is too long, though, the client must get the error.
        ids = await render(None)
        return [Prompt(tuple(ids), left_out="tools")]
    if error is not None:
        raise error
    return [Prompt(tuple(ids))]


async def fit_alone(prompts: Prompts, caller: Caller, tools: list[Json] | None) -> bool:
    """Return whether these tools and an empty message leave any of the context."""
    try:
        ids = await prompts.chat([{"role": "user", "content": ""}], tools, caller=caller.flow)
    except TextTooLong:
        return False
    return prompts.max_len is None or len(ids) < prompts.max_len


def check_accepts_tools(model: LoadedModel) -> None:
    """Raise 400 if the operator has chosen a parser that could not parse any call."""
    if model.formats.tools is None:
        raise invalid("Invalid 'tools': this server runs with --tool-call-parser none.", "tools")
    if model.formats.tools != GENERIC and not renders_tools(model.prompts.template_source):
        raise invalid(
            "Invalid 'tools': the model's chat template renders no tools, and those that are described to the model "
            f"without it are called in the format of --tool-call-parser {GENERIC}.",
            "tools",
        )


def as_tools(tools: Iterable[Tool]) -> list[Json] | None:
    """Return tools in the form that chat templates expect; None: no tools."""
    return [tool.as_json for tool in tools] or None
