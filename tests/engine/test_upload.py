"""Upload: several readers, small buffers, and files that fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models.checkpoint import upload
from engine.models.checkpoint.upload import Upload, pieces

CPU = torch.device("cpu")


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[tuple[int, torch.Tensor]]:
    """A file that holds 100,003 numbers after 8 bytes, as its descriptor, and the numbers."""
    expected = torch.randn(100_003).to(torch.bfloat16)
    (tmp_path / "numbers").write_bytes(b"8 bytes." + expected.view(torch.uint8).numpy().tobytes())
    descriptor = os.open(tmp_path / "numbers", os.O_RDWR)
    yield descriptor, expected
    os.close(descriptor)


@pytest.fixture
def four_readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upload]:
    monkeypatch.setattr(upload, "PIECE_BYTES", 1000)
    started = Upload(CPU, readers=4)
    yield started
    started.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_piece_reaches_its_place(four_readers, numbers, dtype):
    descriptor, expected = numbers
    target, done = torch.zeros(len(expected), dtype=dtype), []
    work = list(pieces(descriptor, 8, torch.bfloat16, target))
    assert len(work) == 201  # more than there are buffers, and the last one is short
    four_readers.run(work, done.append)
    assert torch.equal(target, expected.to(dtype))
    assert sum(done) == 2 * len(expected) and len(done) == len(work)


def test_an_upload_serves_one_tensor_after_the_other(four_readers, numbers):
    descriptor, expected = numbers
    targets = torch.zeros(2, 1000)
    for row, offset in enumerate((8, 108)):
        four_readers.run(pieces(descriptor, offset, torch.bfloat16, targets[row]), lambda num_bytes: None)
    assert torch.equal(targets, torch.stack([expected[:1000], expected[50:1050]]).float())


def test_a_file_that_ends_early_names_its_descriptor_and_stops_the_rest(four_readers, numbers):
    descriptor, expected = numbers
    os.truncate(descriptor, 8)
    target, done = torch.zeros(len(expected)), []
    with pytest.raises(OSError, match="it ends early") as caught:
        four_readers.run(pieces(descriptor, 8, torch.bfloat16, target), done.append)
    assert caught.value.filename == descriptor and not done and not target.any()


def test_a_descriptor_that_cannot_be_read_is_named(four_readers, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="Is a directory") as caught:
        four_readers.run(pieces(descriptor, 0, torch.float32, torch.zeros(8)), lambda num_bytes: None)
    assert caught.value.filename == descriptor
    os.close(descriptor)
