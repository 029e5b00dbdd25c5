"""POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec.json import decode

from ...generation.http_response import respond
from ...generation.output import Json
from ...http.admission import Caller
from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import OPENAI_ERRORS, ApiError, invalid, not_found
from ...http.excerpt import shown
from ...http.openapi import described, events, returned
from ...state import AppDep
from .. import conversation
from ..tools import MAX_TOOLS
from .items import MAX_ITEMS, is_repeat
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
    **{status: OPENAI_ERRORS[status] for status in (400, 401, 503)},
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
    await resolve(responses.store, caller, payload)
    keep = keeper(responses.store, app.keys.payer(caller), caller, payload)
    write = partial(ResponsesWriter, payload, store=keep)
    made = await respond(app, caller, request, payload.resolve(), write=write, prefix="resp_")
    if not payload.background:
        return made
    assert isinstance(made.writer, ResponsesWriter)
    queued = made.writer.keep("queued")
    responses.start(queued.id, Job(made.generation, made.writer), caller.hand_over())
    return reply(msgspec.json.encode(queued))


@router.post(
    "/v1/responses/input_tokens",
    responses={status: OPENAI_ERRORS[status] for status in (400, 401, 404, 413, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": SAME_BODY}}}},
)
async def input_tokens(
    payload: ResponsesBody, app: AppDep, responses: ResponsesDep, caller: UserDep, request: Request
) -> InputTokens:
    """Count the tokens of the prompt of such a response, without generating or storing anything."""
    if payload.is_empty and payload.instructions is None:
        raise no_input()
    await resolve(responses.store, caller, payload)
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
    return reply(await asyncio.to_thread(page_of, record.items, limit, order, after))


def keeper(store: Store, payer: str, caller: Caller, payload: ResponsesRequest) -> Callable[[ResponseObject], None]:
    """Return a function that stores one request's response with the conversation before it, unless store is false."""
    items = b""  # the conversation; encoded once, since it can be long

    def keep(response: ResponseObject) -> None:
        nonlocal items
        if payload.is_stored:
            is_replacement = bool(items)
            items = items or msgspec.json.encode(named(payload, response.id))
            is_open = response.status in OPEN
            record = Record(response.id, caller.key, is_open, msgspec.json.encode(response), items, payer)
            store.put(record, is_replacement)

    return keep


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


async def resolve(store: Store, caller: Caller, payload: ResponsesRequest) -> None:
    """Look up what a request continues and the items that it refers to; raises 400 for unknown ids."""
    before: list[Json] = []
    if payload.previous_response_id is not None:
        before = await stored_items(store, caller, payload.previous_response_id)
    continued = {item["id"]: item for item in before}
    known = dict(continued)
    own = []
    for index, item in enumerate(payload.given):
        is_reference = item["type"] == "item_reference"
        own.append(await referred(store, caller, item["id"], known, f"input.{index}.id") if is_reference else item)
    if len(before) + len(own) > MAX_ITEMS:
        message = f"Invalid 'input': the conversation has {len(before) + len(own)} items, and may have {MAX_ITEMS}."
        raise invalid(message, "input")
    payload.expand(before, [item for item in own if not is_repeat(item, continued)])
    if len(payload.callables) > MAX_TOOLS:
        raise invalid(f"Invalid 'input': the conversation has more than {MAX_TOOLS} functions.", "input")


async def stored_items(store: Store, caller: Caller, response_id: str) -> list[Json]:
    """Return all items of a stored response, including its own output."""
    record = await store.get(response_id, caller.key)
    field = "previous_response_id"
    if record is None:
        raise invalid(f"There is no stored response '{shown(response_id)}'.", field, "previous_response_not_found")
    if record.is_open:
        raise invalid(f"Invalid '{field}': the response is not complete yet.", field)
    return await asyncio.to_thread(all_items, record)


async def referred(store: Store, caller: Caller, id: str, known: dict[str, Json], field: str) -> Json:
    """Return the item of an id. `known` has the items found so far; all items of its response are added to it."""
    if id not in known:
        record = await store.get(response_of(id), caller.key)
        items = [] if record is None else await asyncio.to_thread(all_items, record)
        known |= {item["id"]: item for item in items}
    if id not in known:
        raise invalid(f"There is no stored item '{shown(id)}'.", field, "item_not_found")
    return known[id]


# The rest runs on a thread, since a stored conversation can have tens of megabytes.


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


def all_items(record: Record) -> list[Json]:
    """Return a response's conversation and output as the next response reads them."""
    items: list[Json] = [decode(item) for item in elements(record.items)]
    for item in decode(record.answer)["output"]:
        if item["type"] in ("function_call", "custom_tool_call") and item["status"] != "completed":
            continue  # a call that was cut off cannot be run
        if item["type"] == "message":
            item["content"] = [{**part, "logprobs": []} for part in item["content"]]
        items.append(item)
    return items


def listed(item: Json) -> Json:
    """Return an item as the list of items shows it: with a status, and a message's text as a list of parts."""
    if item["type"] != "additional_tools":
        item = {"status": "completed", **item}
    if isinstance(item.get("content"), str):
        item["content"] = [{"type": "input_text", "text": item["content"]}]
    return item
