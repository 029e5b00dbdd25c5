"""RequestTracker: figures of choices that end before the engine has ended them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine import RequestStats
from server.observability.tracking import RequestTracker
from tests.server.observability.test_metrics import Bench

# With the first token, at second 1003 of the test's clock.
FIRST = RequestStats(
    prompt_tokens=8, cached_tokens=4, output_tokens=1, arrived=1000.0, scheduled=1002.0, first_token=1003.0,
    last_token=1003.0,
)  # fmt: skip


def generated(bench: Bench, *stats: RequestStats) -> RequestTracker:
    """A request that has delivered a token at second 1003 and at each of the next ones, with these stats."""
    track = RequestTracker(bench.metrics, "req-1", 1, [8], 16)
    bench.clock.now += 2
    for each in stats:
        bench.clock.now += 1
        track.delivered(1, 0, each)
    return track


def test_a_choice_that_ends_at_a_stop_string_is_measured_up_to_its_last_token():
    bench = Bench()
    track = generated(bench, FIRST, FIRST, FIRST, replace(FIRST, preemptions=2, output_tokens=4), FIRST)
    bench.clock.now += 50
    track.finished("stop", replace(FIRST, preemptions=2, output_tokens=4))
    page = bench.page()
    assert page("vllm:request_queue_time_seconds_sum") == pytest.approx(2)
    assert page("vllm:request_prefill_time_seconds_sum") == pytest.approx(1)
    assert page("vllm:request_decode_time_seconds_sum") == pytest.approx(4)
    assert page("vllm:request_inference_time_seconds_sum") == pytest.approx(5)
    assert page("vllm:request_num_preemptions_sum") == 2


def test_a_choice_that_the_engine_has_ended_is_measured_by_its_times():
    bench = Bench()
    track = generated(bench, FIRST, FIRST, FIRST)  # its reader gets the last token at 1005
    track.finished("length", replace(FIRST, output_tokens=3, last_token=1003.5))
    page = bench.page()
    assert page("vllm:request_decode_time_seconds_sum") == pytest.approx(0.5)
    assert page("vllm:request_inference_time_seconds_sum") == pytest.approx(1.5)


def test_an_aborted_choice_counts_its_cached_tokens_and_its_time_in_the_queue(caplog):
    bench = Bench()
    with caplog.at_level("INFO", logger="pequod.request"):
        generated(bench, FIRST, FIRST).aborted("disconnect")
    page = bench.page()
    assert page("vllm:prompt_tokens_total") == 8
    assert page("vllm:prompt_tokens_cached_total") == 4
    assert page("vllm:request_queue_time_seconds_sum") == pytest.approx(2)
    assert page("vllm:request_decode_time_seconds_sum") == pytest.approx(1)
    assert page("vllm:request_num_preemptions_count") == 1
    (line,) = [record.fields for record in caplog.records]
    assert (line["cached_tokens"], line["queue_s"], line["finish"]) == (4, 2.0, "abort")


def test_an_abort_before_the_first_token_has_no_times():
    bench = Bench()
    generated(bench).aborted("timeout")
    page = bench.page()
    assert page("vllm:request_queue_time_seconds_count") == page("vllm:prompt_tokens_cached_total") == 0
