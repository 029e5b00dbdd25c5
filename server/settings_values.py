"""The types of settings and their validators."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, FilePath, SecretStr

from .parsers.formats import REASONING_ALIASES, REASONING_FORMATS, TOOL_ALIASES, TOOL_FORMATS

UNITS = {"": 1, **{unit + "b": 1000**i for i, unit in enumerate("kmgt", 1)}, "b": 1}
# A bare unit letter is a power of 1024, as in docker and the kernel.
UNITS |= {suffix: 1024**i for i, unit in enumerate("kmgt", 1) for suffix in (unit, unit + "ib")}
# Of numbers, as in vLLM: 8k is 8,000 and 8K is 8,192.
MULTIPLES = {unit: 1000**i for i, unit in enumerate("kmg", 1)} | {unit: 1024**i for i, unit in enumerate("KMG", 1)}

MAX_DIFFERENT = 4  # characters, of both names together, of a misspelling
MAX_KEY_FILE = 1 << 20  # bytes
MAX_WEIGHT = 1000.0
# vLLM's names of the formats of quantized checkpoints, which are detected here.
CHECKPOINT_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "compressed-tensors", "modelopt")


class SettingsError(Exception):
    """A setting is invalid; the text is one sentence that names where it was set."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a misspelling of."""
    from difflib import SequenceMatcher, get_close_matches

    def plain(word: str) -> str:
        # Without the hyphens that all flags begin with, which would make --temp and --help alike.
        return word.lower().replace("_", "-").lstrip("-")

    def is_meant(choice: str) -> bool:
        # Long names of different settings are alike, too: so few characters may differ, unless words are missing or end
        # otherwise.
        num_equal = sum(block.size for block in SequenceMatcher(None, choice, typed).get_matching_blocks())
        words = choice.split("-")
        lacks_words = all(any(word.startswith(part[:4]) for word in words) for part in typed.split("-"))
        return lacks_words or len(choice) + len(typed) - 2 * num_equal <= MAX_DIFFERENT

    typed, choices = plain(name), {plain(choice): choice for choice in known}
    return next((choices[each] for each in get_close_matches(typed, choices, cutoff=0.65) if is_meant(each)), None)


def hint(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown name: the name that was meant, or what to do otherwise."""
    near = nearest(name, known)
    advice = f"did you mean {near}?" if near else otherwise
    return f"; {advice}" if advice else ""


def num_bytes(value: Any) -> Any:
    """Convert a size such as 4GiB, 500MB or 4096 to bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]{0,3})", value.strip().lower())
    if match is None or match[2] not in UNITS:
        raise ValueError("is not a size such as 4GiB, 500MB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def whole_number(value: Any) -> Any:
    """Convert a number such as 8k; others are left to pydantic."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgKMG])", value.strip()) if isinstance(value, str) else None
    return value if match is None else round(float(match[1]) * MULTIPLES[match[2]])


def split(value: Any) -> Any:
    """Convert `a,b`, `["a","b"]` as JSON, or several such flags to a list."""
    if isinstance(value, str):
        if value.strip().startswith("["):
            import json

            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError("is not a valid JSON list") from None
        else:
            value = value.split(",")
    return [item.strip() if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


def _no_blank(values: list[Any]) -> list[Any]:
    if not all(str(value.get_secret_value() if isinstance(value, SecretStr) else value) for value in values):
        raise ValueError("has an empty entry")
    return values


def _not_blank(value: SecretStr) -> SecretStr:
    if not value.get_secret_value():
        raise ValueError("is empty")
    return value


def read_keys(path: Path) -> dict[str, float]:
    """Return the API keys of a file with the weights of their shares.

    A line is `KEY` or `KEY weight=NUMBER`; empty lines and lines that begin with # are skipped. Raises ValueError with
    a predicate for the file's name. Errors quote no line, since it may hold a key.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if len(data) > MAX_KEY_FILE:
        raise ValueError(f"has more than {MAX_KEY_FILE} bytes")
    keys: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, *more = words
        if key in keys:
            raise ValueError(f"repeats a key in line {number}")
        keys[key] = _weight(more, number)
    if not keys:
        raise ValueError("has no key")
    return keys


def _weight(words: list[str], number: int) -> float:
    if not words:
        return 1.0
    name, _, value = words[0].partition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if len(words) > 1 or name != "weight" or not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"needs KEY or KEY weight=NUMBER (at most {MAX_WEIGHT:g}) in line {number}")
    return weight


def _key_file(path: Path) -> Path:
    read_keys(path)
    return path


def _in_folder(path: Path) -> Path:
    if not path.absolute().parent.is_dir():
        raise ValueError("is in a folder that does not exist")
    if path.is_dir():
        raise ValueError("is a folder, not a file")
    return path


def _socket_path(path: Path) -> Path:
    if len(os.fsencode(path)) > 107:  # sun_path holds 108 bytes with its final NUL
        raise ValueError("is longer than 107 bytes, the limit for a socket's path")
    return _in_folder(path)


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


def _quantization(value: Any) -> Any:
    if value in CHECKPOINT_FORMATS:
        advice = "leave it out: a quantized checkpoint needs no flag, and plain weights are rounded to int8 or int4"
        raise ValueError(f"is not needed; {advice}")
    return value


def _generation_config(value: str) -> str:
    if value in ("vllm", "none"):
        return "engine"
    if value not in ("auto", "engine") and not Path(value).exists():
        raise ValueError("must be auto, engine, or a folder or file that exists")
    return value


def _root_path(value: str) -> str:
    if value and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", value):
        raise ValueError("must be a path such as /llm")
    return value.rstrip("/")


Bytes = Annotated[int, BeforeValidator(num_bytes)]
Names = Annotated[list[str], BeforeValidator(split), AfterValidator(_no_blank)]
Secrets = Annotated[list[SecretStr], BeforeValidator(split), AfterValidator(_no_blank)]
Secret = Annotated[SecretStr, AfterValidator(_not_blank)]
KeyFile = Annotated[FilePath, AfterValidator(_key_file)]
NewFile = Annotated[Path, AfterValidator(_in_folder)]
SocketPath = Annotated[Path, AfterValidator(_socket_path)]
Number = Annotated[int, BeforeValidator(whole_number)]
Count = Annotated[Number, Field(ge=1, le=2**31 - 1)]


def _renamed(names: Mapping[str, Any]) -> BeforeValidator:
    """Replace vLLM's names of some values by ours."""
    return BeforeValidator(lambda value: names.get(str(value), value))


MaxLength = Annotated[Count | None, _renamed({"auto": None, "-1": None})]
LoadFormat = Annotated[Literal["auto", "dummy"], _renamed({"safetensors": "auto"})]
KVCacheDType = Annotated[Literal["auto", "int8", "fp8"], _renamed({"fp8_e4m3": "fp8"})]
DType = Annotated[
    Literal["auto", "float32", "float16", "bfloat16", "float64"], _renamed({"half": "float16", "float": "float32"})
]
Device = Annotated[str, AfterValidator(_device)]
Quantization = Annotated[Literal["none", "int8", "int4"], BeforeValidator(_quantization)]


def _one_of(formats: Iterable[str], aliases: Mapping[str, str]) -> AfterValidator:
    """Accept auto, none, or one of these by its name or another."""
    known = ("auto", "none", *formats)

    def check(value: str) -> str:
        name = aliases.get(value, value)
        if name not in known:
            raise ValueError(f"must be one of {', '.join(known)}{hint(value, known)}")
        return name

    return AfterValidator(check)


ToolParser = Annotated[str, _one_of(TOOL_FORMATS, TOOL_ALIASES)]
ReasoningParser = Annotated[str, _one_of(REASONING_FORMATS, REASONING_ALIASES)]
