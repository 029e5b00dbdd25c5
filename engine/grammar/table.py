"""Table: llguidance's table of every token's bytes, from the tokenizer.json that the server reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer
from msgspec import Struct

from ..files import LIST_BYTES, read_file, read_json
from ..tokenizer_files.folder import FILE, MAX_BYTES, tokenizer_folder
from ..types import ModelError
from . import GrammarError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LIST_TOKENS = ("additional_special_tokens", "extra_special_tokens")
PLACEHOLDER = "<|no text ends here|>"
APART = "\U0010fffd\U000ffffd special "  # private use characters, which no text contains

MAX_ADDED = 1 << 14  # llguidance takes quadratic time, and some seconds for this number
FEW_NAMES = 64  # each is searched for in the vocabulary's whole text
ESCAPED = re.compile(rb"\\(.)", re.DOTALL)  # in JSON


class _Added(Struct):
    id: int
    content: str
    special: bool = False


class _File(Struct):
    added_tokens: list[_Added] = []


class Table:
    """llguidance's table of one tokenizer. Special tokens have no text in it, so no grammar allows them.

    llguidance requires an end token. Stop tokens differ among requests, so it is an arbitrary special token, and
    Matcher decides whether it may be sampled.
    """

    def __init__(self, data: bytes, width: int, special: frozenset[str] = frozenset()) -> None:
        """`data`: a tokenizer.json. `width`: of the logits. `special`: further special tokens, from other files."""
        added = msgspec.json.decode(data, type=_File).added_tokens
        if len(special.union(token.content for token in added)) > MAX_ADDED:
            raise GrammarError(f"grammars cannot be used with a model that has more than {MAX_ADDED:,} added tokens")
        ends = [token.id for token in added if token.special and token.id < width]
        if not ends or not special <= {token.content for token in added if token.special}:
            data, ends = _with_special(data, special)
        data = _named_apart(data, width)
        self.width = width
        self.end_id = ends[0]
        try:
            self.library = LLTokenizer(data.decode(), n_vocab=width, eos_token=self.end_id)
        except ValueError as error:
            if "vocab size" not in str(error):  # there are more tokens than logits
                raise
            self.library = LLTokenizer(data.decode(), eos_token=self.end_id)

    @classmethod
    def of(cls, folder: Path, width: int) -> Table:
        """Read the table of a folder's tokenizer. Raises GrammarError without one, and if its tokens are not bytes."""
        try:
            found = tokenizer_folder(folder)
            data = read_file(found / FILE, MAX_BYTES)
            special = _special_names(folder) | _special_names(found)
        except ModelError as error:
            raise GrammarError(str(error)) from None
        if data is None:
            raise GrammarError("the model's tokenizer.json is gone")
        try:
            return cls(data, width, special)
        except GrammarError:
            raise
        except BaseException:  # a panic of llguidance is not an Exception
            raise GrammarError("the model's tokenizer.json is of a kind that grammars cannot be used with") from None


def _has_no_text(token: dict[str, Any]) -> bool:
    """Return whether llguidance treats an added token as one without text."""
    text = token["content"]
    return bool(token.get("special")) or (text.startswith("<") and text.endswith(">"))


def _special_names(folder: Path) -> frozenset[str]:
    """Return the special tokens of a folder's other files; the server removes them from texts."""
    names: list[Any] = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_json(folder / file, LIST_BYTES) or {}
        names += [config.get(name) for name in NAMED_TOKENS]
        for name in LIST_TOKENS:
            more = config.get(name)
            names += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
        listed = config.get("added_tokens_decoder")
        listed = listed.values() if isinstance(listed, dict) else ()
        names += [each for each in listed if isinstance(each, dict) and each.get("special")]
    texts = [name.get("content") if isinstance(name, dict) else name for name in names]
    return frozenset(text for text in texts if isinstance(text, str) and text)


def _with_special(data: bytes, special: frozenset[str]) -> tuple[bytes, list[int]]:
    """Declare these tokens of the file special; returns the file, and the ids of all special tokens, at least one."""
    file = msgspec.json.decode(data)  # the json module takes three times as long
    added = {token["content"]: token for token in file.get("added_tokens") or ()}
    vocabulary = file["model"].get("vocab") or {}
    if not isinstance(vocabulary, dict):  # a unigram model: [text, score]
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for name in sorted(special):
        if name in added:
            added[name]["special"] = True
        elif name in vocabulary:
            added[name] = {"id": vocabulary[name], "content": name, **flags}
    ends = [token["id"] for token in added.values() if token.get("special")]
    if not ends:
        ends = [max([*vocabulary.values(), *(token["id"] for token in added.values())], default=-1) + 1]
        added[PLACEHOLDER] = {"id": ends[0], "content": PLACEHOLDER, **flags}
    file["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    return msgspec.json.encode(file), ends


def _named_apart(data: bytes, width: int) -> bytes:
    """Rename the file's tokens without text, so that no text contains their names. A grammar refers to them as <[id]>.

    llguidance encodes forced text with the tokenizer. Text that looks like such a token would otherwise be encoded as
    the token, which the grammar then refuses. The same holds for added tokens from `width` on, which the model lacks.
    """
    file = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(file.get("added_tokens", b"null"), type=list[dict[str, Any]] | None) or []
    apart = [token for token in added if _has_no_text(token) or token["id"] >= width]
    names = {token["content"]: f"{APART}{token['id']}" for token in apart}
    for token in added:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": True}
    file["added_tokens"] = msgspec.Raw(msgspec.json.encode(added))
    model = msgspec.json.decode(file["model"], type=dict[str, msgspec.Raw])
    vocab = bytes(model.get("vocab", b"null"))
    if len(names) <= FEW_NAMES and _is_spelt_plainly(vocab, names):  # decoding a large vocabulary takes 0.2 s
        for name, other in names.items():
            vocab = vocab.replace(msgspec.json.encode(name), msgspec.json.encode(other))
        model["vocab"] = msgspec.Raw(vocab)
    else:
        vocabulary = msgspec.json.decode(model["vocab"])
        if isinstance(vocabulary, dict):
            vocabulary = {names.get(text, text): index for text, index in vocabulary.items()}
        else:
            vocabulary = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocabulary or ()]
        model["vocab"] = msgspec.Raw(msgspec.json.encode(vocabulary))
    unknown = msgspec.json.decode(model.get("unk_token", b"null"))
    if isinstance(unknown, str) and unknown in names:
        model["unk_token"] = msgspec.Raw(msgspec.json.encode(names[unknown]))
    file["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(file)


def _is_spelt_plainly(data: bytes, texts: Iterable[str]) -> bool:
    """Return whether a search for the encoded texts finds exactly these strings of some JSON: no character is written
    as \\u0041 and no slash as \\/, and none of the texts follows a backslash."""
    if any(b"\\" + msgspec.json.encode(text) in data for text in texts):
        return False
    return not any(found[1] in b"u/" for found in ESCAPED.finditer(data))
