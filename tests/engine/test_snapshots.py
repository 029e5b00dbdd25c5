"""SnapshotCache: where snapshots of states are taken, and which prefixes can be used because of them."""

from engine.blocks import BlockPool
from engine.sequence import Sequence
from engine.snapshots import SnapshotCache
from engine.types import EngineRequest, SamplingParams

PROMPT = list(range(100, 122))  # five full blocks of four tokens, and two tokens


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
    cache = SnapshotCache(BlockPool(64), count=4)
    first = sequence(1, PROMPT)
    enter(cache, first)
    compute(cache, first)
    other = sequence(2, [*PROMPT[:14], 1, 2, 3, 4, 5])
    assert cache.match(other) == [], "three blocks are cached, but the state after them was not kept"
    enter(cache, other)
    assert launch(cache, (other, 19)) == [(-1, ((12, 1), (16, 2)))], "where it branches off, and at its end"
    collect(cache, other, 1)
    assert len(cache.match(sequence(3, [*PROMPT[:14], 9, 9, 9])) or []) == 3
    assert cache.match(sequence(4, PROMPT, prompt_logprobs=0)) == [], "a cached token has no logits"
    cache.check([first, other])


def test_who_waits_for_a_prefix_has_a_snapshot_taken_where_it_branches_off():
    cache = SnapshotCache(BlockPool(64), count=4)
    first, second = sequence(1, PROMPT), sequence(2, [*PROMPT[:14], 1, 2, 3])
    enter(cache, first)
    assert cache.match(second) is None
    assert launch(cache, (first, 8)) == [(-1, ())]
    collect(cache, first)
    assert cache.match(second) is None, "the third block is not full"
    assert launch(cache, (first, 14)) == [(-1, ((12, 0), (20, 1)))]
    collect(cache, first, 7)
    assert enter(cache, second) == 12 and launch(cache, (second, 5)) == [(0, ((16, 2),))]
    cache.check([first, second])


def test_nobody_waits_for_a_snapshot_that_can_no_longer_be_taken():
    cache = SnapshotCache(BlockPool(64), count=4)
    first, second = sequence(1, PROMPT), sequence(2, [*PROMPT[:14], 1, 2, 3])
    enter(cache, first)
    launch(cache, (first, 14))  # in flight
    assert cache.match(second) == []


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
    used = sequence(7, [0, *PROMPT, 1])
    assert enter(cache, used) == 20
    third = sequence(8, [8, *PROMPT])
    enter(cache, third)
    [(_, own), (_, saved)] = launch(cache, (used, 4), (third, 23))
    assert (own, saved) == ((), ((20, 1),)), "what a row of the step continues from is not written in it"
    collect(cache, third, 1)
    assert cache.match(sequence(9, [1, *PROMPT, 1])) == [] and cache.match(sequence(10, [0, *PROMPT, 1])) != []
    cache.check([used, third])


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
