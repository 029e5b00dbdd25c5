"""Whatever is wrong with a body leaves as a 400 that names the field, and repeats nothing long."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine import EngineDied, ModelError, RequestError
from server.api.anthropic.request import MessagesRequest
from server.api.chat.request import ChatRequest
from server.api.completions.request import CompletionRequest
from server.api.embeddings.request import EmbeddingRequest
from server.api.rerank.request import RerankRequest, ScoreRequest
from server.api.responses.request import ResponsesRequest
from server.http.body import (
    FEW_QUOTES,
    MAX_ELEMENTS,
    MAX_NODES,
    MAX_STRINGS,
    NODES,
    is_suspect,
    parse,
    without_strings,
)
from server.http.errors import ApiError, from_exception, from_validation, invalid
from server.http.openapi import described


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Text(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Text], Field(min_length=1)]


class Ask(Strict):
    messages: list[Message] = Field(min_length=1)
    temperature: float = Field(1.0, ge=0, le=2)
    n: int = Field(1, ge=1, le=16)
    anything: Any = None
    stop: list[str] | str | None = None

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("must not be empty")
        if value == "refused":
            raise invalid("'stop' is refused.", "stop", "unsupported")
        return value


MISSING = "missing_required_parameter"
OK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def refusal(raw: bytes | dict[str, Any], ignore: tuple[str, ...] = ()) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(Ask, raw if isinstance(raw, bytes) else json.dumps(raw).encode(), ignore)
    assert caught.value.status == 400
    envelope = json.loads(caught.value.body())["error"]
    assert set(envelope) == {"message", "type", "param", "code"}
    assert envelope["type"] == "invalid_request_error"
    return caught.value


def test_a_right_body_is_parsed():
    asked = parse(Ask, json.dumps({**OK, "temperature": 0, "stop": ["a", "b"]}).encode())
    assert asked.messages[0].content == "Hi"
    assert asked.temperature == 0
    assert asked.stop == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"n": 10**30}, "n", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}, "messages.1.role", MISSING),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", MISSING),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x", "unknown_parameter"),
        ({"colour": "blue"}, "colour", "unknown_parameter"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": "refused"}, "stop", "unsupported"),
        ({"stop": [1]}, "stop.0", "invalid_type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "invalid_value"),
        ({"": 1}, "", "unknown_parameter"),
    ],
)  # fmt: skip
def test_the_field_is_named_as_in_the_clients_document(change, param, code):
    error = refusal({**OK, **change})
    assert (error.param, error.code) == (param, code)
    assert param in error.message


def test_a_missing_field_is_named():
    error = refusal(b"{}")
    assert (error.param, error.code) == ("messages", MISSING)


def test_a_missing_role_is_named_where_the_role_selects_the_kind():
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, b'{"messages": [{"content": "a"}]}')
    assert (caught.value.param, caught.value.code) == ("messages.0.role", MISSING)


def test_a_body_of_very_many_names_is_refused_before_each_of_them_is_an_error():
    many = {str(i): 1 for i in range(MAX_NODES + 1)}
    for body in (many, {**OK, "anything": many}, {**OK, "anything": [{}] * (MAX_NODES + 1)}):
        error = refusal(body)
        assert (error.param, error.code) == (None, "body_too_complex")
    # Of a few less one is named.
    assert refusal({**OK, **{str(i): 1 for i in range(MAX_NODES // 2)}}).param == "0"


def test_of_very_many_errors_one_is_named():
    many = {str(i): 1 for i in range(1000)}
    message = {"role": "user", "content": "a"}
    assert refusal({**many, **OK}).param == "0"
    assert refusal({"messages": [{**many, **message}]}).param == "messages.0.0"
    assert refusal({"messages": [message, {**many, **message}]}).param == "messages.1.0"
    assert refusal({"messages": [{"role": "user", "content": 1}] * 1000}).param == "messages.0.content"
    # Those that are not among the first of an array have no name.
    error = refusal({"messages": [message] * 500 + [{"role": "user", "content": 1}] * 500})
    assert (error.param, "errors" in error.message) == (None, True)


def test_very_many_unknown_names_are_one_error():
    many = {str(i): 1 for i in range(1000)}
    for body in ({**OK, **many}, {"messages": [{"role": "user", "content": "a", **many}]}):
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate(body)
        assert [error["loc"][-1] for error in caught.value.errors()] == ["0"]


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"messages": {}}, "messages", "an array"),
        ({"messages": [1]}, "messages.0", "an object"),
        ({"metadata": []}, "metadata", "an object"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
    ],
)
def test_a_wrong_type_is_named_in_the_words_of_json(change, param, told):
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, json.dumps({"messages": [{"role": "user", "content": "a"}], **change}).encode())
    assert caught.value.message == f"Invalid '{param}': must be {told}."


@pytest.mark.parametrize(
    ("model", "body", "param", "told"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "a string or an array"),
        (ChatRequest, {**OK, "stop": 7}, "stop", "a string or an array"),
        (ChatRequest, {**OK, "n": "2"}, "n", "an integer"),
        (ChatRequest, {**OK, "stream": 1}, "stream", "true or false"),
        (CompletionRequest, {"prompt": 7}, "prompt", "a string or an array"),
        (CompletionRequest, {"prompt": {"a": 1}}, "prompt", "a string or an array"),
        (CompletionRequest, {"prompt": [7, "a"]}, "prompt.1", "an integer"),
        (EmbeddingRequest, {"input": True}, "input", "a string or an array"),
        (RerankRequest, {"query": "a", "documents": ["a", 7]}, "documents.1", "a string or an object"),
        (ScoreRequest, {"text_1": {}, "text_2": "a"}, "text_1", "a string or an array"),
    ],
)
def test_every_type_that_a_field_accepts_is_named(model, body, param, told):
    with pytest.raises(ApiError) as caught:
        parse(model, json.dumps(body).encode())
    assert caught.value.message == f"Invalid '{param}': must be {told}."
    assert (caught.value.param, caught.value.code) == (param, "invalid_type")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NO_ID = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL = {"id": "1", **NO_ID}
SCHEMA = {"name": "a", "schema": {}}
FORMAT = {"type": "json_schema", "json_schema": SCHEMA}


def called(call):
    return {"messages": [*OK["messages"], {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("model", "change", "told"),
    [
        (ChatRequest, {"tools": [{**TOOL, "x": {}}]}, "Unknown field: 'tools.0.x'"),
        (ChatRequest, {"tools": [{**TOOL, "name": "f"}]}, "'tools.0.name'"),
        (ChatRequest, {"tools": [{**TOOL, "function": {"name": 5}}]}, "'tools.0.function.name'"),
        (ChatRequest, {"tools": [{**TOOL, "function": {}}]}, "Missing required field: 'tools.0.function.name'"),
        (ChatRequest, {"tools": [{"type": "function"}]}, "Missing required field: 'tools.0.function'"),
        (ChatRequest, {"response_format": {**FORMAT, "x": 1}}, "'response_format.x'"),
        (ChatRequest, {"response_format": {**FORMAT, "json_schema": {**SCHEMA, "x": 1}}}, "_format.json_schema.x'"),
        (ChatRequest, called({**CALL, "extra_content": {}}), "'messages.1.tool_calls.0.extra_content'"),
        (ChatRequest, called({**CALL, "id": 5}), "'messages.1.tool_calls.0.id': must be a string"),
        (ChatRequest, called({**CALL, "function": {"name": "f", "arguments": {}}}), "_calls.0.function.arguments'"),
        (ChatRequest, called(NO_ID), "Missing required field: 'messages.1.tool_calls.0.id'"),
        (ResponsesRequest, {"tools": [TOOL]}, "Missing required field: 'tools.0.name'"),
        (ResponsesRequest, {"tools": [{**TOOL, "name": "f"}]}, "'tools.0.function'"),
        (ResponsesRequest, {"text": {"format": FORMAT}}, "'text.format.name'"),
        (
            MessagesRequest,
            {"thinking": {"type": "enabled", "enabled": {}, "budget_tokens": 1024}},
            "'thinking.enabled'",
        ),
    ],
)
def test_a_field_beside_one_that_has_the_name_of_the_kind_is_named(model, change, told):
    body = {"input": "a"} if model is ResponsesRequest else {**OK, "max_tokens": 5}
    with pytest.raises(ApiError) as caught:
        parse(model, json.dumps({**body, **change}).encode())
    assert told in caught.value.message
    assert f"'{caught.value.param}'" in caught.value.message


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (MessagesRequest, {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ],
)
def test_images_are_refused_as_such(model, body):
    with pytest.raises(ApiError) as caught:
        parse(model, json.dumps(body).encode())
    assert "images are not supported" in caught.value.message
    assert caught.value.param.endswith("content.0.type")


def test_what_a_text_holds_is_not_counted():
    text = 'a: "b\\": [{"\\\\' * MAX_NODES
    assert parse(Ask, json.dumps({**OK, "anything": [text, "\\", '"', text]}).encode()).anything[0] == text


@pytest.mark.parametrize(
    "value", [1, [], {"a": [{}, {"b": ":[{"}]}, 'quote " colon : \\" bracket [', "\\", '\\"', {'"\\': "{"}]
)
def test_the_count_of_names_arrays_and_objects_is_exact(value, monkeypatch):
    def nodes(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + nodes(item) for item in value.values())
        return 1 + sum(map(nodes, value)) if isinstance(value, list) else 0

    for few in (FEW_QUOTES, 0):  # escaped marks one by one, and all at once
        monkeypatch.setattr("server.http.body.FEW_QUOTES", few)
        bare = without_strings(json.dumps(value).encode())
        assert sum(map(bare.count, NODES)) == nodes(value)


def test_a_text_without_an_end_is_refused():
    for raw in (b'{"a": "b}', b'{"a": "b\\"}', b'"' + b"\\" * 1001, b'"' + b"\\" * 1000 + b'""'):
        assert refusal(raw).code == "invalid_json"


def test_a_body_of_very_many_numbers_is_refused():
    numbers = b'{"anything": [' + b"1," * MAX_ELEMENTS
    assert refusal(numbers + b"1]}").param == "messages"  # so many are read
    assert refusal(numbers + b"1,1]}").code == "body_too_complex"
    assert refusal({**OK, "anything": [""] * (MAX_STRINGS + 1)}).code == "body_too_complex"
    text = json.dumps({**OK, "anything": "1," * 2 * MAX_ELEMENTS + '"' * 3 * MAX_STRINGS})
    assert parse(Ask, text.encode()).anything.startswith("1,1")


def test_long_runs_of_digits_cost_no_more_than_other_text():
    text = ("1" * 199 + "a") * 30_000
    began = time.process_time()
    assert not is_suspect(text.encode())
    assert time.process_time() - began < 1  # a search that begins anew at each digit needs two seconds


@pytest.mark.parametrize("number", ["1e400", "1" * 250 + "e99", "0.1e99999", "-" + "9" * 211 + "e+99"])
def test_a_number_that_no_float_holds_is_refused(number):
    assert refusal(json.dumps(OK)[:-1].encode() + f', "anything": {number}}}'.encode()).code == "invalid_json"


@pytest.mark.parametrize("number", ["1e99", "1" * 199 + "e99", "0." + "0" * 199 + "1", "1e-400"])
def test_a_number_that_a_float_holds_is_not(number):
    assert parse(Ask, json.dumps(OK)[:-1].encode() + f', "anything": {number}}}'.encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"{} {}",
        b"\x00",
        b"\xef\xbb\xbf" + json.dumps(OK).encode(),
        json.dumps(OK).encode("utf-16"),
        b'{"anything": NaN}',
        b'{"anything": [1, -Infinity]}',
        b'{"anything": 1e999}',
        b'{"anything": {"deep": [-1E+400]}}',
        b'{"anything": ' + b"9" * 400 + b".0}",
        b'{"anything": ' + b"9" * 5000 + b"}",
        b'{"anything": "\\ud800"}',
        b'{"anything": "\\ude00\\ud800"}',
        b'{"anything": "\xff"}',
        b'{"anything": "\x01"}',
        b'{"anything": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    ],
)
def test_what_is_not_strict_json_is_refused(raw):
    body = raw if not raw.startswith(b'{"anything"') else raw[:-1] + b', "messages": [{"role":"user","content":"a"}]}'
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize("raw", [b"[]", b'"text"', b"null", b"7"])
def test_a_body_that_is_no_object_is_refused(raw):
    error = refusal(raw)
    assert error.param is None
    assert "object" in error.message


def test_words_that_look_like_numbers_are_text():
    messages = [{"role": "user", "content": "NaN, Infinity and 1e999 " + "9" * 400}]
    assert parse(Ask, json.dumps({"messages": messages}).encode()).messages[0].content.startswith("NaN")


def test_of_a_key_that_is_written_twice_the_last_one_counts():
    assert parse(Ask, b'{"n": 1, "n": 3, "messages": [{"role": "user", "content": "a"}]}').n == 3


def test_ignored_fields_are_dropped_at_the_top_and_nowhere_else():
    body = {**OK, "colour": "blue", "temperature": 0.1 + 0.2}
    assert parse(Ask, json.dumps(body).encode(), ("colour", "smell")).temperature == 0.1 + 0.2
    assert refusal({**body, "smell": 1}, ("colour",)).param == "smell"
    inside = {"messages": [{"role": "user", "content": "a", "colour": 1}]}
    assert refusal(inside, ("colour",)).param == "messages.0.colour"


def test_nothing_long_is_repeated():
    canary = "sperm-whale-" * 20
    for change in (
        {canary: 1},
        {"temperature": canary},
        {"n": canary},
        {"messages": [{"role": canary, "content": "a"}]},
        {"messages": canary},
        {"stop": {canary: 1}},
    ):
        error = refusal({**OK, **change})
        assert canary not in error.body().decode()
        assert len(error.message) < 300


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_parsed_or_refused(raw):
    try:
        parse(Ask, raw)
    except ApiError as error:
        assert error.status == 400


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.integers(), lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["messages", "role", "content", "n", "x"]), inner)
), max_leaves=8))  # fmt: skip
def test_any_json_is_parsed_or_refused(document):
    try:
        parse(Ask, json.dumps(document).encode())
    except ApiError as error:
        assert error.status == 400


def test_a_validation_error_without_a_document_still_names_its_place():
    with pytest.raises(ValidationError) as caught:
        Ask.model_validate({"messages": [], "n": 1})
    assert from_validation(caught.value).param == "messages"


def test_errors_of_the_engine_have_their_status():
    assert from_exception(RequestError("the prompt has no tokens")).status == 400
    assert from_exception(EngineDied("it died")).status == 503
    assert from_exception(EngineDied("it died")).response({"path": "/"}).headers["retry-after"] == "5"
    assert from_exception(ModelError("/secret/place is broken")).status == 503
    assert b"secret" not in from_exception(ModelError("/secret/place is broken")).body()


def test_an_unknown_error_is_logged_by_type_and_place_and_never_by_its_text(caplog):
    try:
        raise ValueError("call me ishmael")
    except ValueError as error:
        answer = from_exception(error)
    assert answer.status == 500
    assert b"ishmael" not in answer.body()
    assert "ishmael" not in caplog.text
    assert "ValueError" in caplog.text
    assert "test_errors.py" in caplog.text


def test_the_schema_of_a_body_points_into_the_shared_part():
    schema = described(Ask)["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    assert "Text" in schema["$defs"]
