"""SnapshotCache: where snapshots of states are taken, and which prefixes can be used because of them."""

from engine.blocks import BlockPool
from engine.cache_groups import CacheGroups
from engine.sequence import Sequence
from engine.snapshots import SnapshotCache
from engine.types import EngineRequest, SamplingParams

PROMPT = list(range(100, 122))  # five full blocks of four tokens, and two tokens
LONG = list(range(100, 194))  # 23 full blocks, and two tokens


def sequence(number: int, tokens: list[int], **params) -> Sequence:
    request = EngineRequest(id=number, prompt_ids=tuple(tokens), params=SamplingParams(max_tokens=200, **params))
    return Sequence(request, arrival=number, arrived=0.0, block_size=4, max_length=400)


def enter(cache: SnapshotCache, seq: Sequence) -> int:
    """Start a sequence; returns the number of tokens of the prefix that it continues."""
    hits = cache.match(seq)
    assert hits is not None, "it waits"
    cache.start(seq, hits)
    seq.num_computed = seq.start = seq.capacity
    return seq.capacity


def launch(cache: SnapshotCache, *counts: tuple[Sequence, int]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Launch a step; returns what each row continues from and which snapshots it takes."""
    for seq, count in counts:
        assert cache.grow(seq, seq.start + count)
    cache.prepare(dict(counts))
    rows = [seq.launch(count) for seq, count in counts]
    found = [row.snapshots or (-1, ()) for row in rows]
    return [(restored, tuple(saved)) for restored, saved in found]


def collect(cache: SnapshotCache, seq: Sequence, *sampled: int) -> None:
    seq.num_computed = seq.start
    seq.tokens += sampled
    cache.publish(seq)


def compute(cache: SnapshotCache, seq: Sequence, output: int = 1) -> None:
    """Compute a prompt in one step, then an output token by token."""
    launch(cache, (seq, len(seq.tokens) - seq.start))
    for token in range(output):
        collect(cache, seq, token)
        if token + 1 < output:
            launch(cache, (seq, 1))


def test_a_snapshot_is_taken_at_the_end_of_a_prompt_and_the_next_turn_continues_there():
    cache = SnapshotCache(BlockPool(64), count=4)
    first = sequence(1, PROMPT)
    assert enter(cache, first) == 0
    assert launch(cache, (first, 22)) == [(-1, ((20, 0),))], "at the end of the last full block"
    second = sequence(2, [*PROMPT, 7, 8, 9])
    collect(cache, first, 7)
    cache.release(first)
    assert enter(cache, second) == 20
    assert launch(cache, (second, 5)) == [(0, ((24, 1),))]
    cache.check([second])


def test_a_prefix_counts_as_far_as_there_is_a_snapshot():
    cache = SnapshotCache(BlockPool(128), count=4)
    first = sequence(1, LONG)
    enter(cache, first)
    compute(cache, first)
    other = sequence(2, [*LONG[:75], 1, 2, 3, 4, 5])
    assert cache.match(other) == [], "18 blocks are cached, but the state after them was not kept"
    enter(cache, other)
    assert launch(cache, (other, 80)) == [(-1, ((72, 1), (76, 2)))], "where it branches off, and at its end"
    collect(cache, other, 1)
    assert len(cache.match(sequence(3, [*LONG[:75], 9, 9, 9])) or []) == 18
    assert cache.match(sequence(4, LONG, prompt_logprobs=0)) == [], "a cached token has no logits"
    near = sequence(5, [*LONG[:50], 1, 2, 3, 4, 5])
    enter(cache, near)
    assert launch(cache, (near, 55)) == [(-1, ((52, 3),))], "48 tokens are not worth a snapshot of their own"
    cache.check([first, other, near])


def test_who_waits_for_a_prefix_has_a_snapshot_taken_where_it_branches_off():
    cache = SnapshotCache(BlockPool(256), count=4)
    whole = [*LONG, *range(100)]  # 48 full blocks, and two tokens
    first, second = sequence(1, whole), sequence(2, [*whole[:150], 1, 2, 3])
    enter(cache, first)
    assert cache.match(sequence(3, [*whole[:40], 1, 2, 3])) == [], "40 tokens are not worth waiting for"
    assert cache.match(second) is None
    launch(cache, (first, 60))
    collect(cache, first)
    assert cache.match(second) is None, "there is a snapshot at 60 tokens, and there will be one at 148"
    assert launch(cache, (first, 134)) == [(-1, ((148, 1), (192, 2)))]
    assert cache.match(second) is None, "the step that takes it is in flight"
    collect(cache, first, 7)
    assert enter(cache, second) == 148 and launch(cache, (second, 5)) == [(1, ((152, 0),))]
    cache.check([first, second])


def test_nobody_waits_for_a_snapshot_that_can_no_longer_be_taken():
    cache = SnapshotCache(BlockPool(128), count=4)
    first, second = sequence(1, LONG), sequence(2, [*LONG[:70], 1, 2, 3])
    enter(cache, first)
    launch(cache, (first, 80))  # in flight
    assert cache.match(second) == []


def test_sequences_wait_for_one_that_computes_a_cached_prefix_again_for_its_snapshot():
    cache = SnapshotCache(BlockPool(128), count=4)
    first = sequence(1, LONG)
    enter(cache, first)
    compute(cache, first)
    second, third = (sequence(number, [*LONG[:80], number, number]) for number in (2, 3))
    enter(cache, second)
    assert cache.match(third) is None, "the blocks are cached, and the second sequence will take the snapshot"
    assert launch(cache, (second, 82)) == [(-1, ((80, 1),))], "one, though it branches off where its prompt ends"
    collect(cache, second, 1)
    assert enter(cache, third) == 80
    fourth = sequence(4, [*LONG[:70], 1, 2, 3])
    enter(cache, fourth)
    waiting = sequence(5, [*LONG[:70], 9])
    assert cache.match(waiting) is None
    cache.release(fourth)
    assert cache.match(waiting) == [], "nobody will take it any more"
    cache.check([first, second, third])


def test_the_last_snapshot_of_a_prompt_moves_with_its_parts_so_that_a_preemption_loses_little():
    cache = SnapshotCache(BlockPool(64), count=4)
    first = sequence(1, LONG)
    enter(cache, first)
    assert launch(cache, (first, 30)) == [(-1, ((28, 0),))]
    collect(cache, first)
    assert launch(cache, (first, 30)) == [(-1, ((60, 1),))]
    collect(cache, first)
    assert cache.match(sequence(2, [*LONG[:30], 5])) == [], "that at 28 tokens is gone"
    cache.release(first)
    first.num_computed = first.start = 0
    assert enter(cache, first) == 60
    assert launch(cache, (first, 34)) == [(1, ((92, 0),))]
    collect(cache, first, 7)
    cache.check([first])


def test_the_last_snapshot_of_an_output_moves_with_it():
    cache = SnapshotCache(BlockPool(64), count=8)
    first = sequence(1, PROMPT)
    enter(cache, first)
    compute(cache, first, output=150)
    told = list(first.tokens)
    cache.release(first)
    cache.check([])
    found = cache.match(sequence(2, [*told, 5, 6]))
    assert found is not None and len(found) == 128 // 4, "the output's snapshots are 64 tokens apart"
    assert cache.match(sequence(3, [*told[:70], 5])) == cache.match(sequence(4, [*told[:30], 5])), (
        "that at 64 tokens is gone; both continue at the end of the prompt"
    )


def test_the_least_recently_used_snapshot_makes_room():
    cache = SnapshotCache(BlockPool(64), count=2)
    for number in range(2):
        seq = sequence(number, [number, *PROMPT])
        enter(cache, seq)
        compute(cache, seq)
        cache.release(seq)
    used, again = sequence(6, [0, *PROMPT, 1]), sequence(7, [0, *PROMPT, 1])
    assert enter(cache, used) == 20
    launch(cache, (used, 4))
    collect(cache, used, 1)
    cache.release(used)
    assert enter(cache, again) == 20
    third = sequence(8, [8, *PROMPT])
    enter(cache, third)
    [(_, own), (_, saved)] = launch(cache, (again, 4), (third, 23))
    assert (own, saved) == ((), ((20, 1),)), "what a row of the step continues from is not written in it"
    collect(cache, third, 1)
    assert cache.match(sequence(9, [1, *PROMPT, 1])) == [] and cache.match(sequence(10, [0, *PROMPT, 1])) != []
    cache.check([again, third])


def test_a_sequence_that_leaves_returns_the_snapshots_of_its_step_in_flight():
    cache = SnapshotCache(BlockPool(64), count=1)
    first = sequence(1, PROMPT)
    enter(cache, first)
    launch(cache, (first, 22))
    cache.release(first, step=1)
    cache.collected(1)
    cache.check([])
    assert cache.match(sequence(2, PROMPT)) == [], "it was never collected"


def test_without_snapshots_no_prefix_is_shared():
    cache = SnapshotCache(BlockPool(64), count=0)
    first = sequence(1, PROMPT)
    enter(cache, first)
    assert launch(cache, (first, 22)) == [(-1, ())]
    collect(cache, first, 1)
    assert cache.match(sequence(2, PROMPT)) == []
    cache.check([first])


def test_a_snapshot_that_others_continue_from_stays_though_the_prompt_moves_on():
    cache = SnapshotCache(BlockPool(256), count=8)
    first, second, third = sequence(1, LONG), sequence(2, [*LONG[:80], 1, 2]), sequence(3, [*LONG[:80], 3, 4])
    enter(cache, first)
    launch(cache, (first, 80))
    collect(cache, first)
    assert enter(cache, second) == 80
    launch(cache, (second, 2))
    collect(cache, second, 7)
    launch(cache, (first, 12))
    collect(cache, first)
    assert enter(cache, third) == 80
    cache.check([first, second, third])


def test_a_snapshot_that_two_sequences_continue_from_stays_when_one_of_them_leaves():
    """Before either has been launched; and while one of them is not in the next step."""
    cache = SnapshotCache(BlockPool(256), count=1)
    first = sequence(1, PROMPT)
    enter(cache, first)
    compute(cache, first)
    cache.release(first)
    second, third = sequence(2, [*PROMPT, 1, 2, 3, 4, 5]), sequence(3, [*PROMPT, 6, 7, 8, 9, 10])
    assert enter(cache, second) == enter(cache, third) == 20
    cache.release(third)
    other = sequence(4, PROMPT[::-1])
    enter(cache, other)
    assert launch(cache, (other, 22)) == [(-1, ())], "the only snapshot is to be read"
    assert launch(cache, (second, 7)) == [(0, ())]
    cache.check([second, other])


def test_a_sequence_that_moves_on_drops_no_snapshot_of_another():
    cache = SnapshotCache(BlockPool(256), count=1)
    first = sequence(1, LONG)
    enter(cache, first)
    launch(cache, (first, 80))
    collect(cache, first)
    other = sequence(2, PROMPT[::-1])  # takes the only one
    enter(cache, other)
    compute(cache, other)
    cache.release(other)
    second = sequence(3, [*LONG[:80], 1, 2])
    enter(cache, second)
    assert launch(cache, (second, 82)) == [(-1, ((80, 0),))]
    collect(cache, second, 7)
    launch(cache, (first, 2))
    collect(cache, first)
    assert cache.match(sequence(4, [*LONG[:80], 5])) != [], "this one was taken at the end of a prompt"
    cache.check([first, second])


def test_prompts_in_parts_write_their_own_snapshots_again_and_evict_no_others():
    cache = SnapshotCache(BlockPool(512), count=3)
    kept = sequence(1, PROMPT)
    enter(cache, kept)
    compute(cache, kept)
    cache.release(kept)
    prompts = [sequence(number, [number, *LONG]) for number in (2, 3)]
    for prompt in prompts:
        enter(cache, prompt)
    for _ in range(4):
        rows = launch(cache, *((prompt, 20) for prompt in prompts))
        assert all(len(taken) == 1 for _, taken in rows)
        for prompt in prompts:
            collect(cache, prompt)
    assert cache.match(sequence(4, [*PROMPT, 1])) != []
    cache.check(prompts)


def test_beside_a_window_a_snapshot_can_be_used_if_the_blocks_in_the_window_before_it_are_cached():
    groups = CacheGroups((None, 8), (0, 1))  # the second group's layers attend to eight tokens
    cache = SnapshotCache(BlockPool(12), groups=groups, count=4)
    first = sequence(1, PROMPT)
    enter(cache, first)
    compute(cache, first)
    cache.release(first)
    again = sequence(2, [*PROMPT, 7, 8, 9])
    everywhere, in_window = slice(0, None, 2), slice(1, None, 2)
    hits = cache.match(again)
    assert hits is not None and len(hits) == 10, "five blocks of each group"
    assert min(hits[everywhere]) >= 0 and hits[in_window][:3] == [-1] * 3 and min(hits[in_window][3:]) >= 0
    cache.pool.take(cache.pool.num_available - 9)
    assert cache.match(again) == hits, "the blocks before the window were evicted first"
    cache.pool.take(3)
    assert cache.match(again) == [], "a block in the window was evicted"


def test_beside_a_window_a_sequence_continues_from_the_snapshot_after_its_cached_blocks():
    cache = SnapshotCache(BlockPool(64), groups=CacheGroups((None, 8), (0, 1)), count=4)
    first, again = sequence(1, PROMPT), sequence(2, [*PROMPT, 7, 8, 9])
    enter(cache, first)
    compute(cache, first)
    cache.release(first)
    assert enter(cache, again) == 20
    assert launch(cache, (again, 5)) == [(0, ((24, 1),))]
    collect(cache, again, 1)
    assert again.num_freed == [4], "16 of 25 tokens are before the window"
    cache.check([again])


def test_sequences_wait_for_one_that_computes_the_blocks_in_a_window_again():
    cache = SnapshotCache(BlockPool(80), groups=CacheGroups((None, 16), (0, 1)), count=4)
    first, second, third = (sequence(number, [*LONG, 1, 2, 3]) for number in (1, 2, 3))
    enter(cache, first)
    compute(cache, first)
    cache.release(first)
    window = cache.block_hash(second, 23) + cache._suffixes[1]
    taken = []
    while cache.pool.find(window) is not None:  # it is evicted before those of the other group
        taken += cache.pool.take(1) or []
    cache.pool.release(taken)
    assert enter(cache, second) == 0, "there is a snapshot at 96 tokens, and no block in the window before it"
    assert cache.match(third) is None
    compute(cache, second)
    assert enter(cache, third) == 96
    cache.check([second, third])
