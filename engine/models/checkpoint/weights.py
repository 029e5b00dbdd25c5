"""Reads checkpoints in safetensors files. Headers are checked first; then tensors are streamed into the model.

The format is a length (8 bytes, little-endian), a JSON header of that length (name -> dtype, shape, offsets), and the
tensors' bytes. Tensors are read directly into their targets, through small buffers if the dtypes differ or the target
is on a GPU. Loading thus needs the model's memory and that of the tensors being packed. Weights that the kernels can
pack as stored are read by the kernels. Files in other formats are never opened: unpickling runs whatever code their
author put into them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ...files import LIST_BYTES, check_values, read_file
from ...kernels.matmul import Packing, Sources, Stored
from ...types import ModelError
from ..gpu.coded import CodedRows
from .upload import PIECE_BYTES, Piece, Upload, pieces, read_all

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
REPORT_S = 0.1  # between two reports of the packing's progress
SAMPLE_BYTES = 4096  # of a tensor's start and end, for weights_hash


# Sizes and offsets in a header. Numbers that no file can have are refused before anything is computed from them.
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

    @property
    def pieces(self) -> tuple[Entry, ...]:
        """Its contiguous parts, in the order of its rows."""
        return (self,)


class Checkpoint:
    """The tensors of a model folder, by name. The constructor only reads and checks the headers. Raises ModelError."""

    renames: tuple[tuple[str, str], ...] = ()  # see `rename`

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._headers: list[tuple[str, int, bytes]] = []  # file name, file size, header
        self._header_bytes = 0
        self._opened: dict[Path, int] = {}  # descriptors
        self._uploads: dict[torch.device, Upload] = {}
        listed = _index(folder)
        for path in sorted({folder / file for file in listed.values()}) if listed else _files(folder):
            self._open(path, listed)
        for name, file in listed.items():
            if name not in self.entries:
                raise ModelError(f"{folder / file} does not hold the tensor {name} that its index promises")

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the files' names, sizes and headers and the first and last 4 KiB of every tensor.

        It distinguishes checkpoints by reading a few megabytes. It does not detect a change in the middle of a tensor.
        """
        digest = hashlib.sha256()
        for name, size, header in self._headers:
            digest.update(f"{name} {size} ".encode() + header)
        own = sorted((piece for entry in self.entries.values() for piece in entry.pieces), key=_place)
        for file, entries in groupby(own, key=lambda piece: piece.file):
            with file.open("rb") as stream:
                for entry in entries:
                    for start in {0, max(0, entry.num_bytes - SAMPLE_BYTES)}:
                        stream.seek(entry.offset + start)
                        digest.update(stream.read(min(SAMPLE_BYTES, entry.num_bytes)))
        return digest.hexdigest()

    @property
    def num_numbers(self) -> int:
        """The total number of elements of all tensors."""
        return sum(prod(entry.shape) for entry in self.entries.values())

    def rename(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Replace the first text of each pair in the tensors' names by the second. Raises ModelError."""
        renamed: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            own = name
            for old, new in pairs:
                own = own.replace(old, new)
            if own in renamed:
                raise ModelError(f"the checkpoint holds two tensors for {own}, one of which is {name}")
            renamed[own] = entry
        self.entries, self.renames = renamed, tuple(pairs)

    def original(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        return original(name, self.renames)

    def check(self, targets: Mapping[str, Tensor]) -> None:
        """Raise ModelError unless the checkpoint has every name, with the shape of its target."""
        for name, target in targets.items():
            entry = self.entries.get(name)
            if entry is None:
                own = self.original(name)
                raise ModelError(f"the checkpoint lacks the tensor {own}; is it complete, and of this architecture?")
            if entry.shape not in (tuple(target.shape), (1, *target.shape)):  # some vectors are matrices of one row
                raise ModelError(
                    f"the tensor {self.original(name)} in {entry.file} has the shape {list(entry.shape)}, "
                    f"but config.json asks for {list(target.shape)}"
                )

    def num_bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.entries[name].num_bytes for name in names)

    def fill(self, targets: Mapping[str, Tensor], progress: Callable[[int], None]) -> None:
        """Copy each named tensor into its target, in file order. `check` must have passed. `progress` is called with
        the size of each piece in bytes. Files stay open until `close`."""
        uploads: dict[torch.device, list[Piece]] = {}
        with self.reading():
            for entry, target in self._in_order(targets):
                descriptor = self._descriptor(entry.file)
                if target.dtype == entry.dtype and target.device.type == "cpu":
                    read_into(descriptor, entry, target, progress)
                else:
                    work = pieces(descriptor, entry.offset, entry.dtype, target)
                    uploads.setdefault(target.device, []).extend(work)
            for device, work in uploads.items():
                if device not in self._uploads:
                    self._uploads[device] = Upload(device)
                self._uploads[device].run(work, progress)

    def rows(self, name: str, count: int) -> Tensor:
        """Return the first rows of a matrix, up to `count`, in the file's data type."""
        entry = self.entries[name]
        found = torch.empty(min(count, entry.shape[0]), *entry.shape[1:], dtype=entry.dtype)
        with self.reading():
            left = found
            for piece in entry.pieces:
                part, left = left[: piece.shape[0]], left[piece.shape[0] :]
                own = replace(piece, num_bytes=part.nbytes)
                read_into(self._descriptor(piece.file), own, part, lambda num_bytes: None)
        return found

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> Sources:
        """Return these tensors' locations in files that stay open until `close`; empty if one has another dtype."""
        entries = [self.entries[name] for name in names]
        if any(entry.dtype != dtype for entry in entries):
            return []
        return [
            Stored(self._descriptor(piece.file), piece.offset, piece.shape, dtype)
            for entry in entries
            for piece in entry.pieces
        ]

    def coded(self, names: Sequence[str]) -> list[CodedRows]:
        """Return these tensors in forms that a GPU computes with; empty if one has none."""
        return []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise ModelError for an OSError whose filename is one of our descriptors; others pass."""
        try:
            yield
        except OSError as error:
            if error.filename not in self._opened.values():
                raise
            raise self.unreadable(error) from None

    def unreadable(self, error: OSError) -> ModelError:
        """Return the error for a file that cannot be read; the filename of `error` is one of our descriptors."""
        file = next(file for file, opened in self._opened.items() if opened == error.filename)
        return ModelError(f"{file} cannot be read: {error.strerror}; download it again")

    def close(self) -> None:
        """End the uploads, and close the files that `fill` and `stored` have opened."""
        while self._uploads:
            self._uploads.popitem()[1].close()
        while self._opened:
            os.close(self._opened.popitem()[1])

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors are equal, byte for byte."""
        a, b = self.entries[one], self.entries[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if len(a.pieces) > 1 or len(b.pieces) > 1:
            found = [self.rows(name, a.shape[0]).view(torch.uint8) for name in (one, other)]
            return torch.equal(*found)
        buffers = bytearray(min(PIECE_BYTES, a.num_bytes)), bytearray(min(PIECE_BYTES, a.num_bytes))
        for start in range(0, a.num_bytes, PIECE_BYTES):
            left, right = (memoryview(buffer)[: a.num_bytes - start] for buffer in buffers)
            try:
                read_all(self._descriptor(a.file), left, a.offset + start)
                read_all(self._descriptor(b.file), right, b.offset + start)
            except OSError as error:
                raise self.unreadable(error) from None
            if left != right:
                return False
        return True

    def _descriptor(self, file: Path) -> int:
        if file not in self._opened:
            try:
                self._opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelError(f"{file} cannot be read: {error.strerror}") from None
        return self._opened[file]

    def _open(self, path: Path, listed: Mapping[str, str]) -> None:
        """Read the header of a file. Where two files hold a tensor, the index, `listed`, decides; of a tensor that it
        does not list, such as a rotary buffer, the first is used."""
        if not os.path.isfile(path):
            raise ModelError(f"the weights file {path} is missing; download the model again")
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                start = stream.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
                if not 2 <= length <= size - 8:
                    raise ModelError(f"{path} is not a safetensors file, or it is cut short; download it again")
                # All headers of a model stay in memory, so one bound applies to their total size.
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
        for name in self.entries.keys() & tensors.keys():
            if not listed:
                other = self.entries[name].file
                raise ModelError(f"{path} and {other} both hold the tensor {name[:64]}; remove one of them")
            if listed.get(name) != path.name:
                del tensors[name]
        self.entries.update(tensors)
        self._headers.append((path.name, size, header))

    def _in_order(self, targets: Mapping[str, Tensor]) -> list[tuple[Entry, Tensor]]:
        """Return the pieces of tensors and the parts of their targets, each as a vector, so that files are read
        sequentially."""
        found: list[tuple[Entry, Tensor]] = []
        for name, target in targets.items():
            own = self.entries[name].pieces
            parts = target.split([piece.shape[0] for piece in own]) if len(own) > 1 else [target]
            found += [(piece, part.view(-1)) for piece, part in zip(own, parts, strict=True)]
        return sorted(found, key=lambda part: _place(part[0]))


def _place(entry: Entry) -> tuple[Path, int]:
    return entry.file, entry.offset


def original(name: str, renames: Sequence[tuple[str, str]]) -> str:
    """Return the name that a tensor had before Checkpoint.rename."""
    for old, new in reversed(renames):
        name = name.replace(new, old)
    return name


def _entry(path: Path, base: int, found: _Described) -> Entry:
    begin, end = found.data_offsets
    if found.dtype not in DTYPES:
        raise ModelError(f"{path} holds numbers of the type {found.dtype[:64]}, which are not supported")
    dtype = DTYPES[found.dtype]
    if end - begin != prod(found.shape) * dtype.itemsize:
        raise ValueError
    return Entry(path, base + begin, end - begin, dtype, found.shape)


def _end(begin: int, entries: Iterable[Entry]) -> int:
    """Return the end of a file's last tensor; the first may start at `begin`. Raises ValueError if tensors overlap."""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset < begin:
            raise ValueError
        begin = entry.offset + entry.num_bytes
    return begin


def read_into(descriptor: int, entry: Entry, target: Tensor, progress: Callable[[int], None]) -> None:
    """Read a tensor's bytes directly into `target`."""
    data = target.view(torch.uint8).view(-1).numpy().data
    for start in range(0, entry.num_bytes, PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        read_all(descriptor, piece, entry.offset + start)
        progress(len(piece))


def _index(folder: Path) -> dict[str, str]:
    """Return tensor name -> file for a sharded checkpoint; empty for a single file.

    As in transformers, a single file is used though there is an index: that of an older checkpoint, of shards.
    """
    if os.path.isfile(folder / "model.safetensors"):
        return {}
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
    """Return the weight files of a folder without an index: model.safetensors, or else all safetensors files."""
    single = folder / "model.safetensors"
    if os.path.isfile(single):
        return [single]
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None
    files = [folder / name for name in names if name.endswith(".safetensors")]
    shards = [file for file in files if "-of-" in file.name]
    if shards and str(len(shards)) != shards[0].stem.rpartition("-of-")[2].lstrip("0"):
        raise ModelError(f"{folder} holds {len(shards)} of the weights' parts and no index; download the model again")
    if files:
        return files
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise ModelError(
            f"{folder} holds its weights only as {pickled[0]}, a format that can run code when it is read; "
            "convert the model to safetensors"
        )
    raise ModelError(f"{folder} holds no weights: there is no *.safetensors file in it")


@contextmanager
def reported(packing: Packing, progress: Callable[[int], None]) -> Iterator[None]:
    """Report the number of packed bytes at intervals, from now until the end."""
    ended = threading.Event()

    def watch() -> None:
        progress(packing.num_bytes)
        while not ended.wait(REPORT_S):
            progress(packing.num_bytes)

    watcher = threading.Thread(target=watch, name="weights", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
