"""Converting batches to tensors: random traces against AttentionMeta.of, which works row by row."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention import AttentionMeta, KVCache
from engine.attention.reference import Reference
from engine.batch import PENDING, Row
from engine.runner.inputs import Inputs

CPU = torch.device("cpu")


def inputs_of(max_seqs, max_blocks, block_size):
    cache = KVCache(Reference(), [])
    sizes = {"max_seqs": max_seqs, "max_tokens": 40, "max_blocks": max_blocks, "block_size": block_size}
    return Inputs(**sizes, cache=cache, device=CPU)


class World:
    """Sequences that start, grow, pause and end, with blocks that are reused."""

    def __init__(self, seed, *, max_seqs=4, block_size=4, max_blocks=8):
        self.rng = random.Random(seed)
        self.block_size, self.max_seqs, self.max_blocks = block_size, max_seqs, max_blocks
        self.free = list(range(40))
        self.seqs = {}  # id -> [tokens computed, blocks]
        self.inputs = inputs_of(max_seqs, max_blocks, block_size)
        self.next_id = 0

    def step(self):
        rng = self.rng
        for seq_id in [s for s in self.seqs if rng.random() < 0.15]:
            self.free += self.seqs.pop(seq_id)[1]
            self.inputs.leave(seq_id)
        while len(self.seqs) < self.max_seqs and rng.random() < 0.6:
            self.seqs[self.next_id] = [0, []]
            self.inputs.enter(self.next_id)
            self.next_id += 1
        rows = []
        for seq_id, state in self.seqs.items():
            start, blocks = state
            room = self.max_blocks * self.block_size - start
            if room == 0 or rng.random() < 0.1:
                continue
            count = min(room, rng.choice([1, 1, 1, 3, 9]))
            need = -(-(start + count) // self.block_size) - len(blocks)
            rng.shuffle(self.free)
            new = [self.free.pop() for _ in range(need)]
            if start == 0 and rng.random() < 0.3 and need > 1:  # a prefix found in the cache: blocks, not tokens
                start = self.block_size
                count = max(1, count - start)
            blocks += new
            state[0] = start + count
            tokens = [rng.randrange(1000) for _ in range(count)]
            rows.append(Row(seq_id, start, tokens, new, rng.choice([0, 1])))
        return rows


@pytest.mark.parametrize("seed", range(6))
def test_random_traces_equal_the_row_by_row_version(seed):
    world = World(seed)
    for _ in range(60):
        rows = world.step()
        if not rows:
            continue
        world.inputs.append_blocks(rows)
        got = world.inputs.prepare(rows)
        want = AttentionMeta.of(
            [(world.seqs[row.seq_id][1], row.start, len(row.token_ids)) for row in rows], world.block_size
        )
        assert got.forward.ids.tolist() == [token for row in rows for token in row.token_ids]
        assert got.forward.positions.tolist() == [row.start + i for row in rows for i in range(len(row.token_ids))]
        for name in ("query_start", "seq_lens", "slot_mapping"):
            mine, theirs = getattr(got.forward.plan.meta, name), getattr(want, name)
            assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist(), name
        assert got.forward.plan.meta.block_table.dtype == torch.int32
        for row, line in zip(rows, got.forward.plan.meta.block_table.tolist(), strict=True):
            used = -(-(row.start + len(row.token_ids)) // world.block_size)
            assert line[:used] == world.seqs[row.seq_id][1][:used]
            assert all(0 <= block < 40 for block in line), "what lies behind a row's blocks is still a block"
        assert (got.forward.plan.meta.max_query, got.forward.plan.meta.max_seq) == (want.max_query, want.max_seq)
        assert (got.forward.plan.meta.query_start_list, got.forward.plan.meta.seq_lens_list) == (
            want.query_start_list,
            want.seq_lens_list,
        )
        ends = got.forward.plan.meta.query_start_list[1:]
        assert got.forward.logits_at.tolist() == [
            end - 1 for row, end in zip(rows, ends, strict=True) if row.num_logits
        ]
        assert got.layout.sampled_rows.tolist() == [index for index, row in enumerate(rows) if row.num_logits]
        assert got.lengths.tolist() == want.seq_lens_list


def test_a_step_without_draws_asks_for_no_logits():
    inputs = inputs_of(2, 4, 4)
    inputs.enter(9)
    rows = [Row(9, 0, [1, 2, 3], [5], 0)]
    inputs.append_blocks(rows)
    got = inputs.prepare(rows)
    assert got.forward.logits_at.shape == (0,) and got.forward.logits_at.dtype == torch.int64
    assert got.forward.plan.meta.slot_mapping.tolist() == [20, 21, 22]


def test_a_slot_is_given_again_with_an_empty_table():
    inputs = inputs_of(1, 3, 2)
    for seq_id, blocks in ((1, [7, 8]), (2, [3])):
        inputs.enter(seq_id)
        rows = [Row(seq_id, 0, [1] * (2 * len(blocks)), blocks, 1)]
        inputs.append_blocks(rows)
        assert inputs.prepare(rows).forward.plan.meta.block_table.tolist() == [blocks]
        inputs.leave(seq_id)


def test_rows_that_enter_again_have_the_blocks_of_their_new_slots():
    inputs = inputs_of(2, 4, 4)
    for slots, blocks in (([0, 1], [5, 6]), ([1, 0], [7, 8])):
        assert [inputs.enter(seq_id) for seq_id in (1, 2)] == slots
        rows = [Row(seq_id, 0, [9], [block], 1) for seq_id, block in zip((1, 2), blocks, strict=True)]
        inputs.append_blocks(rows)
        got = inputs.prepare(rows)
        assert got.layout.slots.tolist() == slots
        assert got.forward.plan.meta.block_table.tolist() == [[block] for block in blocks]
        inputs.leave(1)
        inputs.leave(2)


def test_the_block_table_of_rows_that_decode_again_has_their_new_blocks_and_follows_their_order():
    inputs = inputs_of(2, 4, 2)
    tables = {1: [5, 6, 7], 2: [8]}
    for seq_id, blocks in tables.items():
        inputs.enter(seq_id)
        inputs.append_blocks([Row(seq_id, 0, [], blocks, 0)])
    # Sequence 1 has the longest table throughout, so the shape of the steps stays the same.
    for order, start, new in (([1, 2], 0, []), ([1, 2], 1, []), ([1, 2], 2, [9]), ([2, 1], 3, []), ([2, 1], 4, [3])):
        tables[2] = tables[2] + new
        of_seq = {1: Row(1, 4 + start % 2, [4], [], 1), 2: Row(2, start, [4], new, 1)}
        rows = [of_seq[seq_id] for seq_id in order]
        inputs.append_blocks(rows)
        got = inputs.prepare(rows).forward.plan.meta.block_table.tolist()
        for seq_id, line in zip(order, got, strict=True):
            assert line[: len(tables[seq_id])] == tables[seq_id]


@pytest.mark.parametrize(
    "other",
    [
        {"embeds": True},
        {"scored": [4], "num_logits": 1},
        {"embeds": True, "num_logits": 0, "num_hidden": 1},
    ],
)
def test_rows_that_do_more_than_sample_do_not_share_the_layout_of_rows_that_sample(other):
    inputs = inputs_of(2, 4, 4)
    inputs.enter(1)
    inputs.append_blocks([Row(1, 0, [], [5], 0)])
    for start, is_plain in enumerate((True, True, False, True, False, False)):
        more = {"num_logits": 1} | ({} if is_plain else other)
        got = inputs.prepare([Row(1, start, [9], [], **more)])
        assert got.layout.sampled_rows.tolist() == ([0] if is_plain else [])
        assert bool(got.layout.scored or got.layout.pooled or got.layout.pooled_logits) is not is_plain
        assert (got.lengths.tolist(), got.forward.positions.tolist()) == ([start + 1], [start])


def test_a_pending_token_is_read_at_its_slot_beside_known_tokens_and_without_any():
    inputs = inputs_of(3, 4, 4)
    last = torch.tensor([30, 31, 32, 0])
    for number, seq_id in enumerate((4, 5, 6)):
        inputs.enter(seq_id)
        inputs.append_blocks([Row(seq_id, 0, [], [number], 0)])
    for number, (tokens, want) in enumerate(
        (([7, PENDING, 8], [7, 31, 8]), ([PENDING] * 3, [30, 31, 32]), ([7, 8, 9], [7, 8, 9]))
    ):
        rows = [Row(seq_id, number, [token], [], 1) for seq_id, token in zip((4, 5, 6), tokens, strict=True)]
        assert inputs.prepare(rows, last).forward.ids.tolist() == want


def addresses(prepared):
    forward, meta = prepared.forward, prepared.forward.plan.meta
    parts = [forward.ids, forward.positions, forward.logits_at]
    parts += [meta.slot_mapping, meta.query_start, meta.seq_lens, meta.block_table]
    return [part.data_ptr() for part in parts]


def test_each_input_has_the_same_address_in_every_step():
    world, found = World(7), []
    while len(found) < 20:
        if rows := world.step():
            world.inputs.append_blocks(rows)
            found.append(addresses(world.inputs.prepare(rows)))
    of_each = [set(column) - {0} for column in zip(*found, strict=True)]  # 0: of an input without numbers
    assert [len(seen) for seen in of_each] == [1] * len(of_each)
    assert len(set.union(*of_each)) == len(of_each)


def test_a_step_shows_nothing_of_a_larger_one_before_it():
    inputs = inputs_of(2, 3, 2)
    for seq_id, blocks in ((1, [2, 5, 6]), (2, [4])):
        inputs.enter(seq_id)
        inputs.append_blocks([Row(seq_id, 0, [], blocks, 0)])
    inputs.prepare([Row(1, 0, [9, 9, 9, 9, 9, 9], [], 6), Row(2, 0, [8, 8], [], 1)])
    got = inputs.prepare([Row(2, 0, [7], [], 1)]).forward
    assert (got.ids.tolist(), got.positions.tolist(), got.logits_at.tolist()) == ([7], [0], [0])
    meta = got.plan.meta
    assert (meta.query_start.tolist(), meta.seq_lens.tolist()) == ([0, 1], [1])
    assert (meta.slot_mapping.tolist(), meta.block_table.tolist()) == ([8], [[4]])


def test_a_step_larger_than_the_buffers_is_a_mistake():
    inputs = inputs_of(1, 100, 2)
    inputs.enter(1)
    with pytest.raises(AssertionError, match="larger than any step"):
        inputs.prepare([Row(1, 0, [3] * 41, [], 1)])
