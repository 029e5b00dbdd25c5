"""Converts Mistral's tekken.json, which lists tokens by rank and the pattern that splits texts, to a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files import LIST_BYTES, read_json
from ..types import ModelError
from .byte_level import MAX_TOKENS, added_token, check_bytes, decoded, tokenizer_json

FILE = "tekken.json"
MAX_PATTERN = 4096  # characters; the published ones have about 300
MAX_NAME = 256  # characters of a special token
# The special tokens of files that list none, in the order of their ids; the rest of the ids have no use.
OLDER = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def convert(source: Path, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for the folder `source` to `target`. Raises ModelError."""
    file = read_json(source / FILE, LIST_BYTES) or {}
    config = file.get("config")
    config = config if isinstance(config, dict) else {}
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise ModelError(f"{FILE} has no config.pattern of at most {MAX_PATTERN:,} characters")
    special = _number(config, "default_num_special_tokens", 0)
    size = _number(config, "default_vocab_size", special)
    added = _added(file.get("special_tokens"), special)
    contents = {token["content"] for token in added}
    defaults = {name: token for name, token in DEFAULTS.items() if token in contents}
    made = tokenizer_json(
        _ranks(file.get("vocab"), size - special), [pattern], added, first=special, bos=defaults.get("bos_token")
    )
    (target / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    (target / "tokenizer_config.json").write_text(json.dumps(defaults))


def _number(config: dict[str, Any], name: str, least: int) -> int:
    found = config.get(name)
    if type(found) is not int or not least <= found <= MAX_TOKENS:
        raise ModelError(f"config.{name} in {FILE} is not a number of tokens in {least}..{MAX_TOKENS}")
    return found


def _ranks(listed: Any, count: int) -> dict[bytes, int]:
    """Return token -> rank of the first `count` tokens; the file may list more than the model has."""
    ranks: dict[bytes, int] = {}
    for entry in listed if isinstance(listed, list) else ():
        rank = entry.get("rank") if isinstance(entry, dict) else None
        encoded = entry.get("token_bytes") if isinstance(entry, dict) else None
        if type(rank) is not int or not isinstance(encoded, str):
            raise ModelError(f"an entry of vocab in {FILE} is not a rank and token_bytes")
        if rank >= count:
            continue
        token = decoded(encoded, f"the token of rank {rank} in {FILE}")
        if token in ranks:
            raise ModelError(f"the token of rank {rank} in {FILE} repeats another one")
        ranks[token] = rank
    if sorted(ranks.values()) != list(range(count)):
        raise ModelError(f"{FILE} does not list each rank below {count:,} once")
    check_bytes(ranks, FILE)
    return ranks


def _added(listed: Any, count: int) -> list[dict[str, Any]]:
    """Return the entries of the special tokens, which have the ids before all others."""
    names = dict(enumerate(OLDER))
    if isinstance(listed, list):
        names = {}
        for entry in listed:
            rank = entry.get("rank") if isinstance(entry, dict) else None
            name = entry.get("token_str") if isinstance(entry, dict) else None
            if type(rank) is not int or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
                raise ModelError(f"an entry of special_tokens in {FILE} is not a rank and token_str")
            names[rank] = name
    return [added_token(rank, names.get(rank) or f"<SPECIAL_{rank}>", special=True) for rank in range(count)]
