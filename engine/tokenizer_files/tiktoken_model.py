"""Converts tiktoken.model, a list of tokens with their ranks, to a tokenizer.json, without the code of its folder.

The file does not say how texts are split before BPE. The code that tokenizer_config.json names does, and it is not run:
what known code does is written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import LIST_BYTES, read_file, read_json
from ..gguf.tokenizer import PATTERNS
from ..types import ModelError
from .byte_level import MAX_TOKENS, added_token, check_bytes, decoded, tokenizer_json

FILE = "tiktoken.model"
MAX_BYTES = 64 << 20  # that of Kimi K2, with 163,584 tokens, has 2.8 MB
# The code of Moonlight's tokenizer, and that of Kimi K2: their patterns are the same.
KIMI_CODE = ("tokenization_moonshot.TikTokenTokenizer", "tokenization_kimi.TikTokenTokenizer")
# What this code does: 256 ids after those of the file are tokens, whether tokenizer_config.json names them or not.
RESERVED = 256
DEFAULTS = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


def convert(source: Path, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for the folder `source` to `target`. Raises ModelError."""
    config = read_json(source / "tokenizer_config.json", LIST_BYTES) or {}
    code = _code(config)
    if code not in KIMI_CODE:
        named = f"names {code[:64]!r} as its code" if code else "has no auto_map for AutoTokenizer"
        raise ModelError(
            f"{FILE} does not say how texts are split, and the code that does is not run: tokenizer_config.json "
            f"{named}; supported are {' and '.join(KIMI_CODE)}"
        )
    ranks = _ranks(read_file(source / FILE, MAX_BYTES) or b"")
    added = _added(config, len(ranks))
    made = tokenizer_json(ranks, PATTERNS["kimi-k2"], added)
    (target / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    contents = {token["content"] for token in added}
    defaults = {name: token for name, token in DEFAULTS.items() if token in contents}
    (target / "tokenizer_config.json").write_text(json.dumps(defaults))


def _code(config: Mapping[str, Any]) -> str:
    """Return the name of the folder's code for its tokenizer; empty: there is none.

    A model that transformers has saved with code of a hub names the repository before it, `REPO--file.Class`.
    """
    named = config.get("auto_map")
    found = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if isinstance(found, list) and found:
        found = found[0]
    return found.rpartition("--")[2] if isinstance(found, str) else ""


def _ranks(data: bytes) -> dict[bytes, int]:
    """Return token -> rank from lines of a token in base64 and its rank, which is also its id."""
    lines = data.split(b"\n", MAX_TOKENS + 1)
    if len(lines) > MAX_TOKENS + 1:
        raise ModelError(f"{FILE} has more than {MAX_TOKENS:,} lines")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts:
            continue
        where = f"line {number} of {FILE}"
        if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > len(str(MAX_TOKENS)):
            raise ModelError(f"{where} is not a token in base64 and its rank")
        token = decoded(parts[0], where)
        if token in ranks:
            raise ModelError(f"{where} repeats a token")
        ranks[token] = int(parts[1])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"the ranks in {FILE} are not the numbers from 0 on, each of them once")
    check_bytes(ranks, FILE)
    return ranks


def _added(config: Mapping[str, Any], start: int) -> list[dict[str, Any]]:
    """Return the entries of the tokens with the ids from `start` on."""
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    tokens = []
    for index in range(start, start + RESERVED):
        entry = listed.get(str(index))
        entry = entry if isinstance(entry, dict) and isinstance(entry.get("content"), str) else {}
        content = entry.get("content") or f"<|reserved_token_{index}|>"
        flags = {flag: entry[flag] for flag in FLAGS if isinstance(entry.get(flag), bool)}
        tokens.append(added_token(index, content, **flags))
    return tokens
