"""The table of a tokenizer's bytes that grammars use."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from engine.grammar import GrammarError, limits, source
from engine.grammar.grammars import Matcher
from engine.grammar.table import MAX_ADDED, Table, _named_apart
from engine.types import SamplingParams
from server.tokenization.tokenizer import Tokenizer
from tests.toys import MADE, byte_level


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "byte fallback, no strip"])
def test_the_table_has_the_bytes_that_the_server_writes(kind, tmp_path):
    MADE[kind]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.takes_grammars
    table = Table.of(tmp_path, tokenizer.vocab_size + 20)
    assert table.library.vocab_size == tokenizer.vocab_size + 20
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.decoder.piece(token, token)
        if token in tokenizer.special_ids:
            assert table.library.is_special_token(token)
        elif piece != b"\xff":  # llguidance's mark of special tokens, and in no text
            assert table.library.decode_bytes([token]) == piece, token


def bytes_in_base64() -> list[str]:
    return [base64.b64encode(bytes((byte,))).decode() for byte in range(256)]


def write_tiktoken(folder: Path) -> None:
    (folder / "tiktoken.model").write_text("".join(f"{byte} {rank}\n" for rank, byte in enumerate(bytes_in_base64())))
    added = {"256": {"content": "[BOS]", "special": True}, "258": {"content": "<|im_end|>", "special": True}}
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    settings = {"auto_map": code, "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tekken(folder: Path) -> None:
    vocab = [{"rank": rank, "token_bytes": byte} for rank, byte in enumerate(bytes_in_base64())]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 266, "default_num_special_tokens": 10}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))


def write_gpt2(folder: Path) -> None:
    """Vocabulary and merges in files of their own, which transformers converts."""
    model = json.loads(byte_level().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(("bos_token", "eos_token"), "<|end|>")})
    )


@pytest.mark.parametrize("write", [write_tiktoken, write_tekken, write_gpt2])
def test_a_folder_without_tokenizer_json_has_the_bytes_and_tokens_of_the_server(write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder)
    tokenizer = Tokenizer(folder)
    assert tokenizer.takes_grammars
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("converted a second time"))
    table = Table.of(folder, tokenizer.vocab_size)
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.decoder.piece(token, token)
        if token in tokenizer.special_ids:
            assert table.library.is_special_token(token)
        elif piece != b"\xff" and not piece.startswith(b"<|reserved_token"):
            assert table.library.decode_bytes([token]) == piece, token
    schema = {"type": "object", "properties": {"ship": {"const": "The sea"}}, "required": ["ship"]}
    text = '{"ship": "The sea"}'
    matcher = LLMatcher(table.library, source("json_schema", json.dumps(schema)), limits=limits(), log_level=0)
    assert matcher.consume_tokens(tokenizer.encode(text, add_special=False)) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ["word pieces", "metaspace"])
def test_tokenizers_without_byte_level_tokens_refuse_grammars(kind, tmp_path):
    MADE[kind]().save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer(tmp_path).takes_grammars


def test_folder_without_a_tokenizer_refuses_grammars(tmp_path):
    with pytest.raises(GrammarError, match="has no tokenizer"):
        Table.of(tmp_path, 100)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "no such"}}')
    with pytest.raises(GrammarError, match="cannot be used"):
        Table.of(tmp_path, 100)


def test_tokenizer_that_makes_the_library_panic_or_recurse_refuses_grammars(tmp_path):
    made = json.loads(byte_level().to_str())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**made, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}))
    with pytest.raises(GrammarError, match="of a kind that grammars cannot be used with"):
        Table.of(tmp_path, 400)
    path.write_text('{"added_tokens": [], "model": {"vocab": ' + "[" * 100_000)
    with pytest.raises(GrammarError, match="of a kind that grammars cannot be used with"):
        Table.of(tmp_path, 400)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(GrammarError, match="is not a regular file"):
        Table.of(tmp_path, 400)


@pytest.mark.parametrize("listed", [True, False], ids=["in tokenizer.json", "in tokenizer_config.json"])
def test_too_many_added_tokens_refuse_grammars(tmp_path, listed):
    made = json.loads(byte_level().to_str())
    names = [f"<t{number}>" for number in range(MAX_ADDED)]
    if listed:
        made["added_tokens"] += [
            {**made["added_tokens"][0], "id": 400 + i, "content": name} for i, name in enumerate(names)
        ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"additional_special_tokens": names}))
    with pytest.raises(GrammarError, match="more than 16,384 added tokens"):
        Table.of(tmp_path, 20_000)


def test_tokens_that_only_other_files_call_special_have_no_text(tmp_path):
    library = byte_level()
    library.add_tokens(["[tool]"])
    library.save(str(tmp_path / "tokenizer.json"))
    number = library.token_to_id("[tool]")
    assert not Table.of(tmp_path, 400).library.is_special_token(number)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"additional_special_tokens": ["[tool]"]}))
    assert Table.of(tmp_path, 400).library.is_special_token(number)


def test_forced_text_may_look_like_special_tokens(data):
    table = Table.of(data / "tokenizers/qwen3", 151_936)
    text = "<think>\nhm</think>\n<tool_call>\n{}\n</tool_call><|im_end|>."
    matcher = LLMatcher(table.library, source("choice", json.dumps([text])), limits=limits(), log_level=0)
    forced = matcher.compute_ff_tokens()
    assert max(forced) < 151_643, "it is spelt in letters"
    assert matcher.consume_tokens(forced) and matcher.is_accepting(), matcher.get_error()
    named = LLMatcher(table.library, source("lark", 'start: <[151657]> "x" <[151645]>'), limits=limits(), log_level=0)
    assert named.consume_tokens([151_657, 87, 151_645]) and named.is_accepting(), "a grammar can still name them"


def matcher(table: Table, kind: str, text: str) -> Matcher:
    library = LLMatcher(table.library, source(kind, text), limits=limits(), log_level=0)
    return Matcher(library, table, SamplingParams(max_tokens=50))


def test_text_is_forced_in_tokens_that_the_model_has(tmp_path):
    library = byte_level()
    library.add_tokens(["[tool]"])
    library.save(str(tmp_path / "tokenizer.json"))
    width = library.token_to_id("[tool]")
    table = Table.of(tmp_path, width)
    forced = [*matcher(table, "choice", json.dumps(["x[tool]yx", "x[tool]z"])).begin(50)]
    assert max(forced) < width
    assert library.decode(forced) == "x[tool]"


def test_forced_text_stops_before_a_token_that_the_model_lacks(tmp_path):
    library = byte_level()
    library.save(str(tmp_path / "tokenizer.json"))
    text = "The sea and the captain of the ship"
    tokens = library.encode(text).ids
    width = sorted(tokens)[-1]  # the last one of the vocabulary is not the first of the text
    table = Table.of(tmp_path, width)
    letters = matcher(table, "choice", json.dumps([text]))
    assert letters.begin(50) == tokens[: tokens.index(width)] and not letters.has_failed


@pytest.mark.parametrize("width", [256, 257, 288])
def test_an_end_token_that_the_model_lacks_is_in_no_mask(tmp_path, width):
    library = byte_level()
    made = json.loads(library.to_str())
    alphabet = sorted(text for text in made["model"]["vocab"] if len(text) == 1)
    made["model"] |= {"vocab": {text: i for i, text in enumerate(alphabet)}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made | {"added_tokens": []}))
    table = Table.of(tmp_path, width)
    assert (len(alphabet), table.end_id) == (256, 256)
    letters = matcher(table, "regex", "[a-z]+")
    bits = np.zeros(-(-table.library.vocab_size // 32), np.int32)
    letters.fill(bits)
    bits = np.pad(bits, (0, 1))[: -(-width // 32)]
    letters.finish(bits)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert sorted(alphabet[token] for token in allowed) == sorted("abcdefghijklmnopqrstuvwxyz")


def test_tokens_without_text_are_renamed_in_any_encoding_of_the_vocabulary():
    added = [{"id": 1, "content": "<a/b>", "special": True}]
    plain = {"added_tokens": added, "model": {"vocab": {"x": 0, "<a/b>": 1, "\\u": 2}, "unk_token": "<a/b>"}}
    text = json.dumps(plain)
    spellings = [text, text.replace("a/b", "a\\/b"), text.replace("<", "\\u003c")]
    found = [json.loads(_named_apart(spelling.encode(), 99)) for spelling in spellings]
    assert found[0] == found[1] == found[2]
    name = found[0]["added_tokens"][0]["content"]
    assert name != "<a/b>" and found[0]["model"] == {"vocab": {"x": 0, name: 1, "\\u": 2}, "unk_token": name}
    # A token that ends as a mark does, behind a quote, is a text of its own.
    plain["model"] = {"vocab": {"<a/b>": 0, '"<a/b>': 1}}
    assert json.loads(_named_apart(json.dumps(plain).encode(), 99))["model"]["vocab"] == {name: 0, '"<a/b>': 1}
    plain["model"] = {"type": "of another kind"}
    assert json.loads(_named_apart(json.dumps(plain).encode(), 99))["model"]["type"] == "of another kind"
