"""The types of settings and their validators."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from .parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from .settings_keys import read_keys

UNITS = {"": 1, **{unit + "b": 1000**i for i, unit in enumerate("kmgt", 1)}, "b": 1}
# A bare unit letter is a power of 1024, as in docker and the kernel.
UNITS |= {suffix: 1024**i for i, unit in enumerate("kmgt", 1) for suffix in (unit, unit + "ib")}


class SettingsError(Exception):
    """A setting is invalid; the text is one sentence that names where it was set."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a misspelling of."""
    from difflib import get_close_matches

    plain = {choice.lower().replace("_", "-"): choice for choice in known}
    close = get_close_matches(name.lower().replace("_", "-"), plain, n=1)
    return plain[close[0]] if close else None


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


def _file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("is not a file")
    return path


def _key_file(path: Path) -> Path:
    read_keys(_file(path))
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
Names = Annotated[list[str], NoDecode, BeforeValidator(split), AfterValidator(_no_blank)]
Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(split), AfterValidator(_no_blank)]
Secret = Annotated[SecretStr, AfterValidator(_not_blank)]
File = Annotated[Path, AfterValidator(_file)]
KeyFile = Annotated[Path, AfterValidator(_key_file)]
NewFile = Annotated[Path, AfterValidator(_in_folder)]
SocketPath = Annotated[Path, AfterValidator(_socket_path)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
DType = Annotated[
    Literal["auto", "float32", "float16", "bfloat16", "float64"],
    BeforeValidator(lambda value: {"half": "float16", "float": "float32"}.get(str(value), value)),
]
Device = Annotated[str, AfterValidator(_device)]


def _one_of(formats: Iterable[str]) -> AfterValidator:
    """Accept auto, none, or one of these."""
    known = ("auto", "none", *formats)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}{hint(value, known)}")
        return value

    return AfterValidator(check)


ToolParser = Annotated[str, _one_of(TOOL_FORMATS)]
ReasoningParser = Annotated[str, _one_of(REASONING_FORMATS)]
