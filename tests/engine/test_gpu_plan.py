"""The work items of a step, against lists that are written row by row."""

from __future__ import annotations

import random

import pytest

from engine.attention import AttentionMeta, gpu_plan
from engine.attention.gpu_plan import Plan

Items = list[tuple[int, ...]]


def obvious(rows: list[tuple[int, int]], window: int | None, queries: int, split: int) -> tuple[list[Items], Items]:
    """Return the items of each launch of decodes, and those of longer rows, for rows of (cached tokens, new ones)."""
    decodes: list[Items] = [[]]
    chunks = []
    for row, (cached, new) in enumerate(rows):
        if new == 1:
            begin = 0 if window is None else max(0, cached + 1 - window) // split
            count = -(-(cached + 1) // split) - begin
            if decodes[-1] and len(decodes[-1]) + count > gpu_plan.MAX_PARTS:
                decodes.append([])
            base = len(decodes[-1])
            decodes[-1] += [(row, 0, part, count, base) for part in range(count)]
        else:
            chunks += [(cached + first, row, first) for first in range(0, new, queries)]
    return [items for items in decodes if items], [(row, first) for _, row, first in sorted(chunks, reverse=True)]


@pytest.mark.parametrize("seed", range(30))
def test_every_part_of_a_step_is_an_item(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(gpu_plan, "SPLIT", draw.choice([32, 256]))
    monkeypatch.setattr(gpu_plan, "MAX_PARTS", draw.choice([4, 50, 4096]))
    rows = [(draw.randrange(2000), draw.choice([0, 1, 1, 1, 1, 5, 70, 300])) for _ in range(draw.randrange(1, 20))]
    uniform = draw.choice([False, False, True])
    plan = Plan(AttentionMeta.of([([0] * 150, *row) for row in rows], 16), uniform=uniform)
    is_few = sum(new == 1 for _, new in rows) <= gpu_plan.FEW_ROWS and not uniform
    for window, queries in ((None, 8), (None, 1), (draw.randrange(1, 600), 16)):
        split = gpu_plan.SPLIT // 2 if is_few else gpu_plan.SPLIT
        launches, chunks = obvious(rows, window, queries, split)
        if is_few and sum(map(len, launches)) > gpu_plan.MAX_PARTS:
            split = gpu_plan.SPLIT
            launches, chunks = obvious(rows, window, queries, split)
        decodes, longer = plan.on_host((window, queries))
        assert [work.num_parts for work in decodes] == [len(items) for items in launches]
        splits = [split] * len(decodes) + [gpu_plan.SPLIT] * len(longer)
        wanted = [*launches, chunks] if chunks else launches
        for work, items, tokens in zip([*decodes, *longer], wanted, splits, strict=True):
            assert work.table[0].tolist()[:3] == [len(items), 150, tokens]
            assert [tuple(item) for item in work.table[1:].tolist()] == [(*each, *[0] * 8)[:8] for each in items]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 100])
def test_no_step_has_more_parts_than_there_is_memory_for(rows):
    """Steps of fewer rows have shorter parts, and so may have more of them."""
    for length in (1, 128, 129, 1000):
        parts = []
        for count in range(1, rows + 1):
            plan = Plan(AttentionMeta.of([([0] * 63, length - 1, 1)] * count, 16))
            parts.append(sum(work.num_parts for work in plan.on_host((None, 1))[0]))
        assert max(parts) <= gpu_plan.most_parts(rows, length) <= 2 * max(parts)
