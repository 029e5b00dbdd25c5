"""Chat and completions: what is refused by name and what counts as absent. Effects: test_capabilities.py."""

import pytest
import tokenizers

from server.api.chat.request import ChatRequest
from server.api.completions.request import CompletionRequest
from server.app import build_app
from server.http.body import models
from server.http.fields import kinds
from server.settings import Settings
from tests.fakes import INFO, FakeEngine, model_folder, reranker_folder, serving
from tests.server.wire import CHAT, COMPLETIONS, EMBEDDINGS, QUESTION, RERANK, RESPONSES, SCORE, ask, ids, saying

BASE = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "the sea"}}
MODELS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model") / "fake")


def refused_fields(path):
    return MODELS[path].unsupported.items()


async def answers(folder, path, bodies, **settings):
    """Status, param and message for each of these additions to a good request."""
    async with serving(folder, FakeEngine(saying("a")), **settings) as (client, _):
        seen = []
        for body in bodies:
            content = {"content": body} if isinstance(body, bytes) else {"json": {**BASE[path], **body}}
            response = await client.post(path, **content)
            error = response.json().get("error", {})
            seen.append((response.status_code, error.get("param"), error.get("message")))
        return seen


def test_the_table_has_the_kind_of_each_field():
    table = kinds(ChatRequest)
    assert {table[name] for name in ("response_format", "structured_outputs")} == {"effect"}
    assert {table[name] for name in ("temperature", "n", "stop", "messages", "stream_options")} == {"effect"}
    assert {name for name, kind in table.items() if kind == "label"} == {
        "session_id", "user", "metadata", "prompt_cache_key", "prompt_cache_options", "safety_identifier",
        "service_tier", "store", "prediction", "ttl", "draft_model", "verbosity",
    }  # fmt: skip
    assert {table[name] for name in ("functions", "audio", "web_search_options")} == {"refused"}


@BOTH
async def test_what_is_not_supported_is_refused_by_name(folder, path):
    fields = [name for name, _ in refused_fields(path)]
    values = [{"a": 1}, [1], "no such default", 7, 1.5]
    seen = await answers(folder, path, [{name: value} for name in fields for value in values])
    for (name, value), (status, param, message) in zip(
        ((name, value) for name in fields for value in values), seen, strict=True
    ):
        assert (status, param) == (400, name), (name, value)
        assert "not support" in message


async def test_a_refused_field_is_named_before_anything_else_that_is_wrong(folder):
    [(status, param, _)] = await answers(folder, CHAT, [{"temperature": "hot", "n": 0, "colour": 1, "mirostat": 2}])
    assert (status, param) == (400, "mirostat")


@BOTH
async def test_the_error_says_what_to_send_instead(folder, path):
    bodies = [{"guided_json": {}}, {"n_predict": 5}, {"mirostat": 2}]
    assert [message for _, _, message in await answers(folder, path, bodies)] == [
        "'guided_json' is not supported; send structured_outputs.json instead.",
        "'n_predict' is not supported; send max_tokens instead.",
        "'mirostat' is not supported.",
    ]


@BOTH
async def test_null_and_documented_defaults_count_as_absent(folder, path):
    names = [*MODELS[path].model_fields, *MODELS[path].unsupported]
    everything = {name: None for name in names if name not in BASE[path]}
    one_by_one = [{name: value} for name, mark in refused_fields(path) for value in mark.defaults]
    seen = await answers(folder, path, [everything, *one_by_one])
    assert [status for status, _, _ in seen] == [200] * len(seen), seen


@pytest.mark.parametrize(
    "value",
    [
        {"tools": None}, {"tools": []}, {"response_format": {"type": "text"}}, {"tool_choice": "none"},
        {"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"logprobs": False}, {"modalities": ["text"]}, {"n": 1},
        {"best_of": 1}, {"top_logprobs": 0}, {"store": False}, {"service_tier": "default"}, {"metadata": {}},
        {"stop": None}, {"stop": []}, {"logit_bias": {}}, {"stream": False, "stream_options": None},
        {"max_tokens": 4, "max_completion_tokens": 4}, {"continue_final_message": False, "add_generation_prompt": True},
        {"temperature": 1}, {"seed": 2**64 - 1}, {"seed": -(2**63)}, {"top_k": -1}, {"logit_bias": {"339": 100}},
        {"stop": ["a"] * 16}, {"n": 16}, {"logprobs": True, "top_logprobs": 20}, {"stop": ""}, {"stop": ["", "a"]},
        {"max_tokens": 100_000}, {"max_tokens": -1}, {"max_completion_tokens": -1}, {"best_of": 2, "n": 2},
        {"top_p": 0},
        {"prompt_logprobs": -1}, {"service_tier": "flex"}, {"store": True}, {"repeat_penalty": 1.1},
        {"prediction": {"type": "content", "content": "a"}}, {"verbosity": "low"}, {"ttl": 300},
        {"messages": [{"role": "user", "content": []}]}, {"thinking": {"type": "enabled"}},
        {"repeat_penalty": 1.1, "repetition_penalty": 1.1},
    ],
    ids=str,
)  # fmt: skip
async def test_good_values_of_chat(folder, value):
    assert await answers(folder, CHAT, [value]) == [(200, None, None)]


SHARED = [
    ("temperature", [-0.1, 2.1, "1", True, [1]]),
    ("top_p", [-0.01, 1.01, -1, "x"]),
    ("top_k", [-2, 2**31, 1.5, "5", True]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, 2.1, 1e-300]),
    ("seed", [-(2**63) - 1, 2**64, 1.5, "1", True, 10**400]),
    ("n", [0, -1, 17, 1.0, "2", True]),
    ("repeat_penalty", [0, 2.1, "1"]),
    ("best_of", [0, 2, 17, "1"]),
    ("max_tokens", [-2, 2**31, 1.5, "16", True]),
    ("min_tokens", [-1, 17, 513, "1"]),
    ("ignore_eos", [0, "true"]),
    ("stop", [5, ["a"] * 17, "a" * 1025, ["a", 5], {}]),
    ("stop_token_ids", [5, [-1], [340], ["5"], [True], [5] * 257]),
    ("include_stop_str_in_output", [1]),
    ("skip_special_tokens", ["no"]),
    ("return_token_ids", [1]),
    ("stream", [1, "true"]),
    ("stream_options", [{}, {"include_usage": True}]),
    (
        "logit_bias",
        [[], {"x": 1}, {" 1": 1}, {"1_0": 1}, {"1.0": 1}, {"01": 1}, {"9" * 5000: 1},
         {"-1": 1}, {"340": 1}, {"5": 101}, {"5": -101}, {"5": "1"}, {str(i): 0 for i in range(1025)}],
    ),
    ("response_format", [5, {}, {"type": "xml"}, {"type": "text", "a": 1}, {"type": "json_schema"},
                         {"type": "json_object", "schema": {}}]),
    ("structured_outputs", [5, {}, {"regex": None}, {"colour": "red"}, {"json": 5}, {"regex": 5}, {"choice": []},
                            {"choice": [5]}, {"choice": "ab"}, {"grammar": ["a"]}, {"json_object": 1},
                            {"regex": "a", "choice": ["b"]}, {"json": {}, "json_object": True}]),
    ("allowed_token_ids", [[], 5, [-1], [340], ["5"], [True], [5] * 4097]),
    ("bad_words", ["whale", [""], [" "], [5], ["a" * 129], ["a"] * 129]),
    ("prompt_logprobs", [-2, 21, True, "1", 1.0]),
    ("priority", [1.5, 2**31, "1", 1]),
    ("cache_salt", ["", 5, "a" * 513]),
    ("user", [5, "a" * 513]),
    ("model", [5]),
    ("echo", ["yes"]),
    ("messages", [5]),
    ("prompt", [5]),
    ("colour", [None, "red"]),
]  # fmt: skip
CHAT_ONLY = [
    ("messages", [None, [], "hi", [5], [{"role": "user"}], [{"content": "a"}], [{"role": "captain", "content": "a"}],
                  [{"role": "user", "content": None}],
                  [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
                  [{"role": "user", "content": "a", "colour": 1}],
                  [{"role": "tool", "content": "a"}],
                  [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}],
                  [{"role": "user", "content": "a"}] * 4097]),
    ("logprobs", [1, 5, "true"]),
    ("top_logprobs", [1, 21, -1, True]),
    ("max_tokens", [0]),
    ("max_completion_tokens", [0, "5"]),
    ("metadata", [{"a": 5}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "" for i in range(17)}]),
    ("service_tier", ["slow", 5]),
    ("prompt_cache_options", [5, {"mode": "never"}, {"prewarm": True}, {"colour": 1}]),
    ("thinking_budget", [-2, "5", 1.5]),
    ("store", [1, "true"]),
    ("thinking", [True, {}, {"type": "maybe"}, {"type": "enabled", "budget_tokens": 0}]),
    ("reasoning", [True, {"effort": "huge"}, {"max_tokens": -1}, {"enabled": 1}]),
    ("enable_thinking", [1, "false"]),
    ("verbosity", ["loud"]),
    ("chat_template_kwargs", [5, {"messages": 1}, {"tools": 1}, {"a": [1]}, {"a": {}}, {str(i): 1 for i in range(65)}]),
    ("add_generation_prompt", [1]),
    ("continue_final_message", [1]),
]  # fmt: skip
COMPLETIONS_ONLY = [
    ("prompt", [None, [], [[]], "", [""], [True], [1.5], [-1], [340], [[1], [340]], [1, "a"], ["a", 1], {}, ["a"] * 257,
                [[1]] * 257, [2**70]]),
    ("logprobs", [-1, 21, True, "1"]),
    ("add_special_tokens", [1]),
    ("metadata", [{}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "field", "values"),
    [(path, *case) for path, own in ((CHAT, CHAT_ONLY), (COMPLETIONS, COMPLETIONS_ONLY)) for case in SHARED + own],
    ids=lambda case: case.rpartition("/")[2] if isinstance(case, str) else "",
)
async def test_bad_values_are_refused_by_name(folder, path, field, values):
    body = {"max_tokens": 16} if field == "min_tokens" else {}
    if (path, field) == (CHAT, "min_tokens"):
        body = {"max_completion_tokens": 16}
    seen = await answers(folder, path, [body | {field: value} for value in values])
    for value, (status, param, message) in zip(values, seen, strict=True):
        assert status == 400, value
        assert param is not None, value
        assert param == field or param.startswith(f"{field}."), value
        assert len(message) < 300


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        (CHAT, {"stream_options": {"colour": 1}, "stream": True}, "stream_options.colour"),
        (CHAT, {"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        (CHAT, {"thinking_token_budget": 5, "thinking_budget": 6}, "thinking_budget"),
        (CHAT, {"n": 2, "best_of": 1}, "best_of"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"prompt": [[11] * 500] * 16, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [11] * 400, "n": 16, "echo": True, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"allowed_token_ids": [5, 6], "logit_bias": {"5": -100, "6": -100}}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [*ids(" whale")], "bad_words": ["whale"]}, "allowed_token_ids"),
        (CHAT, {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        (COMPLETIONS, {"n": 16, "prompt": ["a"] * 17}, "n"),
    ],
)
async def test_fields_that_do_not_go_together_are_refused(folder, path, body, param):
    [(status, seen, _)] = await answers(folder, path, [body], max_num_queued_reqs=256)
    assert (status, seen) == (400, param)


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        '"temperature": NaN', '"temperature": Infinity', '"temperature": -Infinity', '"temperature": 1e400',
        '"seed": 1e5', '"user": "\\ud800"', '"logit_bias": {"5": NaN}', '"tools": ' + "[" * 500 + "]" * 500,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
async def test_numbers_and_letters_that_json_does_not_have_are_refused(folder, path, text):
    base = '"messages": [{"role": "user", "content": "a"}]' if path == CHAT else '"prompt": "a"'
    [(status, _, message)] = await answers(folder, path, [f"{{{base}, {text}}}".encode()])
    assert status == 400
    assert len(message) < 300


async def test_no_value_of_a_client_comes_back_in_an_error(folder):
    secret = "s3cr3t" * 40
    bodies = [
        {"user": secret * 10}, {"stop": [secret * 10]}, {"temperature": secret}, {"messages": [{"role": secret}]},
        {"service_tier": secret}, {"tools": [{"name": secret}]},
    ]  # fmt: skip
    for status, param, message in await answers(folder, CHAT, bodies):
        assert status == 400
        assert "s3cr3t" not in message, "not even its beginning"
        assert "s3cr3t" not in param


async def test_a_long_name_that_the_server_does_not_know_comes_back_shortened(folder):
    name = "s3cr3t" * 40
    for status, _, message in await answers(folder, CHAT, [{name: 1}, {"model": name}]):
        assert status in (400, 404)
        assert name[:30] in message and name[:80] not in message


async def test_a_text_with_a_token_that_the_model_lacks_is_refused(tmp_path):
    folder = model_folder(tmp_path / "model")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([f"[tool {number}]" for number in range(INFO.vocab_size)])
    library.save(str(folder / "tokenizer.json"))
    missing = f"Use [tool {INFO.vocab_size - 1}] now."
    said = [{"messages": [{"role": "user", "content": missing}]}, {"prompt": missing}, {"input": missing}]
    for path, body in zip((CHAT, COMPLETIONS, EMBEDDINGS), said, strict=True):
        response = await ask(folder, path, body, FakeEngine(saying("a")))
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(body))), response.text
        assert "which the model lacks" in response.text


async def test_priority_needs_the_policy(folder):
    assert (await answers(folder, CHAT, [{"priority": 0}]))[0][0] == 200
    assert (await answers(folder, CHAT, [{"priority": 1}]))[0][:2] == (400, "priority")
    assert (await answers(folder, CHAT, [{"priority": 1}], scheduling_policy="priority"))[0][0] == 200


async def test_ignored_fields_are_dropped(folder):
    settings = {"ignore_fields": ["tools", "colour"]}
    assert await answers(folder, CHAT, [{"tools": [{}], "colour": 1}], **settings) == [(200, None, None)]
    assert (await answers(folder, CHAT, [{"functions": [{}]}], **settings))[0][:2] == (400, "functions")


async def test_a_bad_field_reaches_no_engine(folder):
    engine = FakeEngine()
    assert (
        await ask(folder, CHAT, {"messages": QUESTION, "temperature": 3, "stream": True}, engine)
    ).status_code == 400
    assert engine.requests == []


async def test_what_no_branch_of_a_template_value_takes_is_one_error(folder):
    [(status, param, message)] = await answers(folder, CHAT, [{"chat_template_kwargs": {"a": {}}}])
    assert (status, param) == (400, "chat_template_kwargs.a")
    assert message.endswith("must be a string, a number, true, false or null.")


ALL = models(build_app(Settings(model="none"), FakeEngine()).routes)
LEAST = {
    CHAT: {"messages": QUESTION},
    COMPLETIONS: {"prompt": "the sea"},
    EMBEDDINGS: {"input": "the sea"},
    RESPONSES: {"input": "the sea"},
    RERANK: {"query": "the sea", "documents": ["a"]},
    SCORE: {"text_1": "the sea", "text_2": "a"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/tokenize": {"prompt": "the sea"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": QUESTION},
}


@pytest.mark.parametrize("path", ALL)
async def test_every_optional_field_may_be_null(folder, tmp_path, path):
    if path in (RERANK, SCORE):
        folder = reranker_folder(tmp_path / "reranker")
    optional = [name for name, field in ALL[path].model_fields.items() if not field.is_required()]
    nulls = {ALL[path].model_fields[name].alias or name: None for name in optional if name not in LEAST[path]}
    nulls |= dict.fromkeys(ALL[path].unsupported)
    response = await ask(folder, path, {**LEAST[path], **nulls}, FakeEngine(saying("a")))
    assert response.status_code == 200, response.text
