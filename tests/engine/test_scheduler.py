"""Scheduler: each test reads as the trace of a few steps, {request: tokens computed}."""

import pytest

from engine.batch import PENDING, Batch, RowError, Sampled, StepResult
from engine.cache_groups import CacheGroups
from engine.config import EngineConfig
from engine.scheduler import Scheduler
from engine.types import EngineRequest, SamplingParams, TokenDelta
from tests.simulation.scheduler import ManualClock


class Driver:
    """Adds requests by name and runs steps; every sampled token is 9, or the stop id if requested."""

    def __init__(self, num_blocks: int = 64, groups: CacheGroups | None = None, **config) -> None:
        defaults = {"block_size": 4, "max_len": num_blocks * 4, "max_seqs": 8, "max_batched_tokens": 64}
        self.clock = ManualClock()
        resolved = EngineConfig(model="test", **{**defaults, **config})
        self.scheduler = Scheduler(resolved, num_blocks, vocab_size=1000, clock=self.clock, groups=groups)
        self.names: dict[int, str] = {}
        self.deltas: list[TokenDelta] = []
        self.batch: Batch | None = None

    def add(self, name: str, prompt, max_tokens: int = 100, **fields) -> "Driver":
        ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
        if isinstance(prompt, int) and "salt" not in fields:  # prompts share nothing unless they are told to
            ids = tuple((ord(name) * 7 + i) % 1000 for i in ids)
        params = SamplingParams(max_tokens=max_tokens, **fields.pop("params", {}))
        salt = fields.pop("salt", "")
        request = EngineRequest(id=len(self.names) + 1, prompt_ids=ids, params=params, cache_salt=salt, **fields)
        self.names[request.id] = name
        delta = self.scheduler.add(request)
        if delta:
            self.deltas.append(delta)
        return self

    def id(self, name: str) -> int:
        return next(i for i, n in self.names.items() if n == name)

    def abort(self, name: str) -> None:
        delta = self.scheduler.abort(self.id(name))
        if delta:
            self.deltas.append(delta)

    def launch(self) -> dict[str, int]:
        self.batch = self.scheduler.schedule()
        if self.batch is None:
            return {}
        return {self.names[row.seq_id]: len(row.token_ids) for row in self.batch.rows}

    def collect(self, token: int = 9) -> list[TokenDelta]:
        assert self.batch is not None
        result = StepResult([Sampled([token]) if row.is_sampled else None for row in self.batch.rows])
        deltas = self.scheduler.update(self.batch, result)
        self.deltas += deltas
        self.clock.now += 1
        self.scheduler.check()
        return deltas

    def step(self, token: int = 9) -> dict[str, int]:
        rows = self.launch()
        if rows:
            self.collect(token)
        return rows

    def ends(self) -> dict[str, str]:
        return {self.names[d.id]: d.finish_reason for d in self.deltas if d.finish_reason}


def test_requests_join_and_leave_at_every_step():
    driver = Driver().add("a", prompt=3, max_tokens=3)
    assert driver.step() == {"a": 3}
    driver.add("b", prompt=2, max_tokens=2)
    assert driver.step() == {"a": 1, "b": 2}
    assert driver.step() == {"a": 1, "b": 1}
    assert driver.ends() == {"a": "length", "b": "length"}
    assert driver.step() == {}
    assert driver.scheduler.pool.num_held == 0


def test_a_long_prompt_is_chunked_and_decode_rows_come_first():
    driver = Driver(max_batched_tokens=16).add("a", prompt=2)
    driver.step()
    driver.add("b", prompt=40)
    assert driver.step() == {"a": 1, "b": 15}
    assert driver.step() == {"a": 1, "b": 15}
    assert driver.step() == {"a": 1, "b": 10}
    assert driver.step() == {"a": 1, "b": 1}


def test_a_long_prompt_takes_half_of_a_step_while_others_wait_and_all_when_they_do_not():
    driver = Driver(max_batched_tokens=16).add("a", prompt=40).add("b", prompt=6)
    assert driver.step() == {"a": 10, "b": 6}, "half is 8; what b cannot use is not wasted"
    assert driver.step() == {"a": 15, "b": 1}
    driver = Driver(max_batched_tokens=16).add("a", prompt=40).add("b", prompt=40)
    assert driver.step() == {"a": 8, "b": 8}
    driver = Driver(max_batched_tokens=16, long_prefill_tokens=4).add("a", prompt=40).add("b", prompt=40).add("c", 40)
    assert driver.launch() == {"a": 8, "b": 4, "c": 4}


def test_every_running_row_is_in_every_step_even_when_the_budget_is_small():
    driver = Driver(max_batched_tokens=3, max_seqs=3).add("a", prompt=9).add("b", prompt=9).add("c", prompt=9)
    assert driver.step() == {"a": 1, "b": 1, "c": 1}
    for _ in range(5):
        assert set(driver.step()) == {"a", "b", "c"}


def test_the_batch_is_in_order_of_arrival_and_carries_block_ids_once():
    driver = Driver(max_batched_tokens=8).add("a", prompt=9).add("b", prompt=2)
    driver.launch()
    a, b = driver.batch.rows
    assert (a.seq_id, a.start, len(a.token_ids), len(a.new_block_ids), a.num_logits) == (1, 0, 6, 2, 0)
    assert (b.seq_id, b.start, len(b.token_ids), len(b.new_block_ids), b.num_logits) == (2, 0, 2, 1, 1)
    assert [entered.seq_id for entered in driver.batch.entered] == [1, 2]
    driver.collect()
    driver.launch()
    a, b = driver.batch.rows
    assert (a.start, a.token_ids, len(a.new_block_ids), a.num_logits) == (6, [686, 687, 688], 1, 1)
    assert (b.start, b.token_ids, len(b.new_block_ids)) == (2, [9], 0)
    assert driver.batch.entered == []


def test_the_second_of_two_equal_prompts_finds_all_but_its_last_block():
    driver = Driver().add("a", range(1, 17), max_tokens=1)
    driver.step()
    driver.add("b", range(1, 17), max_tokens=1)
    assert driver.step() == {"b": 4}, "a shared block is never written, so the last one is computed again"
    assert driver.deltas[-1].stats.cached_tokens == 12
    assert (driver.scheduler.counters.prefix_queries, driver.scheduler.counters.prefix_hits) == (32, 12)
    driver.add("c", range(1, 17), max_tokens=1, params={"prompt_logprobs": 0})
    assert driver.step() == {"c": 16}, "its log-probabilities need all of the prompt"
    assert (driver.scheduler.counters.prefix_queries, driver.scheduler.counters.prefix_hits) == (32, 12)


def test_another_salt_finds_nothing_and_no_prefix_caching_neither():
    driver = Driver().add("a", range(1, 17), max_tokens=1)
    driver.step()
    driver.add("b", range(1, 17), max_tokens=1, salt="mine")
    assert driver.step() == {"b": 16}
    driver = Driver(prefix_caching=False).add("a", range(1, 17), max_tokens=1)
    driver.step()
    driver.add("b", range(1, 17), max_tokens=1)
    assert driver.step() == {"b": 16}


def test_a_burst_with_one_prompt_costs_one_prefill():
    driver = Driver(max_batched_tokens=64)
    for name in "abcd":
        driver.add(name, range(1, 18), max_tokens=2)
    assert driver.step() == {"a": 17}, "the others wait for the blocks that a fills"
    assert driver.step() == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_a_sequence_that_waits_for_a_block_continues_when_its_writer_is_gone():
    driver = Driver(max_batched_tokens=8).add("a", range(1, 18)).add("b", range(1, 18))
    assert driver.step() == {"a": 8}
    driver.abort("a")
    assert driver.step() == {"b": 8}, "b found the 8 tokens of a and computes the next 8"
    assert driver.scheduler.by_id[2].cached_tokens == 8


def test_blocks_are_found_only_when_the_step_that_filled_them_was_collected():
    driver = Driver().add("a", range(1, 9))
    driver.launch()
    driver.add("b", range(1, 9))
    content = driver.scheduler.cache.block_hash(driver.scheduler.by_id[1], 0)
    assert driver.scheduler.pool.find(content) is None
    driver.collect()
    assert driver.scheduler.pool.find(content) is not None


def test_the_last_in_order_is_preempted_and_is_first_in_line():
    driver = Driver(num_blocks=6, max_len=24).add("a", prompt=8, max_tokens=12).add("b", prompt=8, max_tokens=12)
    driver.step()
    driver.add("c", prompt=4, max_tokens=1)
    seen = [driver.step() for _ in range(5)]
    assert seen[-1] == {"a": 1}, "a took the last block, b gave all of its own, and c was not let in"
    assert driver.scheduler.counters.preempted == 1
    assert [seq.id for seq in driver.scheduler.waiting] == [2, 3]
    while driver.step():
        pass
    assert driver.ends() == {"a": "length", "b": "length", "c": "length"}
    stats = [d.stats for d in driver.deltas if d.stats and driver.names[d.id] == "b"]
    assert [each.preemptions for each in stats] == [0, 1, 1], "first token, first one after the preemption, last one"
    assert stats[-1].output_tokens == 12


def test_the_victim_under_priority_is_the_least_important():
    driver = Driver(num_blocks=6, max_len=24, policy="priority")
    driver.add("a", prompt=8, priority=5).add("b", prompt=8, priority=1)
    for _ in range(6):
        driver.step()
    assert [seq.id for seq in driver.scheduler.waiting] == [1]


def test_waiting_requests_start_in_the_order_of_the_policy():
    driver = Driver(policy="priority", max_seqs=1).add("a", 4, 1, priority=3).add("b", 4, 1, priority=0).add("c", 4, 1)
    assert [driver.step(), driver.step(), driver.step()] == [{"b": 4}, {"c": 4}, {"a": 4}]


def test_prefill_first_lets_prompts_push_decode_rows_out_of_a_step():
    driver = Driver(policy="prefill-first", max_batched_tokens=8).add("a", prompt=2)
    driver.step()
    driver.add("b", prompt=20)
    assert [driver.step() for _ in range(4)] == [{"a": 1, "b": 7}, {"b": 8}, {"a": 1, "b": 5}, {"a": 1, "b": 1}]


def test_static_admits_none_before_the_last_batch_has_ended():
    driver = Driver(policy="static").add("a", prompt=2, max_tokens=2).add("b", prompt=2, max_tokens=4)
    driver.step()
    driver.add("c", prompt=2)
    assert [driver.step() for _ in range(4)] == [{"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {"c": 2}]


def test_an_abort_in_flight_ends_at_once_and_releases_when_the_step_is_collected():
    driver = Driver().add("a", prompt=8)
    driver.launch()
    driver.abort("a")
    assert driver.scheduler.pool.num_held == 2 and driver.ends() == {"a": "abort"}
    assert driver.collect() == []
    assert driver.scheduler.pool.num_held == 0
    assert driver.step() == {}
    driver.scheduler.abort(99)


def test_an_abort_of_a_waiting_request_ends_it_at_once():
    driver = Driver(max_seqs=1).add("a", prompt=8).add("b", prompt=8)
    driver.step()
    driver.abort("b")
    assert driver.ends() == {"b": "abort"}


def test_a_stop_id_ends_a_request_but_not_before_min_tokens():
    params = {"stop_ids": (7,), "min_tokens": 2}
    driver = Driver().add("a", prompt=2, params=params)
    driver.step(token=7)
    assert driver.ends() == {}
    driver.step(token=7)
    assert driver.ends() == {"a": "stop"}


def test_a_request_handed_over_part_way_counts_from_the_end_of_its_prompt():
    driver = Driver().add("a", prompt=3, max_tokens=4, output_ids=(9, 9))
    assert driver.step() == {"a": 5}
    assert driver.step() == {"a": 1}
    assert driver.ends() == {"a": "length"}
    assert driver.deltas[-1].stats.output_tokens == 4


def test_a_request_ends_at_the_length_of_the_model():
    driver = Driver(max_len=6).add("a", prompt=4, max_tokens=100)
    driver.step()
    driver.step()
    assert driver.ends() == {"a": "length"}
    assert driver.deltas[-1].stats.output_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ((), {}, "no tokens"),
        (range(24), {}, "24 tokens"),
        ((1, 1000), {}, "outside"),
        ((1, -1), {}, "outside"),
        ((1,), {"output_ids": (1,), "max_tokens": 1}, "no token left"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt, fields, words):
    driver = Driver(max_len=24).add("a", prompt, **fields)
    assert driver.ends() == {"a": "error"}
    assert words in driver.deltas[0].error
    assert driver.step() == {}


def test_a_row_that_fails_hurts_only_itself():
    driver = Driver().add("a", prompt=2).add("b", prompt=2)
    driver.launch()
    error = RowError("its logits are not numbers")
    deltas = driver.scheduler.update(driver.batch, StepResult([error, Sampled([9])]))
    assert [(d.finish_reason, d.error) for d in deltas] == [("error", "its logits are not numbers"), (None, None)]
    assert driver.step() == {"b": 1}


def test_a_step_out_of_memory_costs_its_largest_request_and_makes_steps_smaller():
    driver = Driver(max_batched_tokens=32).add("a", prompt=2).add("b", prompt=20).add("c", prompt=3)
    assert driver.launch() == {"a": 2, "b": 20, "c": 3}
    driver.deltas += driver.scheduler.abandon(driver.batch)
    assert driver.ends() == {"b": "error"}
    assert driver.scheduler.limits.budget == 16
    assert driver.step() == {"a": 2, "c": 3}, "nothing of the lost step counts"


def test_a_token_counts_as_a_prompts_also_when_it_is_the_last_one_of_it_and_alone_in_its_step():
    driver = Driver(max_batched_tokens=8).add("a", prompt=17)
    counts = []
    for _ in range(4):
        driver.step()
        counts.append((driver.batch.num_tokens, driver.batch.prompt_tokens))
    assert counts == [(8, 8), (8, 8), (1, 1), (1, 0)]
    driver.add("b", prompt=1)
    driver.step()
    assert (driver.batch.num_tokens, driver.batch.prompt_tokens) == (2, 1)


def schedule_twice(driver: Driver) -> tuple[Batch, Batch]:
    """Schedule a step while the one before it is in flight."""
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()
    assert first is not None and second is not None
    return first, second


def starts(batch: Batch) -> list[tuple[int, int, int]]:
    return [(row.seq_id, row.start, len(row.token_ids)) for row in batch.rows]


def test_a_step_starts_where_the_one_in_flight_ends():
    driver = Driver(max_batched_tokens=16).add("a", prompt=30)
    first, second = schedule_twice(driver)
    assert (starts(first), starts(second)) == ([(1, 0, 16)], [(1, 16, 14)])
    assert [row.is_sampled for row in (*first.rows, *second.rows)] == [False, True]
    assert driver.scheduler.update(first, StepResult([None])) == []
    assert driver.scheduler.pool.num_held == 8, "the blocks of both steps"
    assert [d.token_ids for d in driver.scheduler.update(second, StepResult([Sampled([9])]))] == [(9,)]
    assert starts(driver.scheduler.schedule()) == [(1, 30, 1)]


def test_a_row_follows_the_one_in_flight_although_its_token_is_not_known():
    driver = Driver().add("a", prompt=5)
    first, second = schedule_twice(driver)
    assert (starts(first), starts(second)) == ([(1, 0, 5)], [(1, 5, 1)])
    assert second.rows[0].token_ids == [PENDING] and second.rows[0].is_sampled
    assert (first.prompt_tokens, second.prompt_tokens) == (5, 0)
    assert [d.token_ids for d in driver.scheduler.update(first, StepResult([Sampled([9])]))] == [(9,)]
    third = driver.scheduler.schedule()
    assert starts(third) == [(1, 6, 1)] and third.rows[0].token_ids == [PENDING]
    assert [d.token_ids for d in driver.scheduler.update(second, StepResult([Sampled([8])]))] == [(8,)]
    assert driver.scheduler.by_id[1].tokens[-2:] == [9, 8]


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"max_tokens": 9, "max_len": 6}])
def test_no_row_follows_a_token_that_is_known_to_be_the_last(limits):
    driver = Driver(max_len=limits.pop("max_len", 64)).add("a", prompt=5, **limits)
    driver.launch()
    assert driver.scheduler.schedule() is None
    driver.collect()
    assert driver.ends() == {"a": "length"}


def test_a_stop_token_costs_a_row_and_its_blocks_are_free_when_that_row_is_collected():
    driver = Driver().add("a", prompt=4, params={"stop_ids": (9,)})
    first, second = schedule_twice(driver)
    assert [d.finish_reason for d in driver.scheduler.update(first, StepResult([Sampled([9])]))] == ["stop"]
    assert driver.scheduler.pool.num_held == 2 and not driver.scheduler.running
    driver.scheduler.check()
    driver.add("b", prompt=3)
    third = driver.scheduler.schedule()
    assert third.left == [1] and starts(third) == [(2, 0, 3)], "the runner's slot is free at once"
    assert driver.scheduler.update(second, StepResult([Sampled([7])])) == []
    assert driver.scheduler.pool.num_held == 1
    driver.scheduler.check()


def test_what_was_sampled_where_a_grammar_has_forced_a_token_meanwhile_is_discarded():
    driver = Driver().add("a", prompt=4)
    first, second = schedule_twice(driver)
    assert [d.token_ids for d in driver.scheduler.update(first, StepResult([Sampled([9, 8, 7])]))] == [(9, 8, 7)]
    assert not driver.scheduler.is_awaited(second.rows[0])
    third = driver.scheduler.schedule()
    assert [(row.start, row.token_ids) for row in third.rows] == [(5, [8, 7])]
    assert driver.scheduler.is_awaited(third.rows[0])
    assert driver.scheduler.update(second, StepResult([Sampled([1])])) == []
    assert [d.token_ids for d in driver.scheduler.update(third, StepResult([Sampled([6])]))] == [(6,)]
    assert driver.scheduler.by_id[1].tokens[4:] == [9, 8, 7, 6]


def test_rows_with_a_grammar_follow_the_step_in_flight_beside_others_and_not_alone():
    driver = Driver().add("a", prompt=4, params={"grammar": ("regex", "x")})
    driver.launch()
    assert driver.scheduler.schedule() is None
    driver.collect()
    driver.add("b", prompt=4)
    first, second = schedule_twice(driver)
    assert starts(first) == [(1, 4, 1), (2, 0, 4)] and starts(second) == [(1, 5, 1), (2, 4, 1)]


def test_a_request_that_is_aborted_in_two_steps_keeps_its_blocks_until_the_last_is_collected():
    driver = Driver(max_batched_tokens=16).add("a", prompt=30)
    first, second = schedule_twice(driver)
    driver.abort("a")
    assert driver.ends() == {"a": "abort"}
    assert driver.scheduler.update(first, StepResult([None])) == []
    assert driver.scheduler.pool.num_held == 8
    assert driver.scheduler.update(second, StepResult([Sampled([9])])) == []
    assert driver.scheduler.pool.num_held == 0


def test_no_step_is_scheduled_while_the_sequence_to_preempt_is_in_flight():
    driver = Driver(num_blocks=9, max_len=32).add("a", prompt=15).add("b", prompt=15)
    driver.step()
    assert driver.launch() == {"a": 1, "b": 1}
    assert driver.scheduler.schedule() is None, "a and b need a block each, and one is free"
    assert driver.scheduler.counters.preempted == 0
    driver.collect()
    assert driver.step() == {"a": 1}
    assert driver.scheduler.counters.preempted == 1


def test_a_flow_that_runs_nothing_gets_its_turn_when_the_step_in_flight_is_collected():
    driver = Driver(max_seqs=2).add("a", prompt=4, flow="whale").add("b", prompt=4, flow="whale")
    driver.launch()
    driver.add("c", prompt=4, flow="ship")
    assert driver.scheduler.schedule() is None, "b makes way, and it is in flight"
    driver.collect()
    assert driver.step() == {"a": 1, "c": 4}


def test_a_step_without_memory_fails_nobody_if_another_one_was_in_flight():
    driver = Driver(max_batched_tokens=16).add("a", prompt=5)
    first, second = schedule_twice(driver)
    driver.scheduler.update(first, StepResult([Sampled([9])]))
    assert driver.scheduler.abandon(second, may_fit=True) == []
    driver.batch = driver.scheduler.schedule()
    assert [(row.start, row.token_ids) for row in driver.batch.rows] == [(5, [9])], "nothing of the lost step counts"
    for _ in range(64):
        assert driver.scheduler.schedule() is None, "for a while each step is launched alone"
        driver.collect()
        driver.launch()
    assert starts(driver.scheduler.schedule()) == [(1, 70, 1)]


def test_admission_leaves_blocks_for_running_sequences():
    driver = Driver(num_blocks=10, max_len=40).add("a", prompt=16, max_tokens=20)
    driver.step()
    driver.add("b", prompt=21, max_tokens=1)
    assert driver.step() == {"a": 1}, "5 blocks are free and 6 are needed"
    driver.abort("b")
    driver.add("c", prompt=17, max_tokens=1)
    assert driver.step() == {"a": 1}, "5 are free and 5 are needed, but one is kept"
    driver.abort("c")
    driver.add("d", prompt=15, max_tokens=1)
    assert driver.step() == {"a": 1, "d": 15}


def test_the_stats_of_a_step_count_what_happened_in_it():
    driver = Driver().add("a", prompt=6).add("b", prompt=1)
    driver.step()
    stats = driver.scheduler.stats(driver.batch, {"forward": 0.5}, 12.0)
    assert stats.rows == ((1, 6), (2, 1))
    assert (stats.prompt_tokens, stats.decode_tokens, stats.running, stats.waiting) == (7, 0, 2, 0)
    assert (stats.blocks_held, stats.blocks_unaccounted, stats.prefix_queries) == (3, 0, 7)
    assert driver.scheduler.stats(driver.batch, {}, 12.0).prefix_queries == 0, "told once"


def test_a_static_batch_of_one_flow_goes_on_when_another_flow_would_be_next():
    """The flow with the lowest counter would be next, but it is in no batch yet, and no request may wait for it."""
    driver = Driver(num_blocks=4, policy="static", max_seqs=2)
    driver.add("a", prompt=12, max_tokens=1, flow="whale").add("b", prompt=12, max_tokens=1, flow="whale")
    driver.add("c", prompt=2, max_tokens=1, flow="ship")
    assert [driver.step() for _ in range(4)] == [{"a": 12}, {"b": 12}, {"c": 2}, {}]
    assert driver.ends() == {"a": "length", "b": "length", "c": "length"}


def test_a_static_batch_is_formed_once_also_when_a_step_cannot_take_all_of_it():
    driver = Driver(policy="static", max_batched_tokens=8, max_seqs=4)
    for name in "abc":
        driver.add(name, prompt=8, max_tokens=2)
    driver.step()
    driver.add("d", prompt=8, max_tokens=2)
    seen = [set(driver.step()) for _ in range(8)]
    assert {"a", "b", "c"} <= set.union(*seen)
    assert all(not ("d" in rows and rows & {"a", "b", "c"}) for rows in seen), "d joined a batch that was running"


def test_rows_are_cut_when_fewer_tokens_did_not_help_against_a_lack_of_memory():
    driver = Driver(max_batched_tokens=8, max_seqs=8)
    for name in "abcdefgh":
        driver.add(name, prompt=1)
    driver.launch()
    driver.deltas += driver.scheduler.abandon(driver.batch)
    assert driver.scheduler.limits.max_seqs == 7
    assert len(driver.step()) == 7


def out_of_memory(driver: Driver, name: str) -> None:
    """Run a step with a new prompt of 32 tokens out of memory, which fails that request."""
    driver.add(name, prompt=32, max_tokens=1)
    driver.launch()
    driver.deltas += driver.scheduler.abandon(driver.batch)
    driver.scheduler.check()
    assert driver.ends()[name] == "error"


def test_scored_prompts_share_the_logits_of_a_step():
    driver = Driver(num_blocks=256, max_seqs=32, max_batched_tokens=1024)
    for name in "abcd":
        driver.add(name, prompt=100, max_tokens=2, params={"prompt_logprobs": 0})
    driver.add("e", prompt=100, max_tokens=2)
    assert driver.step() == {"a": 64, "b": 64, "c": 1, "d": 1, "e": 100}, "of 128, and one each"
    assert driver.step() == {"a": 36, "b": 36, "c": 56, "d": 1, "e": 1}
    assert driver.step() == {"a": 1, "b": 1, "c": 43, "d": 64}
    assert driver.step() == {"c": 1, "d": 34}
    assert driver.step() == {"d": 1}


def steps_until_recovered(driver: Driver) -> int:
    scheduler = driver.scheduler
    for steps in range(1, 100_000):
        driver.step()
        if (scheduler.limits.budget, scheduler.limits.max_seqs) == (64, 4):
            return steps
    raise AssertionError("it never recovered")


@pytest.fixture
def hopeful(monkeypatch):
    """Let the scheduler raise its limits after a few successful steps."""
    monkeypatch.setattr("engine.step_limits.GOOD_STEPS", 4)
    monkeypatch.setattr("engine.step_limits.MOST_GOOD_STEPS", 256)
    driver = Driver(num_blocks=500, max_len=2000, max_batched_tokens=64, max_seqs=4)
    driver.add("a", prompt=4, max_tokens=1900)
    driver.step()
    return driver


def test_what_a_lack_of_memory_has_cost_comes_back_step_by_step_and_later_each_time(hopeful):
    driver = hopeful
    out_of_memory(driver, "b")
    assert (driver.scheduler.limits.budget, driver.scheduler.limits.max_seqs) == (32, 4)
    assert steps_until_recovered(driver) == 4
    out_of_memory(driver, "c")
    assert steps_until_recovered(driver) == 8
    for name in "defg":  # budget 32, 16, 8, 4
        out_of_memory(driver, name)
    assert driver.scheduler.limits.budget == 4
    out_of_memory(driver, "h")
    assert driver.scheduler.limits.max_seqs < 4
    assert steps_until_recovered(driver) > 256, "each of several raises takes 256 steps now"


def test_after_a_long_time_without_a_lack_of_memory_it_is_forgotten(hopeful):
    driver = hopeful
    for name in "bcd":
        out_of_memory(driver, name)
        steps_until_recovered(driver)
    for _ in range(256):
        driver.step()
    out_of_memory(driver, "e")
    assert steps_until_recovered(driver) == 4


def test_stats_count_what_the_rows_see():
    driver = Driver(max_batched_tokens=10)
    driver.add("a", prompt=4).launch()
    driver.collect()
    first = driver.scheduler.stats(driver.batch, {}, 0.0)
    # Each of four tokens sees itself and those before it.
    assert (first.context, first.pairs, first.logits) == (4, 1 + 2 + 3 + 4, 1)
    driver.add("b", prompt=20)
    assert driver.launch() == {"a": 1, "b": 9}
    driver.collect()
    second = driver.scheduler.stats(driver.batch, {}, 0.0)
    assert (second.context, second.pairs, second.logits) == (5 + 9, 5 + 45, 1)
