"""Tokenizer: held to the references, to the files that say what is special, and to folders that are broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import ModelError
from server.tokenization.detokenizer import Detokenizer
from server.tokenization.tokenizer import ByteDecoder, PairDecoder, Tokenizer
from tests.toys import byte_fallback, byte_level

Make = Callable[[str], Tokenizer]
Folder = Callable[..., Path]


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_reference_encodings(data: Path, name: str) -> None:
    tokenizer = Tokenizer(data / "tokenizers" / name)
    for case in json.loads((data / "tokenizers" / name / "reference_encodings.json").read_text()):
        assert tokenizer.encode(case["text"], add_special=False) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "models/stories260k"])
def test_naughty_strings_come_back(data: Path, name: str) -> None:
    tokenizer = Tokenizer(data / name)
    for line in (data / "prompts" / "naughty_strings.jsonl").read_bytes().splitlines():
        text = json.loads(line)["text"]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = Detokenizer(tokenizer)
        assert "".join(map(stream.feed, ids)) + stream.finish() == text


def test_reference_answers_are_the_models_text(data: Path) -> None:
    tokenizer = Tokenizer(data / "models" / "stories260k")
    assert tokenizer.eos_ids == (1, 2)  # generation_config.json knows more than config.json
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("Once")[0] == 1


def test_every_token_has_its_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the sea 🐳 é", add_special=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert b"".join(data for _, data in texts).decode().strip() == tokenizer.decode(ids, skip_special=False).strip()
    for text, data in texts:
        assert text.encode() == data or text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_token_text_shows_special_tokens_and_half_characters(made: Make) -> None:
    tokenizer = made("byte fallback")
    assert tokenizer.token_text(1) == ("<s>", b"<s>")
    assert tokenizer.token_text(3 + 0x0A) == ("\n", b"\n")
    assert tokenizer.token_text(3 + 0xE2) == ("bytes:\\xe2", b"\xe2")
    (the,) = tokenizer.encode("the", add_special=False)
    assert tokenizer.token_text(the) == (" the", b" the")
    assert tokenizer.tokens([the, 10**9]) == ["▁the", ""]


def test_ids_beyond_the_vocabulary_are_empty(tokenizer: Tokenizer) -> None:
    (known,) = tokenizer.encode("s", add_special=False)[-1:]
    plain = tokenizer.decode([known])
    for stranger in (tokenizer.vocab_size, 10**6, 2**32, 2**70, -1):
        assert tokenizer.decode([stranger, known, stranger]) == plain
        assert tokenizer.token_text(stranger) == ("", b"")
        assert tokenizer.tokens([stranger]) == [""]


def test_decoders_are_chosen_by_kind(made: Make) -> None:
    kinds: dict[str, type] = {
        "byte level": ByteDecoder,
        "byte fallback": ByteDecoder,
        "byte fallback, no strip": ByteDecoder,
    }
    kinds |= {"word pieces": PairDecoder, "metaspace": PairDecoder}
    assert {kind: type(made(kind).decoder) for kind in kinds} == kinds


def test_word_pieces_join_as_the_library_joins(made: Make) -> None:
    tokenizer = made("word pieces")
    ids = tokenizer.encode("the seas, sailor.")
    assert tokenizer.decode(ids) == tokenizer._library.decode(ids)


def test_truncation_and_padding_of_the_file_are_off(folder: Folder) -> None:
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=16)
    tokenizer = Tokenizer(folder(library))
    assert len(tokenizer.encode("x" * 10)) == 10
    assert len(tokenizer.encode("x")) == 1


def test_encoding_lets_other_threads_run(made: Make) -> None:
    tokenizer = made("byte level")
    done = threading.Event()

    def work() -> None:
        tokenizer.encode("the whale " * 40_000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1  # stands still for as long as the other thread keeps the interpreter
    thread.join()
    assert turns > 100


# --- what the other files say -------------------------------------------------------------------


def test_special_tokens_from_the_config(folder: Folder) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    tokenizer = Tokenizer(folder(byte_fallback(), tokenizer_config=config))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, (2,))
    assert tokenizer.special_ids == {0, 1, 2}


def test_special_tokens_from_the_old_map(folder: Folder) -> None:
    tokenizer = Tokenizer(folder(byte_fallback(), special_tokens_map={"eos_token": "</s>"}))
    assert tokenizer.eos_ids == (2,)


def test_a_plain_token_can_be_declared_special(folder: Folder) -> None:
    tokenizer = Tokenizer(folder(byte_fallback(), tokenizer_config={"additional_special_tokens": ["▁sea"]}))
    (sea,) = tokenizer._library.encode("▁sea", add_special_tokens=False).ids[-1:]
    assert sea in tokenizer.special_ids
    assert tokenizer.decode([sea]) == ""


def test_tokens_that_only_the_config_lists(folder: Folder) -> None:
    library = byte_level()
    free = library.get_vocab_size()
    listed = {
        str(free): {"content": "<think>", "special": False},
        str(free + 1): {"content": "<|stop|>", "special": True},
        str(free + 7): {"content": "<|gap|>", "special": True},  # would get another id than it says
    }
    tokenizer = Tokenizer(folder(library, tokenizer_config={"added_tokens_decoder": listed}))
    assert tokenizer.encode("<think><|stop|>") == [free, free + 1]
    assert tokenizer.decode([free, free + 1]) == "<think>"
    assert tokenizer.vocab_size == free + 2


def test_very_many_new_tokens_are_added_at_once(folder: Folder) -> None:
    library = byte_level()
    free = library.get_vocab_size()
    listed = {str(free + i): {"content": f"<{i}>", "special": i % 2 == 0} for i in range(60_000)}
    listed |= {"100": {"content": "<taken>"}, str(free + 60_001): {"content": "<after a gap>"}}
    tokenizer = Tokenizer(folder(library, tokenizer_config={"added_tokens_decoder": listed}))
    assert tokenizer.encode("<0><1><59999>") == [free, free + 1, free + 59_999]
    assert tokenizer.decode([free, free + 1]) == "<1>"
    assert tokenizer.vocab_size == free + 60_000


def test_config_decides_on_bos_and_eos(folder: Folder) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    library = byte_fallback()
    assert Tokenizer(folder(library, tokenizer_config=config)).encode("the")[0] == 1
    ids = Tokenizer(folder(library, tokenizer_config=config | {"add_bos_token": False})).encode("the")
    assert 1 not in ids
    both = Tokenizer(folder(library, tokenizer_config=config | {"add_bos_token": True, "add_eos_token": True}))
    assert both.encode("the") == [1, *ids, 2]
    assert both.encode("the", add_special=False) == ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [7, 2]}, "config": {"eos_token_id": 9}}, (7, 2)),
        ({"generation_config": {"eos_token_id": 7}}, (7, 2)),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, (9, 2)),
        ({"config": {"text_config": {"eos_token_id": [9, 2]}}}, (9, 2)),
        ({"config": {"eos_token_id": None}}, (2,)),
    ],
)
def test_end_tokens(folder: Folder, files: dict[str, object], expected: tuple[int, ...]) -> None:
    tokenizer = Tokenizer(folder(byte_fallback(), tokenizer_config={"eos_token": "</s>"}, **files))
    assert tokenizer.eos_ids == expected


def test_templates_in_all_their_places(folder: Folder) -> None:
    library = byte_level()
    assert Tokenizer(folder(library)).templates == {}
    assert Tokenizer(folder(library, chat_template={"chat_template": "old"})).templates == {"default": "old"}
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    several = folder(library, tokenizer_config={"chat_template": listed})
    assert Tokenizer(several).templates == {"default": "a", "tool_use": "b"}
    files = {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "more"}
    assert Tokenizer(folder(library, **files)).templates == {"default": "file", "tool_use": "b", "rag": "more"}


def test_settings_of_the_wrong_kind_are_not_believed(folder: Folder) -> None:
    config = {
        "bos_token": 1,
        "additional_special_tokens": "abc",
        "added_tokens_decoder": {"x": {}, "5": "y"},
        "chat_template": [1, {"name": 2, "template": "t"}, {"name": "default", "template": "ok"}],
    }
    tokenizer = Tokenizer(
        folder(byte_level(), tokenizer_config=config, config={"text_config": 1, "eos_token_id": True})
    )
    assert (tokenizer.special_tokens, tokenizer.eos_ids) == ({}, ())
    assert tokenizer.templates == {"default": "ok"}


# --- folders without tokenizer.json, and broken ones -------------------------------------------------


def test_older_files_are_converted_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "old").mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(data / "tokenizers" / "gpt2" / name, tmp_path / "old")
    converted, original = Tokenizer(tmp_path / "old"), Tokenizer(data / "tokenizers" / "gpt2")
    text = "Hello, world! 🐳 <|endoftext|>"
    assert converted.encode(text) == original.encode(text)
    assert (converted.eos_ids, converted.special_tokens) == (original.eos_ids, original.special_tokens)

    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("converted a second time"))
    assert Tokenizer(tmp_path / "old").encode(text) == original.encode(text)


def test_read_only_home_converts_in_a_temporary_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # not a folder: nothing can be made in it
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "old").mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(data / "tokenizers" / "gpt2" / name, tmp_path / "old")
    assert Tokenizer(tmp_path / "old").encode("Hello") == [15496]
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("converted a second time"))
    assert Tokenizer(tmp_path / "old").encode("Hello") == [15496], "the engine finds it there"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer_config.json": "[1]", "tokenizer.json": "{}"}, "must hold a JSON object"),
        ({"tokenizer_config.json": "{", "tokenizer.json": "{}"}, "is not valid JSON"),
        ({"vocab.json": "{", "merges.txt": ""}, "cannot be converted"),
        ({"tokenizer.model": "not a model"}, "cannot be converted"),
    ],
)
def test_broken_folders_are_reported_in_one_sentence(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], says: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=says) as caught:
        Tokenizer(folder(**files))
    assert "\n" not in str(caught.value)


def test_the_server_side_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, server.tokenization.encoder, server.tokenization.detokenizer;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
