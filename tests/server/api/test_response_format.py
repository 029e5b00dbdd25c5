"""Structured output over HTTP: what reaches the engine, what is refused and why, and that answers follow."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import time

import httpx
import jsonschema
import openai
import pydantic
import pytest

from engine import EngineConfig, LocalEngine, TokenDelta, builtin
from server.app import build_app
from server.grammar.schemas import MAX_DEPTH, find_problem
from server.settings import Settings
from tests.fakes import FakeEngine, model_folder
from tests.server.wire import CHAT, COMPLETIONS, QUESTION, ask, chunks, joined, run, saying

BASE = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "the sea"}}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def schema(inner, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": inner, **more}}}


async def refusal(folder, path, body):
    answer = await ask(folder, path, {**BASE[path], **body}, FakeEngine(saying("a")))
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@BOTH
@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (schema(POINT), "json_schema", POINT),
        (schema(POINT, strict=True, description="a point"), "json_schema", POINT),
        ({"structured_outputs": {"json": POINT}}, "json_schema", POINT),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, "json_schema", POINT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"regex": "[ab]+", "choice": None}}, "regex", "[ab]+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}, "response_format": {"type": "text"}}, "lark", 'start: "a"'),
    ],
)
async def test_each_way_to_ask_reaches_the_engine(folder, path, body, kind, text):
    engine = FakeEngine(saying('{"x": 1}'))
    assert (await ask(folder, path, {**BASE[path], **body, "n": 2, "temperature": 1}, engine)).status_code == 200
    for request in engine.requests:
        said_kind, said = request.params.grammar
        assert (said_kind, json.loads(said) if kind in ("json_schema", "choice") else said) == (kind, text)


@BOTH
async def test_text_is_the_default(folder, path):
    for body in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": None}):
        engine = FakeEngine(saying("a"))
        assert (await ask(folder, path, {**BASE[path], **body}, engine)).status_code == 200
        assert engine.requests[0].params.grammar is None


SCHEMA_FIELD = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ({"not": {}}, "/not"),
        ({"properties": {"a/b": {"items": {"uniqueItems": True}}}}, "/properties/a~1b/items/uniqueItems"),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "/anyOf/1/if"),
        ({"$defs": {"a": {"contains": {}}}}, "/$defs/a/contains"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"$ref": "https://example.org/b"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "/properties/a/pattern"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}}, "/properties/a/oneOf"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"pattern": "("}}}, "/$defs/b/pattern"),
        ({"minItems": "5"}, "/minItems"),
    ],
    ids=str,
)  # fmt: skip
async def test_a_keyword_that_cannot_be_kept_is_named_with_its_place(folder, bad, place):
    status, param, message = await refusal(folder, CHAT, schema(bad))
    assert (status, param) == (400, SCHEMA_FIELD)
    assert f"'{place}'" in message, message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("given", "followed"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"properties": {"a": {"type": "string", "format": "password"}}}, {"properties": {"a": {"type": "string"}}}),
        ({"type": "string", "format": "date-time"}, {"type": "string", "format": "date-time"}),
        ({"dependentRequired": {}, "unevaluatedProperties": True, "type": "object"}, {"type": "object"}),
        (
            {"properties": {"format": {"const": "x"}, "uniqueItems": {"type": "null"}}, "enum": [{"format": "x"}]},
            {"properties": {"format": {"const": "x"}, "uniqueItems": {"type": "null"}}, "enum": [{"format": "x"}]},
        ),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("where", ["response_format", "structured_outputs", "text"])
async def test_keywords_that_say_nothing_are_left_out(folder, given, followed, where):
    body = schema(given) if where == "response_format" else {
        "structured_outputs": {"json": json.dumps(given) if where == "text" else given}
    }  # fmt: skip
    engine = FakeEngine(saying("{}"))
    assert (await ask(folder, CHAT, {**BASE[CHAT], **body}, engine)).status_code == 200
    assert json.loads(engine.requests[0].params.grammar[1]) == followed


@BOTH
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: " + "(" * 9000}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"items":' * 2000 + "{}" + "}" * 2000}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a" * 1000] * 100}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        (schema({"enum": [f"value {i}" for i in range(9000)]}), SCHEMA_FIELD),
        (schema({}, name="two words"), "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA_FIELD),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens"),
        ({"guided_json": {}}, "guided_json"),
    ],
    ids=lambda case: str(case)[:60],
)  # fmt: skip
async def test_a_bad_grammar_is_refused_quickly_with_its_field(folder, path, body, field):
    began = time.process_time()
    status, param, message = await refusal(folder, path, body)
    assert (status, param) == (400, field), message
    assert len(message) < 300
    assert "a" * 65 not in message
    assert time.process_time() - began < 5  # the app starts and ends in it; others' work does not count


@BOTH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stop_string_ends_text_that_follows_a_schema(folder, path, stream):
    body = {**BASE[path], **schema({}), "stop": ["whale"], "stream": stream}
    response = await ask(folder, path, body, FakeEngine(saying('{"a": "the whale"}')))
    assert response.status_code == 200
    if stream:
        [choice] = joined(chunks(response.text)).values()
        text, reason = choice["text"], choice["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        reason = choice["finish_reason"]
    assert (text, reason) == ('{"a": "the ', "stop")


async def test_schemas_may_be_nested_so_deep_and_no_deeper(folder):
    def nested(depth):
        inner = {}
        for _ in range(depth):
            inner = {"type": "array", "items": inner}
        return inner

    assert find_problem("json_schema", json.dumps(nested(MAX_DEPTH))) is None
    status, _, message = await refusal(folder, CHAT, schema(nested(MAX_DEPTH + 1)))
    assert status == 400 and "deep" in message


def test_every_refusal_of_a_collection_is_quick_and_short(data):
    slowest = 0.0
    for file in sorted((data / "schemas").rglob("*.jsonl")):
        for line in file.read_text().splitlines()[::4]:
            began = time.process_time()
            said = find_problem("json_schema", json.dumps(json.loads(line)["schema"]))
            slowest = max(slowest, time.process_time() - began)
            assert said is None or len(said) < 260
    assert slowest < 0.5


async def test_a_grammar_that_fails_in_the_engine_is_the_clients_error(folder):
    class Refusing(FakeEngine):
        async def generate(self, request):
            yield TokenDelta(id=request.id, finish_reason="error", error="the grammar is bad", field="grammar")

    asked = {**BASE[CHAT], "structured_outputs": {"regex": "a"}}
    answer = await ask(folder, CHAT, asked, Refusing())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs.regex")
    assert (await ask(folder, CHAT, {**asked, "stream": True}, Refusing())).status_code == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_is_not_json_after_all_is_no_success(folder, path, stream):
    body = {**BASE[path], "structured_outputs": {"json_object": True}, "stream": stream}
    assert (await ask(folder, path, body, FakeEngine(saying('{"a": 1}')))).status_code == 200
    broken = await ask(folder, path, body, FakeEngine(saying('{"a": ')))
    assert broken.status_code == (200 if stream else 500)
    assert '"code":"invalid_answer"' in broken.text
    cut = await ask(folder, path, {**body, "max_tokens": 2}, FakeEngine(saying('{"a": 1}')))
    assert "invalid_answer" not in cut.text and '"length"' in cut.text


async def test_a_folder_without_tokenizer_json_has_structured_output(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shutil.copytree(builtin.path(), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    vocab = [{"rank": byte, "token_bytes": base64.b64encode(bytes((byte,))).decode()} for byte in range(256)]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 266, "default_num_special_tokens": 10}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))

    sea = {"type": "object", "properties": {"sea": {"enum": ["calm", "rough"]}}, "required": ["sea"]}
    sea["additionalProperties"] = False  # so that 60 tokens are enough

    async def use(client):
        asked = {"prompt": "the sea", "structured_outputs": {"json": sea}, "temperature": 1.5, "max_tokens": 60}
        answer = await client.post(COMPLETIONS, json=asked)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(json.loads(answer.json()["choices"][0]["text"]), sea)

    await serve(use, str(folder))


async def test_a_model_whose_tokens_are_not_bytes_refuses(tmp_path):
    from tests.toys import word_pieces

    folder = model_folder(tmp_path / "fake")
    word_pieces().save(str(folder / "tokenizer.json"))
    status, param, _ = await refusal(folder, COMPLETIONS, {"structured_outputs": {"regex": "a"}})
    assert (status, param) == (400, "structured_outputs.regex")


# --- with a model


async def serve(use, model="builtin"):
    app = build_app(Settings(model=model), LocalEngine(EngineConfig(model=model, num_blocks=512)))
    async with app.router.lifespan_context(app):
        await app.state.pequod.ready()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await use(client)


CASES = [
    (schema(POINT), lambda text: jsonschema.validate(json.loads(text), POINT)),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)[0]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"].index),
    ({"structured_outputs": {"grammar": 'start: "x" start | "y"'}}, lambda text: re.fullmatch("x*y", text)[0]),
    ({"structured_outputs": {"regex": " ?é+🐋"}}, lambda text: re.fullmatch(" ?é+🐋", text)[0]),
]  # fmt: skip


@BOTH
async def test_answers_follow_their_grammar_streamed_and_whole(path):
    async def use(client):
        jobs = []
        for i, (body, check) in enumerate(CASES):
            asked = {**BASE[path], **body, "temperature": 1.5, "seed": i, "max_tokens": 60, "n": 3}
            whole, stream = await asyncio.gather(
                client.post(path, json=asked), client.post(path, json={**asked, "stream": True})
            )
            assert whole.status_code == stream.status_code == 200, whole.text
            texts = {
                choice["index"]: (choice["message"]["content"] if path == CHAT else choice["text"])
                for choice in whole.json()["choices"]
            }
            streamed = joined(chunks(stream.text))
            assert {index: choice["text"] for index, choice in streamed.items()} == texts
            jobs += [(check, texts[c["index"]], c["finish_reason"]) for c in whole.json()["choices"]]
        metrics = (await client.get("/metrics")).text
        return jobs, metrics

    jobs, metrics = await serve(use)
    stopped = 0
    for check, text, reason in jobs:
        if reason == "stop":
            check(text)
            stopped += 1
    assert stopped > 10
    assert float(re.search(r"\npequod:grammar_mask_seconds_count (\S+)", metrics)[1]) > 10
    assert float(re.search(r"\npequod:grammar_forced_tokens_total (\S+)", metrics)[1]) > 5


async def test_a_grammar_row_has_logprobs_for_every_token():
    async def use(client):
        asked = {**BASE[CHAT], **schema(POINT), "logprobs": True, "top_logprobs": 1, "seed": 1, "max_tokens": 60}
        return (await client.post(CHAT, json=asked)).json()

    answer = await serve(use)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    text = "".join(entry["token"] for entry in entries)
    assert text.removesuffix("<|im_end|>").startswith('{"x": ')


class Crew(pydantic.BaseModel):
    captain: str = pydantic.Field(max_length=8)
    size: int = pydantic.Field(ge=0, le=99)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"allowed_token_ids": [700]}, "allowed_token_ids"),
        ({"logit_bias": {"700": 100}}, "logit_bias"),
        ({"bad_words": ["wh", "whale", "w", "whal", "wha"]}, "bad_words"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_fields_that_leave_nothing_to_draw_are_the_clients_error(server, more, param, stream):
    body = {"messages": QUESTION, "structured_outputs": {"choice": ["whale"]}, "stream": stream, **more}
    response = server.client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    message = response.json()["error"]["message"]
    assert "leave no token that could be sampled" in message
    assert "allowed_token_ids, bad_words, stop_token_ids" in message


def test_the_openai_sdk_parses_what_it_asks_for(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for seed in range(4):
        asked = {"model": "builtin", "messages": QUESTION, "temperature": 1.5, "seed": seed, "max_tokens": 200}
        answer = client.chat.completions.parse(response_format=Crew, **asked)
        assert isinstance(answer.choices[0].message.parsed, Crew)
        with client.chat.completions.stream(response_format=Crew, **asked) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    answer = client.chat.completions.create(
        model="builtin", messages=QUESTION, extra_body={"structured_outputs": {"choice": ["aye", "nay"]}}
    )
    assert answer.choices[0].message.content in ("aye", "nay")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="builtin", messages=QUESTION, **schema({"not": {}}))
    assert bad.value.param == SCHEMA_FIELD
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="builtin",
            messages=QUESTION,
            extra_body={"structured_outputs": {"json": {"allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijkl"]}}},
        )


async def test_many_bodies_at_once_and_the_server_goes_on(folder):
    async def use(client):
        bad = {**BASE[CHAT], **schema({"properties": {f"p{i}": {"not": {}} for i in range(500)}})}
        good = {**BASE[CHAT], **schema(POINT)}
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for body in [bad, good] * 10))
        return [answer.status_code for answer in answers]

    assert await run(folder, use, FakeEngine(saying('{"x": 1}')), max_num_queued_reqs=256) == [400, 200] * 10
