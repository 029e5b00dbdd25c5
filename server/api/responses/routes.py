"""POST /v1/responses, and what can be done with a stored response."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from ...generation.http_response import answer
from ...generation.output import Head, Json, Prompt, TokenText
from ...http.admission import Caller
from ...http.auth import UserDep
from ...http.body import body
from ...http.errors import OPENAI_ERRORS, ApiError, invalid, not_found
from ...http.excerpt import shown
from ...http.openapi import described, events, returned
from ...state import AppDep
from .. import conversation
from .background import Job
from .items import MAX_ITEMS
from .records import Record, elements, unpacked
from .request import ResponsesRequest
from .response import ResponsesWriter, item_id, response_of
from .schema import InputItems, InputTokens, ResponseDeleted, ResponseEvent, ResponseObject
from .state import ResponsesDep
from .store import Store

OPEN = ("queued", "in_progress")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


async def check_query(request: Request, _: UserDep) -> None:
    """Raise 400 for a query parameter that the route does not have; only for those who may know what it has."""
    known = {param.alias for param in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise invalid(f"Unknown field: '{shown(name)}'.", shown(name), "unknown_parameter")


router = APIRouter(tags=["responses"], dependencies=[Depends(check_query)])

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
ONE = returned(ResponseObject, "The response as it is now", STORED)


@router.post("/v1/responses", response_class=Response, responses=RETURNS, openapi_extra=described(ResponsesRequest))
async def create(
    asked: Annotated[ResponsesRequest, Depends(body(ResponsesRequest))],
    app: AppDep,
    responses: ResponsesDep,
    caller: UserDep,
    request: Request,
) -> Response:
    """The answer to a text or to a conversation, which goes on from a stored one where that is asked for."""
    await resolve(responses.store, caller, asked)
    keeper = Keeper(responses.store, app.keys.payer(caller), caller, asked)
    made = await answer(app, caller, request, asked.resolve(), write=keeper.writer, prefix="resp_")
    if not asked.background:
        return made
    assert isinstance(made.writer, ResponsesWriter)
    queued = made.writer.keep("queued")
    responses.background.start(queued.id, Job(made.generation, made.writer), caller.hand_over())
    return reply(msgspec.json.encode(queued))


@router.post(
    "/v1/responses/input_tokens",
    responses={status: OPENAI_ERRORS[status] for status in (400, 401, 404, 413, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": SAME_BODY}}}},
)
async def input_tokens(
    asked: Annotated[ResponsesRequest, Depends(body(ResponsesRequest))],
    app: AppDep,
    responses: ResponsesDep,
    caller: UserDep,
    request: Request,
) -> InputTokens:
    """How many tokens the prompt of such a response has, without generating or storing anything."""
    await resolve(responses.store, caller, asked)
    count = await conversation.count_tokens(app, caller, request, asked.model, asked.prompt_source, field="input")
    return InputTokens(input_tokens=count)


@router.post("/v1/responses/compact", responses={status: OPENAI_ERRORS[status] for status in (401, 404)})
async def compact(_: UserDep) -> None:
    """Not supported: a 404. What a compacted conversation holds, only the model that made it can read."""
    raise not_found("This server does not compact conversations; leave out older items of the input instead.", None)


@router.get("/v1/responses/{response_id}", response_class=Response, responses=ONE)
async def retrieve(
    *,
    response_id: str,
    responses: ResponsesDep,
    caller: UserDep,
    stream: bool = False,
    include_obfuscation: bool | None = None,
) -> Response:
    """A stored response, as it is now; include_obfuscation is accepted: no event is padded either way."""
    if stream:
        raise invalid("Unsupported field: 'stream'; ask again until status tells the end.", "stream")
    return reply((await found(responses.store, caller, response_id)).answer)


@router.post("/v1/responses/{response_id}/cancel", response_class=Response, responses=ONE)
async def cancel(response_id: str, responses: ResponsesDep, caller: UserDep) -> Response:
    """Stop the work on a background response; what has come to its end stays as it is."""
    record = await found(responses.store, caller, response_id)
    if not await asyncio.to_thread(is_background, record.answer):
        raise invalid("Only a response with background true can be cancelled; to stop another, hang up.", "response_id")
    await responses.background.cancel(response_id)
    return reply((await found(responses.store, caller, response_id)).answer)


@router.delete("/v1/responses/{response_id}", responses=STORED)
async def delete(response_id: str, responses: ResponsesDep, caller: UserDep) -> ResponseDeleted:
    """Forget a response; work that goes on for it is stopped. Responses that went on from it stay whole."""
    if await responses.store.get(response_id, caller.key) is not None:
        await responses.background.cancel(response_id)
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
) -> Response:
    """The conversation before a response, what it went on from included; `after` is the last item of a page."""
    record = await found(responses.store, caller, response_id)
    return reply(await asyncio.to_thread(page_of, record.items, limit, order, after))


class Keeper:
    """Has one request's response kept in the store, with the conversation that led to it, unless store is false."""

    def __init__(self, store: Store, payer: str, caller: Caller, asked: ResponsesRequest) -> None:
        self.store = store
        self.owner = caller.key
        self.payer = payer
        self.asked = asked
        self._items = b""  # the conversation; made once, it can be long

    def writer(self, head: Head, prompts: list[Prompt], token_text: TokenText) -> ResponsesWriter:
        return ResponsesWriter(self.asked, head, prompts, token_text, keep=self.keep)

    def keep(self, response: ResponseObject) -> None:
        if self.asked.is_stored:
            is_replacement = bool(self._items)
            self._items = self._items or msgspec.json.encode(named(self.asked, response.id))
            is_open = response.status in OPEN
            record = Record(response.id, self.owner, is_open, msgspec.json.encode(response), self._items, self.payer)
            self.store.put(record, is_replacement)


def named(asked: ResponsesRequest, response_id: str) -> list[Json]:
    """The conversation up to the answer; what the request brought gets ids where it has none."""
    own = asked.given
    ids = [item_id(PREFIXES[item["type"]], response_id, place) for place, item in enumerate(own)]
    return asked.items[: -len(own)] + [{"id": id, **item} for id, item in zip(ids, own, strict=True)]


async def found(store: Store, caller: Caller, response_id: str) -> Record:
    """A caller's own stored response; raises 404."""
    record = await store.get(response_id, caller.key)
    if record is None:
        raise no_response(response_id)
    return record


def no_response(response_id: str) -> ApiError:
    """404: no response of this id, or not the caller's."""
    return not_found(f"There is no stored response '{shown(response_id)}'.", "response_id", "response_not_found")


def reply(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def resolve(store: Store, caller: Caller, asked: ResponsesRequest) -> None:
    """Find what comes before a request's input, and what its references mean; raises 400 where it is not there."""
    before: list[Json] = []
    if asked.previous_response_id is not None:
        before = await stored_items(store, caller, asked.previous_response_id)
    known = {item["id"]: item for item in before}
    own = []
    for place, item in enumerate(asked.given):
        is_reference = item["type"] == "item_reference"
        own.append(await referred(store, caller, item["id"], known, f"input.{place}.id") if is_reference else item)
    if len(before) + len(own) > MAX_ITEMS:
        message = f"Invalid 'input': the conversation has {len(before) + len(own)} items, and may have {MAX_ITEMS}."
        raise invalid(message, "input")
    asked.expand(before, own)


async def stored_items(store: Store, caller: Caller, response_id: str) -> list[Json]:
    """All items of a stored response, its own output included."""
    record = await store.get(response_id, caller.key)
    field = "previous_response_id"
    if record is None:
        raise invalid(f"There is no stored response '{shown(response_id)}'.", field, "previous_response_not_found")
    if record.is_open:
        raise invalid(f"Invalid '{field}': the response is not complete yet.", field)
    return await asyncio.to_thread(all_items, record)


async def referred(store: Store, caller: Caller, id: str, known: dict[str, Json], field: str) -> Json:
    """The item of an id. `known` are the items found so far; those of its response come in with it."""
    if id not in known:
        record = await store.get(response_of(id), caller.key)
        items = [] if record is None else await asyncio.to_thread(all_items, record)
        known |= {item["id"]: item for item in items}
    if id not in known:
        raise invalid(f"There is no stored item '{shown(id)}'.", field, "item_not_found")
    return known[id]


# A stored conversation can be tens of MB: what follows runs on a thread.


class Identified(msgspec.Struct):
    """An item, of which only the id is decoded."""

    id: str


class Begun(msgspec.Struct):
    """A response, of which only this field is decoded."""

    background: bool


def is_background(answer: bytes) -> bool:
    """Whether a stored response was requested with background true."""
    return msgspec.json.decode(answer, type=Begun).background


def page_of(data: bytes, limit: int, order: str, after: str | None) -> bytes:
    """A page of a stored conversation as JSON; only its own items are decoded whole."""
    items = elements(data)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = (msgspec.json.decode(item, type=Identified).id for item in items)
        index = next((index for index, id in enumerate(ids) if id == after), None)
        if index is None:
            raise invalid("Invalid 'after': no item of the response has this id.", "after")
        items = items[index + 1 :]
    page = listed([unpacked(item) for item in items[:limit]])
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return msgspec.json.encode(InputItems("list", page, first, last, len(items) > limit))


def all_items(record: Record) -> list[Json]:
    """A response's conversation and output, as what comes next is to see them."""
    items: list[Json] = [unpacked(item) for item in elements(record.items)]
    for item in unpacked(record.answer)["output"]:
        if item["type"] == "function_call" and item["status"] != "completed":
            continue  # what was cut off is not a call
        if item["type"] == "message":
            item["content"] = [{**part, "logprobs": []} for part in item["content"]]
        items.append(item)
    return items


def listed(items: list[Json]) -> list[Json]:
    """Items as they are listed: a message's text is a list of parts."""
    return [
        {**item, "content": [{"type": "input_text", "text": item["content"]}]}
        if isinstance(item.get("content"), str)
        else item
        for item in items
    ]
