"""Fair service: the waiting flow that has been served the fewest tokens is next."""

import random
from itertools import islice

import pytest

from engine.service import MAX_IDLE, Service
from tests.engine.test_scheduler import Driver


def started(driver: Driver, steps: int = 100) -> list[str]:
    """Return the names of requests in the order of their first step."""
    names: list[str] = []
    for _ in range(steps):
        names += [name for name in driver.step() if name not in names]
    return names


def test_flows_alternate_regardless_of_arrival():
    driver = Driver(max_seqs=1)
    for name in "abcd":
        driver.add(name, 4, 1, flow="many")
    driver.add("x", 4, 1, flow="one").add("y", 4, 1, flow="one")
    assert started(driver) == ["a", "x", "b", "y", "c", "d"]


def test_one_flow_alone_is_served_in_order_of_arrival():
    driver = Driver(max_seqs=2)
    for name in "abcde":
        driver.add(name, 4, 3, flow="only")
    assert started(driver) == list("abcde")


def test_tokens_count_and_not_requests():
    driver = Driver(max_seqs=1)
    driver.add("A", 40, 1, flow="long").add("B", 40, 1, flow="long")
    for name in "abcdefgh":
        driver.add(name, 4, 1, flow="short")
    # 42 tokens for one of the long ones, 6 for each short one: seven of these are as much.
    assert started(driver) == ["A", "a", "b", "c", "d", "e", "f", "g", "B", "h"]


def test_output_counts_twice():
    driver = Driver(max_seqs=1)
    driver.add("A", 4, 10, flow="talks").add("B", 4, 10, flow="talks")
    for name in "abcde":
        driver.add(name, 8, 1, flow="reads")
    # 4 + 2 * 10 = 24 tokens against 8 + 2 * 1 = 10.
    assert started(driver) == ["A", "a", "b", "c", "B", "d", "e"]


def test_cached_tokens_are_not_charged():
    driver = Driver(max_seqs=1)
    driver.add("A", range(1, 41), 1, flow="shares").add("B", range(1, 41), 1, flow="shares")
    driver.add("C", range(1, 41), 1, flow="shares")
    for name in "abcdefghi":
        driver.add(name, 4, 1, flow="other")
    order = started(driver)
    assert order.index("C") == order.index("B") + 2, "B cost 4 + 2 tokens: 36 of its 40 were found"


def test_a_flow_of_twice_the_weight_gets_twice_the_tokens():
    driver = Driver(max_seqs=1)
    for name in "ABCDEF":
        driver.add(name, 8, 1, flow="heavy", weight=2.0)
    for name in "abc":
        driver.add(name, 8, 1, flow="light")
    assert started(driver)[:6] == ["A", "a", "B", "C", "b", "D"]


def test_flow_gains_no_credit_while_idle():
    driver = Driver(max_seqs=1)
    driver.add("a", 4, 1, flow="pauses").add("A", 4, 1, flow="works").add("B", 4, 1, flow="works")
    for name in "CDEF":
        driver.add(name, 4, 1, flow="works")
    for _ in range(4):
        driver.step()
    for name in "bcde":
        driver.add(name, 4, 1, flow="pauses")
    assert started(driver) == ["D", "b", "E", "c", "F", "d", "e"]


def test_a_flow_gains_no_credit_while_it_runs_all_that_it_wants():
    """A new request of `light` comes before its last one has ended, so it is never idle, and always has few."""
    driver = Driver(max_seqs=4, num_blocks=400, max_len=400)
    for i in range(60):
        driver.add(f"light {i}", range(4), 8, flow="light")
        for _ in range(5):
            while sum(seq.flow == "busy" for seq in driver.scheduler.by_id.values()) < 8:
                driver.add(f"busy {len(driver.names)}", range(4), 20, flow="busy")
            driver.step()
    driver.add("newcomer", range(4), 1, flow="new")
    counters = [driver.scheduler.service.of(flow) for flow in ("busy", "light", "new")]
    assert max(counters) - min(counters) <= 4 * (4 + 2 * 20), "what runs at once"


def test_short_pause_keeps_a_debt():
    service = Service()
    for flow in ("greedy", "other"):
        service.enter(flow)
    service.charge("greedy", 100, 1.0)
    service.leave("greedy")
    service.enter("greedy")
    assert service.of("greedy") == 100


def test_counters_of_idle_flows_are_bounded_and_the_longest_idle_is_dropped():
    service = Service()
    service.enter("stays")
    for i in range(MAX_IDLE + 1):
        service.enter(f"flow {i}")
        service.charge(f"flow {i}", 7, 1.0)
        service.leave(f"flow {i}")
    service.enter("flow 0")
    service.enter("flow 1")
    assert (service.of("flow 0"), service.of("flow 1")) == (0, 7)


def test_counters_are_reset_when_no_flow_is_active():
    service = Service()
    service.enter("a")
    service.charge("a", 100, 1.0)
    service.leave("a")
    service.enter("a")
    assert service.of("a") == 0


def test_a_preempted_request_is_first_in_line_whatever_its_flow_has_had():
    driver = Driver(num_blocks=6, max_len=24)
    driver.add("a", 8, 12, flow="x").add("b", 8, 12, flow="y")
    driver.step()
    driver.add("c", 4, 1, flow="new")
    while driver.scheduler.counters.preempted == 0:
        driver.step()
    order = started(driver)
    assert order.index("b") < order.index("c")
    assert driver.ends() == {"a": "length", "b": "length", "c": "length"}


def test_a_newcomers_prompt_is_computed_before_the_rest_of_a_busy_flows_prompts():
    driver = Driver(max_batched_tokens=16, max_seqs=4)
    for name in "ABC":
        driver.add(name, 60, 1, flow="busy")
    driver.step()
    driver.add("a", 8, 1, flow="new")
    rows = driver.step()
    assert rows["a"] == 8


def test_priorities_come_before_fairness():
    driver = Driver(policy="priority", max_seqs=1)
    for name, flow, priority in (("a", "x", 1), ("b", "y", 2), ("c", "x", 1)):
        driver.add(name, 4, 1, flow=flow, priority=priority)
    assert started(driver) == ["a", "c", "b"]


@pytest.mark.parametrize("seed", range(5))
def test_two_busy_flows_get_the_same_tokens_for_any_requests(seed):
    rng = random.Random(seed)
    driver = Driver(num_blocks=400, max_len=400, max_seqs=4, max_batched_tokens=32)
    shapes = {"small": (1, 8, 1, 4), "large": (20, 60, 5, 30)}
    served = {"small": 0, "large": 0}
    flow_of = {}

    def refill() -> None:
        for flow, (least, most, few, many) in shapes.items():
            while sum(seq.request.flow == flow for seq in driver.scheduler.waiting) < 8:
                name = chr(200 + len(driver.names))
                flow_of[name] = flow
                driver.add(name, rng.randint(least, most), rng.randint(few, many), flow=flow)

    for _ in range(1500):
        refill()
        driver.step()
    for delta in driver.deltas:
        if delta.finish_reason and delta.stats:
            served[flow_of[driver.names[delta.id]]] += delta.stats.prompt_tokens + 2 * delta.stats.output_tokens
    # They differ by at most what fits into the batch at once: four requests of the largest size.
    assert abs(served["small"] - served["large"]) <= 4 * (60 + 2 * 30) * 2


def test_a_flow_that_fills_all_places_makes_way_for_another():
    driver = Driver(max_seqs=3)
    for name in "abc":
        driver.add(name, 4, 60, flow="many")
    driver.step()
    driver.add("x", 4, 3, flow="one").add("d", 4, 1, flow="many")
    assert driver.step() == {"a": 1, "b": 1, "x": 4}, "the last of the flow that holds most gives way at once"
    for _ in range(2):
        driver.step()
    assert driver.ends() == {"x": "length"}
    assert "c" in driver.step(), "who gave way goes on before later requests of its flow"
    while driver.step():
        pass
    assert driver.ends() == dict.fromkeys("xdabc", "length")
    assert {driver.names[d.id]: d.stats.preemptions for d in driver.deltas if d.finish_reason}["c"] == 1


def test_a_flow_that_holds_all_blocks_makes_way_for_another():
    driver = Driver(num_blocks=18, max_len=64)
    for name in "abc":
        driver.add(name, 16, 8, flow="many")
    driver.step()
    driver.add("x", 24, 1, flow="one")
    assert driver.step()["x"] == 24
    assert driver.scheduler.counters.preempted == 1
    while driver.step():
        pass
    assert driver.ends() == dict.fromkeys("xabc", "length")


def test_nothing_makes_way_in_vain_and_others_go_on_until_it_helps():
    """x cannot start before L ends, whatever else gives way."""
    driver = Driver(num_blocks=24, max_len=64, max_seqs=8).add("L", 40, 12, flow="long")
    driver.step()
    shorts = iter("abcdefghijklmnopqrstuvw")
    for name in islice(shorts, 4):
        driver.add(name, 4, 4, flow="short")
    driver.step()
    driver.add("x", 56, 1, flow="large")
    while "L" not in driver.ends():
        driver.add(next(shorts), 4, 4, flow="short")
        assert set(driver.step()) - {"L"}, "the blocks that are too few for x are used"
    assert driver.scheduler.counters.preempted == 0
    assert driver.step()["x"] == 56
    while driver.step():
        pass
    assert set(driver.ends().values()) == {"length"} and len(driver.ends()) == len(driver.names)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_passes_one_that_is_held_up_makes_way_for_it(policy):
    """A busy flow always runs something, and with its successors could keep x from starting for ever."""
    driver = Driver(num_blocks=100, max_len=400, max_seqs=16, max_batched_tokens=256, policy=policy)
    for name in "abc":
        driver.add(name, 120, 20, flow="busy", priority=1)
        driver.step()
    driver.add("x", 320, 2, flow="large").add("y", 4, 1, flow="small", priority=1)
    assert "y" in driver.step(), "it may pass"
    while "x" not in driver.ends():
        while sum(seq.flow == "busy" for seq in driver.scheduler.by_id.values()) < 3:
            driver.add(chr(1000 + len(driver.names)), 120, 20, flow="busy", priority=1)
        driver.step()
        assert len(driver.ends()) < 8, "x waits for more than those that ran when it came"


def test_a_starved_flow_comes_before_what_a_busy_one_had_to_give_up():
    """The next sequence of `busy` lacked blocks and still does; that must not keep x, which fits, from starting."""
    driver = Driver(num_blocks=12, max_len=48, max_seqs=8)
    for name in "ab":
        driver.add(name, 16, 30, flow="busy")
    while not driver.scheduler.counters.preempted:
        driver.step()
    assert [driver.names[seq.id] for seq in driver.scheduler.waiting] == ["b"]
    driver.add("x", 4, 1, flow="new")
    assert "x" in driver.step()


def test_nothing_makes_way_for_one_that_waits_for_its_prefix():
    """x and C begin alike; x starts when C has computed that."""
    driver = Driver(num_blocks=200, max_len=400, max_seqs=3, max_batched_tokens=16)
    prompt = list(range(1, 121))
    for name in "ab":
        driver.add(name, 4, 200, flow="busy")
    driver.step()
    driver.add("C", prompt, 200, flow="other")
    driver.step()
    driver.add("x", prompt, 1, flow="new")
    while "x" not in driver.ends():
        driver.step()
    assert driver.scheduler.counters.preempted == 1


def test_one_running_request_of_each_flow_is_never_pushed_out():
    driver = Driver(max_seqs=2)
    driver.add("a", 4, 20, flow="x").add("b", 4, 20, flow="y")
    driver.step()
    driver.add("c", 4, 1, flow="z")
    for _ in range(10):
        assert driver.step() == {"a": 1, "b": 1}
    assert driver.scheduler.counters.preempted == 0


def test_a_more_important_request_makes_no_way():
    driver = Driver(policy="priority", max_seqs=2)
    driver.add("a", 4, 20, flow="x", priority=0).add("b", 4, 20, flow="x", priority=0)
    driver.step()
    driver.add("c", 4, 1, flow="y", priority=1)
    assert driver.step() == {"a": 1, "b": 1}


def test_static_policy_preempts_no_flow():
    driver = Driver(policy="static", max_seqs=2).add("a", 4, 20, flow="x").add("b", 4, 20, flow="x")
    driver.step()
    driver.add("c", 4, 1, flow="y")
    assert driver.step() == {"a": 1, "b": 1}
