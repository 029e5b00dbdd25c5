"""The memory of a cache on the CPU is there before requests write to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.attention import cache_memory
from engine.attention.cache_memory import HUGE_BYTES, Population, request_huge_pages

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def empty(num_bytes: int) -> torch.Tensor:
    """Return memory of which the system has provided next to nothing yet."""
    before = resident()
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    request_huge_pages(tensor)
    assert resident() - before < num_bytes // 4
    return tensor


def test_layers_are_populated_up_to_the_limit_and_keep_what_they_have():
    layers = [empty(64 << 20) for _ in range(2)]
    layers[0][5 << 20] = 7
    population = Population([*layers, layers[0]], limit_bytes=64 << 20)  # two layers may share a tensor
    before = resident()
    while population.advance():
        pass
    grown = resident() - before
    assert 56 << 20 < grown < 72 << 20, f"{grown >> 20} MiB of two layers of 64 MiB, instead of 64"
    assert layers[0][5 << 20] == 7
    at_once = resident()
    for layer in layers:
        layer[: 24 << 20] = 1
    assert resident() - at_once < 8 << 20, "the first pages of both layers were there already"
    assert not population.advance()


def test_layers_with_parts_of_the_same_blocks_are_populated_together():
    memory = empty(64 << 20)
    population = Population([memory.view(4, -1)[:, : 1 << 20], memory.view(4, -1)[:, 1 << 20 :]])
    before = resident()
    while population.advance():
        pass
    assert 56 << 20 < resident() - before < 72 << 20


def test_a_turn_is_short(monkeypatch):
    layer = empty(64 << 20)
    population = Population([layer])
    monkeypatch.setattr(cache_memory.time, "monotonic", iter(range(1000)).__next__)
    before = resident()
    assert population.advance()
    assert resident() - before <= 2 * HUGE_BYTES


def test_a_system_that_cannot_populate_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(cache_memory, "_madvise", lambda: lambda *arguments: asked.append(arguments) or -1)
    monkeypatch.setattr(cache_memory.ctypes, "get_errno", lambda: 22)
    population = Population([torch.empty(8 << 20, dtype=torch.uint8)])
    assert not population.advance()
    assert len(asked) == 1


def test_a_cache_below_a_huge_page_is_left_alone():
    assert not Population([torch.empty(1 << 20, dtype=torch.uint8)]).advance()
