"""Pieces: long texts are cut only where the tokens of the parts are the tokens of the whole."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import tokenizers

from server.tokenization import split as pieces_module
from server.tokenization.split import TextSplitter, minima
from server.tokenization.tokenizer import Tokenizer
from tests.toys import byte_level

PARTS = [
    *"abcxyzABC 0123456789.,;\n\t'\"(){}é日🐳 \r\u00a0\u0301", "the ", "\n\n", "  ", "don't ", "I'm ", "word word ",
    "a1 ", "123abc ", "\r\n", "'s", "'LL ", "<|end|>", "deadbeef01",
]  # fmt: skip


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces_module, "PIECE", 20)


def test_the_tokens_of_the_pieces_are_those_of_the_whole(tokenizer: Tokenizer, small_pieces) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(PARTS) for _ in range(200))
        for special in (True, False):
            assert tokenizer.encode_long(text, special) == tokenizer.encode(text, special), repr(text)


@pytest.mark.parametrize("filler", ["日本語", "🐳", " ", "\n", "a", "e\u0301", "привет "])
def test_a_boundary_is_found_wherever_a_window_of_the_search_ends(tokenizer: Tokenizer, small_pieces, filler) -> None:
    cut = tokenizer.splitter._cut
    for length in range(17, 43):
        for boundary in ("see the", "see\nthe", "see123"):
            text = (filler * length)[:length] + boundary + filler * 3
            assert tokenizer.encode_long(text, False) == tokenizer.encode(text, False), repr(text)
            whole = cut.search(text, 20) if cut else None
            first = next(tokenizer.splitter.pieces(text))
            assert len(first) == (whole.start() if whole else len(text)), repr(text)


class Searches:
    """A pattern that records the length of each of its searches."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.sizes = pattern, []

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        self.sizes.append(min(end, len(text)) - start)
        return self.pattern.search(text, start, end)


def test_a_text_without_boundaries_is_searched_in_windows(made: Callable[[str], Tokenizer]) -> None:
    """A search holds the GIL."""
    splitter = made("byte level").splitter
    splitter._cut = searches = Searches(splitter._cut)
    text = "日本" * 200_000
    assert list(splitter.pieces(text)) == [text]
    assert max(searches.sizes) == pieces_module.PIECE + pieces_module.LOOKAHEAD
    assert sum(searches.sizes) >= len(text) - pieces_module.PIECE


@pytest.mark.parametrize(
    "parts", [["日", "本", "語", "。"], ["🐳", "\u200d", "a"], [" ", "\n"], ["1", "2"], ["a", "b"]]
)
def test_slices_count_at_most_the_tokens_of_the_whole(tokenizer: Tokenizer, monkeypatch, parts) -> None:
    monkeypatch.setattr(pieces_module, "MAX_UNCOUNTED", 4000)
    monkeypatch.setattr(pieces_module, "SLICE", 1000)
    rng = random.Random(2)
    for text in ("".join(rng.choice(parts) for _ in range(8000)), parts[0] * 8000):
        sizes = []

        def encode(part: str, sizes: list[int] = sizes) -> list[int]:
            sizes.append(len(part))
            return tokenizer.encode(part, False)

        counted = list(minima(encode, text))
        count = len(tokenizer.encode(text, False))
        assert sizes == [1000] * 8
        assert count - 8 * (pieces_module.MAX_ADDED + 2) <= counted[-1] <= count
        assert list(minima(encode, text[:4000])) == []


@pytest.mark.parametrize("kind", ["byte level", "byte fallback, no strip", "metaspace"])
def test_ordinary_texts_are_cut(made: Callable[[str], Tokenizer], small_pieces, kind: str) -> None:
    cut = list(made(kind).splitter.pieces("the sea and\nthe whale a1 " * 40))
    assert len(cut) > 20 and max(map(len, cut)) < 60


def test_hexadecimal_is_cut_where_digits_follow_letters(made: Callable[[str], Tokenizer], small_pieces) -> None:
    assert len(list(made("byte level").splitter.pieces("c0ffee12" * 100))) > 20


def test_where_nothing_can_be_cut_a_text_is_one_piece(made: Callable[[str], Tokenizer], small_pieces) -> None:
    for text in ("", "a" * 1000, " " * 1000, "日本" * 500):
        assert list(made("byte level").splitter.pieces(text)) == [text]


def test_no_cut_goes_through_a_token_that_has_a_space_within(folder, small_pieces) -> None:
    """As vocabularies of several words have them; and added tokens, which are found wherever they stand."""
    library = byte_level()
    library.add_tokens([tokenizers.AddedToken("the white whale", normalized=False)])
    tokenizer = Tokenizer(folder(library))
    text = "see the white whale " * 50
    ids = tokenizer.encode_long(text, False)
    assert ids == tokenizer.encode(text, False)
    assert ids.count(tokenizer._library.token_to_id("the white whale")) == 50


def test_a_tokenizer_that_looks_across_words_is_not_cut() -> None:
    def by_length(text: str) -> list[int]:
        return [len(text)]  # every token depends on all of the text

    assert list(TextSplitter(by_length, ["a"]).pieces("word word\nword a1 " * 10_000)) == [
        "word word\nword a1 " * 10_000
    ]
