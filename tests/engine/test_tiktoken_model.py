"""Folders with tiktoken.model: compared with tiktoken's algorithm, written directly, and with a real vocabulary."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from engine import ModelError, byte_characters
from engine.tokenizer_files.byte_level import MAX_TOKEN
from engine.tokenizer_files.tiktoken_model import DEFAULTS, convert
from server.tokenization.tokenizer import Tokenizer

Folder = Callable[..., Path]

# As published in the tokenizer's code of Moonlight and Kimi K2.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPLIT = regex.compile(PATTERN, regex.VERSION1)
TEXTS = [
    "Call me Ishmael. I'm sure they'll say IT'S THEIR'S, we'd DON'T; o'clock 'tis",
    "1 12 123 1234 12345678901234 3.14159 0x7f \u0661\u0662\u0663\u0664 \u00b2\u00bd",
    "\u4e2d\u6587English\u6df7\u5408 \u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u5317\u4eac\u5e02 Pascal x\u4e00y \U00020000\u3007\u3005",
    "  two   three    \n\n\n  def f(x):\r\n\t\treturn x**2  # \n \n",
    "HTTPServer iPhone \u01c5abc caf\u00e9 cafe\u0301 \u0915\u093f",
    "\u0645\u0631\u062d\u0628\u0627 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600\U0001f468\u200d\U0001f469 \u20ac5 !?...\n\n/path/to//file",
    "a\u00a0b\u2003c\u3000d\u0085e\u2028f",
    "",
]


def by_tiktoken(text: str, ranks: Mapping[bytes, int]) -> list[int]:
    """Return the ids of a text: of each word all of it, or of parts merged by the lowest rank of two neighbors."""
    ids: list[int] = []
    for word in (found.group().encode() for found in SPLIT.finditer(text)):
        parts = [word] if word in ranks else [word[index : index + 1] for index in range(len(word))]
        while pairs := [
            (ranks[left + right], index) for index, (left, right) in enumerate(pairwise(parts)) if left + right in ranks
        ]:
            _, index = min(pairs)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def trained(texts: Iterable[str], count: int) -> dict[bytes, int]:
    """Return token -> rank of `count` merges of the most frequent neighbors in some texts, after all bytes."""
    words = [[bytes((byte,)) for byte in found.group().encode()] for text in texts for found in SPLIT.finditer(text)]
    ranks = {bytes((byte,)): 255 - byte for byte in range(256)}
    for _ in range(count):
        seen: dict[bytes, int] = {}
        for word in words:
            for left, right in pairwise(word):
                seen[left + right] = seen.get(left + right, 0) + 1
        best = max((token for token in seen if token not in ranks), key=lambda token: (seen[token], token))
        ranks[best] = len(ranks)
        for word in words:
            for index in range(len(word) - 1, 0, -1):
                if index < len(word) and word[index - 1] + word[index] == best:
                    word[index - 1 : index + 1] = [best]
    return ranks


def lines(ranks: Mapping[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def config(count: int, **fields: Any) -> dict[str, Any]:
    """Return the tokenizer_config.json of a model like Kimi K2 whose tiktoken.model has `count` tokens."""
    names = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 11: ("<|tool_call_begin|>", False)}
    return {
        "added_tokens_decoder": {
            str(count + index): {"content": name, "special": special, "normalized": False}
            for index, (name, special) in names.items()
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        **fields,
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Write a model folder: folder(tokenizer_config={...}, other_file=text)."""

    def write(**files: Any) -> Path:
        for name, content in files.items():
            path = tmp_path / (name if "." in name else f"{name}.json")
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


def test_a_folder_with_tiktoken_model_has_the_ids_of_tiktoken(folder: Folder) -> None:
    ranks = trained(TEXTS, 120)
    ranks[b" Ishmael"] = len(ranks)  # no merges lead to it: it is found only as a whole word
    files = {"tiktoken.model": lines(ranks), "chat_template.jinja": "{{ messages }}"}
    place = folder(tokenizer_config=config(len(ranks)), **files)
    (place / "tokenization_kimi.py").write_text("raise SystemExit('the code of the folder was run')")
    tokenizer = Tokenizer(place)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == by_tiktoken(text, ranks)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_long(text) == ids
    assert tokenizer.encode(" Ishmael") == [len(ranks) - 1]
    assert tokenizer.templates == {"default": "{{ messages }}"}


def test_ids_after_the_file_are_special_tokens(folder: Folder) -> None:
    ranks = trained(TEXTS, 20)
    count = len(ranks)
    tokenizer = Tokenizer(folder(tokenizer_config=config(count), **{"tiktoken.model": lines(ranks)}))
    text = f"a<|im_end|>[BOS]<|tool_call_begin|>b<|reserved_token_{count + 255}|>"
    a, b = ranks[b"a"], ranks[b"b"]
    assert tokenizer.encode(text) == [a, count + 2, count, count + 11, b, count + 255]
    assert tokenizer.decode(tokenizer.encode(text)) == f"a<|tool_call_begin|>b<|reserved_token_{count + 255}|>"
    assert tokenizer.vocab_size == count + 256
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (count, (count + 2,))


def test_names_that_the_config_lacks_are_those_of_the_code(folder: Folder) -> None:
    ranks = trained(TEXTS, 0)
    code = "moonshotai/Moonlight-16B-A3B--tokenization_moonshot.TikTokenTokenizer"  # as transformers saves it
    settings = config(len(ranks), auto_map={"AutoTokenizer": code})
    settings = {name: value for name, value in settings.items() if name not in DEFAULTS}
    tokenizer = Tokenizer(folder(tokenizer_config=settings, **{"tiktoken.model": lines(ranks)}))
    assert tokenizer.special_tokens == DEFAULTS


def test_ranks_in_any_order_give_the_ids_of_tiktoken(tmp_path: Path) -> None:
    """Also if a token has a lower rank than its parts, or no merges lead to it."""
    for seed in range(60):
        chance = random.Random(seed)
        tokens = {bytes(chance.choices(b"abc", k=chance.randint(2, 6))) for _ in range(30)}
        order = [*sorted(tokens), *(bytes((byte,)) for byte in range(256))]
        chance.shuffle(order)
        ranks = {token: rank for rank, token in enumerate(order)}
        (tmp_path / "tiktoken.model").write_text(lines(ranks))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config(len(ranks))))
        convert(tmp_path, tmp_path)
        tokenizer = Tokenizer(tmp_path)
        for _ in range(50):
            text = "".join(chance.choices("abc ", k=40))
            assert tokenizer.encode(text) == by_tiktoken(text, ranks)


def test_a_real_vocabulary_has_the_merges_of_its_own_tokenizer(data: Path, tmp_path: Path) -> None:
    """Qwen's tokenizer.json was made from a file of this format."""
    model = json.loads((data / "tokenizers/qwen3/tokenizer.json").read_text())["model"]
    byte_of = {char: byte for byte, char in byte_characters().items()}
    ranks = {bytes(byte_of[each] for each in token): rank for token, rank in model["vocab"].items()}
    (tmp_path / "tiktoken.model").write_text(lines(ranks))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config(len(ranks))))
    convert(tmp_path, tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert made["vocab"] == model["vocab"]
    assert made["merges"] == [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    tokenizer = Tokenizer(tmp_path)
    naughty = (data / "prompts/naughty_strings.jsonl").read_text().split("\n")
    for text in (*TEXTS, *(json.loads(line)["text"] for line in naughty if line)):
        assert tokenizer.encode(text) == by_tiktoken(text, ranks)


BYTES = {bytes((byte,)): byte for byte in range(256)}


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        (lines(BYTES), {"auto_map": None}, "has no auto_map for AutoTokenizer; supported are tokenization"),
        (
            lines(BYTES),
            {"auto_map": {"AutoTokenizer": ["code.Mine", None]}},
            "names 'code.Mine' as its code; supported are tokenization",
        ),
        (lines(BYTES), {"auto_map": {"AutoTokenizer": [{}]}}, "has no auto_map for AutoTokenizer"),
        ("", {}, "no token for the byte 0x00"),
        (lines({token: rank for token, rank in BYTES.items() if rank != 255}), {}, "no token for the byte 0xFF"),
        ("!" + lines(BYTES), {}, "line 1 of tiktoken.model is not a token in base64"),
        (lines(BYTES) + "QUI=", {}, "line 257 of tiktoken.model is not"),
        (lines(BYTES) + "QUI= -1", {}, "line 257 of tiktoken.model is not"),
        (lines(BYTES) + "QUI= 25_6", {}, "line 257 of tiktoken.model is not"),
        (lines(BYTES) + "QUI= " + "9" * 5000, {}, "line 257 of tiktoken.model is not"),
        (lines(BYTES) + "QQ== 256", {}, "line 257 of tiktoken.model repeats a token"),
        (lines(BYTES) + "QUI= 255", {}, "are not the numbers from 0 on"),
        (lines(BYTES) + "QUI= 300", {}, "are not the numbers from 0 on"),
        (lines({**BYTES, b"a" * (MAX_TOKEN + 1): 256}), {}, "a token of 1025 bytes"),
        (lines(BYTES) + "\n" * (1 << 20), {}, "more than 1,048,576 lines"),
        (
            lines(BYTES),
            {"added_tokens_decoder": {"256": {"content": "x y"}, "257": {"content": "x y"}}},
            "an added token has several ids",
        ),
        (lines(BYTES), {"added_tokens_decoder": {"256": {"content": "A"}}}, "or is a token of the vocabulary, too"),
    ],
)
def test_a_broken_or_unknown_model_gets_a_sentence(
    folder: Folder, model: str, fields: dict[str, Any], says: str
) -> None:
    place = folder(tokenizer_config=config(256, **fields), **{"tiktoken.model": model})
    with pytest.raises(ModelError, match=r"cannot be converted: .*\.$") as caught:
        Tokenizer(place)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_model_is_not_read(folder: Folder) -> None:
    place = folder(tokenizer_config=config(256), **{"tiktoken.model": ""})
    with (place / "tiktoken.model").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(ModelError, match="is larger than the 64 MiB"):
        Tokenizer(place)
