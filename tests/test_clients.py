"""The table of `make clients`, for the clients that the tests want anyway: the SDKs of OpenAI and Anthropic."""

import contextlib
import copy
import inspect

import pytest

from tests.clients import table
from tests.clients.place import Place

HERE = ["openai_sdk", "anthropic_sdk"]


@pytest.fixture(scope="module")
def place():
    with Place() as place:
        yield place


def calls():
    """Every client here with every row; ids such as openai_sdk-chat."""
    for name in HERE:
        pytest.importorskip(table.CLIENTS[name])
        for row in table.offered(table.client(name)):
            yield pytest.param(name, row, id=f"{name}-{row}")


@pytest.mark.parametrize(("name", "row"), [*calls()])
def test_a_client_does_what_its_row_says(place, name, row):
    table.call(table.client(name), row, place)


@pytest.mark.parametrize("name", HERE)
def test_a_client_has_no_call_that_the_table_does_not_show(name):
    module = table.client(name)
    taking = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and [*inspect.signature(value).parameters] == ["place"]
    ]
    assert {*taking} - {"client_of", "async_client_of"} == {*table.offered(module)}


def test_what_a_client_needs_once_is_entered_once_and_its_failure_is_raised_every_time(place):
    entered = []

    @contextlib.contextmanager
    def program(place):
        entered.append("program")
        yield "a whale"

    @contextlib.contextmanager
    def broken(place):
        entered.append("broken")
        raise OSError("no whale")
        yield

    assert [place.once(program), place.once(program)] == ["a whale", "a whale"]
    for _ in range(2):
        with pytest.raises(OSError, match="no whale"):
            place.once(broken)
    assert entered == ["program", "broken"]


def test_a_client_may_say_its_version_and_what_it_lacks(place, monkeypatch):
    class Program:
        @staticmethod
        def version(place):
            return "0.12"

        @staticmethod
        def missing(place):
            return "there is no browser"

    monkeypatch.setattr(table, "client", lambda name: Program)
    assert table.version("program", place) == "0.12"
    assert table.missing(Program, place) == "there is no browser"
    assert table.missing(object, place) is None


def test_a_failure_is_reported_with_its_reason():
    class Client:
        @staticmethod
        def chat(place):
            raise ValueError("no whale")

        @staticmethod
        async def models(place):
            pass

    assert table.offered(Client) == ["chat", "models"]

    class Here:
        @staticmethod
        def run(coroutine):
            coroutine.close()

    Here.runner = Here
    failed, good = table.results(Client, Here, table.offered(Client))
    assert (failed.failure, good.failure) == ("ValueError: no whale", None)
    shown = table.markdown({"a 1.0": {"chat": failed}, "b 2.0": {"models": good}})
    assert shown.splitlines() == [
        "| | a 1.0 | b 2.0 |", "|---|---|---|", "| chat | FAILED | - |", "| models | - | ok |",
    ]  # fmt: skip


def test_only_the_form_of_another_models_response_is_checked(place):
    other = copy.copy(place)
    other.is_builtin = False
    assert place.answers("It is 12.") and not place.answers("It is 13.") and not place.answers(None)
    assert other.answers("It is 13.") and not other.answers(" ") and not other.answers(None)
    assert (
        place.ends("stop") and not place.ends("length") and not place.ends("stop", "end_turn") and not place.ends(None)
    )
    assert other.ends("incomplete", "completed") and not other.ends("error") and not other.ends("length", "end_turn")
    assert place.goes_on("Yes.", []) and not place.goes_on("Yes.", ["call"]) and not place.goes_on("")
    assert other.goes_on("", ["call"]) and not other.goes_on("", [])
