"""Text to token ids and back, from the files of a model folder, without transformers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine import (
    LIST_BYTES,
    TOKENIZER_BYTES,
    ModelError,
    byte_characters,
    read_file,
    read_json,
    read_text,
    tokenizer_folder,
)

from .split import TextSplitter, minima

# Otherwise the library starts a thread per core for batches.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LIST_TOKENS = ("additional_special_tokens", "extra_special_tokens")
MAX_TEMPLATES, MAX_TEMPLATE = 64, 1 << 20  # chat templates of a model, and characters of one; large ones have 50,000
MAX_ENDS, MAX_ID = 256, (1 << 31) - 1  # end tokens of a model, and the largest id of one


@dataclass(frozen=True)
class ByteShape:
    """How a vocabulary of byte sequences writes them."""

    byte_level: bool  # every byte as a character; otherwise text, with <0x0A> for bytes without a token
    replace: tuple[tuple[str, str], ...] = ()  # in a token, such as the character for the start of a word and a space
    strip: bytes = b""  # removed once, at the start of a text

    @staticmethod
    def of(steps: Sequence[dict[str, Any]]) -> ByteShape | None:
        """The shape for the steps of a library decoder; None if tokens are more than bytes."""
        kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
        if kinds == ["ByteLevel"]:
            return ByteShape(byte_level=True)
        replace = [step for step in steps if step["type"] == "Replace"]
        strips = [step for step in steps if step["type"] == "Strip"]
        # Only after Fuse does Strip see the whole text, and not each token.
        whole = not strips or [step["type"] for step in steps[-2:]] == ["Fuse", "Strip"]
        simple = all(step["start"] <= 1 and step["stop"] == 0 for step in strips)
        plain = all("String" in step["pattern"] for step in replace)
        order = ["Replace"] * len(replace) + ["ByteFallback"] + ["Strip"] * len(strips)
        if kinds != order or len(strips) > 1 or not (whole and simple and plain):
            return None
        return ByteShape(
            byte_level=False,
            replace=tuple((step["pattern"]["String"], step["content"]) for step in replace),
            strip=b"".join(step["content"].encode() for step in strips if step["start"]),
        )


class ByteDecoder:
    """Decodes tokens that are fixed bytes: byte-level vocabularies, and sentencepiece ones with byte fallback.

    In a run of fallback bytes that is not UTF-8, the library replaces every byte by U+FFFD. A stream cannot retract
    what it has sent, so here only the invalid bytes are replaced.
    """

    def __init__(self, library: tokenizers.Tokenizer, shape: ByteShape) -> None:
        self._library = library
        self._shape = shape
        self._byte_of = {char: byte for byte, char in byte_characters().items()} if shape.byte_level else None
        self._known: dict[int, bytes] = {}  # a cache, since most of a vocabulary is never used

    def piece(self, token_id: int, after: int | None) -> bytes | None:
        """Return the bytes of a token after the token `after` (None: at the start of a text); None if unknown."""
        data = self._known.get(token_id)
        if data is None:
            token = _token(self._library, token_id)
            if not token:
                return None
            data = self._known[token_id] = self._bytes(token)
        return data.removeprefix(self._shape.strip) if after is None else data

    def _bytes(self, token: str) -> bytes:
        for old, new in self._shape.replace:
            token = token.replace(old, new)
        with contextlib.suppress(KeyError, ValueError):
            if self._byte_of is not None:
                return bytes(self._byte_of[character] for character in token)
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes((int(token[3:5], 16),))
        return token.encode()


class PairDecoder:
    """Decodes any other vocabulary: the text that the library adds for a token after another."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    def piece(self, token_id: int, after: int | None) -> bytes | None:
        if _token(self._library, token_id) is None:
            return None
        if after is None:
            return self._decode(token_id).encode()
        before, both = self._decode(after), self._decode(after, token_id)
        while not both.startswith(before):  # the second token has changed the text of the first
            before = before[:-1]
        return both[len(before) :].encode()

    def _decode(self, *ids: int) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)


class Tokenizer:
    """The tokenizer of a model folder, with its special tokens, end tokens and chat templates.

    Immutable, so that every thread may use it. Raises ModelError if the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        with _readable(self.folder):
            self._read()

    def _read(self) -> None:
        config = read_json(self.folder / "tokenizer_config.json", LIST_BYTES) or {}
        if "added_tokens_decoder" not in config:  # older folders have a file for special tokens
            config |= read_json(self.folder / "special_tokens_map.json", LIST_BYTES) or {}
        self._library, defaults = _load(self.folder)
        config = defaults | config
        # A file saved by a training script may truncate or pad texts.
        self._library.no_truncation()
        self._library.no_padding()
        listed = _add_tokens(self._library, self.folder, config)

        self.special_tokens = {name: text for name in NAMED_TOKENS if (text := _content(config.get(name)))}
        self.bos_id = self._id(self.special_tokens.get("bos_token"))
        self.eos_id = self._id(self.special_tokens.get("eos_token"))
        _add_ends(self._library, config, self.bos_id, self.eos_id)
        added = self._library.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in added.items()}  # tokens that no text encodes to
        self.special_ids = frozenset(i for i, token in added.items() if token.special) | listed
        self.eos_ids = _eos_ids(self.folder, self.eos_id)
        self.templates = _templates(self.folder, config)

        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # the logits may be wider
        self.longest = max(map(len, vocabulary), default=1)  # characters
        shape = ByteShape.of(_decoder_steps(self._library))
        self.decoder = ByteDecoder(self._library, shape) if shape else PairDecoder(self._library)

    @property
    def takes_grammars(self) -> bool:
        """Whether the engine can use this tokenizer, which needs the bytes of every token, for grammars."""
        return isinstance(self.decoder, ByteDecoder)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Encode a text; `add_special` adds the tokens that the model expects around a text, such as bos."""
        # Only the batch call releases the GIL.
        return self._library.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    @cached_property
    def splitter(self) -> TextSplitter:
        """Splits long texts; belongs to the thread that encodes them."""
        return TextSplitter(lambda text: self.encode(text, False), self._library.get_vocab(with_added_tokens=True))

    def encode_long(
        self, text: str, add_special: bool = True, check: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        """Return the ids that `encode` returns, encoded in pieces.

        `check` is called between them with a lower bound of the number of tokens, and may raise an exception.
        """
        around, special = self.encode_marked("a", add_special)
        own = [index for index, is_special in enumerate(special) if not is_special] or [len(around)]
        ids = around[: own[0]]
        for piece in self.splitter.pieces(text):
            for least in minima(lambda part: self.encode(part, False), piece):
                check(len(ids) + least)
            ids += self.encode(piece, False)
            check(len(ids))
        return ids + around[own[-1] + 1 :]

    def encode_marked(self, text: str, add_special: bool = True) -> tuple[list[int], list[bool]]:
        """Encode a text; also returns for each token whether it was added around the text."""
        encoding = self._library.encode_batch_fast([text], add_special_tokens=add_special)[0]
        return encoding.ids, [bool(is_special) for is_special in encoding.special_tokens_mask]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode token ids; unknown ids are skipped, and bytes that are not UTF-8 become U+FFFD."""
        parts: list[bytes] = []
        after: int | None = None
        for token_id in ids:
            data = None if skip_special and token_id in self.special_ids else self.decoder.piece(token_id, after)
            if data is not None:
                parts.append(data)
                after = token_id
        return b"".join(parts).decode(errors="replace")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return each token as the vocabulary has it; empty for unknown ids."""
        return [_token(self._library, token_id) or "" for token_id in ids]

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """The ids of these tokens, without those that the vocabulary does not have."""
        found = (self._library.token_to_id(token) for token in tokens)
        return frozenset(token_id for token_id in found if token_id is not None)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token's text inside a text, and its exact bytes.

        Bytes that are not UTF-8 are written as by OpenAI, `bytes:\\xe2\\x82`, so that such tokens have different texts.
        """
        # After itself, since any token will do that is not the start of a text.
        data = self.decoder.piece(token_id, token_id) or b""
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._library.token_to_id(token)


def _token(library: tokenizers.Tokenizer, token_id: int) -> str | None:
    return library.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None


def _decoder_steps(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the library's decoder in a flat list, as in tokenizer.json."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] == "Sequence":
            return [inner for part in step["decoders"] for inner in flat(part)]
        return [step]

    decoder = library.decoder
    return [] if decoder is None else flat(json.loads(decoder.__getstate__()))


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise a ModelError for any error of an invalid tokenizer."""
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is not even an Exception
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"The tokenizer of {folder} cannot be read: {reason}.") from error


def _content(token: Any) -> str | None:
    """The text of a special token, which is a string or an object with flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


# Loading


def _load(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Load the tokenizer; also returns settings that the folder lacks, because older code has them as defaults."""
    found = tokenizer_folder(folder)
    library = tokenizers.Tokenizer.from_buffer(read_file(found / "tokenizer.json", TOKENIZER_BYTES) or b"")
    config = {} if found == folder else read_json(found / "tokenizer_config.json", LIST_BYTES) or {}
    return library, {name: config[name] for name in NAMED_TOKENS if name in config}


def _add_tokens(library: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Add the tokens that only the other files list; returns the ids of the special ones."""
    listed = config.get("added_tokens_decoder")
    entries = {
        int(i): entry
        for i, entry in (listed.items() if isinstance(listed, dict) else ())
        if i.isdecimal() and isinstance(entry, dict)
    }
    if not entries:
        legacy = read_json(folder / "added_tokens.json", LIST_BYTES) or {}
        entries = {i: {"content": text} for text, i in legacy.items() if isinstance(i, int)}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    special: list[tokenizers.AddedToken] = []
    new: dict[str, tokenizers.AddedToken] = {}  # in one call, since each call is linear in the tokens added before
    free = library.get_vocab_size(with_added_tokens=True)
    for token_id, entry in sorted(entries.items()):
        text = _content(entry)
        if text is None:
            continue
        token = tokenizers.AddedToken(
            text, special=bool(entry.get("special")), **{flag: entry[flag] for flag in flags if flag in entry}
        )
        # A new token gets the next free id; one that is listed with another id is not added.
        if token_id == free + len(new) and text not in new and library.token_to_id(text) is None:
            new[text] = token
        if token.special:
            special.append(token)
    library.add_tokens(list(new.values()))
    named = [config.get(name) for name in NAMED_TOKENS]
    for name in LIST_TOKENS:
        more = config.get(name)
        named.extend(more.values() if isinstance(more, dict) else more if isinstance(more, list) else ())
    special += [
        tokenizers.AddedToken(text, special=True, normalized=False) for token in named if (text := _content(token))
    ]
    known = {i: token for token in special if (i := library.token_to_id(token.content)) is not None}
    library.add_special_tokens(list(known.values()))
    return frozenset(known)


def _add_ends(library: tokenizers.Tokenizer, config: dict[str, Any], bos: int | None, eos: int | None) -> None:
    """Replace the post-processor of tokenizer.json if tokenizer_config.json says whether to add bos and eos."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    ends = {
        "bos_token": bos if config.get("add_bos_token") else None,
        "eos_token": eos if config.get("add_eos_token") else None,
    }
    text = {name: _content(config.get(name)) for name, token_id in ends.items() if token_id is not None}
    single = [part for part in (text.get("bos_token"), "$A", text.get("eos_token")) if part]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=[(token, ends[name]) for name, token in text.items()]
    )


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """The tokens that end a completion: those of generation_config.json or config.json, and the tokenizer's."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name) or {}
        inner = config.get("text_config")
        value = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        ends = [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0]
        if len(ends) > MAX_ENDS or max(ends, default=0) > MAX_ID:
            raise ModelError(
                f"eos_token_id in {folder / name} must be at most {MAX_ENDS} token ids, none above {MAX_ID}."
            )
        if ends:
            break
    return tuple(dict.fromkeys([*ends, *([] if own is None else [own])]))


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files override those of the config."""
    found: dict[str, str] = {}
    value = config.get("chat_template") or (read_json(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict):
        found = {name: text for name, text in value.items() if isinstance(name, str) and isinstance(text, str)}
    files = {"default": folder / "chat_template.jinja"}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files |= {path.stem: path for path in more[: MAX_TEMPLATES + 1]}  # one too many is refused below
    for name, path in files.items():
        text = read_text(path)
        if text is not None:
            found[name] = text
    if len(found) > MAX_TEMPLATES or any(len(text) > MAX_TEMPLATE for text in found.values()):
        raise ModelError(
            f"{folder} has more than {MAX_TEMPLATES} chat templates, or one of more than {MAX_TEMPLATE:,} characters."
        )
    return found
