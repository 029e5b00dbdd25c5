"""Reads the small files of a model folder, which is not trusted: only regular files, of a bounded size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from .types import ModelError

# A config.json has up to 100 kB, a chat template up to 50 kB.
SMALL_BYTES = 4 << 20
# Files that list tokens or tensors: the largest published ones have about 20 MB, and the headers of a quantized model
# with as many experts as Qwen3-Next would have up to 38.
LIST_BYTES = 48 << 20
# Values in a JSON document. An empty object takes three bytes in a file and twenty times as many in memory. The longest
# published lists have half a million values.
MAX_VALUES = 2_000_000
VALUE_DELIMITERS = (b",", b"[", b"{")


def read_file(path: Path, max_bytes: int) -> bytes | None:
    """Return the content of a regular file of at most `max_bytes` bytes, or None if it does not exist.

    Raises ModelError for a file that is larger, cannot be read, or is a directory, pipe or device.
    """
    try:
        # Without O_NONBLOCK, opening a pipe blocks until a writer opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ModelError(f"{path} is not a regular file")
            if found.st_size > max_bytes:
                raise ModelError(f"{path} is larger than the {max_bytes >> 20} MiB that such a file may have")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(max_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str | None:
    """Return the text of a small UTF-8 file, or None if it does not exist. Raises ModelError."""
    data = read_file(path, SMALL_BYTES)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not text in UTF-8") from None


def read_json(path: Path, max_bytes: int = SMALL_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in a file of at most `max_bytes`, or None if it does not exist. Raises ModelError."""
    data = read_file(path, max_bytes)
    if data is None:
        return None
    check_values(path, data)
    try:
        value = json.loads(data)
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def check_values(path: Path, data: bytes) -> None:
    """Raise ModelError for JSON with more than MAX_VALUES values."""
    if sum(data.count(delimiter) for delimiter in VALUE_DELIMITERS) > MAX_VALUES:
        raise ModelError(f"{path} holds more than {MAX_VALUES:,} values")


def shown(value: object) -> str:
    """Return a value of config.json for an error message: on one line, truncated."""
    text = " ".join(str(value).split())
    return text if len(text) <= 64 else f"{text[:61]}..."
