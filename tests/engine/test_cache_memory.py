"""The memory of a cache on the CPU is there before requests write to it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest
import torch

from engine.attention import cache_memory
from engine.attention.cache_memory import HUGE_BYTES, Population, request_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are there")


def resident(*tensors: torch.Tensor) -> int:
    """Return the bytes of the tensors that the system has provided.

    The process's own figure would count what other threads and the garbage collector free meanwhile.
    """
    page, pages = os.sysconf("SC_PAGESIZE"), 0
    for tensor in tensors:
        first = tensor.data_ptr() // page * page
        there = (ctypes.c_ubyte * -(-(tensor.data_ptr() + tensor.nbytes - first) // page))()
        size = ctypes.c_size_t(len(there) * page)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size, there) == 0
        pages += sum(state & 1 for state in there)
    return pages * page


def empty(num_bytes: int) -> torch.Tensor:
    """Return memory of which the system has provided next to nothing yet.

    It comes from the system itself: the allocator may hand out what earlier tests have freed, which is there already.
    """
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    request_huge_pages(tensor)
    assert resident(tensor) <= HUGE_BYTES
    return tensor


def test_layers_are_populated_up_to_the_limit_and_keep_what_they_have():
    layers = [empty(64 << 20) for _ in range(2)]
    layers[0][5 << 20] = 7
    population = Population([*layers, layers[0]], limit_bytes=64 << 20)  # two layers may share a tensor
    while population.advance():
        pass
    provided = [resident(layer) >> 20 for layer in layers]
    assert all(30 <= each <= 34 for each in provided), f"{provided} MiB of two layers of 64 MiB, instead of 32 of each"
    assert layers[0][5 << 20] == 7
    for layer in layers:
        assert resident(layer[HUGE_BYTES : 24 << 20]) >= 22 << 20, "the first pages come first"
    assert not population.advance()


def test_layers_with_parts_of_the_same_blocks_are_populated_together():
    memory = empty(64 << 20)
    population = Population([memory.view(4, -1)[:, : 1 << 20], memory.view(4, -1)[:, 1 << 20 :]])
    while population.advance():
        pass
    assert resident(memory) > 56 << 20


def test_a_turn_is_short(monkeypatch):
    layer = empty(64 << 20)
    population = Population([layer])
    monkeypatch.setattr(cache_memory.time, "monotonic", iter(range(1000)).__next__)
    assert population.advance()
    assert resident(layer) <= 3 * HUGE_BYTES


def test_a_system_that_cannot_populate_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(cache_memory, "_madvise", lambda: lambda *arguments: asked.append(arguments) or -1)
    monkeypatch.setattr(cache_memory.ctypes, "get_errno", lambda: 22)
    population = Population([torch.empty(8 << 20, dtype=torch.uint8)])
    assert not population.advance()
    assert len(asked) == 1


def test_a_cache_below_a_huge_page_is_left_alone():
    assert not Population([torch.empty(1 << 20, dtype=torch.uint8)]).advance()
