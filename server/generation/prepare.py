"""What must be known of a request before its first byte: checks, prompts, the engine's requests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple

from fastapi import Request

from engine import EngineInfo, EngineRequest

from ..grammar.schemas import Grammar
from ..http.admission import Caller, Ticket
from ..http.errors import CONTEXT_CODE, ApiError, invalid
from ..loading import LoadedModel
from ..state import AppState
from ..tokenization.detokenizer import Detokenizer
from ..tokenization.encoder import Prompts, TextTooLong
from ..tokenization.generic_tools import FORMAT as GENERIC
from ..tokenization.renderer import TemplateError
from .choices import Choice, Due, Scores
from .output import Json, Prompt
from .output_constraint import Shape, check_takes_grammars, hidden_ids, shape
from .request import UNLIMITED, ConversationPrompt, GenerationRequest, TextPrompts, Tool

DEADLINE_HEADER = "X-Deadline-Ms"
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
# Log-probabilities of prompts in one answer: 10 MB of JSON, written in a quarter of a second (off the event loop).
MAX_SCORES = 1 << 17
ALL_TOKENS = -1  # as a number of alternatives
NEVER = -100  # a logit_bias that forbids


class Prepared(NamedTuple):
    """What must be known of a request before the engine gets it."""

    prompts: list[Prompt]
    shape: Shape | None  # of a conversation
    grammar: Grammar | None  # of the whole text
    max_tokens: list[int]  # of each prompt's completions
    bad_words: tuple[tuple[int, ...], ...]


async def prepare(
    app: AppState,
    model: LoadedModel,
    caller: Caller,
    asked: GenerationRequest,
    *,
    ticket: Ticket,
    default_max_tokens: int | None,
) -> Prepared:
    """Check the grammar and encode the prompts; raises the 400, 429 or 503 that ends the request here."""
    info = model.info
    grammar = await checked_grammar(app, model, caller, asked)
    prompts = await encoded(encode(model, caller, asked.prompt), asked.prompt_field)
    shaped = None
    if isinstance(asked.prompt, ConversationPrompt):
        shaped = await shape(
            app.grammars, model, caller, asked, conversation=asked.prompt, grammar=grammar, prompt=prompts[0]
        )
    max_tokens = [room(info, asked, prompt.ids, default_max_tokens) for prompt in prompts]
    check_scores(asked, prompts, info.vocab_size)
    ticket.add_prompt(sum(len(prompt.ids) for prompt in prompts))
    bad_words = await spelt(model, caller, asked)
    return Prepared(prompts, shaped, shaped.grammar if shaped else grammar, max_tokens, bad_words)


# Checks before the first byte


def time_limit(app: AppState, request: Request) -> Due | None:
    """When the answer must be complete: the client's own deadline or --request-timeout, whichever is sooner."""
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


def check_fields(app: AppState, info: EngineInfo, asked: GenerationRequest) -> None:
    """What the schema cannot know: the model's vocabulary and the server's settings."""
    check_priority(app, asked.priority)
    check_token_ids(info, asked.stop_token_ids, "stop_token_ids")
    check_token_ids(info, tuple(asked.logit_bias), "logit_bias")
    check_token_ids(info, asked.allowed_token_ids or (), "allowed_token_ids")
    if asked.limit[1] == 0 and not asked.only_scores:
        field = asked.limit[0]
        raise invalid(f"Invalid '{field}': 0 is for scoring a prompt, with echo.", field)


def check_priority(app: AppState, priority: int | None) -> None:
    """Raise 400 unless priorities decide here."""
    if priority and app.settings.scheduling_policy != "priority":
        raise invalid("Invalid 'priority': the server does not run with --scheduling-policy priority.", "priority")


def check_token_ids(info: EngineInfo, ids: Sequence[int], param: str) -> None:
    """Raise 400 unless the model has all of these tokens."""
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        raise invalid(f"Invalid '{param}': token ids must be in 0..{info.vocab_size - 1}.", param)


async def checked_grammar(
    app: AppState, model: LoadedModel, caller: Caller, asked: GenerationRequest
) -> Grammar | None:
    """The grammar that a request brings, if it does; raises 400 when it cannot be used."""
    grammar = asked.grammar
    if grammar is None:
        return None
    check_takes_grammars(model, asked, grammar.field)
    return await app.grammars.check(grammar, caller.flow)


async def encoded(encoding: Awaitable[list[Prompt]], param: str) -> list[Prompt]:
    """The prompts of the field `param`; what the tokenizer or the template refuses becomes a 400."""
    try:
        prompts = await encoding
    except (TemplateError, TextTooLong) as error:
        raise text_error(error, param) from None
    if not all(prompt.ids for prompt in prompts):
        raise invalid(f"Invalid '{param}': the prompt has no tokens.", param)
    return prompts


def text_error(error: TemplateError | TextTooLong, param: str) -> ApiError:
    """400 for a text that cannot become token ids."""
    return invalid(str(error), param, CONTEXT_CODE if isinstance(error, TextTooLong) else "invalid_value")


def room(info: EngineInfo, asked: GenerationRequest, ids: Sequence[int], default: int | None) -> int:
    """The most tokens that this prompt's completion may have; raises 400 when the prompt leaves no place for any."""
    left = info.max_len - len(ids)
    if left < 1:
        message = f"The prompt has {len(ids)} tokens, and the context holds {info.max_len} of prompt and completion"
        raise invalid(f"{message} together (--max-model-len).", asked.prompt_field, CONTEXT_CODE)
    limit = asked.limit[1]
    if limit is None:
        limit = default
    most = left if limit is None or limit == UNLIMITED else min(limit, left)
    if asked.min_tokens > most:
        raise invalid(f"Invalid 'min_tokens': the completion has at most {most} tokens.", "min_tokens")
    return most


def check_scores(asked: GenerationRequest, prompts: list[Prompt], vocab_size: int) -> None:
    """Raise 400 when the prompts' own log-probabilities are more than one answer may hold."""
    if asked.scoring is None:
        return
    field, count = asked.scoring
    count = vocab_size if count == ALL_TOKENS else count
    tokens = sum(len(prompt.ids) for prompt in prompts) * asked.num_choices
    if tokens * (count + 1) > MAX_SCORES:
        told = f"Invalid '{field}': {tokens} prompt tokens with {count + 1} log-probabilities each"
        raise invalid(f"{told} are more than the {MAX_SCORES} that one answer holds.", field)


async def spelt(model: LoadedModel, caller: Caller, asked: GenerationRequest) -> tuple[tuple[int, ...], ...]:
    """The request's bad words as tokens; raises 400 when they and the other fields leave nothing to draw."""
    words: list[tuple[int, ...]] = []
    if asked.bad_words:
        known = range(model.info.vocab_size)  # the model draws no others
        spellings = await model.prompts.encode_words(asked.bad_words, caller=caller.flow)
        words = [word for word in spellings if all(id in known for id in word)]
    if asked.allowed_token_ids is not None:
        ends = asked.stop_token_ids if asked.min_tokens else ()
        never = [id for id, bias in asked.logit_bias.items() if bias <= NEVER]
        if not {*asked.allowed_token_ids} - {word[0] for word in words if len(word) == 1} - {*ends} - {*never}:
            raise invalid("Invalid 'allowed_token_ids': other fields forbid all of them.", "allowed_token_ids")
    return tuple(words)


# Engine requests


def engine_requests(
    app: AppState,
    model: LoadedModel,
    caller: Caller,
    asked: GenerationRequest,
    prompts: list[Prompt],
    *,
    max_tokens: list[int],
    grammar: Grammar | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> list[EngineRequest]:
    """One request per choice, prompt by prompt."""
    salt = app.keys.salt_for(caller, asked.cache_salt)
    requests = []
    for prompt, most in zip(prompts, max_tokens, strict=True):
        seed = app.new_seed() if asked.seed is None else asked.seed % 2**64
        for i in range(asked.num_choices):
            own = seed if asked.num_choices == 1 else seed_of_choice(seed, i)
            params = asked.params(
                model.default_sampling,
                max_tokens=max(1, most),
                seed=own,
                eos_ids=model.tokenizer.eos_ids,
                grammar=grammar,
                bad_words=bad_words,
                scores=i == 0,
                vocab_size=model.info.vocab_size,
            )
            requests.append(
                EngineRequest(
                    id=app.new_id(),
                    prompt_ids=prompt.ids,
                    params=params,
                    priority=asked.priority,
                    cache_salt=salt,
                    flow=caller.flow,
                    weight=caller.weight,
                    compile_s=grammar.compile_s if grammar else 0.0,
                )
            )
    return requests


def seed_of_choice(seed: int, index: int) -> int:
    """The seed with which choice `index` of several draws; equal in every run and on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def make_choices(
    model: LoadedModel,
    asked: GenerationRequest,
    requests: list[EngineRequest],
    grammar: Grammar | None,
    shaped: Shape | None,
) -> list[Choice]:
    """A Choice per request; those of one prompt share its scores."""
    choices = []
    scores = None
    for index, request in enumerate(requests):
        if index % asked.num_choices == 0:
            scores = None if asked.scoring is None else Scores()
        choice = Choice(
            index,
            request,
            text_stream(model, asked, request, grammar, shaped),
            grammar.field if grammar else "",
            parser=None if shaped is None else shaped.parser(),
            scores=scores,
            is_silent=asked.only_scores,
            is_json=asked.grammar is not None and asked.grammar.kind == "json_schema",
            one_call=shaped is not None and shaped.calling is not None and not shaped.calling.is_parallel,
        )
        choices.append(choice)
    return choices


def text_stream(
    model: LoadedModel, asked: GenerationRequest, request: EngineRequest, grammar: Grammar | None, shaped: Shape | None
) -> Detokenizer:
    hidden = hidden_ids(model, shaped.formats) if shaped else model.tokenizer.special_ids
    if not asked.skip_special_tokens:
        hidden = frozenset()
    return Detokenizer(
        model.tokenizer,
        asked.stops,
        include_stop=asked.include_stop,
        hidden=hidden,
        context=request.prompt_ids,
        strip=grammar is None,
        min_tokens=asked.min_tokens,
    )


# Prompts


async def encode(model: LoadedModel, caller: Caller, prompt: TextPrompts | ConversationPrompt) -> list[Prompt]:
    """The prompts as token ids; raises TemplateError, TextTooLong, ApiError."""
    if isinstance(prompt, ConversationPrompt):
        return await encode_conversation(model, caller, prompt)
    return [await encode_text(model, caller, each, prompt) for each in prompt.prompts]


async def encode_text(model: LoadedModel, caller: Caller, given: str | list[int], source: TextPrompts) -> Prompt:
    """A text or token ids as a prompt, with its text where the answer is to begin with it."""
    text = ""
    offsets: list[int] = []
    if isinstance(given, str):
        if source.echo:
            text = given
            ids, offsets = await model.prompts.encode_with_offsets(given, source.add_special, caller=caller.flow)
        else:
            ids = await model.prompts.encode(given, source.add_special, caller=caller.flow)
    else:
        check_token_ids(model.info, given, "prompt")
        ids = given
        if source.echo:
            text, offsets = await model.prompts.decode_with_offsets(ids, source.skip_special, caller=caller.flow)
    return Prompt(tuple(ids), text, tuple(offsets))


async def encode_conversation(
    model: LoadedModel, caller: Caller, asked: ConversationPrompt, *, fits: bool = True
) -> list[Prompt]:
    """The conversation as the model's chat template writes it; `fits`: it must fit the context."""
    prompts = model.prompts
    calling = asked.calling
    if calling is not None:
        check_takes_tools(model)
    tools = as_tools(calling.in_prompt if calling else ())
    ids: list[int] = []
    error: TextTooLong | None = None
    try:
        ids = await prompts.chat(asked.turns, tools, caller=caller.flow, fits=fits, **asked.render_options)
    except TextTooLong as raised:
        error = raised
    is_long = error is not None or (fits and prompts.max_len is not None and len(ids) >= prompts.max_len)
    if is_long and calling is not None and not calling.is_required and not await fit_alone(prompts, caller, tools):
        # Some chat interfaces send more tools with every message than a small model's context holds. The model may
        # answer without them. Where the conversation has become too long, though, the client must hear of it.
        ids = await prompts.chat(asked.turns, None, caller=caller.flow, fits=fits, **asked.render_options)
        return [Prompt(tuple(ids), left_out="tools")]
    if error is not None:
        raise error
    return [Prompt(tuple(ids))]


async def fit_alone(prompts: Prompts, caller: Caller, tools: list[Json] | None) -> bool:
    """Whether the context has room for these tools and anything else."""
    try:
        ids = await prompts.chat([{"role": "user", "content": ""}], tools, caller=caller.flow)
    except TextTooLong:
        return False
    return prompts.max_len is None or len(ids) < prompts.max_len


def check_takes_tools(model: LoadedModel) -> None:
    """Raise 400 where the operator has chosen a parser with which no call could be read."""
    if model.formats.tools is None:
        raise invalid("Invalid 'tools': this server runs with --tool-call-parser none.", "tools")
    if model.formats.tools != GENERIC and not model.prompts.renders_tools:
        raise invalid(
            "Invalid 'tools': the model's chat template renders no tools, and those that are described to the model "
            f"without it are called in the format of --tool-call-parser {GENERIC}.",
            "tools",
        )


def as_tools(tools: Iterable[Tool]) -> list[Json] | None:
    """Tools as chat templates read them; None: there are none."""
    return [tool.as_json for tool in tools] or None
