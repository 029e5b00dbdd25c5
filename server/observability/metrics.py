"""Prometheus metrics: requests, delivered tokens and the engine's steps.

Families under `pequod:` are ours. Those under `vllm:` have the names, labels and buckets of vLLM's V1 metrics, so that
dashboards, autoscalers and routers made for it work unchanged. Both live in registries of one app: nothing is global.
A scrape reads this state and calls nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine import Engine, EngineInfo, StepStats

from ..http.admission import Limits
from ..settings import Settings
from .logs import StepLog, dropped_lines
from .phases import KERNELS, PHASES
from .token_times import TokenTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
ABORT_CAUSES = ("disconnect", "timeout", "deadline", "drain", "slow_reader", "cancelled", "error")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ROOFLINE_DECAY = 0.98  # of a step's weight in pequod:roofline_fraction, per later step: a window of about 50 steps

# Limit on rendering the page: a router that scrapes every 50 ms still gets a fresh one each time.
RENDERS_PER_S, RENDER_BURST = 20, 20

TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ITERATION = (1, *(2**i for i in range(3, 15)))
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)
HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Small models take less than a millisecond per token and step, below vLLM's smallest bucket.
FINE = (*(m * 10.0**e for e in range(-4, 1) for m in (1, 2.5, 5)), 10.0)


def decades(top: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50… up to `top`."""
    return [m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= top]


class Metrics:
    """All families of one app."""

    def __init__(
        self, settings: Settings, engine: Engine, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # By default the library adds a creation time to every family. The switch is for the whole process.
        prometheus_client.disable_created_metrics()
        self.engine = engine
        self.limits = limits
        self.model = settings.names[0]
        self.clock = clock
        self.last_step: StepStats | None = None
        self.step_log: StepLog | None = None
        self._restarts = 0  # of the engine, before last_step
        self.begun = 0  # choices of open requests that have sent tokens or ended
        self._least_actual: dict[str, tuple[float, float]] = {}  # by phase: times of steps, older ones count less
        self.own = CollectorRegistry()
        self.vllm = CollectorRegistry()
        self._page = b""
        self._renders, self._rendered_at = float(RENDER_BURST), self.clock()
        self._rendered = [self.own] + [self.vllm] * (settings.metrics_compat == "vllm")

        own_histogram = partial(Histogram, buckets=FINE, registry=self.own)
        own_counter = partial(Counter, registry=self.own)
        by_route = ["method", "handler"]
        self.http_requests = own_counter(
            "http_requests", "HTTP requests by method, route and status of the response.", [*by_route, "status"]
        )
        self.http_seconds = own_histogram(
            "http_request_duration_seconds",
            "Seconds from a request's head to the last byte of its response.",
            by_route,
            buckets=HTTP,
        )
        self.delivered = TokenTimes(PER_TOKEN, FINE)
        step_seconds = own_histogram(
            "pequod:step_seconds",
            "Seconds per engine step by phase; kernels is the part spent in our CPU kernels.",
            ["phase"],
        )
        self.step_seconds = {phase: step_seconds.labels(phase) for phase in (*PHASES, KERNELS)}
        self.grammar_masks = own_histogram(
            "pequod:grammar_mask_seconds",
            "Seconds to compute the grammar masks of one step, in parallel with the forward pass.",
        )
        self.forced_tokens = own_counter(
            "pequod:grammar_forced_tokens", "Tokens that were not sampled because a grammar allowed only one."
        )
        self.loop_lag = own_histogram(
            "pequod:event_loop_lag_seconds", "Seconds by which the server's event loop woke up late."
        )
        aborts = own_counter(
            "pequod:request_aborts", "Requests aborted before they were complete, by cause.", ["cause"]
        )
        self.aborts = {cause: aborts.labels(cause) for cause in ABORT_CAUSES}
        self.own.register(_Scrape(self._own_families))

        self._labels = {"model_name": self.model, "engine": "0"}

        counter = partial(self._labelled, Counter)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens whose prefill is complete.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("num_preemptions", "Preemptions of sequences.")
        self.prefix_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        success = Counter(
            "vllm:request_success",
            "Finished choices by reason.",
            [*self._labels, "finished_reason"],
            registry=self.vllm,
        )
        self.success = {reason: success.labels(**self._labels, finished_reason=reason) for reason in FINISH_REASONS}
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Prompt tokens computed and output tokens added per engine step.", ITERATION
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "Time to first token (TTFT) in seconds.", TTFT)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token after the first, per choice.", PER_TOKEN
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to the end of a choice.", LATENCY
        )
        self.queue_seconds = self._histogram(
            "request_queue_time_seconds", "Seconds in the queue, before the first step.", LATENCY
        )
        self.inference_seconds = self._histogram(
            "request_inference_time_seconds", "Seconds from the first step to the last token.", LATENCY
        )
        self.prefill_seconds = self._histogram(
            "request_prefill_time_seconds", "Seconds from the first step to the first token.", LATENCY
        )
        self.decode_seconds = self._histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last token.", LATENCY
        )
        self.preemptions_each = self._histogram("request_num_preemptions", "Preemptions per sequence.", PREEMPTIONS)
        self.params_n = self._histogram("request_params_n", "Choices (n) per request.", CHOICES)
        self.vllm.register(_Scrape(self._vllm_families))

    def _labelled(self, kind: type[F], name: str, text: str, **options: Any) -> F:
        return kind(f"vllm:{name}", text, list(self._labels), registry=self.vllm, **options).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._labelled(Histogram, name, text, buckets=buckets)

    def bind(self, info: EngineInfo) -> None:
        """Create the families whose buckets end at the model's length, once it is known and before any request."""
        buckets = decades(info.max_len)
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Prompt tokens per finished choice.", buckets)
        self.output_lengths = self._histogram(
            "request_generation_tokens", "Generated tokens per finished choice.", buckets
        )
        self.max_tokens = self._histogram("request_params_max_tokens", "max_tokens per request.", buckets)

    # Recording

    def step(self, stats: StepStats) -> None:
        """Record one engine step; registered in engine.on_step."""
        self.last_step = stats
        self._restarts = self.engine.status.restarts
        if stats.rows:  # otherwise nothing was computed, as after an abort between two steps
            self.iteration_tokens.observe(stats.prompt_tokens + stats.output_tokens)
        self.preemptions.inc(stats.preempted)
        self.prefix_queries.inc(stats.prefix_queries)
        self.prefix_hits.inc(stats.prefix_hits)
        self.forced_tokens.inc(stats.forced_tokens)
        if "masks" in stats.seconds:
            self.grammar_masks.observe(stats.seconds["masks"])
        for phase, seconds in stats.seconds.items():
            if phase in self.step_seconds:
                self.step_seconds[phase].observe(seconds)

        if stats.rows:
            self._add_roofline(stats)

    def _add_roofline(self, stats: StepStats) -> None:
        limit = self.engine.info.roofline if self.engine.info is not None else None
        taken = sum(stats.seconds.get(phase, 0.0) for phase in PHASES)
        if limit is not None and taken > 0:
            phase = "prefill" if stats.prompt_tokens else "decode"
            tokens = stats.prompt_tokens + stats.decode_tokens
            least = limit.seconds(tokens, stats.context, stats.pairs, stats.logits)
            decayed = [total * ROOFLINE_DECAY for total in self._least_actual.get(phase, (0.0, 0.0))]
            self._least_actual[phase] = decayed[0] + least, decayed[1] + taken

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Record one HTTP request; `handler` is a route's template, never a path chosen by a client."""
        method = method if method in METHODS else "OTHER"
        self.http_requests.labels(method, handler, str(status)).inc()
        self.http_seconds.labels(method, handler).observe(seconds)

    # Exposition

    def render(self) -> bytes:
        """Return the page, in the format CONTENT_TYPE.

        Always Prometheus' text format, which every scraper accepts: in OpenMetrics the library replaces the colons of
        our names by underscores, so that a Prometheus that prefers it would not have the names of the dashboards.

        Rendering takes some milliseconds; beyond RENDERS_PER_S the last page is returned again.
        """
        now = self.clock()
        self._renders = min(RENDER_BURST, self._renders + (now - self._rendered_at) * RENDERS_PER_S)
        self._rendered_at = now
        if self._renders >= 1 or not self._page:
            self._renders -= 1
            self._page = b"".join(generate_latest(registry) for registry in self._rendered)
        return self._page

    def running_waiting(self) -> tuple[int, int]:
        """The numbers of open choices that are running in the engine, and that wait in it or before it.

        The engine reports its numbers with its steps. After the last request is aborted there is no further step, so
        the open choices limit them. Choices that are open because their client reads slowly may have ended in the
        engine: they count as neither.
        """
        status, limits = self.engine.status, self.limits
        running = min(status.running, limits.open_choices)
        queued = min(status.waiting, limits.open_choices - running)
        others = limits.open_choices - running - queued
        if self._restarts != status.restarts:  # a new engine process has not reported yet, and all wait for it
            return running, queued + others
        is_new = limits.busy_since > status.last_step
        if not (status.running or status.waiting or is_new):  # all have ended, as in `AppState._stalled_for`
            return running, 0
        # A choice that has sent tokens does not wait for its prompt or grammar.
        return running, queued + min(others, max(0, limits.open_choices - self.begun))

    def _own_families(self) -> Iterator[Metric]:
        status, info = self.engine.status, self.engine.info
        yield CounterMetricFamily(
            "pequod:engine_restarts", "Restarts of the engine process after it died or hung.", status.restarts
        )
        yield CounterMetricFamily(
            "pequod:streams_resumed", "Sequences that continued in a new engine process.", status.streams_resumed
        )
        text = "Log lines dropped because the reader was too slow or a write failed; server: stderr, steps: --step-log."
        dropped = {"server": dropped_lines(), "steps": self.step_log.dropped if self.step_log else 0}
        yield _with_values(CounterMetricFamily("pequod:log_lines_dropped", text, labels=["log"]), dropped)
        text = "Inter-token latency (ITL) in seconds, in finer buckets than the vllm: family."
        yield self.delivered.histogram("pequod:inter_token_latency_seconds", text, FINE, {})
        free, cached, held, unaccounted = self._blocks()
        text = "KV cache blocks by state: held by sequences, cached for reuse, or free."
        states = {"free": free, "cached": cached, "held": held}
        yield _with_values(GaugeMetricFamily("pequod:kv_blocks", text, labels=["state"]), states)
        yield GaugeMetricFamily(
            "pequod:kv_blocks_unaccounted",
            "KV cache blocks that are in no state; anything but 0 is a bug.",
            unaccounted,
        )
        if self._least_actual:
            text = (
                "Shortest time that this machine allows for the last steps, divided by their actual time; steps with"
                " prompt tokens are prefill."
            )
            fractions = {phase: least / actual for phase, (least, actual) in self._least_actual.items()}
            yield _with_values(GaugeMetricFamily("pequod:roofline_fraction", text, labels=["phase"]), fractions)
        if status.last_step:
            yield GaugeMetricFamily(
                "pequod:last_step_age_seconds",
                "Seconds since the engine completed a step.",
                max(0.0, self.clock() - status.last_step),
            )
        if info is not None:
            memory = {"weights": info.weights_bytes, "kv": info.kv_cache_bytes}
            text = "Bytes of device memory by use."
            yield _with_values(GaugeMetricFamily("pequod:memory_bytes", text, labels=["kind"]), memory)
        if (resident := resident_bytes(getattr(self.engine, "pid", None))) is not None:
            yield GaugeMetricFamily(
                "pequod:engine_resident_bytes", "Resident memory of the engine process in bytes.", resident
            )

    def _vllm_families(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*names, *labels])
            family.add_metric([*values, *labels.values()], value)
            return family

        yield self.delivered.counter("vllm:generation_tokens", "Tokens delivered to clients.", self._labels)
        text = "Inter-token latency (ITL) in seconds."
        yield self.delivered.histogram("vllm:inter_token_latency_seconds", text, PER_TOKEN, self._labels)
        running, waiting = self.running_waiting()
        yield gauge("num_requests_running", "Sequences that are running.", running)
        yield gauge("num_requests_waiting", "Sequences that are admitted and not running.", waiting)
        queued = min(self.engine.status.waiting, waiting)
        text = "Sequences that wait, by reason: capacity, in the scheduler; deferred, for prompt or grammar before it."
        reasons = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=[*names, "reason"])
        yield _with_values(reasons, {"capacity": queued, "deferred": waiting - queued}, values)
        free, cached, held, _ = self._blocks()
        usage = held / (free + cached + held or 1)
        yield gauge("kv_cache_usage_perc", "Fraction of KV cache blocks that sequences hold, 0 to 1.", usage)
        text = "Requests refused, by reason; share is a 429, the others are a 503."
        rejections = CounterMetricFamily("vllm:admission_rejections", text, labels=[*names, "reason"])
        yield _with_values(rejections, self.limits.rejections, values)
        info = self.engine.info
        if info is not None:
            sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
            sizes["cache_dtype"] = info.kv_dtype
            yield gauge("cache_config_info", "KV cache configuration, in the labels; always 1.", 1, **sizes)

    def _blocks(self) -> tuple[int, int, int, int]:
        """Blocks free, cached, held and unaccounted; all free before the first step of an engine process."""
        last, info = self.last_step, self.engine.info
        if last is None or self._restarts != self.engine.status.restarts:
            return (info.num_blocks if info else 0), 0, 0, 0
        return last.blocks_free, last.blocks_cached, last.blocks_held, last.blocks_unaccounted


F = TypeVar("F", Counter, Histogram)
M = TypeVar("M", CounterMetricFamily, GaugeMetricFamily)


def _with_values(family: M, values: Mapping[str, float], labels: Sequence[str] = ()) -> M:
    """Add a sample for each value of the family's last label; `labels` are the values of the others."""
    for label, value in values.items():
        family.add_metric([*labels, label], value)
    return family


class _Scrape:
    """Families whose values are read at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self.collect = families

    def describe(self) -> list[Metric]:
        return []


def resident_bytes(pid: int | None) -> int | None:
    """Return the resident memory of a process; None if there is none or the system does not report it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
