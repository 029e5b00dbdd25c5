"""From a parsed request to the bytes of its answer: the one line that all APIs which generate share.

`answer` checks everything that can be known before the first byte. Its Answer then runs a Generation and writes the
outputs, as one JSON object or as a stream of events: a stream's deltas, joined, are the answer in one piece.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from engine import EngineInfo, EngineRequest

from ..api.conversation import Conversation
from ..api.sampling import UNLIMITED, Drawing
from ..grammar.schemas import Grammar
from ..http import sse
from ..http.admission import Caller, Ticket
from ..http.disconnect import while_connected
from ..http.errors import CONTEXT_CODE, ApiError, deadline, from_exception, invalid
from ..loading import LoadedModel
from ..state import Pequod
from ..tokenization.detokenizer import TextStream
from ..tokenization.encoder import TextTooLong
from ..tokenization.renderer import TemplateError
from .choices import Choice, Due, Generation, Gone, Scores
from .output import Head, Json, Output, Prompt, TokenText, Writer
from .output_constraint import Shape, check_takes_grammars, hidden_ids, shape
from .output_constraint import parser as message_parser

WRITE_TIMEOUT_S = 30.0  # for a client that has stopped reading
DEADLINE_HEADER = "X-Deadline-Ms"
LEFT_OUT_HEADER = "X-Pequod-Left-Out"
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
# Log-probabilities of prompts in one answer: 10 MB of JSON, written in a quarter of a second (off the event loop).
MAX_SCORES = 1 << 17
ALL_TOKENS = -1  # as a number of alternatives
NEVER = -100  # a logit_bias that forbids

Body = TypeVar("Body", bound=Drawing)
Encode = Callable[[LoadedModel, Caller, Body], Awaitable[list[Prompt]]]
MakeWriter = Callable[[Body, Head, list[Prompt], TokenText], Writer]


async def answer(
    app: Pequod,
    caller: Caller,
    request: Request,
    body: Body,
    *,
    encode: Encode[Body],
    write: MakeWriter[Body],
    prefix: str,
    default_max_tokens: int | None = None,
) -> Answer:
    """Take a request in, or raise the ApiError that it deserves; nothing has been sent when this returns.

    `encode` makes the prompts, `write` the API's Writer; `prefix` begins the answer's id. Where the request sets no
    limit, an answer has at most `default_max_tokens` tokens, None: as many as fit.
    """
    began = app.metrics.clock()
    name = app.check_model(body.model)
    model = app.require_ready()
    due = time_limit(app, request)
    check_fields(app, model.info, body)
    # The ticket is the caller's: it ends with the HTTP request, however that ends. Nothing slow comes before it.
    ticket = app.limits.admit(caller, body.num_prompts * body.num_choices)
    preparing = prepare(app, model, caller, body, encode=encode, ticket=ticket, default_max_tokens=default_max_tokens)
    try:
        async with asyncio.timeout(due and due.left_s):
            prompts, shaped, grammar, max_tokens, bad_words = await while_connected(request, preparing)
    except TimeoutError:
        raise deadline() from None
    head = Head(
        f"{prefix}{uuid.uuid4().hex}",
        int(time.time()),
        name,
        model.fingerprint,
        request.state.request_id,
        model.default_sampling,
    )
    requests = engine_requests(
        app, model, caller, body, prompts, max_tokens=max_tokens, grammar=grammar, bad_words=bad_words
    )
    track = app.metrics.track(
        request.state.request_id, body.num_choices, [len(prompt.ids) for prompt in prompts], max(max_tokens)
    )
    track.began = began  # the client waits since then, not since its prompt was tokenized
    choices = make_choices(model, body, requests, grammar, shaped)
    generation = Generation(app.engine, choices, body.num_choices, track, due, cut=app.deadline_passed)
    return Answer(generation, write(body, head, prompts, model.tokenizer.token_text), body)


class Prepared(NamedTuple):
    """What must be known of a request before the engine gets it."""

    prompts: list[Prompt]
    shape: Shape | None  # of a conversation
    grammar: Grammar | None  # of the whole text
    max_tokens: list[int]  # of each prompt's completions
    bad_words: tuple[tuple[int, ...], ...]


async def prepare(
    app: Pequod,
    model: LoadedModel,
    caller: Caller,
    body: Body,
    *,
    encode: Encode[Body],
    ticket: Ticket,
    default_max_tokens: int | None,
) -> Prepared:
    """Check the grammar and encode the prompts; raises the 400, 429 or 503 that ends the request here."""
    info = model.info
    grammar = await checked_grammar(app, model, caller, body)
    prompts = await encoded(encode(model, caller, body), body.prompt_field)
    shaped = (
        await shape(app.grammars, model, caller, body, grammar=grammar, prompt=prompts[0])
        if isinstance(body, Conversation)
        else None
    )
    max_tokens = [room(info, body, prompt.ids, default_max_tokens) for prompt in prompts]
    check_scores(body, prompts, info.vocab_size)
    ticket.add_prompt(sum(len(prompt.ids) for prompt in prompts))
    bad_words = await spelt(model, caller, body)
    return Prepared(prompts, shaped, shaped.grammar if shaped else grammar, max_tokens, bad_words)


# Checks before the first byte


def time_limit(app: Pequod, request: Request) -> Due | None:
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


def check_fields(app: Pequod, info: EngineInfo, body: Drawing) -> None:
    """What the schema cannot know: the model's vocabulary and the server's settings."""
    check_priority(app, body.priority)
    check_token_ids(info, body.stop_token_ids or (), "stop_token_ids")
    check_token_ids(info, tuple(body.logit_bias or ()), "logit_bias")
    check_token_ids(info, body.allowed_token_ids or (), "allowed_token_ids")
    if body.limit[1] == 0 and not body.only_scores:
        field = body.limit[0]
        raise invalid(f"Invalid '{field}': 0 is for scoring a prompt, with echo.", field)


def check_priority(app: Pequod, priority: int | None) -> None:
    """Raise 400 unless priorities decide here."""
    if priority and app.settings.scheduling_policy != "priority":
        raise invalid("Invalid 'priority': the server does not run with --scheduling-policy priority.", "priority")


def check_token_ids(info: EngineInfo, ids: Sequence[int], param: str) -> None:
    """Raise 400 unless the model has all of these tokens."""
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        raise invalid(f"Invalid '{param}': token ids must be in 0..{info.vocab_size - 1}.", param)


async def checked_grammar(app: Pequod, model: LoadedModel, caller: Caller, body: Drawing) -> Grammar | None:
    """The grammar that a request brings, if it does; raises 400 when it cannot be used."""
    grammar = body.answer_grammar
    if grammar is None:
        return None
    check_takes_grammars(model, body, grammar.field)
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


def room(info: EngineInfo, body: Drawing, ids: Sequence[int], default: int | None) -> int:
    """The most tokens that this prompt's completion may have; raises 400 when the prompt leaves no place for any."""
    left = info.max_len - len(ids)
    if left < 1:
        message = f"The prompt has {len(ids)} tokens, and the context holds {info.max_len} of prompt and completion"
        raise invalid(f"{message} together (--max-model-len).", body.prompt_field, CONTEXT_CODE)
    limit = body.limit[1]
    if limit is None:
        limit = default
    most = left if limit is None or limit == UNLIMITED else min(limit, left)
    if (body.min_tokens or 0) > most:
        raise invalid(f"Invalid 'min_tokens': the completion has at most {most} tokens.", "min_tokens")
    return most


def check_scores(body: Drawing, prompts: list[Prompt], vocab_size: int) -> None:
    """Raise 400 when the prompts' own log-probabilities are more than one answer may hold."""
    if body.scoring is None:
        return
    field, count = body.scoring
    count = vocab_size if count == ALL_TOKENS else count
    tokens = sum(len(prompt.ids) for prompt in prompts) * body.num_choices
    if tokens * (count + 1) > MAX_SCORES:
        told = f"Invalid '{field}': {tokens} prompt tokens with {count + 1} log-probabilities each"
        raise invalid(f"{told} are more than the {MAX_SCORES} that one answer holds.", field)


async def spelt(model: LoadedModel, caller: Caller, body: Drawing) -> tuple[tuple[int, ...], ...]:
    """The request's bad words as tokens; raises 400 when they and the other fields leave nothing to draw."""
    words: list[tuple[int, ...]] = []
    if body.bad_words:
        known = range(model.info.vocab_size)  # the model draws no others
        spellings = await model.prompts.spellings(body.bad_words, caller=caller.flow)
        words = [word for word in spellings if all(id in known for id in word)]
    if body.allowed_token_ids is not None:
        ends = body.stop_token_ids or () if body.min_tokens else ()
        never = [id for id, bias in (body.logit_bias or {}).items() if bias <= NEVER]
        if not {*body.allowed_token_ids} - {word[0] for word in words if len(word) == 1} - {*ends} - {*never}:
            raise invalid("Invalid 'allowed_token_ids': other fields forbid all of them.", "allowed_token_ids")
    return tuple(words)


# Engine requests


def engine_requests(
    app: Pequod,
    model: LoadedModel,
    caller: Caller,
    body: Drawing,
    prompts: list[Prompt],
    *,
    max_tokens: list[int],
    grammar: Grammar | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> list[EngineRequest]:
    """One request per choice, prompt by prompt."""
    salt = app.keys.salt_for(caller, body.cache_salt)
    requests = []
    for prompt, most in zip(prompts, max_tokens, strict=True):
        seed = app.new_seed() if body.seed is None else body.seed % 2**64
        for i in range(body.num_choices):
            own = seed if body.num_choices == 1 else seed_of_choice(seed, i)
            params = body.params(
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
                    priority=body.priority or 0,
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
    model: LoadedModel, body: Drawing, requests: list[EngineRequest], grammar: Grammar | None, shaped: Shape | None
) -> list[Choice]:
    """A Choice per request; those of one prompt share its scores."""
    choices = []
    scores = None
    for index, request in enumerate(requests):
        if index % body.num_choices == 0:
            scores = None if body.scoring is None else Scores()
        stream = text_stream(model, body, request, grammar, shaped)
        parser = message_parser(body, shaped) if shaped and isinstance(body, Conversation) else None
        field = grammar.field if grammar else ""
        asked = body.answer_grammar
        calling = body.calling if isinstance(body, Conversation) else None
        choice = Choice(
            index,
            request,
            stream,
            field,
            parser=parser,
            scores=scores,
            is_silent=body.only_scores,
            is_json=asked is not None and asked.kind == "json_schema",
            one_call=calling is not None and not calling.is_parallel,
        )
        choices.append(choice)
    return choices


def text_stream(
    model: LoadedModel, body: Drawing, request: EngineRequest, grammar: Grammar | None, shaped: Shape | None
) -> TextStream:
    hidden = hidden_ids(model, shaped.formats) if shaped else model.tokenizer.special_ids
    if body.skip_special_tokens is False:
        hidden = frozenset()
    return TextStream(
        model.tokenizer,
        body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        hidden=hidden,
        context=request.prompt_ids,
        strip=grammar is None,
        min_tokens=body.min_tokens or 0,
    )


# Sending


class Answer(Response):
    """Runs a Generation while it is being sent; an error before the first byte leaves as an ordinary exception."""

    def __init__(self, generation: Generation, writer: Writer, body: Drawing) -> None:
        super().__init__()
        self.generation = generation
        self.writer = writer
        self.request = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.generation.running(receive):
            if self.request.stream:
                await Stream(self.generation, self.writer, self.request, send).run()
            else:
                await self._send_whole(scope, receive, send)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs: list[list[Output]] = [[] for _ in self.generation.choices]
        async for taken in self.generation.outputs():
            for output in taken:
                outputs[output.choice].append(output)
        usage = self.generation.usage()

        def written() -> bytes:
            return msgspec.json.encode(self.writer.whole([Output.join(each) for each in outputs], usage))

        body = written() if self.request.scoring is None else await asyncio.to_thread(written)
        response = Response(body, media_type="application/json", headers=notes(self.writer.prompts))
        await response(scope, receive, lambda message: self._send_patiently(send, message))

    async def _send_patiently(self, send: Send, message: Any) -> None:
        await patiently(self.generation, send, message)


class Stream:
    """Writes a generation as server-sent events.

    The head waits for the first token or for HEARTBEAT_S, so that whatever fails until then has its own status.
    """

    def __init__(self, generation: Generation, writer: Writer, body: Drawing, send: Send) -> None:
        self.generation = generation
        self.writer = writer
        self.request = body
        self.send = send
        self.has_begun = False

    async def run(self) -> None:
        try:
            async for outputs in self.generation.outputs():
                await self._begin()
                await self._write(await self._frames(outputs) if outputs else sse.HEARTBEAT)
            await self._write(self._events(self.writer.closing(self.generation.usage())) + self.writer.end, more=False)
        except Gone:
            raise
        except Exception as error:
            if not self.has_begun:
                raise
            self.generation.stop(error, "error")
            # The status has gone: the error is the last event, never a cut connection.
            failure = self.writer.failure(from_exception(error), self.generation.usage())
            await self._write(failure + self.writer.end, more=False)

    async def _begin(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        told = sse.HEADERS | notes(self.writer.prompts)
        headers = [(name.lower().encode(), value.encode()) for name, value in told.items()]
        await patiently(self.generation, self.send, {"type": "http.response.start", "status": 200, "headers": headers})
        usage = self._running()
        if usage is not None:  # none of the first tokens has been sent yet
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        await self._write(self._events(self.writer.opening(usage)))

    async def _frames(self, outputs: list[Output]) -> bytes:
        running = self._running()

        def written() -> bytes:
            return b"".join(self._events(self.writer.chunks(output, running)) for output in outputs)

        has_scores = any(output.prompt_logprobs for output in outputs)
        return await asyncio.to_thread(written) if has_scores else written()

    def _running(self) -> Json | None:
        """Usage so far, where every chunk is to tell it."""
        return self.generation.usage() if self.request.continuous_usage else None

    def _events(self, chunks: list[Json]) -> bytes:
        return b"".join(self.writer.frame(chunk) for chunk in chunks)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            await patiently(self.generation, self.send, {"type": "http.response.body", "body": data, "more_body": more})


def notes(prompts: list[Prompt]) -> dict[str, str]:
    """Headers that say what of the request is not part of its prompts."""
    left_out = sorted({prompt.left_out for prompt in prompts} - {""})
    return {LEFT_OUT_HEADER: ", ".join(left_out)} if left_out else {}


async def patiently(generation: Generation, send: Send, message: Any) -> None:
    """Send, or raise Gone when the client has not read for WRITE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        generation.stop(Gone(), "slow_reader")
        raise Gone from None
    except OSError:
        generation.stop(Gone(), "disconnect")
        raise Gone from None
