"""Folders with tekken.json: compared with its algorithm, written directly."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from engine import ModelError, tokenizer_folder
from engine.tokenizer_files.byte_level import _merges
from engine.tokenizer_files.tekken import OLDER, convert
from server.tokenization.tokenizer import Tokenizer

# As in the files of Mistral Nemo and later models.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGED = [b"th", b"he", b"the", b" the", b"se", b"sea", b" sea", b"ab", b"abc"]
TEXTS = ["the sea, the Sea!", "abcabc THE sea\n\n  2024 caf\u00e9 \U0001f433", " \r\n\tx"]


def tekken(tokens: Iterable[bytes] = MERGED, special: int = 30, size: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a file whose model has the bytes, these tokens and `special` tokens without text."""
    listed = [*(bytes((byte,)) for byte in range(256)), *tokens]
    size = len(listed) + special if size is None else size
    return {
        "config": {"pattern": PATTERN, "default_vocab_size": size, "default_num_special_tokens": special},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(listed)
        ],
        **more,
    }


def made(folder: Path, file: dict[str, Any]) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(file))
    convert(folder, folder)
    return Tokenizer(folder)


def directly(text: str, first: int) -> list[int]:
    ranks = {token: rank for rank, token in enumerate([*(bytes((byte,)) for byte in range(256)), *MERGED])}
    ids: list[int] = []
    for word in (found.group().encode() for found in regex.finditer(PATTERN, text)):
        parts = [word] if word in ranks else [word[i : i + 1] for i in range(len(word))]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [first + ranks[part] for part in parts]
    return ids


def test_texts_get_the_ids_of_tekken_after_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, tekken())
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == directly(text, first=30)
        assert tokenizer.encode(text)[0] == tokenizer.bos_id == 1
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 30 + 256 + len(MERGED)


def test_long_tokens_take_no_cubic_time() -> None:
    ranks = {bytes((byte,)): byte for byte in range(256)}
    ranks |= {b"a" * length: 254 + length for length in range(2, 301)}
    lookups = 0

    class Counting(dict[bytes, int]):
        def get(self, *args: Any) -> Any:
            nonlocal lookups
            lookups += 1
            return super().get(*args)

    pairs = list(_merges(Counting(ranks)))
    assert pairs[:2] == [(b"a", b"a"), (b"aa", b"a")] and pairs[-1][0] + pairs[-1][1] == b"a" * 300
    assert lookups < 3 * 300 * 300, "a few for each byte of a token"


def test_special_tokens_are_those_of_the_file_or_of_older_models(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, tekken())
    assert tokenizer.tokens(range(30)) == [*OLDER, *(f"<SPECIAL_{index}>" for index in range(len(OLDER), 30))]
    assert (tokenizer.eos_ids, tokenizer.special_ids) == ((2,), frozenset(range(30)))
    listed = [{"rank": rank, "token_str": name} for rank, name in enumerate(["<unk>", "<s>", "</s>", "[THINK]"])]
    newer = made(tmp_path, tekken(special=5, special_tokens=listed))
    assert newer.encode("[THINK]a</s>") == [1, 3, 5 + ord("a"), 2]
    assert newer.tokens([4]) == ["<SPECIAL_4>"]


def test_tokens_beyond_the_size_of_the_model_are_left_out(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, tekken(size=30 + 256 + 2))
    assert tokenizer.vocab_size == 30 + 256 + 2
    assert tokenizer.encode("the", add_special=False) == [30 + 256, 30 + ord("e")], "'the' is the third merge"


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({}, "no config.pattern"),
        ({**tekken(), "config": {"pattern": "x" * 5000}}, "no config.pattern of at most 4,096"),
        (tekken(special=-1), "default_num_special_tokens in tekken.json is not a number of tokens in 0"),
        (tekken(size=3), "default_vocab_size in tekken.json is not a number of tokens in 30"),
        (tekken(size=1 << 40), "default_vocab_size in tekken.json is not a number"),
        (tekken(size=1000), "does not list each rank below 970 once"),
        (tekken(vocab=None), "does not list each rank"),
        (tekken(vocab=[{"rank": 0}]), "is not a rank and token_bytes"),
        (tekken(vocab=[{"rank": 0, "token_bytes": "!"}]), "rank 0 in tekken.json is not a token in base64"),
        (tekken([b"a"]), "rank 256 in tekken.json repeats another one"),
        (tekken(size=30 + 255), "no token for the byte 0xFF"),
        (tekken(special_tokens=[{"rank": 0}]), "is not a rank and token_str"),
        (tekken(special_tokens=[{"rank": rank, "token_str": "<s>"} for rank in range(2)]), "has several ids"),
        (tekken(special_tokens=[{"rank": 0, "token_str": "A"}]), "or is a token of the vocabulary"),
    ],
)
def test_a_broken_file_gets_a_sentence(tmp_path: Path, file: dict[str, Any], says: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    with pytest.raises(ModelError, match=says):
        convert(tmp_path, tmp_path)


def test_a_pattern_that_cannot_be_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tekken()
    file["config"]["pattern"] = "(the"
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tokenizer files of .* cannot be converted: .*parenthesis"):
            tokenizer_folder(tmp_path)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name.startswith("token")] == []
