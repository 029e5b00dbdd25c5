"""Every field that the API page shows is sent to a real server: it has its effect, is a label, or is refused by name.

The rows come from the server, the telling values from the tables here: a field without an entry fails its test.
"""

import concurrent.futures
import json
import re
import shutil
import typing

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat

from engine import fetch
from server.app import build_app
from server.body import models
from server.protocol.wire import Refused, Wire, table
from server.settings import Settings
from tests.fakes import FakeEngine
from tests.live import Server, eventually
from tests.server.wire import CHAT, COMPLETIONS, chunks, joined

TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
QUESTION = [{"role": "user", "content": "What is continuous batching?"}]
BASE = {
    CHAT: {"messages": QUESTION, "max_tokens": 12, "temperature": 0},
    COMPLETIONS: {"prompt": "The captain", "max_tokens": 12, "temperature": 0},
    TOKENIZE: {},
    DETOKENIZE: {},
    TEMPLATE: {"messages": QUESTION},
}
END = 2  # <|im_end|> of the built-in model
MODELS = models(build_app(Settings(model="none"), FakeEngine()).routes)
ROWS = [(path, row.field) for path, model in MODELS.items() for row in table(model)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The built-in model, with a token before every text and a variable in the chat template; one request at a time."""
    folder = tmp_path_factory.mktemp("model") / "own"
    shutil.copytree(fetch("builtin", weights=True).path, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    for name in ("tokenizer_config.json",):
        (folder / name).write_text(json.dumps({**config, "bos_token": "<|endoftext|>", "add_bos_token": True}))
    (folder.parent / "template.jinja").write_text("{{ mood }}" + template)
    flags = ["--chat-template", str(folder.parent / "template.jinja"), "--scheduling-policy", "priority"]
    names = ["--served-model-name", "own", "other"]
    with Server(str(folder), *flags, *names, "--max-num-seqs", "1", "--dtype", "float32") as running:
        yield running


class Endpoint:
    """Sends requests that differ from a plain one in what a test is about."""

    def __init__(self, server, path):
        self.server, self.path, self.client = server, path, server.client

    def post(self, **more):
        return self.client.post(self.path, json={**BASE[self.path], **more})

    def ask(self, **more):
        response = self.post(**more)
        assert response.status_code == 200, response.text
        return response.json()

    def choices(self, **more):
        return self.ask(**more, return_token_ids=True)["choices"]

    def tokens(self, **more):
        return self.choices(**more)[0]["token_ids"]

    def text(self, **more):
        [choice] = self.choices(**more)
        return choice["message"]["content"] if self.path == CHAT else choice["text"]

    def prompt(self, **more):
        """The prompt's ids."""
        answer = self.ask(**more, return_token_ids=True)
        return (answer if self.path == CHAT else answer["choices"][0])["prompt_token_ids"]

    def logprobs(self, **more):
        """Per token its log-probability and how many likely ones are beside it."""
        told = self.choices(**more)[0]["logprobs"]
        if self.path == CHAT:
            return [(entry["logprob"], len(entry["top_logprobs"])) for entry in told["content"]]
        return list(zip(told["token_logprobs"], map(len, told["top_logprobs"]), strict=True))

    def stream(self, **more):
        response = self.post(**more, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return chunks(response.text)

    def decode(self, ids):
        return self.client.post(DETOKENIZE, json={"tokens": ids}).json()["prompt"]


# What each field does, as far as a client can see it

GREEDY_LIKE = {"temperature": 2.0, "max_tokens": 6}


def differ(e, **more):
    return len({tuple(e.tokens(seed=seed, **more)) for seed in range(5)}) > 1


def model(e):
    assert [e.ask(model=name)["model"] for name in ("own", "other")] == ["own", "other"]
    assert e.post(model="third").status_code == 404


def temperature(e):
    assert not differ(e, temperature=0)
    assert differ(e, temperature=2.0)


def narrowing(field, value):
    def check(e):
        assert differ(e, **GREEDY_LIKE)
        greedy = e.tokens(max_tokens=6)
        assert all(e.tokens(**GREEDY_LIKE, **{field: value}, seed=seed) == greedy for seed in range(5))

    return check


def penalty(field, high, low):
    def check(e):
        few = {"allowed_token_ids": list(range(300, 330)), "max_tokens": 30, "temperature": 1.0}

        def various(value):
            return sum(len(set(e.tokens(**few, **{field: value}, seed=seed))) for seed in range(4))

        assert various(low) < various(None) < various(high)

    return check


def seed(e):
    assert e.tokens(temperature=2.0, seed=7) == e.tokens(temperature=2.0, seed=7)
    assert differ(e, temperature=2.0)


def n(e):
    choices = e.choices(n=3, temperature=2.0, seed=1)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1


def logit_bias(e):
    assert set(e.tokens(logit_bias={"777": 100})) == {777}
    first = e.tokens()[0]
    assert first not in e.tokens(logit_bias={str(first): -100})


def allowed_token_ids(e):
    drawn = {token for seed in range(3) for token in e.tokens(temperature=2.0, seed=seed, allowed_token_ids=[50, 60])}
    assert drawn == {50, 60}


def bad_words(e):
    word = next(word for word in e.text(max_tokens=20).split() if len(word) > 3)
    said = e.text(max_tokens=20, bad_words=[word])
    assert word in e.text(max_tokens=20)
    assert word not in said.split()


def prompt_logprobs(e):
    answer = e.ask(prompt_logprobs=2, return_token_ids=True)
    place = answer if e.path == CHAT else answer["choices"][0]
    ids, told = place["prompt_token_ids"], place["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == len(ids)
    for token, entry in zip(ids[1:], told[1:], strict=True):
        assert entry[str(token)]["logprob"] <= 0
        assert 2 <= len(entry) <= 3
        assert {1, 2} <= {each["rank"] for each in entry.values()}
        assert all(each["decoded_token"] == e.decode([int(i)]) for i, each in entry.items() if i.isdigit())
    assert "prompt_logprobs" not in e.ask()


def max_tokens(e):
    assert len(e.tokens(max_tokens=3, ignore_eos=True)) == 3
    assert e.choices(max_tokens=3)[0]["finish_reason"] == "length"


def max_completion_tokens(e):
    e = Endpoint(e.server, CHAT)
    assert len(e.tokens(max_tokens=None, max_completion_tokens=3)) == 3


def min_tokens(e):
    ending = {"logit_bias": {str(END): 50}}
    assert e.tokens(**ending) == [END]
    assert END not in e.tokens(**ending, min_tokens=5)[:5]


def ignore_eos(e):
    ending = {"logit_bias": {str(END): 50}}
    assert len(e.tokens(**ending, ignore_eos=True)) == 12


def stop(e):
    text = e.text()
    assert e.text(stop=text[4:7]) == text[: text.index(text[4:7])]
    assert e.choices(stop=["never said", text[4:7]])[0]["finish_reason"] == "stop"


def include_stop_str_in_output(e):
    text = e.text()
    assert e.text(stop=text[4:7], include_stop_str_in_output=True).endswith(text[4:7])


def stop_token_ids(e):
    tokens = e.tokens()
    assert e.tokens(stop_token_ids=[tokens[3]]) == tokens[: tokens.index(tokens[3]) + 1]


def skip_special_tokens(e):
    special = {"logit_bias": {str(END): 100}, "ignore_eos": True, "max_tokens": 2}
    assert e.text(**special) == ""
    assert e.text(**special, skip_special_tokens=False) == "<|im_end|>" * 2


def return_token_ids(e):
    [choice] = e.ask(return_token_ids=True, ignore_eos=True)["choices"]
    assert e.decode(choice["token_ids"]).endswith(e.text(ignore_eos=True))
    assert "token_ids" not in e.ask()["choices"][0]


def stream(e):
    assert len(e.stream()) > 3


def stream_options(e):
    assert e.stream(stream_options={"include_usage": True}) != e.stream()
    assert e.post(stream_options={}).json()["error"]["param"] == "stream_options", "nothing to tell without a stream"


def include_usage(e):
    seen = e.stream(stream_options={"include_usage": True})
    assert seen[-1]["choices"] == [] and seen[-1]["usage"]["completion_tokens"] == len(e.tokens())
    assert "usage" not in e.stream()[-1]


def continuous_usage_stats(e):
    seen = e.stream(stream_options={"continuous_usage_stats": True})
    counts = [part["usage"]["completion_tokens"] for part in seen if part.get("usage")]
    assert len(counts) > 2 and counts == sorted(counts)


def priority(e):
    """One runs, and of two that wait the second to come is served first."""
    done = []

    def send(name, tokens, **more):
        e.ask(max_tokens=tokens, ignore_eos=True, **more)
        done.append(name)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(send, "running", 400)]
        eventually(lambda: e.server.metric("vllm:num_requests_running") == 1)
        sent.append(pool.submit(send, "later", 4, priority=5))
        eventually(lambda: e.server.metric("vllm:num_requests_waiting") == 1)
        sent.append(pool.submit(send, "sooner", 4, priority=4))
        for each in sent:
            each.result()
    assert done.index("sooner") < done.index("later")


def cache_salt(e):
    long = "The whale and the sea and the captain. " * 10
    more = {"messages": [{"role": "user", "content": long}]} if e.path == CHAT else {"prompt": long}

    def cached(**salt):
        return e.ask(**more, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    own = f"salt of {e.path}"
    assert cached(cache_salt=own) == 0
    assert cached(cache_salt=own) > 0
    assert cached(cache_salt=own + " no more") == 0


def messages(e):
    two = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    assert "Why?" in e.decode(e.prompt(messages=two))
    assert "batching" in e.decode(e.prompt())


def chat_logprobs(e):
    assert all(p <= 0 and k == 0 for p, k in e.logprobs(logprobs=True))
    assert e.choices()[0]["logprobs"] is None


def top_logprobs(e):
    assert {k for _, k in e.logprobs(logprobs=True, top_logprobs=3)} == {3}


def chat_template_kwargs(e):
    assert e.decode(e.prompt(chat_template_kwargs={"mood": "calm"})).startswith("calm")


def add_generation_prompt(e):
    ending = "<|im_start|>assistant\n"
    assert e.decode(e.prompt()).endswith(ending)
    assert not e.decode(e.prompt(add_generation_prompt=False)).endswith(ending)


def continue_final_message(e):
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert e.decode(e.prompt(messages=begun, continue_final_message=True)).endswith("It is")


def prompt(e):
    texts = e.choices(prompt=["The sea", "A block"])
    assert [e.decode(choice["prompt_token_ids"]) for choice in texts] == [
        "<|endoftext|>The sea",
        "<|endoftext|>A block",
    ]
    assert e.prompt(prompt=[50, 60]) == [50, 60]


def logprobs(e):
    assert all(p <= 0 and k in (2, 3) for p, k in e.logprobs(logprobs=2))
    assert e.choices()[0]["logprobs"] is None


def echo(e):
    assert e.text(echo=True) == "The captain" + e.text()
    assert e.text(echo=True, max_tokens=0) == "The captain"


def add_special_tokens(e):
    assert e.prompt()[0] == 0
    assert e.prompt(add_special_tokens=False) == e.prompt()[1:]


OBJECT = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
ROOM = {"max_tokens": 60, "temperature": 1.0, "seed": 1}


def response_format(e):
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}}
    assert json.loads(e.text(**ROOM, response_format=named)) == {"a": 1}
    assert e.text(response_format={"type": "json_object"}).lstrip().startswith("{")
    assert e.text(response_format={"type": "text"}) == e.text()


def structured_outputs(e):
    assert e.text(**ROOM, structured_outputs={"choice": ["whale"]}) == "whale"
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["whale"]}}
    assert e.post(**both).json()["error"]["param"] == "structured_outputs"


def structured(name, value, matches):
    def check(e):
        assert matches(e.text(**ROOM, structured_outputs={name: value}))
        assert not matches(e.text(**ROOM))

    return check


def begins_an_object(text):
    return text.lstrip().startswith("{")


STRUCTURED = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "structured_outputs.json": structured("json", OBJECT, begins_an_object),
    "structured_outputs.regex": structured("regex", "[ab]{3}", re.compile("[ab]{3}").fullmatch),
    "structured_outputs.choice": structured("choice", ["whale", "captain"], {"whale", "captain"}.__contains__),
    "structured_outputs.grammar": structured("grammar", 'start: "a" "b"', "ab".__eq__),
    "structured_outputs.json_object": structured("json_object", True, begins_an_object),
}

SHARED = {
    "model": model,
    "temperature": temperature,
    "top_p": narrowing("top_p", 0.01),
    "top_k": narrowing("top_k", 1),
    "min_p": narrowing("min_p", 1.0),
    "presence_penalty": penalty("presence_penalty", 2, -2),
    "frequency_penalty": penalty("frequency_penalty", 2, -2),
    "repetition_penalty": penalty("repetition_penalty", 2, 0.5),
    "seed": seed,
    "n": n,
    "logit_bias": logit_bias,
    "allowed_token_ids": allowed_token_ids,
    "bad_words": bad_words,
    "prompt_logprobs": prompt_logprobs,
    "max_tokens": max_tokens,
    "min_tokens": min_tokens,
    "ignore_eos": ignore_eos,
    "stop": stop,
    "include_stop_str_in_output": include_stop_str_in_output,
    "stop_token_ids": stop_token_ids,
    "skip_special_tokens": skip_special_tokens,
    "return_token_ids": return_token_ids,
    "stream": stream,
    "stream_options": stream_options,
    "stream_options.include_usage": include_usage,
    "stream_options.continuous_usage_stats": continuous_usage_stats,
    "priority": priority,
    "cache_salt": cache_salt,
    **STRUCTURED,
}
TEMPLATES = {
    "messages": messages,
    "chat_template_kwargs": chat_template_kwargs,
    "add_generation_prompt": add_generation_prompt,
    "continue_final_message": continue_final_message,
}


# The endpoints about tokens


def seen(e, **more):
    """The prompt as text, whichever of the endpoints tells it."""
    answer = e.ask(**more)
    return answer["prompt"] if e.path == TEMPLATE else e.decode(answer["tokens"])


def served(**base):
    def check(e):
        assert e.ask(**base, model="other")
        assert e.post(**base, model="third").status_code == 404

    return check


def written(name):
    """A chat template's field, where it is only written."""

    def check(e):
        begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
        assert "batching" in seen(e, messages=QUESTION)
        if name == "chat_template_kwargs":
            assert seen(e, messages=QUESTION, chat_template_kwargs={"mood": "calm"}).startswith("calm")
        if name == "add_generation_prompt":
            bare = seen(e, messages=QUESTION, add_generation_prompt=False)
            assert seen(e, messages=QUESTION) == bare + "<|im_start|>assistant\n"
        if name == "continue_final_message":
            assert seen(e, messages=begun, continue_final_message=True).endswith("It is")

    return check


WRITTEN = {name: written(name) for name in TEMPLATES}


def tokenized(e):
    assert seen(e, prompt="The sea") == "<|endoftext|>The sea"


def bare(e):
    assert seen(e, prompt="The sea", add_special_tokens=False) == "The sea"


def spelt(e):
    assert e.ask(prompt="The sea", return_token_strs=True)["token_strs"][0] == "<|endoftext|>"
    assert e.ask(prompt="The sea")["token_strs"] is None


def detokenized(e):
    assert e.ask(tokens=[END])["prompt"] == "<|im_end|>"


EFFECTS = {
    CHAT: {
        **SHARED, **TEMPLATES, "max_completion_tokens": max_completion_tokens, "logprobs": chat_logprobs,
        "top_logprobs": top_logprobs,
    },
    COMPLETIONS: {
        **SHARED, "prompt": prompt, "logprobs": logprobs, "echo": echo, "add_special_tokens": add_special_tokens,
    },
    TOKENIZE: {
        **WRITTEN, "model": served(prompt="a"), "prompt": tokenized, "add_special_tokens": bare,
        "return_token_strs": spelt,
    },
    DETOKENIZE: {"model": served(tokens=[5]), "tokens": detokenized},
    TEMPLATE: {**WRITTEN, "model": served()},
}  # fmt: skip
LABELS = {
    "user": "Ann",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "session_id": "1",
    "store": False,
    "stream_options.include_obfuscation": True,
}
# Fields that the type definitions of no SDK name: vLLM's protocol.py of chat and completions, llama.cpp's
# server-schema.cpp, both as of late 2026, and older names of vLLM's that clients still send.
EXTENSIONS = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens priority
    prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
    skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
    best_of early_stopping guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern logits_processors

    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser dry_allowed_length dry_base
    dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range generation_prompt grammar
    grammar_lazy grammar_triggers id_slot json_schema lora min_keep mirostat mirostat_eta mirostat_tau n_cache_reuse
    n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs preserved_tokens
    reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag
    reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields
    return_progress return_tokens samplers sse_ping_interval t_max_predict_ms timings_per_token top_n_sigma typical_p
    verbose xtc_probability xtc_threshold
"""
OWN_EXTENSIONS = {
    CHAT: """
        add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
        media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    COMPLETIONS: "prompt_embeds",
}


def entry(path, field, kind):
    """What the tables here have for a field; fails where that is nothing."""
    found = {"effect": EFFECTS.get(path, {}), "label": LABELS}.get(kind, {}).get(field)
    if found is None and kind != "refused":
        pytest.fail(f"{field} of {path} is new and of kind {kind}: give it an entry that tells its effect")
    return found


def within(field, value):
    """The request's addition that sets a field, also one inside of an object."""
    outer, _, inner = field.partition(".")
    return {outer: {inner: value} if inner else value}


@pytest.fixture(scope="module")
def capabilities(server):
    rows = server.client.get("/v1/capabilities").json()
    return {(row["endpoint"], row["field"]): row for row in rows}


@pytest.mark.parametrize(("path", "field"), ROWS, ids=lambda part: part.rpartition("/")[2])
def test_a_field_is_what_the_table_says(server, capabilities, path, field):
    row, endpoint = capabilities[path, field], Endpoint(server, path)
    telling = entry(path, field, row["kind"])
    assert row["note"], "nobody can know what it does"
    if row["kind"] == "effect":
        telling(endpoint)
    elif row["kind"] == "label":
        for more in ({}, {"temperature": 1.5, "seed": 3}):
            ways = [within(field, value) | more for value in (None, telling)]
            if "stream_options" in ways[0]:
                plain, labelled = (joined(endpoint.stream(**way)) for way in ways)
            else:
                plain, labelled = (endpoint.tokens(**way) for way in ways)
            assert labelled == plain
    else:
        base = {TOKENIZE: {"messages": QUESTION}}.get(path, {})
        for value in ({"no": "default"}, "no such default"):
            error = endpoint.post(**base, **within(field, value))
            assert error.status_code == 400
            assert error.json()["error"]["param"] == field
        assert endpoint.post(**base, **within(field, None)).status_code == 200


def test_capabilities_and_the_api_page_tell_of_the_same_fields(server, capabilities):
    page = server.client.get("/openapi.json").json()

    def fields(schema, prefix=""):
        for name, inner in schema["properties"].items():
            yield prefix + name
            for part in (inner, *inner.get("anyOf", ())):
                if "$ref" in part and not part.get("items"):
                    yield from fields(page["components"]["schemas"][part["$ref"].rpartition("/")[2]], f"{name}.")

    shown = {
        (path, field)
        for path, operations in page["paths"].items()
        for operation in operations.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        for field in fields(content["schema"])
    }
    assert shown == capabilities.keys() == set(ROWS)
    assert {row["kind"] for row in capabilities.values()} == {"effect", "label", "refused"}


def test_every_field_of_the_apis_and_of_their_common_extensions_is_known():
    known = {path: {row.field for row in table(model)} for path, model in MODELS.items()}
    for path, params in ((CHAT, chat), (COMPLETIONS, completion)):
        official = typing.get_type_hints(params.CompletionCreateParamsStreaming).keys()
        assert official - known[path] == set()
        assert {*EXTENSIONS.split(), *OWN_EXTENSIONS[path].split()} - known[path] == set()
        options = typing.get_type_hints(ChatCompletionStreamOptionsParam).keys()
        assert {f"stream_options.{name}" for name in options} <= known[path]


def test_a_new_field_needs_an_entry():
    class New(MODELS[CHAT]):
        colour: str | None = None

    fresh = [row for row in table(New) if (CHAT, row.field) not in ROWS]
    assert [(row.field, row.kind) for row in fresh] == [("colour", "effect")]
    with pytest.raises(pytest.fail.Exception, match="colour"):
        entry(CHAT, "colour", "effect")


def test_no_entry_is_left_over():
    told = {(path, field) for path, fields in EFFECTS.items() for field in fields}
    assert told <= set(ROWS)
    assert LABELS.keys() <= {field for _, field in ROWS}


def test_refused_notes_say_what_passes():
    class Odd(Wire):
        field: typing.Annotated[typing.Any, Refused((False, 1.5), "Send another.")] = None

    [row] = table(Odd)
    assert row.note == "Not supported: only what asks for nothing is accepted (null, false, 1.5). Send another."
