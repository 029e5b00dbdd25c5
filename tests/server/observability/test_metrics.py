"""Counts are exact, names and buckets are those of the contract, and Prometheus' own tool reads the page."""

from __future__ import annotations

import math
import os
import shutil
import subprocess

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families as read_text

from engine import EngineRequest, RequestStats, Roofline, SamplingParams, StepStats
from server.http.admission import Caller, Limits
from server.observability.metrics import FINE, Metrics, decades
from server.observability.token_times import TokenTimes
from server.observability.tracking import RequestTracker
from server.settings import Settings
from tests.fakes import INFO, FakeEngine, model_folder, serving, until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Page:
    """A page of metrics: page("name", label="value") is a sample's value, summed over what is not named."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in read_text(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name} {labels} is not on the page"
        return sum(found)

    def buckets(self, name: str) -> list[float]:
        return [float(s.labels["le"]) for s in self.samples if s.name == name + "_bucket"]


class Bench:
    """Metrics alone, on a clock that the test turns."""

    def __init__(self, **settings) -> None:
        made = Settings(model="some/model", **settings)
        self.engine = FakeEngine()
        self.clock = Clock()
        self.limits = Limits(made)
        self.metrics = Metrics(made, self.engine, self.limits, self.clock)
        self.metrics.bind(INFO)
        self.engine.on_step.append(self.metrics.step)

    def page(self) -> Page:
        return Page(self.metrics.render().decode())

    def answer(
        self, *, tokens: int = 3, prompt: int = 5, gap: float = 0.02, cached: int = 0, reason: str = "length"
    ) -> None:
        track = RequestTracker(self.metrics, "req-1", 1, [prompt], 16)
        arrived = self.clock.now
        for _ in range(tokens):
            self.clock.now += gap
            track.delivered(1)
        stats = RequestStats(
            prompt_tokens=prompt, cached_tokens=cached, output_tokens=tokens, arrived=arrived,
            scheduled=arrived + gap / 2, first_token=arrived + gap, last_token=self.clock.now,
        )  # fmt: skip
        track.finished(reason, stats)
        track.close()


def test_ten_answers_of_ten_tokens_are_a_hundred():
    bench = Bench()
    for _ in range(10):
        bench.answer(tokens=10, prompt=7, cached=4)
    page = bench.page()
    assert page("vllm:generation_tokens_total", model_name="some/model", engine="0") == 100
    assert page("vllm:prompt_tokens_total") == 70
    assert page("vllm:prompt_tokens_cached_total") == 40
    assert page("vllm:request_success_total", finished_reason="length") == 10
    assert page("vllm:request_success_total") == 10
    assert page("vllm:time_to_first_token_seconds_count") == 10
    assert page("vllm:inter_token_latency_seconds_count") == 90
    assert page("pequod:inter_token_latency_seconds_count") == 90
    assert page("vllm:request_generation_tokens_sum") == 100
    assert page("vllm:request_prompt_tokens_sum") == 70
    assert page("vllm:request_params_max_tokens_sum") == 160
    assert page("vllm:e2e_request_latency_seconds_count") == 10
    assert page("pequod:request_aborts_total") == 0


def test_times_are_those_that_passed():
    bench = Bench()
    bench.answer(tokens=5, gap=0.5)
    page = bench.page()
    assert page("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert page("vllm:inter_token_latency_seconds_sum") == pytest.approx(2.0)
    assert page("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.5)
    assert page("vllm:e2e_request_latency_seconds_sum") == pytest.approx(2.5)
    assert page("vllm:request_queue_time_seconds_sum") == pytest.approx(0.25)
    assert page("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.25)
    assert page("vllm:request_decode_time_seconds_sum") == pytest.approx(2.0)
    assert page("vllm:request_inference_time_seconds_sum") == pytest.approx(2.25)


def test_tokens_that_come_together_share_the_time():
    bench = Bench()
    track = RequestTracker(bench.metrics, "a", 1, [3], 16)
    bench.clock.now += 1
    track.delivered(2)
    bench.clock.now += 0.9
    track.delivered(3)
    track.finished("stop")
    page = bench.page()
    assert page("vllm:generation_tokens_total") == 5
    assert page("vllm:inter_token_latency_seconds_count") == 4
    assert page("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.9)
    assert page("pequod:inter_token_latency_seconds_bucket", le="0.0001") == 1
    assert page("pequod:inter_token_latency_seconds_bucket", le="0.5") == 4


def test_several_prompts_and_choices_count_each_prompt_once():
    bench = Bench()
    track = RequestTracker(bench.metrics, "a", 2, [10, 20], 16)
    for choice in range(4):
        track.delivered(3, choice)
        stats = RequestStats(prompt_tokens=1, cached_tokens=choice + 1, output_tokens=3, arrived=1.0)
        track.finished("stop", stats, choice)
    page = bench.page()
    assert page("vllm:prompt_tokens_total") == 30
    assert page("vllm:prompt_tokens_cached_total") == 1 + 3  # as the first choice of each prompt tells
    assert page("vllm:generation_tokens_total") == 12
    assert page("vllm:request_success_total", finished_reason="stop") == 4
    assert page("vllm:request_params_n_sum") == 2
    assert page("vllm:request_prompt_tokens_sum") == 60  # of answers, as their latencies are


def test_an_end_counts_once_and_nothing_after_it():
    bench = Bench()
    track = RequestTracker(bench.metrics, "a", 1, [3], 16)
    track.delivered(1)
    track.finished("stop")
    track.finished("length")
    track.delivered(5)
    track.aborted("disconnect")
    track.close()
    page = bench.page()
    assert page("vllm:request_success_total") == 1
    assert page("vllm:generation_tokens_total") == 1
    assert page("pequod:request_aborts_total") == 0


def test_an_abort_counts_its_cause_once_and_each_open_choice():
    bench = Bench()
    track = RequestTracker(bench.metrics, "a", 3, [3], 16)
    track.delivered(1, 0)
    track.finished("stop", None, 0)
    track.aborted("timeout")
    track.aborted("drain")
    RequestTracker(bench.metrics, "b", 1, [9], 16).close()
    RequestTracker(bench.metrics, "c", 1, [9], 16).aborted("error")
    page = bench.page()
    assert page("pequod:request_aborts_total", cause="timeout") == 1
    assert page("pequod:request_aborts_total", cause="drain") == 0
    assert page("pequod:request_aborts_total", cause="disconnect") == 1
    assert page("vllm:request_success_total", finished_reason="abort") == 3
    assert page("vllm:request_success_total", finished_reason="error") == 1
    assert page("vllm:prompt_tokens_total") == 3  # no token of b and c has come


async def test_steps_are_exported_as_the_engine_reports_them():
    bench = Bench()
    stepped = Bench()
    stepped.engine = bench.engine
    request = EngineRequest(id=1, prompt_ids=tuple(range(40)), params=SamplingParams(max_tokens=5))
    async for _ in bench.engine.generate(request):
        pass
    bench.engine.die_and_come_back()
    page = bench.page()
    assert page("vllm:iteration_tokens_total_sum") == 45, "40 of the prompt and 5 of the output"
    assert page("vllm:iteration_tokens_total_count") == 5
    assert page("vllm:prefix_cache_queries_total") == 40
    assert page("pequod:step_seconds_count", phase="forward") == 5
    assert page("pequod:engine_restarts_total") == 1
    assert page("pequod:streams_resumed_total") == 0


async def test_blocks_of_a_dead_engine_are_not_held_by_the_next():
    bench = Bench()
    request = EngineRequest(id=1, prompt_ids=tuple(range(40)), params=SamplingParams(max_tokens=5))
    generated = bench.engine.generate(request)
    await anext(generated)
    page = bench.page()
    assert page("pequod:kv_blocks", state="held") == 3
    assert page("pequod:kv_blocks", state="free") == 997
    assert page("pequod:kv_blocks_unaccounted") == 0
    assert page("vllm:kv_cache_usage_perc") == pytest.approx(0.003)
    bench.engine.die_and_come_back()
    assert bench.page()("pequod:kv_blocks", state="free") == 1000
    await generated.aclose()


def test_gauges_are_back_at_zero_when_nothing_is_open():
    bench = Bench()
    bench.engine.status.running, bench.engine.status.waiting = 3, 2  # of the last step: no other one came
    tickets = [bench.limits.admit(Caller(), 1) for _ in range(5)]
    assert bench.metrics.running_waiting() == (3, 2)
    for ticket in tickets[:3]:
        ticket.release()
    assert bench.metrics.running_waiting() == (2, 0)
    for ticket in tickets[3:]:
        ticket.release()
    page = bench.page()
    assert page("vllm:num_requests_running") == page("vllm:num_requests_waiting") == 0


def test_what_only_its_slow_reader_keeps_open_neither_runs_nor_waits():
    bench = Bench()
    status = bench.engine.status
    bench.limits.admit(Caller(), 2)
    assert bench.metrics.running_waiting() == (0, 2), "new work waits for its first step"
    track = RequestTracker(bench.metrics, "req-1", 2, [5], 16)
    status.last_step = bench.limits.busy_since + 1
    assert bench.metrics.running_waiting() == (0, 0), "the last step left nothing in the engine"
    for choice in range(2):
        track.delivered(1, choice)
    bench.limits.admit(Caller(), 3)
    status.running = 1
    assert bench.metrics.running_waiting() == (1, 3), "what has sent tokens is not deferred"
    status.running, status.restarts = 0, 1
    assert bench.metrics.running_waiting() == (0, 5), "all wait for a new engine process"
    track.close()
    track.close()
    assert bench.metrics.begun == 0


def test_the_page_has_the_families_and_buckets_of_the_contract():
    bench = Bench()
    bench.answer()
    bench.metrics.http("GET", "/live", 200, 0.01)
    page = bench.page()
    labels = {"model_name", "engine"}
    for family in page.families.values():
        if family.name.startswith("vllm:"):
            assert all(labels <= sample.labels.keys() for sample in family.samples), family.name
    decade = [1, 2, 5, 10, 20, 50, 100, 200, 500, math.inf]
    fine = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, math.inf]
    expected = {
        "request_prompt_tokens": decade,
        "request_generation_tokens": decade,
        "request_params_max_tokens": decade,
        "request_params_n": [1, 2, 5, 10, 20, math.inf],
        "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, math.inf],
        "time_to_first_token_seconds": [
            0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
            2560, math.inf,
        ],
        "inter_token_latency_seconds": [
            0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, math.inf,
        ],
        "e2e_request_latency_seconds": fine,
        "request_queue_time_seconds": fine,
        "request_inference_time_seconds": fine,
        "request_prefill_time_seconds": fine,
        "request_decode_time_seconds": fine,
    }  # fmt: skip
    for name, buckets in expected.items():
        assert page.buckets(f"vllm:{name}") == buckets, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert page.families[f"vllm:{name}"].type == "gauge"
    for name in (
        "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
        "prompt_tokens_cached", "request_success", "admission_rejections",
    ):  # fmt: skip
        assert page.families[f"vllm:{name}"].type == "counter"
        assert page(f"vllm:{name}_total") >= 0
    assert page("vllm:cache_config_info", block_size="16", num_gpu_blocks="1000", cache_dtype="float32") == 1
    assert page("pequod:memory_bytes", kind="weights") == 4000
    assert page("pequod:memory_bytes", kind="kv") == 64 * 16 * 1000
    assert min(page.buckets("pequod:inter_token_latency_seconds")) == FINE[0] == 0.0001
    assert not any(sample.name.endswith("_created") for sample in page.samples)


def test_decades_end_at_the_models_length():
    assert decades(512) == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert decades(1000)[-1] == 1000
    assert decades(1) == [1]


def test_without_the_other_names_only_ours_are_there():
    bench = Bench(metrics_compat="none")
    bench.answer()
    page = bench.page()
    assert not [name for name in page.families if name.startswith("vllm:")]
    assert page("pequod:inter_token_latency_seconds_count") == 2


async def test_a_scraper_that_prefers_openmetrics_finds_the_same_names(tmp_path):
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        answer = await client.get("/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert Page(answer.text)("vllm:num_requests_running") == 0


def test_two_apps_in_one_process_count_for_themselves():
    first, second = Bench(), Bench()
    first.answer(tokens=3)
    assert first.page()("vllm:generation_tokens_total") == 3
    assert second.page()("vllm:generation_tokens_total") == 0


def test_the_memory_of_the_engines_process_is_exported():
    bench = Bench()
    with pytest.raises(AssertionError):
        bench.page()("pequod:engine_resident_bytes")
    bench.engine.pid = os.getpid()
    assert bench.page()("pequod:engine_resident_bytes") > 10 << 20
    bench.engine.pid = 2**30  # it has just died
    with pytest.raises(AssertionError):
        bench.page()("pequod:engine_resident_bytes")


def test_one_line_per_request_with_figures_and_no_content(caplog):
    bench = Bench()
    with caplog.at_level("INFO", logger="pequod.request"):
        bench.answer(tokens=3, prompt=5, gap=0.25, cached=4)
        track = RequestTracker(bench.metrics, "two", 2, [8], 16)
        track.delivered(1, 0)
        track.finished("length", None, 0)
        assert len(caplog.records) == 1
        track.close()
    first, second = (record.fields for record in caplog.records)
    assert first == {
        "id": "req-1", "model": "some/model", "prompt_tokens": 5, "cached_tokens": 4, "output_tokens": 3,
        "queue_s": 0.125, "ttft_s": 0.25, "itl_p50_s": 0.25, "seconds": 0.75, "finish": "length",
    }  # fmt: skip
    assert second["id"] == "two"
    assert second["finish"] == "length,abort"
    assert second["cause"] == "disconnect"


async def test_handlers_are_templates_and_methods_are_few(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, _):
        for i in range(3):
            await client.get(f"/v1/models/made-up-{i}")
            await client.get(f"/made-up-{i}")
            await client.request(f"MADE{i}", "/live")
        await client.head("/ready")
        page = Page((await client.get("/metrics")).text)
        assert page("http_requests_total", handler="/v1/models/{model_id:path}", status="404") == 3
        assert page("http_requests_total", handler="unmatched", status="404") == 3
        assert page("http_requests_total", handler="/live", method="OTHER", status="405") == 3
        assert page("http_requests_total", handler="/ready", method="HEAD", status="200") == 1
        assert page("http_request_duration_seconds_count", handler="unmatched") == 3
        assert not any("made-up" in value for sample in page.samples for value in sample.labels.values())


async def test_the_event_loops_lag_is_measured(tmp_path):
    async with serving(model_folder(tmp_path / "m")) as (client, app):
        lag = app.state.pequod.metrics.loop_lag
        await until(lambda: lag._sum.get() > 0)
        assert Page((await client.get("/metrics")).text)("pequod:event_loop_lag_seconds_count") >= 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_reads_the_page():
    bench = Bench()
    bench.answer(reason="stop")
    bench.metrics.http("GET", "/live", 200, 0.01)
    bench.engine.status.last_step = bench.clock.now
    bench.engine.pid = os.getpid()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=bench.metrics.render(), capture_output=True, timeout=60, check=False
    )
    # It also lints: a colon is for recording rules, and a histogram should not be called total. Both are in names that
    # others chose and that their dashboards know; nothing else may be said, and then 3 is its exit status.
    total = 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    said = [line for line in (done.stdout + done.stderr).decode().splitlines() if line and line != total]
    assert [line for line in said if not line.endswith("metric names should not contain ':'")] == []
    assert done.returncode in (0, 3)


def test_the_share_of_the_limit_is_exported_by_phase():
    bench = Bench()
    limit = Roofline(
        bytes_per_s=1000.0, flops_per_s=1e9, pair_flops_per_s=1e9, weights_bytes=100, kv_bytes_per_token=10,
        flops_per_token=1, flops_per_pair=1, flops_per_logit=1,
    )  # fmt: skip
    bench.engine.info = replace(INFO, roofline=limit)

    def step(prompt: int, decode: int, context: int, **seconds: float) -> None:
        bench.metrics.step(
            StepStats(
                step=1, time=0.0, rows=((1, prompt + decode),), budget=1, prompt_tokens=prompt, decode_tokens=decode,
                running=1, waiting=0, blocks_free=1, blocks_cached=0, blocks_held=0, blocks_total=1, preempted=0,
                prefix_queries=0, prefix_hits=0, context=context, pairs=context, logits=1, seconds=seconds,
            )
        )  # fmt: skip

    assert "pequod:roofline_fraction" not in bench.page().families
    step(0, 1, 10, forward=0.3, sample=0.1, masks=9.0)  # 200 bytes: 0.2 s at best
    assert bench.page()("pequod:roofline_fraction", phase="decode") == pytest.approx(0.5)
    step(0, 1, 10, forward=0.2)
    assert 0.5 < bench.page()("pequod:roofline_fraction", phase="decode") < 1
    for _ in range(1000):
        step(0, 1, 10, forward=0.25)
    assert bench.page()("pequod:roofline_fraction", phase="decode") == pytest.approx(0.8)
    step(5, 1, 10, forward=2.0)
    assert bench.page()("pequod:roofline_fraction", phase="prefill") == pytest.approx(0.1)


async def test_without_a_known_limit_there_is_no_share():
    bench = Bench()
    assert INFO.roofline is None
    async for _ in bench.engine.generate(EngineRequest(id=1, prompt_ids=(1,), params=SamplingParams(max_tokens=2))):
        pass
    assert "pequod:roofline_fraction" not in bench.page().families


def test_times_of_tokens_fall_into_the_buckets_of_each_histogram():
    times = TokenTimes([1.0, 2.5], [0.5, 1.0, 10.0])
    for seconds, count in [(0.5, 1), (0.6, 2), (1.0, 1), (2.0, 1), (11.0, 1)]:
        times.observe(seconds, count)
    registry = CollectorRegistry()
    registry.register(Both(times))
    samples = {(s.name, s.labels.get("le")): s.value for family in registry.collect() for s in family.samples}
    assert [samples["coarse_bucket", le] for le in ("1.0", "2.5", "+Inf")] == [4, 5, 6]
    assert [samples["fine_bucket", le] for le in ("0.5", "1.0", "10.0", "+Inf")] == [1, 4, 5, 6]
    assert samples["coarse_count", None] == samples["fine_count", None] == 6
    assert samples["coarse_sum", None] == pytest.approx(15.7)


class Both:
    """A collector of two histograms of the same times."""

    def __init__(self, times):
        self.times = times

    def collect(self):
        yield self.times.histogram("coarse", "", [1.0, 2.5], {})
        yield self.times.histogram("fine", "", [0.5, 1.0, 10.0], {})
