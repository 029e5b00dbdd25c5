"""Converts tiktoken.model, a list of tokens with their ranks, to a tokenizer.json, without the code of its folder.

The file does not say how texts are split before BPE. The code that tokenizer_config.json names does, and it is not run:
what known code does is written here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine import LIST_BYTES, ModelError, pre_tokenizer_patterns, read_file, read_json

from .tokenizer import byte_of_character

FILE = "tiktoken.model"
MAX_BYTES = 64 << 20  # that of Kimi K2, with 163,584 tokens, has 2.8 MB
MAX_TOKENS = 1 << 20
MAX_TOKEN = 1024  # bytes; the longest published tokens are runs of 128 spaces
# The code of Moonlight's tokenizer, and that of Kimi K2: their patterns are the same.
KIMI_CODE = ("tokenization_moonshot.TikTokenTokenizer", "tokenization_kimi.TikTokenTokenizer")
# What this code does: 256 ids after those of the file are tokens, whether tokenizer_config.json names them or not.
RESERVED = 256
DEFAULTS = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")

Ranks = Mapping[bytes, int]


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
    characters = {byte: character for character, byte in byte_of_character().items()}
    text = {token: token.decode("latin-1").translate(characters) for token in ranks}
    merges = [(text[left], text[right]) for left, right in _merges(ranks)]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    splits = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in pre_tokenizer_patterns["kimi-k2"]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    library.decoder = decoders.ByteLevel()
    added = _added(config, len(ranks))
    library.add_tokens(added)
    if any(library.token_to_id(token.content) != len(ranks) + index for index, token in enumerate(added)):
        raise ModelError("tokenizer_config.json gives several ids to one token, or gives an id to a token of the file")
    library.save(str(target / "tokenizer.json"))
    contents = {token.content for token in added}
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
        try:
            encoded, rank = parts
            token = base64.b64decode(encoded, validate=True)
            if not rank.isdigit() or len(rank) > len(str(MAX_TOKENS)):
                raise ValueError
        except ValueError:
            raise ModelError(f"line {number} of {FILE} is not a token in base64 and its rank") from None
        if not 0 < len(token) <= MAX_TOKEN:
            raise ModelError(f"line {number} of {FILE} has a token of {len(token)} bytes, not 1 to {MAX_TOKEN}")
        if token in ranks:
            raise ModelError(f"line {number} of {FILE} repeats a token")
        ranks[token] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"the ranks in {FILE} are not the numbers from 0 on, each of them once")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise ModelError(f"{FILE} has no token for the byte 0x{missing[0]:02X}")
    return ranks


def _merges(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """Return the two parts of each token, by rank.

    BPE always joins the neighbors with the smallest rank, whatever stands around them, so the last two parts of a
    token are the same in every text. A token that they do not lead to is found only as a whole word.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [token[index : index + 1] for index in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, MAX_TOKENS) for left, right in pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] == MAX_TOKENS:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _added(config: Mapping[str, Any], start: int) -> list[tokenizers.AddedToken]:
    """Return the tokens with the ids from `start` on."""
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    tokens = []
    for index in range(start, start + RESERVED):
        entry = listed.get(str(index))
        entry = entry if isinstance(entry, dict) and isinstance(entry.get("content"), str) else {}
        content = entry.get("content") or f"<|reserved_token_{index}|>"
        flags = {flag: entry[flag] for flag in FLAGS if isinstance(entry.get(flag), bool)}
        tokens.append(tokenizers.AddedToken(content, **{"normalized": False, **flags}))
    return tokens
