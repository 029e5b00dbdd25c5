"""POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec.json import decode

from ...generation.http_response import respond
from ...generation.output import Json
from ...grammar.schemas import MAX_SOURCE
from ...http.admission import Caller, Limits, Ticket
from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import CONTEXT_CODE, OPENAI_ERRORS, ApiError, invalid, not_found
from ...http.excerpt import shown
from ...http.openapi import described, events, returned
from ...state import AppDep
from .. import conversation
from ..tools import MAX_TOOLS
from .items import MAX_ITEMS, without_repeats
from .request import Included, ResponsesRequest
from .response import ResponsesWriter, item_id, response_of
from .schema import InputItems, InputTokens, ResponseDeleted, ResponseEvent, ResponseObject
from .state import Job, ResponsesDep
from .store import Store
from .store_file import Record

OPEN = ("queued", "in_progress")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
PREFIXES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "additional_tools": "at"}


async def check_query(request: Request, _: UserDep) -> None:
    """Raise 400 for an unknown query parameter; callers without a valid key get a 401 instead."""
    known = {param.alias for param in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise invalid(f"Unknown field: '{shown(name)}'.", shown(name), "unknown_parameter")


router = APIRouter(tags=["responses"], dependencies=[Depends(check_query)])

ResponsesBody = Annotated[ResponsesRequest, Depends(body(ResponsesRequest))]

STREAM = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
    '"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Hello","logprobs":[]}\n\n'
)
RETURNS = returned(
    ResponseObject,
    "The response; with stream true its typed events; with background true as it begins, queued",
    OPENAI_ERRORS,
    **events(ResponseEvent, STREAM, is_typed=True),
)
SAME_BODY = {
    "type": "object",
    "properties": {},
    "description": "The body of POST /v1/responses.",
    "examples": [{"model": "builtin", "input": "What is continuous batching?"}],
}
STORED: dict[int | str, dict[str, Any]] = {
    **{status: OPENAI_ERRORS[status] for status in (400, 401, 429, 503)},
    404: {**OPENAI_ERRORS[404], "description": "No such response, or not the caller's"},
}
INCLUDE_NOTE = "Accepted: a response contains what the request that created it included."
Include = Annotated[list[Included] | None, Query(max_length=16, description=INCLUDE_NOTE)]
# The name that OpenAI's Python and JavaScript libraries send.
IncludeInBrackets = Annotated[list[Included] | None, Query(alias="include[]", max_length=16, description=INCLUDE_NOTE)]
ONE = returned(ResponseObject, "The response as it is now", STORED)


@router.post("/v1/responses", response_class=Response, responses=RETURNS, openapi_extra=described(ResponsesRequest))
async def create(
    payload: ResponsesBody, app: AppDep, responses: ResponsesDep, caller: UserDep, request: Request
) -> Response:
    """Generate a response to a text or a conversation, which may continue a stored one."""
    if payload.is_empty:
        raise no_input()
    num_stored = await resolve(responses.store, app.limits, caller, payload)
    keep = Keeper(responses.store, app.keys.payer(caller), caller, payload)
    write = partial(ResponsesWriter, payload, store=keep)
    made = await respond(app, caller, request, payload.resolve(), write=write, prefix="resp_")
    assert isinstance(made.writer, ResponsesWriter)
    if num_stored and payload.is_stored:
        await asyncio.to_thread(keep.encode, made.writer.head.id)  # what the body adds is no longer than the body
    if not payload.background:
        return made
    queued = made.writer.keep("queued")
    responses.start(queued.id, Job(made.generation, made.writer), caller.hand_over())
    return reply(msgspec.json.encode(queued))


@router.post(
    "/v1/responses/input_tokens",
    responses={status: OPENAI_ERRORS[status] for status in (400, 401, 404, 413, 429, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": SAME_BODY}}}},
)
async def input_tokens(
    payload: ResponsesBody, app: AppDep, responses: ResponsesDep, caller: UserDep, request: Request
) -> InputTokens:
    """Count the tokens of the prompt of such a response, without generating or storing anything."""
    if payload.is_empty and payload.instructions is None:
        raise no_input()
    await resolve(responses.store, app.limits, caller, payload)
    count = await conversation.count_tokens(app, caller, request, payload.model, payload.prompt_source, field="input")
    return InputTokens(input_tokens=count)


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(_: UserDep) -> None:
    """Not supported: a 404. Only the model that compacted a conversation could read the result."""
    raise not_found("This server does not compact conversations; leave out older items of the input instead.", None)


@router.get("/v1/responses/{response_id}", response_class=Response, responses=ONE)
async def retrieve(
    *,
    response_id: str,
    responses: ResponsesDep,
    caller: UserDep,
    stream: bool = False,
    starting_after: int | None = None,
    include: Include = None,
    include_in_brackets: IncludeInBrackets = None,
    include_obfuscation: bool | None = None,
) -> Response:
    """Return a stored response as it is now; include_obfuscation is accepted: events are never padded."""
    if stream or starting_after is not None:
        field = "stream" if stream else "starting_after"
        raise invalid(f"Unsupported field: '{field}'; send the request again until the status is final.", field)
    return reply((await found(responses.store, caller, response_id)).answer)


@router.post("/v1/responses/{response_id}/cancel", response_class=Response, responses=ONE)
async def cancel(response_id: str, responses: ResponsesDep, caller: UserDep) -> Response:
    """Stop a background response; one that has ended stays as it is."""
    record = await found(responses.store, caller, response_id)
    if not await asyncio.to_thread(is_background, record.answer):
        raise invalid("Only a response with background true can be cancelled; to stop another, hang up.", "response_id")
    await responses.cancel(response_id)
    return reply((await found(responses.store, caller, response_id)).answer)


@router.delete("/v1/responses/{response_id}", responses=STORED)
async def delete(response_id: str, responses: ResponsesDep, caller: UserDep) -> ResponseDeleted:
    """Delete a response and stop it if it is still being generated. Responses that continue it keep its items."""
    if await responses.store.get(response_id, caller.key) is not None:
        await responses.cancel(response_id)
    if not await responses.store.delete(response_id, caller.key):
        raise no_response(response_id)
    return ResponseDeleted(id=response_id)


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_class=Response,
    responses=returned(InputItems, "One page of the items", STORED),
)
async def input_items(
    *,
    response_id: str,
    app: AppDep,
    responses: ResponsesDep,
    caller: UserDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=512)] = None,
    include: Include = None,
    include_in_brackets: IncludeInBrackets = None,
) -> Response:
    """List the conversation before a response, with what it continues; `after` is the last item of a page."""
    record = await found(responses.store, caller, response_id)
    app.limits.hold_bytes(caller, record.num_bytes)  # of which many can wait for a thread
    return reply(await asyncio.to_thread(page_of, record.items, limit, order, after))


class Keeper:
    """Stores one request's response with the conversation before it, unless store is false."""

    def __init__(self, store: Store, payer: str, caller: Caller, payload: ResponsesRequest) -> None:
        self._store = store
        self._payer = payer
        self._caller = caller
        self._payload = payload
        self._items = b""  # the conversation; encoded once, since it can be long
        self._is_kept = False  # an earlier version of the response

    def __call__(self, response: ResponseObject) -> None:
        """Store the response as it is now."""
        if self._payload.is_stored:
            self.encode(response.id)
            is_open = response.status in OPEN
            answer = msgspec.json.encode(response)
            record = Record(response.id, self._caller.key, is_open, answer, self._items, self._payer)
            self._store.put(record, self._is_kept)
            self._is_kept = True

    def encode(self, response_id: str) -> None:
        """Encode the conversation, unless that is done already."""
        self._items = self._items or msgspec.json.encode(named(self._payload, response_id))


def named(payload: ResponsesRequest, response_id: str) -> list[Json]:
    """Return the conversation before the output, whose items all have ids of their own."""
    items = list(payload.before)
    taken = {item["id"] for item in items}
    for index, item in enumerate(payload.given):
        id = item.get("id")
        if id is None or id in taken:  # some clients give several items one id
            id = item_id(PREFIXES[item["type"]], response_id, index)
        taken.add(id)
        items.append({**item, "id": id})
    return items


async def found(store: Store, caller: Caller, response_id: str) -> Record:
    """Return a caller's own stored response; raises 404."""
    record = await store.get(response_id, caller.key)
    if record is None:
        raise no_response(response_id)
    return record


def no_input() -> ApiError:
    """Return a 400 for a request without a conversation, in the words of OpenAI."""
    message = 'One of "input" or "previous_response_id" must be provided.'
    return invalid(message, "input", "missing_required_parameter")


def no_response(response_id: str) -> ApiError:
    """Return a 404 for an id that is unknown or another caller's."""
    return not_found(f"There is no stored response '{shown(response_id)}'.", "response_id", "response_not_found")


def reply(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def resolve(store: Store, limits: Limits, caller: Caller, payload: ResponsesRequest) -> int:
    """Look up what a request continues and the items that it refers to; return the number of their bytes.

    Raises 400 for unknown ids and for a conversation that is longer than a body may be, and 429 or 503 if too many
    requests have long ones.
    """
    before: list[StoredItem] = []
    if payload.previous_response_id is not None:
        before = await stored_items(store, limits, caller, payload.previous_response_id)
    known = {stored.item["id"]: stored for stored in before}
    continued = {id: stored.item for id, stored in known.items()}
    given = payload.given
    wanted = {item["id"] for item in given if item["type"] == "item_reference"}
    own: list[Json] = []
    before_bytes, own_bytes = sum(stored.num_bytes for stored in before), 0
    held = limits.hold_bytes(caller, 0)
    for index, item in enumerate(given):
        if item["type"] != "item_reference":
            own.append(item)
            continue
        id = item["id"]
        if id not in known:
            for stored in await referred(store, held, id, wanted):
                known.setdefault(stored.item["id"], stored)
        if id not in known:
            raise invalid(f"There is no stored item '{shown(id)}'.", f"input.{index}.id", "item_not_found")
        # For each reference again: a few bytes of the body can stand for a long item.
        own_bytes += known[id].num_bytes
        check_size(limits, before_bytes + own_bytes, "input")
        held.add_bytes(known[id].num_bytes)
        own.append(known[id].item)
    if len(before) + len(own) > MAX_ITEMS:
        message = f"Invalid 'input': the conversation has {len(before) + len(own)} items, and may have {MAX_ITEMS}."
        raise invalid(message, "input")
    payload.expand([stored.item for stored in before], without_repeats(own, continued))
    num_bytes = before_bytes + own_bytes
    # On a thread, since stored tools are validated again.
    found = await asyncio.to_thread(lambda: payload.callables) if num_bytes else payload.callables
    if len(found) > MAX_TOOLS:
        raise invalid(f"Invalid 'input': the conversation has more than {MAX_TOOLS} functions.", "input")
    if sum(len(each.grammar.definition) for each in found if each.grammar is not None) > MAX_SOURCE:
        message = f"the tools of the conversation have grammars of more than {MAX_SOURCE} characters together"
        raise invalid(f"Invalid 'input': {message}.", "input")
    return num_bytes


def check_size(limits: Limits, num_bytes: int, field: str) -> None:
    """Raise 400 for a stored conversation that is longer than a body may be."""
    if num_bytes > (limit := limits.max_body_bytes):
        message = f"with its stored items the conversation has more than {limit} bytes (--max-body-bytes)"
        raise invalid(f"Invalid '{field}': {message}.", field, CONTEXT_CODE)


async def stored_items(store: Store, limits: Limits, caller: Caller, response_id: str) -> list[StoredItem]:
    """Return all items of a stored response, including its own output."""
    record = await store.get(response_id, caller.key)
    field = "previous_response_id"
    if record is None:
        raise invalid(f"There is no stored response '{shown(response_id)}'.", field, "previous_response_not_found")
    if record.is_open:
        raise invalid(f"Invalid '{field}': the response is not complete yet.", field)
    check_size(limits, len(record.items), field)
    limits.hold_bytes(caller, record.num_bytes)
    items = await asyncio.to_thread(all_items, record)
    check_size(limits, sum(stored.num_bytes for stored in items), field)
    return items


async def referred(store: Store, held: Ticket, id: str, wanted: Collection[str]) -> list[StoredItem]:
    """Return the `wanted` items of the response that the item `id` belongs to, whose bytes `held` then counts."""
    record = await store.get(response_of(id), held.caller.key)
    if record is None:
        return []
    with held.limits.hold_bytes(held.caller, record.num_bytes):
        items = await asyncio.to_thread(all_items, record, wanted)
    held.add_bytes(sum(stored.num_bytes for stored in items))
    return items


# The rest runs on a thread, since a stored conversation can have tens of megabytes.


class StoredItem(NamedTuple):
    """An item of a stored conversation, and the length of its JSON."""

    item: Json
    num_bytes: int


class Identified(msgspec.Struct):
    """An item, of which only the id is decoded."""

    id: str


class Background(msgspec.Struct):
    """A response, of which only this field is decoded."""

    background: bool


def is_background(answer: bytes) -> bool:
    """Whether a stored response was requested with background true."""
    return msgspec.json.decode(answer, type=Background).background


def elements(data: bytes) -> list[msgspec.Raw]:
    """Return the elements of a stored JSON array, not decoded.

    Decoding them one by one lets other threads run in between; msgspec holds the interpreter's lock during a call.
    """
    return msgspec.json.decode(data, type=list[msgspec.Raw])


def page_of(data: bytes, limit: int, order: str, after: str | None) -> bytes:
    """Return a page of a stored conversation as JSON; only the items of the page are decoded whole."""
    items = elements(data)
    if order == "desc":
        items.reverse()
    if after is not None:
        # The last of its id: in files of earlier versions several may have one, and pages must not repeat.
        indices = range(len(items) - 1, -1, -1)
        index = next((i for i in indices if msgspec.json.decode(items[i], type=Identified).id == after), None)
        if index is None:
            raise invalid("Invalid 'after': no item of the response has this id.", "after")
        items = items[index + 1 :]
    page = [listed(decode(item)) for item in items[:limit]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return msgspec.json.encode(InputItems("list", page, first, last, len(items) > limit))


def all_items(record: Record, wanted: Collection[str] | None = None) -> list[StoredItem]:
    """Return a response's conversation and output as the next response reads them; `wanted`: the ids, None for all."""
    items = [
        StoredItem(decode(item), len(memoryview(item)))
        for item in elements(record.items)
        if wanted is None or msgspec.json.decode(item, type=Identified).id in wanted
    ]
    for item in decode(record.answer)["output"]:
        if item["type"] in ("function_call", "custom_tool_call") and item["status"] != "completed":
            continue  # a call that was cut off cannot be run
        if item["type"] == "message":
            item["content"] = [{**part, "logprobs": []} for part in item["content"]]
        if wanted is None or item["id"] in wanted:
            items.append(StoredItem(item, len(msgspec.json.encode(item))))
    return items


def listed(item: Json) -> Json:
    """Return an item as the list of items shows it: with a status, and a message's text as a list of parts."""
    if item["type"] != "additional_tools":
        item = {"status": "completed", **item}
    if isinstance(item.get("content"), str):
        item["content"] = [{"type": "input_text", "text": item["content"]}]
    return item
