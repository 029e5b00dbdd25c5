"""Reads the header of a GGUF file, which is not trusted: every count and size is compared with the file's.

A header is the magic number, a version, the numbers of tensors and of keys (little-endian), the keys with typed values,
and for each tensor its name, dimensions, type and offset. Tensors begin at the next multiple of the alignment.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..files import MAX_VALUES
from ..types import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 16
MAX_HEADER = 64 << 20  # bytes: vocabularies of 262,144 tokens with their merges take 20 MB
MAX_NAME = 256  # bytes of a key or of a tensor's name
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_FILES = 1000
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Type:
    """How a tensor's numbers are stored: in blocks of some numbers and bytes."""

    name: str
    block: int
    block_bytes: int


TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136),
    29: Type("IQ1_M", 256, 56),
    30: Type("BF16", 1, 2),
    34: Type("TQ1_0", 256, 54),
    35: Type("TQ2_0", 256, 66),
    39: Type("MXFP4", 32, 17),
}
PLAIN = {"F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file. `shape` has the rows first, unlike the header."""

    file: Path
    shape: tuple[int, ...]
    type: int
    offset: int  # of its first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """The headers of a model's file, or of all its files: the metadata of the first, and all tensors."""

    files: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read(path: Path) -> Model:
    """Return the headers of a file, and of the other parts of a split model. Raises ModelError."""
    files = files_of(path)
    metadata, tensors = _read_file(files[0])
    for file in files[1:]:
        for name, tensor in _read_file(file)[1].items():
            if name in tensors:
                raise ModelError(f"{file} holds the tensor {name} of another part; download the model again")
            tensors[name] = tensor
    return Model(files, metadata, tensors)


def files_of(path: Path) -> list[Path]:
    """Return all files of the model that `path` is a part of. Raises ModelError if one is missing."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    files = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, min(count, MAX_FILES) + 1)]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        raise ModelError(f"{path} is one of {count} parts, and {missing} is missing; download the model again")
    return files


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelError(f"{path} is not a GGUF file: it has {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError, OverflowError):
        raise ModelError(f"{path} has a broken header, or it is cut short; download it again") from None


class _Header:
    """Reads one header from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.values = 0  # read so far, those in arrays included

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.data[:4] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file")
        self.at = 4
        version = self._number("I")
        if version not in VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ModelError(f"{self.path} is a {kind} GGUF file; versions 2 and 3 in little-endian are supported")
        tensors, keys = self._count(MAX_TENSORS, "tensors"), self._count(MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string(MAX_NAME)
            if key in metadata:
                raise self._broken(f"two values of {key[:64]}")
            metadata[key] = self._value(self._number("I"))
        infos = [(self._string(MAX_NAME), *self._tensor()) for _ in range(tensors)]
        if len({name for name, *_ in infos}) < len(infos):
            raise self._broken("two tensors of one name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"an alignment of {alignment}")
        start = -(-self.at // alignment) * alignment
        return metadata, {name: self._placed(name, start, shape, *rest) for name, shape, *rest in infos}

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"{self.path} has a broken header ({what}); download it again")

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def _count(self, limit: int, of: str) -> int:
        count: int = self._number("Q")
        if count > limit:
            raise self._broken(f"{count} {of}")
        return count

    def _string(self, limit: int = MAX_HEADER) -> str:
        length = self._number("Q")
        if length > min(limit, MAX_HEADER - self.at):
            raise self._broken(f"a text of {length} bytes")
        text = self.data[self.at : self.at + length]
        if len(text) < length:
            raise self._broken("it ends early")
        self.at += length
        return text.decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise self._broken(f"a value of the type {kind}")
        kind, length = self._number("I"), self._number("Q")
        self.values += length
        if self.values > MAX_VALUES:
            raise self._broken(f"arrays of {self.values} values")
        if kind == STRING:
            return [self._string() for _ in range(length)]
        if kind not in SCALARS:
            raise self._broken(f"an array of the type {kind}")
        values = struct.unpack_from(f"<{length}{SCALARS[kind]}", self.data, self.at)
        self.at += struct.calcsize(f"<{length}{SCALARS[kind]}")
        return list(values)

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Return a tensor's shape, type and offset."""
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"a tensor of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return shape[::-1], self._number("I"), self._number("Q")

    def _placed(self, name: str, start: int, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
        kind = TYPES.get(number)
        if kind is None:
            raise ModelError(f"{self.path} holds the tensor {name[:64]} in the type {number}, which is not supported")
        if shape[-1] % kind.block:
            raise self._broken(f"{shape[-1]} columns in blocks of {kind.block}")
        num_bytes = prod(shape) // kind.block * kind.block_bytes
        if start + offset + num_bytes > len(self.data):
            raise ModelError(f"{self.path} is cut short: the tensor {name[:64]} ends beyond it; download it again")
        return TensorInfo(self.path, shape, number, start + offset, num_bytes)
