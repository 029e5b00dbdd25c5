"""Checkpoints of Qwen3-Next, as if their tensors had the rows of Qwen3.5's, see grouped_rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...grouped_rows import MAX_PIECES, Rows, count_of, grouped_rows
from ...types import ModelError
from ..mixers.states import LinearShape
from .weights import Checkpoint, Entry

# Rows of the weight for one of the tensor, if it does not have as many: of packed zero points, and of the scales of
# blocks in fp8.
SHARED_ROWS = 8, 128


@dataclass(frozen=True, slots=True)
class RegroupedEntry(Entry):
    """Rows of a tensor that are not contiguous. `offset` is that of the first of them."""

    parts: tuple[Entry, ...]

    @property
    def pieces(self) -> tuple[Entry, ...]:
        return self.parts


def regroup(checkpoint: Checkpoint, shape: LinearShape, names: Sequence[tuple[str, str]]) -> None:
    """Replace the tensors with grouped rows. `names`: see Family.renames. Raises ModelError if one has other rows."""
    grouped = grouped_rows(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)
    totals = {own: sum(map(count_of, parts.values())) for own, parts in grouped.items()}
    pieces = 0
    for name, entry in list(checkpoint.entries.items()):
        module, _, last = name.rpartition(".")
        start, _, own = module.rpartition(".")
        if own not in grouped:
            continue
        del checkpoint.entries[name]
        if last == "weight_shape":  # which repeats that of the whole weight
            continue
        for part, rows in grouped[own].items():
            renamed = f"{start}.{part}.{last}"
            if renamed in checkpoint.entries:
                raise ModelError(f"the checkpoint holds both {name} and {renamed}")
            pieces += len(rows)
            if pieces > MAX_PIECES:
                raise ModelError(f"the rows of the checkpoint's tensors are in more than {MAX_PIECES} pieces")
            checkpoint.entries[renamed] = _regrouped(name, entry, rows, totals[own])
    checkpoint.renames = tuple(names)


def _regrouped(name: str, entry: Entry, rows: Rows, total: int) -> Entry:
    """Return some rows of a weight of `total` rows, or of what a quantized weight has for these rows."""
    # A scale of all rows, and what columns have
    if not entry.shape or entry.shape[0] == 1 or name.endswith("g_idx"):
        return entry
    shared = next((each for each in (1, *SHARED_ROWS) if entry.shape[0] * each == total), 0)
    if not shared or any(first % shared or count % shared for first, count in rows):
        raise ModelError(
            f"the tensor {name} in {entry.file} has the shape {list(entry.shape)}, in which the {total} rows that are "
            "grouped by key head cannot be separated"
        )
    size, columns = entry.num_bytes // entry.shape[0], entry.shape[1:]
    parts = tuple(
        Entry(entry.file, entry.offset + first // shared * size, count // shared * size, entry.dtype,
              (count // shared, *columns))
        for first, count in rows
    )  # fmt: skip
    num_bytes, count = sum(part.num_bytes for part in parts), count_of(rows) // shared
    return RegroupedEntry(entry.file, parts[0].offset, num_bytes, entry.dtype, (count, *columns), parts)
