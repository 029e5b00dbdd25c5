"""Detokenizer against the slow obvious version: decode everything, look for the stop strings."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.tokenization.detokenizer import Detokenizer, last_with_text
from server.tokenization.stop_matcher import StopMatcher, StopString
from server.tokenization.tokenizer import Tokenizer

Make = Callable[[str], Tokenizer]
PROPERTY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def strings(*texts: str) -> list[StopString]:
    return [StopString(text) for text in texts]


def fed(stream: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(stream.feed(token_id) for token_id in ids)


def run(stream: Detokenizer, ids: Sequence[int]) -> tuple[str, bool, int, list[int]]:
    """Feed, finish, and put together: text, stopped, tokens that count, their offsets."""
    text, offsets = "", []
    for token_id in ids:
        is_text = not stream.stopped
        text += stream.feed(token_id)
        if is_text:
            offsets.append(stream.start)
    return text + stream.finish(), stream.stopped, len(offsets), offsets


def pieces(tokenizer: Tokenizer, ids: Sequence[int], hidden: Collection[int]) -> list[bytes]:
    """The bytes of each token."""
    found, after = [], None
    for token_id in ids:
        piece = None if token_id in hidden else tokenizer.decoder.piece(token_id, after)
        found.append(piece or b"")
        if piece is not None:
            after = token_id
    return found


def visible(tokenizer: Tokenizer, ids: Sequence[int], hidden: Collection[int], final: bool) -> str:
    """The whole text of ids; not final: without the character that is still incomplete."""
    return codecs.utf_8_decode(b"".join(pieces(tokenizer, ids, hidden)), "replace", final)[0]


def without(prompt: str, whole: str) -> str:
    same = 0
    while same < min(len(prompt), len(whole)) and prompt[same] == whole[same]:
        same += 1
    return whole[same:]


def slow(
    tokenizer: Tokenizer,
    ids: list[int],
    stops: list[str],
    *,
    include_stop: bool,
    hidden: Collection[int],
    context: list[int],
    min_tokens: int,
) -> tuple[str, bool, int, list[int]]:
    prompt = visible(tokenizer, context, hidden, final=True)
    texts = [
        without(prompt, visible(tokenizer, [*context, *ids[:count]], hidden, final=False))
        for count in range(len(ids) + 1)
    ]
    offsets = []
    for index, piece in enumerate(pieces(tokenizer, [*context, *ids], hidden)[len(context) :]):
        # With the characters that remain incomplete, if the token is decoded as if it came after them.
        closed = without(prompt, visible(tokenizer, [*context, *ids[:index]], hidden, final=True))
        is_apart = texts[index + 1] == closed + codecs.utf_8_decode(piece, "replace", False)[0]
        offsets.append(len(closed if is_apart else texts[index]))
    for count in range(1, len(ids) + 1):
        text, known = texts[count], len(texts[count - 1])
        ends = {
            (start, start + len(stop))
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > known
        }
        if ends and count > min_tokens:
            start, end = min(ends)
            return text[: end if include_stop else start], True, count, offsets[:count]
    return without(prompt, visible(tokenizer, [*context, *ids], hidden, final=True)), False, len(ids), offsets


@PROPERTY
@given(draw=st.data())
def test_equals_the_slow_version(tokenizer: Tokenizer, draw: st.DataObject) -> None:
    pieces = tokenizer.encode("the sea 🐳é\n日 a", add_special=False)  # bytes that form characters only together
    token = st.one_of(
        st.sampled_from(pieces),
        st.integers(0, tokenizer.vocab_size + 3),
        st.sampled_from(sorted(tokenizer.special_ids)),
    )
    context = draw.draw(st.lists(token, max_size=5), "context")
    ids = draw.draw(st.lists(token, max_size=24), "ids")
    text = visible(tokenizer, ids, frozenset(), final=False)
    part = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda p: text[p[0] : p[0] + p[1]])
    stop = st.one_of(part.filter(bool), st.sampled_from(["a", "the", "\n", "🐳", "é", "aa", "aab", " s"]))
    stops = draw.draw(st.lists(stop, max_size=4), "stops") if text else []
    include_stop, skip_special = draw.draw(st.booleans()), draw.draw(st.booleans())
    min_tokens = draw.draw(st.sampled_from([0, 0, 0, 3, 30]))

    options: dict[str, Any] = {
        "include_stop": include_stop,
        "hidden": tokenizer.special_ids if skip_special else (),
        "context": context,
        "min_tokens": min_tokens,
    }
    want = slow(tokenizer, ids, stops, **options)
    assert run(Detokenizer(tokenizer, strings(*stops), **options), ids) == want
    holding = Detokenizer(tokenizer, strings(*stops), may_resume=True, **options)
    text, *others = run(holding, ids)
    assert (text + holding.included(), *others) == want


@PROPERTY
@given(draw=st.data())
def test_equals_the_library(tokenizer: Tokenizer, draw: st.DataObject) -> None:
    """Joined text = the library's text of prompt and output less that of the prompt, wherever all of it is text."""
    token = st.integers(0, tokenizer.vocab_size + 3)
    context, ids = draw.draw(st.lists(token, max_size=4)), draw.draw(st.lists(token, max_size=12))
    skip_special = draw.draw(st.booleans())
    prompt, whole = (
        tokenizer._library.decode(part, skip_special_tokens=skip_special) for part in (context, context + ids)
    )
    if "\ufffd" not in whole and "\ufffd" not in prompt:
        hidden = tokenizer.special_ids if skip_special else ()
        text, *_ = run(Detokenizer(tokenizer, hidden=hidden, context=context), ids)
        assert prompt + text == whole


def test_stop_finds_every_occurrence() -> None:
    text = "".join(random.Random(1).choices("ab", k=600))
    for stop in ("".join(letters) for size in range(1, 8) for letters in itertools.product("ab", repeat=size)):
        finder = StopMatcher(StopString(stop))
        found = [at + end for at in range(0, len(text), 7) for end in finder.feed(text[at : at + 7])]
        assert found == [end for end in range(len(text) + 1) if text[:end].endswith(stop)]


def test_half_characters_wait(made: Make) -> None:
    tokenizer = made("byte fallback")
    stream = Detokenizer(tokenizer, context=tokenizer.encode("the"))
    whale = [3 + byte for byte in "🐳".encode()]
    assert [stream.feed(i) for i in whale] == ["", "", "", "🐳"]
    assert fed(stream, whale[:2]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(("character", "given"), [("é", 1), ("€", 1), ("€", 2), ("🐳", 1), ("🐳", 2), ("🐳", 3)])
def test_output_completes_the_prompts_half_character(made: Make, character: str, given: int) -> None:
    tokenizer = made("byte fallback")
    data = [3 + byte for byte in character.encode()]
    assert fed(Detokenizer(tokenizer, context=data[:given]), data[given:]) == character
    # Never completed, it is the prompt's U+FFFD and not the output's.
    the = tokenizer.encode("the", add_special=False)
    assert fed(Detokenizer(tokenizer, context=data[:given]), the) == " the"


def test_half_a_surrogate_in_the_prompt_is_the_prompts(made: Make) -> None:
    tokenizer = made("byte fallback")
    half = [3 + byte for byte in b"\xed\xa0"]  # the decoder waits for a third byte, and shows two marks without one
    assert Detokenizer(tokenizer, context=half).finish() == ""
    assert fed(Detokenizer(tokenizer, context=half), tokenizer.encode("the", add_special=False)) == " the"


def test_the_leading_space_stays_after_a_prompt(made: Make) -> None:
    tokenizer = made("byte fallback")
    sea = tokenizer.encode("sea", add_special=False)
    assert tokenizer.decode(sea) == "sea"
    assert fed(Detokenizer(tokenizer, context=tokenizer.encode("the")), sea) == " sea"
    assert fed(Detokenizer(tokenizer, context=[1]), sea) == "sea"  # behind <s> alone a text begins


def test_the_last_tokens_with_text_do_for_the_whole_prompt(made: Make) -> None:
    tokenizer = made("byte fallback")
    prompt = [*tokenizer.encode("the sea"), *(3 + byte for byte in "🐳".encode()[:3]), *[1] * 50]
    last = last_with_text(tokenizer, prompt, tokenizer.special_ids)
    assert len(last) == 3
    rest = [3 + "🐳".encode()[3]]
    assert fed(Detokenizer(tokenizer, context=last), rest) == fed(Detokenizer(tokenizer, context=prompt), rest) == "🐳"


def test_stop_text_is_held_until_decided(made: Make) -> None:
    tokenizer = made("byte level")
    stream = Detokenizer(tokenizer, strings("abc"))
    letters = [tokenizer.encode(letter)[0] for letter in "xabab"]
    assert [stream.feed(i) for i in letters] == ["x", "", "", "ab", ""]
    assert stream.finish() == "ab"


def test_stop_in_one_token_ends_and_counts(made: Make) -> None:
    tokenizer = made("byte level")
    ids = tokenizer.encode("a b. the sea")
    stream = Detokenizer(tokenizer, strings("."))
    text, stopped, count, _ = run(stream, ids)
    assert (text, stopped) == ("a b", True)
    assert tokenizer.decode(ids[:count]) == "a b."
    assert fed(stream, ids) == stream.finish() == ""
    assert stream.stop == "."


def test_the_stop_string_that_ended_the_text_is_known(made: Make) -> None:
    tokenizer = made("byte level")
    for stops, found in ((["ship", "sea"], "sea"), (["the sea", "sea"], "the sea"), (["whale"], None)):
        stream = Detokenizer(tokenizer, strings(*stops))
        fed(stream, tokenizer.encode("a b. the sea"))
        stream.finish()
        assert stream.stop == found


def test_first_complete_stop_wins_then_the_first_to_begin(made: Make) -> None:
    tokenizer = made("byte level")
    letters = [tokenizer.encode(letter)[0] for letter in "abcd"]
    assert fed(Detokenizer(tokenizer, strings("abcd", "bc")), letters) == "a"
    (whole,) = tokenizer.encode(" the")
    assert Detokenizer(tokenizer, strings("e", "th")).feed(whole) == " "


def test_include_stop_holds_nothing(made: Make) -> None:
    tokenizer = made("byte level")
    stream = Detokenizer(tokenizer, strings("abc"), include_stop=True)
    letters = [tokenizer.encode(letter)[0] for letter in "xabcd"]
    assert [stream.feed(i) for i in letters] == ["x", "a", "b", "c", ""]


def test_special_tokens_are_hidden_or_shown(made: Make) -> None:
    tokenizer = made("byte level")
    end = next(i for i in tokenizer.special_ids if tokenizer.tokens([i]) == ["<|end|>"])
    ids = [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    assert fed(Detokenizer(tokenizer), ids) == "ab"
    assert fed(Detokenizer(tokenizer, hidden=()), ids) == "a<|end|>b"
    assert run(Detokenizer(tokenizer, strings("ab")), ids) == ("", True, 3, [0, 1, 1])


def test_ids_beyond_the_vocabulary_are_silent(made: Make) -> None:
    tokenizer = made("byte level")
    ids = [tokenizer.vocab_size, 10**6, 2**40, -1]
    assert run(Detokenizer(tokenizer, strings("x")), ids) == ("", False, 4, [0, 0, 0, 0])


@pytest.mark.parametrize("length", [1_000, 8_000])
def test_work_is_linear(made: Make, length: int) -> None:
    """Each token is looked up once, however long the output and the stop strings are."""
    tokenizer = made("byte level")
    calls = 0
    real = tokenizer.decoder.piece

    class Counting:
        def piece(self, token_id: int, after: int | None) -> bytes | None:
            nonlocal calls
            calls += 1
            return real(token_id, after)

    tokenizer.decoder = Counting()
    letter = tokenizer.encode("a")[0]
    stream = Detokenizer(tokenizer, strings("a" * length + "b"))
    assert "".join(stream.feed(letter) for _ in range(length + 5)) == "a" * 5
    assert calls == length + 5
