"""Checkpoints in which all experts of a layer are one tensor, as if each had tensors of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...bounds import MAX_EXPERTS
from ...kernels.matmul import Sources
from ...types import ModelError
from ..families.family import ExpertKeys
from .weights import Checkpoint, Entry, read_into

# How the name of a tensor of all experts ends -> the dimensions it has, and how the name of an expert's own ends.
ENDS = {
    "": (3, "weight"),
    ".weight": (3, "weight"),
    "_bias": (2, "bias"),
    "_blocks": (4, "blocks"),
    "_scales": (3, "scales"),
}
MAX_TENSORS = 8 * MAX_EXPERTS  # of all experts


@dataclass(frozen=True, slots=True)
class ArrangedEntry(Entry):
    """One expert's part of a tensor. `shape` is that of the arranged part."""

    transposed: bool  # the file has [columns, rows]
    alternating: bool  # rows of gate and up alternate in the file


class StackedCheckpoint(Checkpoint):
    """The tensors of a model folder, those of all experts divided into those of each. Raises ModelError."""

    def __init__(self, folder: Path, keys: ExpertKeys, hidden: object) -> None:
        """`hidden`: hidden_size of config.json."""
        super().__init__(folder)
        self._keys, self._hidden = keys, hidden
        gate, *others = (name.partition(".{}.") for name in keys.names[1:] if name)
        self._joined = gate[2]  # the last part of the names of gate and up
        self._divided = keys.stacking.divided if keys.stacking is not None else ""
        self._halves = gate[2], others[0][2]
        lasts = "|".join(re.escape(last) for last in (self._divided, *(name[2] for name in (gate, *others))) if last)
        pattern = re.compile(rf"(.*{re.escape(gate[0])})\.({lasts})({'|'.join(map(re.escape, ENDS))})")
        for name, entry in list(self.entries.items()):
            if (found := pattern.fullmatch(name)) and len(entry.shape) == ENDS[found[3]][0] and entry.shape[0]:
                if len(self.entries) + entry.shape[0] > MAX_TENSORS:
                    raise ModelError(f"{entry.file} holds the tensors of more than {MAX_EXPERTS} experts")
                del self.entries[name]
                self.entries.update(self._experts(found[1], found[2], found[3], entry))

    def fill(self, targets: Mapping[str, Tensor], progress: Callable[[int], None]) -> None:
        arranged = {name: entry for name in targets if isinstance(entry := self.entries[name], ArrangedEntry)}
        super().fill({name: target for name, target in targets.items() if name not in arranged}, progress)
        for name, entry in arranged.items():
            rows = torch.empty(entry.shape[::-1] if entry.transposed else entry.shape, dtype=entry.dtype)
            try:
                read_into(self._descriptor(entry.file), entry, rows.view(-1), progress)
            except OSError as error:
                raise self.unreadable(error) from None
            rows = rows.T if entry.transposed else rows
            targets[name].copy_(torch.cat([rows[::2], rows[1::2]]) if entry.alternating else rows)

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> Sources:
        if any(isinstance(self.entries[name], ArrangedEntry) for name in names):
            return []
        return super().stored(names, dtype)

    def equal(self, one: str, other: str) -> bool:
        return not any(isinstance(self.entries[name], ArrangedEntry) for name in (one, other)) and super().equal(
            one, other
        )

    def _experts(self, prefix: str, last: str, end: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """Yield the names and the entries of each expert's part."""
        assert self._keys.stacking is not None
        count, shape = entry.shape[0], entry.shape[1:]
        size = entry.num_bytes // count
        if last == self._divided:
            if shape[0] % 2:
                raise ModelError(f"{entry.file} has experts with {shape[0]} rows of gate and up, which is odd")
            for place in range(2 * count):
                expert, half = divmod(place, 2)
                name = f"{prefix}.{expert}.{self._halves[half]}.{ENDS[end][1]}"
                where = entry.file, entry.offset + place * (size // 2), size // 2, entry.dtype
                yield name, Entry(*where, (shape[0] // 2, *shape[1:]))
            return
        transposed = self._keys.stacking.transposed and end == ""
        if self._keys.stacking.may_fit and shape[-1 if last == self._joined else 0] == self._hidden:
            transposed = False
        alternating = self._keys.stacking.alternating and last == self._joined
        for expert in range(count):
            name = f"{prefix}.{expert}.{last}.{ENDS[end][1]}"
            where = entry.file, entry.offset + expert * size, size, entry.dtype
            if transposed or alternating:
                own = shape[::-1] if transposed else shape
                yield name, ArrangedEntry(*where, own, transposed, alternating)
            else:
                yield name, Entry(*where, shape)
