"""Every field that the API page shows is sent to a real server: it has its effect, is a label, or is refused by name.

The rows come from the server, the telling values from tests/server/effects: a field without an entry fails its test.
"""

import json
import shutil
import typing

import pytest

from engine import fetch
from server.app import build_app
from server.body import models
from server.protocol.wire import Refused, Wire, table
from server.settings import Settings
from tests.fakes import FakeEngine
from tests.live import Server
from tests.server.effects import EFFECTS, KNOWN, LABELS
from tests.server.effects.endpoint import QUESTION, TOKENIZE, Endpoint
from tests.server.wire import CHAT, joined

MODELS = models(build_app(Settings(model="none"), FakeEngine()).routes)
ROWS = [(path, row.field) for path, model in MODELS.items() for row in table(model)]


# What the fields of the template are told by; and the marks of a model that reasons.
SPOKEN = "{{ mood }}{{ reasoning_effort }}{{ 'brisk' if enable_thinking is false }}{# <think> </think> #}"


def with_marks(folder):
    """Make the marks of reasoning tokens, in the place of the two last words of the vocabulary."""
    path = folder / "tokenizer.json"
    library = json.loads(path.read_text())
    vocab, merges = library["model"]["vocab"], library["model"]["merges"]
    for mark in ("<think>", "</think>"):
        word = max(vocab, key=vocab.get)
        merges[:] = [pair for pair in merges if "".join(pair if isinstance(pair, list) else pair.split(" ")) != word]
        token = {"id": vocab.pop(word), "content": mark, "special": False, "normalized": False}
        library["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
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
    (folder.parent / "template.jinja").write_text(SPOKEN + template)
    flags = ["--chat-template", str(folder.parent / "template.jinja"), "--scheduling-policy", "priority"]
    names = ["--served-model-name", "own", "other"]
    with Server(str(folder), *flags, *names, "--max-num-seqs", "1", "--dtype", "float32") as running:
        yield running


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
        draws = "temperature" in EFFECTS[path]
        for more in ({}, {"temperature": 1.5, "seed": 3}) if draws else ({},):
            ways = [within(field, value) | more for value in (None, telling)]
            if "stream_options" in ways[0]:
                plain, labelled = (joined(endpoint.stream(**way)) for way in ways)
            elif draws:
                plain, labelled = (endpoint.tokens(**way) for way in ways)
            else:
                plain, labelled = (endpoint.ask(**way) for way in ways)
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
    for path, names in KNOWN.items():
        assert names - {row.field for row in table(MODELS[path])} == set()


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
