"""Pieces: long texts are cut only where the tokens of the parts are the tokens of the whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers

from server.tokenization import split as pieces_module
from server.tokenization.split import TextSplitter
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
            ids = [token for piece in tokenizer.encode_long(text, special) for token in piece]
            assert ids == tokenizer.encode(text, special), repr(text)


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
    ids = [token for piece in tokenizer.encode_long(text, False) for token in piece]
    assert ids == tokenizer.encode(text, False)
    assert ids.count(tokenizer._library.token_to_id("the white whale")) == 50


def test_a_tokenizer_that_looks_across_words_is_not_cut() -> None:
    def by_length(text: str) -> list[int]:
        return [len(text)]  # every token depends on all of the text

    assert list(TextSplitter(by_length, ["a"]).pieces("word word\nword a1 " * 10_000)) == [
        "word word\nword a1 " * 10_000
    ]
