"""Weights packed from files in chunks against the same weights packed from memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels.matmul import Packed, Packing, Quantized, Stored
from tests.engine.test_kernels import drawn, needs_library, variant  # noqa: F401 (a fixture)

# Rows and columns: less than a panel; several pieces with a last one that is cut; odd columns; rows of one piece each.
SHAPES = [(2, 3), (700, 1024), (1502, 333), (70, 9001)]
GAP = 13  # bytes between parts: nothing says that they lie at round places


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[int]]:
    """Return the descriptors of two empty files."""
    opened = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab"]
    yield opened
    for file in opened:
        os.close(file)


def stored(weight: Tensor, files: list[int], cuts: list[int]) -> list[Stored]:
    """Write the weight's rows in parts, alternating between the files; returns the parts."""
    parts = []
    for number, part in enumerate(weight.tensor_split(cuts)):
        file = files[number % 2]
        offset = os.lseek(file, GAP, os.SEEK_END)
        os.write(file, part.contiguous().view(torch.uint8).numpy().tobytes())
        parts.append(Stored(file, offset, tuple(part.shape), part.dtype))
    return parts


@needs_library
@pytest.mark.parametrize(("bits", "gated"), list(product([None, 8, 4], [False, True])))
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_packed_from_files_equal_those_from_memory(variant, dtype, bits, gated, shape, files):  # noqa: F811, PLR0917
    packing, pairs, num_bytes = Packing(variant), [], 0
    for cuts in ([], [1], [shape[0] // 3, shape[0] // 2]):
        weight = drawn(*shape, dtype=dtype)
        kind = {"bits": bits} if bits else {}
        make = Quantized if bits else Packed
        later = make(variant, stored(weight, files, cuts), gated=gated, packing=packing, **kind)
        pairs.append((later, make(variant, weight, gated=gated, **kind)))
        num_bytes += weight.nbytes
    packing.run()
    assert num_bytes * 0.9 < packing.num_bytes <= num_bytes
    for later, now in pairs:
        assert torch.equal(later.panels, now.panels)
        assert later.scales is now.scales is None or torch.equal(later.scales, now.scales)
    packing.run()  # nothing is left to do


@needs_library
def test_truncated_and_unreadable_files_are_reported(variant, files, tmp_path):  # noqa: F811
    weight = drawn(900, 500, dtype=torch.float32)
    (part,) = stored(weight, files, [])
    os.ftruncate(files[0], part.offset + weight.nbytes - 1)
    packing = Packing(variant)
    Packed(variant, [part], packing=packing)
    with pytest.raises(OSError, match="it ends early") as told:
        packing.run()
    assert told.value.filename == files[0]
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        packing = Packing(variant)
        Packed(variant, [part._replace(file=folder)], packing=packing)
        with pytest.raises(OSError) as told:
            packing.run()
        assert (told.value.errno, told.value.filename) == (errno.EISDIR, folder)
    finally:
        os.close(folder)


@needs_library
def test_parts_of_different_shapes_or_dtypes_are_refused(variant, files):  # noqa: F811
    (part,) = stored(drawn(6, 5, dtype=torch.float32), files, [])
    for other in (part._replace(dtype=torch.bfloat16), part._replace(shape=(6, 4))):
        with pytest.raises(ValueError, match=r"of a weight in torch\.float32"):
            Packed(variant, [part, other], packing=Packing(variant))
