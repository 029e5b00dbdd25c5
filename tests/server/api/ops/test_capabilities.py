"""Every field that the API page shows is sent to a real server: it has its effect, is a label, or is refused by name.

The rows come from the server, the values from tests/server/api/effects: a field without an entry fails its test.
"""

import json
import re
import shutil
import typing

import pytest
from pydantic import Field

from engine import fetch
from server.app import build_app
from server.http.body import models
from server.http.fields import RefusedKinds, Wire, refused, table
from server.settings import Settings
from tests.fakes import FakeEngine
from tests.live import PacedServer
from tests.server.api.effects import EFFECTS, ENDPOINTS, HEADERS, KNOWN, LABELS, SDK_TYPES
from tests.server.api.effects.endpoint import QUESTION, TOKENIZE, Endpoint
from tests.server.api.effects.known import gaps
from tests.server.api.effects.places import changed, of_kind
from tests.server.wire import CHAT, joined

MODELS = models(build_app(Settings(model="none"), FakeEngine()).routes)
ROWS = [(path, row.field) for path, model in MODELS.items() for row in table(model)]


# What the fields of the template are told by; and the marks of a model that reasons.
SPOKEN = """{{ mood }}{{ reasoning_effort }}{{ 'brisk' if enable_thinking is false }}{# <think> </think> #}
{%- for m in messages %}{{ m.name }}{{ m.tool_call_id }}{{ m.reasoning_content }}
{%- for call in m.tool_calls or () %}{{ call.id }}{% endfor %}{% endfor %}"""


# A reranker's template, for messages with a query; {# m.role == "user" #} says that it is for others, too.
JUDGING = """{# m.role == "user" #}{% if messages | selectattr("role", "eq", "query") | list -%}
yes or no? {% for m in messages if m.role == "system" %}{{ m.content }} {% endfor -%}
{% for m in messages if m.role == "query" %}{{ m.content }}: {% endfor -%}
{% for m in messages if m.role == "document" %}{{ m.content }}{% endfor %}<|im_end|>{% else -%}
"""


def with_marks(folder):
    """Make tokens of the marks of reasoning and of gaps and of a reranker's yes, in the place of the vocabulary's last
    words."""
    path = folder / "tokenizer.json"
    library = json.loads(path.read_text())
    vocab, merges = library["model"]["vocab"], library["model"]["merges"]
    for mark in ("<think>", "</think>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "yes"):
        word = max(vocab, key=vocab.get)
        merges[:] = [pair for pair in merges if "".join(pair if isinstance(pair, list) else pair.split(" ")) != word]
        token = {"id": vocab.pop(word), "content": mark, "special": False, "normalized": False}
        library["added_tokens"].append({**token, "single_word": mark == "yes", "lstrip": False, "rstrip": False})
    library["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(library))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The built-in model, with a token before every text and a variable in the chat template; one request at a time."""
    folder = tmp_path_factory.mktemp("model") / "own"
    shutil.copytree(fetch("builtin", weights=True).path, folder)
    with_marks(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    for name in ("tokenizer_config.json",):
        (folder / name).write_text(json.dumps({**config, "bos_token": "<|endoftext|>", "add_bos_token": True}))
    (folder.parent / "template.jinja").write_text(f"{JUDGING}{SPOKEN}{template}{{% endif %}}")
    flags = ["--chat-template", str(folder.parent / "template.jinja"), "--scheduling-policy", "priority"]
    names = ["--served-model-name", "own", "other"]
    steps = folder.parent / "steps.jsonl"
    flags += ["--step-log", str(steps)]
    with PacedServer(str(folder), *flags, *names, "--max-num-seqs", "1", "--dtype", "float32") as running:
        running.steps = steps
        yield running


def entry(path, field, kind):
    """What the tables here have for a field; fails where that is nothing."""
    found = {"effect": EFFECTS.get(path, {}), "label": LABELS}.get(kind, {}).get(field)
    if found is None and kind != "refused":
        pytest.fail(f"{field} of {path} is new and of kind {kind}: give it an entry that tells its effect")
    return found


def within(path, field, value):
    """A request's addition without a field, the one that sets it to a value, and how an error names its place."""
    try:
        return changed(path, field, value)
    except LookupError:
        outer, _, inner = field.partition(".")
        return *({outer: {inner: value} if inner else value} for value in (None, value)), field


@pytest.fixture(scope="module")
def capabilities(server):
    rows = server.client.get("/v1/capabilities").json()
    return {(row["endpoint"], row["field"]): row for row in rows}


@pytest.mark.parametrize(("path", "field"), ROWS, ids=lambda part: part.rpartition("/")[2])
def test_a_field_is_what_the_table_says(server, capabilities, path, field):
    row, endpoint = capabilities[path, field], ENDPOINTS.get(path, Endpoint)(server, path)
    telling = entry(path, field, row["kind"])
    assert row["note"], "nobody can know what it does"
    if row["kind"] == "effect":
        telling(endpoint)
    elif row["kind"] == "label":
        draws = "temperature" in EFFECTS[path]
        for more in ({}, {"temperature": 1.5, "seed": 3}) if draws else ({},):
            ways = [way | more for way in within(path, field, telling)[:2]]
            if "stream_options" in ways[0]:
                plain, labelled = (joined(endpoint.stream(**way)) for way in ways)
            elif draws:
                plain, labelled = (endpoint.tokens(**way) for way in ways)
            else:
                plain, labelled = (endpoint.ask(**way) for way in ways)
            assert labelled == plain
    elif field.endswith(("]", "}")):
        plain, other, place, tag = of_kind(path, field)
        error = endpoint.post(**other)
        assert error.status_code == 400
        assert error.json()["error"]["param"] in (place, f"{place}.{tag}")
        assert endpoint.post(**plain).status_code == 200
    else:
        base = {TOKENIZE: {"messages": QUESTION}}.get(path, {})
        endpoint = Endpoint(server, path)  # with the names of its own API alone
        for value in ({"no": "default"}, "no such default"):
            plain, other, place = within(path, field, value)
            error = endpoint.post(**{**base, **other})
            assert error.status_code == 400
            assert error.json()["error"]["param"] == place
        assert endpoint.post(**{**base, **plain}).status_code == 200


def test_the_api_page_has_the_fields_of_the_capabilities_that_are_not_refused(server, capabilities):
    page = server.client.get("/openapi.json").json()

    def fields(schema, prefix=""):
        for name, inner in schema["properties"].items():
            yield prefix + name
            yield from inside(inner, prefix + name)

    def inside(schema, place):
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from inside(part, place)
        if "items" in schema:
            yield from inside(schema["items"], f"{place}[]")
        if "$ref" in schema:
            yield from fields(page["components"]["schemas"][schema["$ref"].rpartition("/")[2]], f"{place}.")

    def without_kinds(field):
        """The page tells of kinds in its own way."""
        return re.sub(r"{.*?}", "", re.sub(r"\[.*?\]", "[]", field))

    shown = {
        (path, field)
        for path, operations in page["paths"].items()
        for operation in operations.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        for field in fields(content["schema"])
    }
    assert set(ROWS) == capabilities.keys()
    taken = {place for place, row in capabilities.items() if row["kind"] != "refused"}
    assert shown == {(path, without_kinds(field)) for path, field in taken}
    assert {row["kind"] for row in capabilities.values()} == {"effect", "label", "refused"}


def test_every_field_of_the_apis_and_of_their_common_extensions_is_known():
    for path, names in KNOWN.items():
        assert names - {row.field for row in table(MODELS[path])} == set()


@pytest.mark.parametrize(("path", "types"), SDK_TYPES.items(), ids=lambda part: str(part).rpartition("/")[2])
def test_every_field_inside_of_objects_and_lists_is_known(path, types):
    assert {gap for theirs in types for gap in gaps(MODELS[path], theirs)} <= HEADERS


def test_no_two_parts_of_requests_share_a_name_on_the_api_page():
    seen = {}
    for model in MODELS.values():
        for name, schema in model.model_json_schema().get("$defs", {}).items():
            assert seen.setdefault(name, schema) == schema


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


def test_a_path_says_which_kind_of_object_where_several_have_a_field():
    class Near(Wire):
        type: typing.Literal["near"]
        far: bool
        """Not."""

    class Far(Near):
        type: typing.Literal["far", "farther"]
        miles: int
        """How many."""

    class Travel(Wire):
        stops: list[typing.Annotated[Near | Far, Field(discriminator="type"), RefusedKinds("type", ("moon",))]] | None
        goal: typing.Annotated[Near | Far, Field(discriminator="type")]
        home: typing.Annotated[Near, RefusedKinds("type", ("moon",))]

    rows = {row.field: (row.kind, row.note) for row in table(Travel)}
    assert list(rows) == [
        "stops", "stops[].type", "stops[type=near].far", "stops[type=far|farther].far", "stops[].miles",
        "stops[type=moon]", "goal", "goal.type", "goal{type=near}.far", "goal{type=far|farther}.far", "goal.miles",
        "home", "home.type", "home.far", "home{type=moon}",
    ]  # fmt: skip
    assert rows["stops[].type"] == ("effect", "One of: near, far, farther.")
    assert rows["stops[type=moon]"] == ("refused", "Not supported: a 400 that names type.")


def test_a_field_that_an_sdk_knows_and_a_request_does_not_is_found():
    class Part(typing.TypedDict):
        type: typing.Literal["near"]
        far: bool
        colour: str

    class Other(typing.TypedDict):
        type: typing.Literal["moon"]

    class Theirs(typing.TypedDict, total=False):
        parts: typing.Iterable[Part | Other] | str
        speed: int

    class Own(Wire):
        type: typing.Literal["near"]
        far: bool

    class Ours(Wire):
        parts: list[Own] | str

    class More(Wire):
        parts: list[typing.Annotated[Own, RefusedKinds("type", ("moon",))]] | str

        unsupported: typing.ClassVar = {"speed": refused()}

    assert set(gaps(Ours, Theirs)) == {"parts[](near).colour", "parts[](moon)", "speed"}
    assert set(gaps(More, Theirs)) == {"parts[](near).colour"}


def test_refused_notes_say_what_passes():
    class Odd(Wire):
        unsupported: typing.ClassVar = {"field": refused(False, 1.5, hint="send another")}

    [row] = table(Odd)
    assert row.note == "Not supported; allowed values: null, false, 1.5. Send another."
