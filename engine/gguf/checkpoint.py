"""The tensors of a GGUF file as a checkpoint. Matrices in blocks are given to the kernels as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import gguf
import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..files import LIST_BYTES, read_file
from ..grouped_rows import Rows
from ..kernels.blocks import PIECE_NUMBERS
from ..kernels.matmul import BlockRows, Parts
from ..models.checkpoint.weights import Checkpoint, Entry
from ..models.gpu.coded import CodedRows
from ..types import ModelError
from .folder import TENSORS
from .forms import FORMS, read, stored_type
from .reader import PLAIN, TYPES

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Listed(Struct):
    """A tensor in tensors.json, see engine/gguf/folder.py."""

    file: Annotated[int, Meta(ge=0)]  # its place among the files
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    type: int
    offset: Annotated[int, Meta(ge=0)]
    num_bytes: Annotated[int, Meta(ge=0)]
    interleaved: Annotated[int, Meta(ge=0)] = 0
    shift: float = 0.0
    is_negative_exponential: bool = False
    rows: tuple[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]], ...] = ()


class _Listing(Struct):
    """What tensors.json has."""

    files: list[str]
    tensors: dict[str, _Listed]


@dataclass(frozen=True, slots=True)
class BlockEntry(Entry):
    """A tensor in a GGUF file. `dtype` is that of its dequantized numbers."""

    type: int
    interleaved: int  # rows of a head, if the halves of each are interleaved; else 0
    shift: float  # added to its numbers
    is_negative_exponential: bool  # of x there is -exp(x)
    rows: Rows  # of the stored tensor those that it has; empty: all

    @property
    def row_bytes(self) -> int:
        """The size of a row; a vector's numbers are its rows."""
        return self.num_bytes // max(1, self.shape[0])

    @property
    def end(self) -> int:
        """The end of its last row in the file."""
        last = max((first + count for first, count in self.rows), default=0)
        return self.offset + (last * self.row_bytes if self.rows else self.num_bytes)


class GgufCheckpoint(Checkpoint):
    """The tensors that the folder of a GGUF file lists. The files are mapped. Raises ModelError."""

    entries: dict[str, BlockEntry]  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened = {}  # the files are mapped
        path = folder / TENSORS
        data = read_file(path, LIST_BYTES) or b""
        try:
            listing = msgspec.json.decode(data, type=_Listing)
            paths = [Path(listing.files[each.file]) for each in listing.tensors.values()]
        except (msgspec.DecodeError, RecursionError, IndexError):
            raise ModelError(f"{path} is broken; remove its folder, and start again") from None
        self.entries = {
            name: BlockEntry(
                file,
                each.offset,
                each.num_bytes,
                DTYPES.get(TYPES[each.type].name, torch.float32),
                each.shape,
                each.type,
                each.interleaved,
                each.shift,
                each.is_negative_exponential,
                each.rows,
            )
            for (name, each), file in zip(listing.tensors.items(), paths, strict=True)
        }
        files = sorted({entry.file for entry in self.entries.values()})
        self._mapped = {file: _map(file) for file in files}
        for name, entry in self.entries.items():
            if entry.end > len(self._mapped[entry.file]):
                raise ModelError(f"{entry.file} is cut short: the tensor {name} ends beyond it; download it again")
        self._headers = [(file.name, len(self._mapped[file]), data) for file in files]

    def blocks_type(self, name: str) -> str | None:
        """Return the type of the blocks that a weight is stored in; None: it is plain, or there is none."""
        entry = self.entries.get(name)
        kind = None if entry is None else TYPES[entry.type].name
        return None if kind in PLAIN else kind

    def fill(self, targets: Mapping[str, Tensor], progress: Callable[[int], None]) -> None:
        with torch.inference_mode():
            for name, target in targets.items():
                entry = self.entries[name]
                heads = self._rows(entry)
                if entry.interleaved:
                    order = np.arange(len(heads)).reshape(-1, entry.interleaved // 2, 2).swapaxes(1, 2).ravel()
                    heads = heads[order]
                step = max(1, PIECE_NUMBERS * len(heads) // max(1, target.numel()))
                for start in range(0, len(heads), step):
                    piece = _numbers(heads[start : start + step], entry)
                    if entry.shift:
                        piece = piece.float() - entry.shift
                    if entry.is_negative_exponential:
                        if not (piece < 0).all():
                            raise ModelError(f"{entry.file}: the numbers of the tensor {name} must be below 0")
                        piece = (-piece.float()).log()
                    target[start : start + step].copy_(piece.view(target[start : start + step].shape))
                progress(entry.num_bytes)

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> Parts:
        """Return the blocks of these tensors; empty if one has none."""
        entries = [self.entries[name] for name in names]
        if any(TYPES[entry.type].name in PLAIN for entry in entries):
            return []
        return [
            BlockRows(
                torch.from_numpy(self._rows(entry)), entry.shape, entry.type, dtype, entry.interleaved, not entry.rows
            )
            for entry in entries
        ]

    def coded(self, names: Sequence[str]) -> list[CodedRows]:
        parts = cast(Sequence[BlockRows], self.stored(names, torch.float32))
        entries = [self.entries[name] for name in names] if parts else []
        return [
            CodedRows(FORMS[stored_type(TYPES[entry.type].name)], entry.shape, partial(read, part), entry.num_bytes)
            for entry, part in zip(entries, parts, strict=True)
        ]

    def equal(self, one: str, other: str) -> bool:
        a, b = self.entries[one], self.entries[other]
        return (a.type, a.shape) == (b.type, b.shape) and bool((self._rows(a) == self._rows(b)).all())

    def close(self) -> None:
        self._mapped.clear()

    def _rows(self, entry: BlockEntry) -> np.ndarray:
        """Return the bytes of a tensor, [rows, bytes of a row]: mapped, or a copy of rows that are not contiguous."""
        data = self._mapped[entry.file][entry.offset : entry.end]
        if not entry.rows:
            return data.reshape(entry.shape[0], -1)
        stored = data.reshape(-1, entry.row_bytes)
        return np.concatenate([stored[first : first + count] for first, count in entry.rows])


def _map(file: Path) -> np.ndarray:
    try:
        # Private and writable, because torch warns of memory that it could not write. Nothing is written.
        return np.memmap(file, np.uint8, "c")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _numbers(rows: np.ndarray, entry: BlockEntry) -> Tensor:
    """Return the numbers of some rows of a tensor."""
    kind = TYPES[entry.type].name
    if kind in PLAIN:
        return torch.from_numpy(np.ascontiguousarray(rows)).view(entry.dtype)
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType(entry.type)))
