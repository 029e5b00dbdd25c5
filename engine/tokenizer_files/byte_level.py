"""Byte-level BPE from a list of tokens as bytes in the order of their ranks, as tiktoken and tekken store it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..types import ModelError

MAX_TOKENS = 1 << 20
MAX_TOKEN = 1024  # bytes; the longest published tokens are runs of 128 spaces

Ranks = Mapping[bytes, int]


def byte_characters() -> dict[int, str]:
    """Return byte -> character of byte-level vocabularies: printable Latin-1 is itself, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def decoded(encoded: str | bytes, where: str) -> bytes:
    """Return a token that is written in base64. Raises ModelError, which says `where` it is."""
    try:
        token = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ModelError(f"{where} is not a token in base64") from None
    if not 0 < len(token) <= MAX_TOKEN:
        raise ModelError(f"{where} has a token of {len(token)} bytes, not 1 to {MAX_TOKEN}")
    return token


def check_bytes(ranks: Ranks, file: str) -> None:
    """Raise ModelError unless every byte is a token."""
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise ModelError(f"{file} has no token for the byte 0x{missing[0]:02X}")


def tokenizer_json(
    ranks: Ranks, patterns: Sequence[str], added: Sequence[dict[str, Any]], *, first: int = 0, bos: str | None = None
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    `patterns`: regular expressions that split texts before BPE, one after the other. `added`: the entries of its added
    tokens. `first`: the id of rank 0. `bos`: the added token that begins every text. Raises ModelError if two tokens
    have the same text.
    """
    characters = byte_characters()
    text = {token: token.decode("latin-1").translate(characters) for token in ranks}
    ids = {text[token]: first + rank for token, rank in ranks.items()}
    contents = {each["content"] for each in added}
    if len(contents) < len(added) or not ids.keys().isdisjoint(contents):
        raise ModelError("an added token has several ids, or is a token of the vocabulary, too")
    below = {each["content"]: each["id"] for each in added if each["id"] < first}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _begins_with(bos, added) if bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": below | ids,
            "merges": [[text[left], text[right]] for left, right in _merges(ranks)],
            # A word that is a token is not merged.
            "ignore_merges": True,
        },
    }


def added_token(index: int, content: str, **flags: bool) -> dict[str, Any]:
    """Return an entry of `added_tokens` in a tokenizer.json."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": index, "content": content, **usual, **flags}


def _merges(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """Return the two parts of each token, by rank.

    BPE always joins the neighbors with the smallest rank, whatever stands around them, so the last two parts of a
    token are the same in every text. A token that they do not lead to is found only as a whole word.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [token[index : index + 1] for index in range(len(token))]
        joined = [ranks.get(left + right, MAX_TOKENS) for left, right in pairwise(parts)]
        while len(parts) > 2 and (lowest := min(joined)) < MAX_TOKENS:
            index = joined.index(lowest)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
            del joined[index]
            # Only the pairs beside the new part change: joining all of them again would take cubic time.
            for beside in range(max(0, index - 1), min(index + 1, len(joined))):
                joined[beside] = ranks.get(parts[beside] + parts[beside + 1], MAX_TOKENS)
        if len(parts) == 2:
            yield parts[0], parts[1]


def _begins_with(bos: str, added: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the post-processor that adds a token before every text."""
    index = next(each["id"] for each in added if each["content"] == bos)
    first: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
    texts: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
