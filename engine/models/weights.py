"""Checkpoints in safetensors files: found, checked before anything is read, and streamed into place piece by piece.

The format is a length (8 bytes, little-endian), a JSON header of that length (name -> dtype, shape, place), and the
tensors' bytes. They are read to where they are wanted, by way of a small buffer where the dtypes differ, some tensors
at a time; so loading needs the model's own memory and that of the tensors which are being packed. What our kernels can
pack as it lies in a file they read themselves. Files of other formats are never opened: unpickling one runs whatever
its author put into it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..files import LIST_BYTES, check_values, read_file
from ..kernels.matmul import Stored
from ..types import ModelError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PIECE_BYTES = 16 << 20  # read at once: long enough for full disk speed, small beside any model worth streaming
SAMPLE_BYTES = 4096  # of a tensor's start and end, for weights_hash


# A header says where each tensor lies. Numbers that no file has are refused before anything is computed from them.
Size = Annotated[int, Meta(ge=0, le=1 << 60)]


class _Described(Struct):
    """One tensor in a header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=16)]
    data_offsets: tuple[Size, Size]


class _Index(Struct):
    weight_map: dict[str, str]


_DESCRIBED = msgspec.json.Decoder(_Described)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file."""

    file: Path
    offset: int  # of its first byte in the file
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a model folder by name. Opening it reads and checks the headers only."""

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self._headers: list[tuple[str, int, bytes]] = []  # file name, file size, header
        self._header_bytes = 0
        self._opened: dict[Path, int] = {}  # descriptors
        listed = _index(folder)
        for path in sorted({folder / file for file in listed.values()}) if listed else _files(folder):
            self._open(path)
        for name, file in listed.items():
            if name not in self.entries:
                raise ModelError(f"{folder / file} does not hold the tensor {name} that its index promises")

    @property
    def weights_hash(self) -> str:
        """SHA-256 over the files' names, sizes and headers and the first and last 4 KiB of every tensor.

        It tells checkpoints apart at the cost of a few megabytes of reading; it does not prove that nobody
        changed a number in the middle of a tensor.
        """
        digest = hashlib.sha256()
        for name, size, header in self._headers:
            digest.update(f"{name} {size} ".encode() + header)
        for file, entries in self._by_file(self.entries).items():
            with file.open("rb") as stream:
                for _, entry in entries:
                    for start in {0, max(0, entry.num_bytes - SAMPLE_BYTES)}:
                        stream.seek(entry.offset + start)
                        digest.update(stream.read(min(SAMPLE_BYTES, entry.num_bytes)))
        return digest.hexdigest()

    @property
    def num_numbers(self) -> int:
        """The numbers in all tensors together."""
        return sum(prod(entry.shape) for entry in self.entries.values())

    def check(self, places: Mapping[str, Tensor]) -> None:
        """Raise ModelError unless every name is there with the shape of its place."""
        for name, place in places.items():
            entry = self.entries.get(name)
            if entry is None:
                raise ModelError(f"the checkpoint lacks the tensor {name}; is it complete, and of this architecture?")
            if entry.shape != tuple(place.shape):
                raise ModelError(
                    f"the tensor {name} in {entry.file} has the shape {list(entry.shape)}, "
                    f"but config.json asks for {list(place.shape)}"
                )

    def num_bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.entries[name].num_bytes for name in names)

    def fill(self, places: Mapping[str, Tensor], progress: Callable[[int], None]) -> None:
        """Copy each named tensor into its place, in the order of the files; `check` has passed. `progress` gets the
        bytes of each piece."""
        with torch.inference_mode():
            for file, entries in self._by_file({name: self.entries[name] for name in places}).items():
                with file.open("rb", buffering=0) as stream:
                    for name, entry in entries:
                        read = _read_into if _is_as_stored(places[name], entry) else _convert_into
                        read(stream, entry, places[name].view(-1), progress)

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> list[Stored]:
        """Where these tensors lie in their files, which stay open until `close`; nothing if one has another dtype."""
        entries = [self.entries[name] for name in names]
        if any(entry.dtype != dtype for entry in entries):
            return []
        return [Stored(self._descriptor(entry.file), entry.offset, entry.shape, dtype) for entry in entries]

    def file_of(self, descriptor: int) -> Path:
        """Which file it is that `stored` has told by its descriptor."""
        return next(file for file, opened in self._opened.items() if opened == descriptor)

    def close(self) -> None:
        """End the use of what `stored` has told."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same, byte for byte."""
        a, b = self.entries[one], self.entries[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        with a.file.open("rb", buffering=0) as left, b.file.open("rb", buffering=0) as right:
            pairs = zip(_pieces(left, a), _pieces(right, b), strict=True)
            return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for (_, x), (_, y) in pairs)

    def _descriptor(self, file: Path) -> int:
        if file not in self._opened:
            try:
                self._opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelError(f"{file} cannot be read: {error.strerror}") from None
        return self._opened[file]

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ModelError(f"the weights file {path} is missing; download the model again")
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                start = stream.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
                if not 2 <= length <= size - 8:
                    raise ModelError(f"{path} is not a safetensors file, or it is cut short; download it again")
                # All headers of a model are kept, so they share one bound.
                self._header_bytes += length
                if self._header_bytes > LIST_BYTES:
                    raise ModelError(
                        f"{path} has a header of {length} bytes; those of a model may have {LIST_BYTES} in all"
                    )
                header = stream.read(length)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        check_values(path, header)
        try:
            found = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            found.pop("__metadata__", None)
            tensors = {name: _entry(path, 8 + length, _DESCRIBED.decode(info)) for name, info in found.items()}
            end = _end(8 + length, tensors.values())
        except (ValueError, RecursionError):
            raise ModelError(f"{path} has a broken safetensors header; download it again") from None
        if end > size:
            raise ModelError(f"{path} is cut short: it has {size} bytes and should have {end}; download it again")
        self.entries.update(tensors)
        self._headers.append((path.name, size, header))

    @staticmethod
    def _by_file(entries: Mapping[str, Entry]) -> dict[Path, list[tuple[str, Entry]]]:
        """Grouped by file, each file's in the order in which they lie: disks like to be read forward."""
        files: dict[Path, list[tuple[str, Entry]]] = {}
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset)):
            files.setdefault(entry.file, []).append((name, entry))
        return files


def _entry(path: Path, base: int, found: _Described) -> Entry:
    begin, end = found.data_offsets
    if found.dtype not in DTYPES:
        raise ModelError(f"{path} holds numbers of the type {found.dtype[:64]}, which are not supported")
    dtype = DTYPES[found.dtype]
    if end - begin != prod(found.shape) * dtype.itemsize:
        raise ValueError
    return Entry(path, base + begin, end - begin, dtype, found.shape)


def _end(begin: int, entries: Iterable[Entry]) -> int:
    """Return where the last of a file's tensors ends, the first of which may start at `begin`; ValueError where two of
    them overlap."""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset < begin:
            raise ValueError
        begin = entry.offset + entry.num_bytes
    return begin


def _is_as_stored(place: Tensor, entry: Entry) -> bool:
    return place.dtype == entry.dtype and place.device.type == "cpu"


def _read_into(stream: RawIOBase, entry: Entry, place: Tensor, progress: Callable[[int], None]) -> None:
    """A tensor's bytes to where they are wanted, without another copy."""
    target = place.view(torch.uint8).numpy().data
    stream.seek(entry.offset)
    for start in range(0, entry.num_bytes, PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        _read_all(stream, piece, entry)
        progress(len(piece))


def _convert_into(stream: RawIOBase, entry: Entry, place: Tensor, progress: Callable[[int], None]) -> None:
    for start, piece in _pieces(stream, entry):
        place[start : start + piece.numel()].copy_(piece)
        progress(piece.numel() * piece.itemsize)


def _read_all(stream: RawIOBase, target: memoryview, entry: Entry) -> None:
    """Fill `target`; the system may give less at once than was asked for."""
    while len(target):
        count = stream.readinto(target)
        if not count:
            raise ModelError(f"{entry.file} ended while it was read; download it again")
        target = target[count:]


def _pieces(stream: RawIOBase, entry: Entry) -> Any:
    """(place of its first number, numbers) of each piece of a tensor; a piece lives until the next one is asked for."""
    buffer = bytearray(min(PIECE_BYTES, entry.num_bytes))
    stream.seek(entry.offset)
    for start in range(0, entry.num_bytes, PIECE_BYTES):
        view = memoryview(buffer)[: min(PIECE_BYTES, entry.num_bytes - start)]
        _read_all(stream, view, entry)
        yield start // entry.dtype.itemsize, torch.frombuffer(view, dtype=entry.dtype)


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, of a sharded checkpoint; empty for a single file."""
    path = folder / "model.safetensors.index.json"
    data = read_file(path, LIST_BYTES)
    if data is None:
        return {}
    check_values(path, data)
    try:
        found = msgspec.json.decode(data, type=_Index).weight_map
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not a valid index of weights files; download it again") from None
    outside = next((file for file in found.values() if Path(file).name != file or file == ".."), None)
    if outside is not None:
        raise ModelError(f"{path} is not a valid index of weights files: it names {outside[:64]!r}, outside the folder")
    return found


def _files(folder: Path) -> list[Path]:
    """The weights of a folder without an index: model.safetensors, or whatever safetensors files are there."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    shards = [file for file in files if "-of-" in file.name]
    if shards and str(len(shards)) != shards[0].stem.rpartition("-of-")[2].lstrip("0"):
        raise ModelError(f"{folder} holds {len(shards)} of the weights' parts and no index; download the model again")
    if files:
        return files
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(kind))
    if pickled:
        raise ModelError(
            f"{folder} holds its weights only as {pickled[0]}, a format that can run code when it is read; "
            "convert the model to safetensors"
        )
    raise ModelError(f"{folder} holds no weights: there is no *.safetensors file in it")
