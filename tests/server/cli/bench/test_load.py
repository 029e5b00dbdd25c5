"""What `pequod bench` sends and what it computes: arrivals, traces, prompts, percentiles. No clock decides here."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from server.cli.bench import figures, options, serve
from server.cli.bench.client import IDS, Shot
from server.cli.bench.load import Arrival, Prompts, Run, fixed, poisson, read_trace, scaled
from server.cli.bench.show import number, table
from server.cli.commands import UsageError


def target(takes_ids: bool = True, words_per_token: float = 1.0):
    return SimpleNamespace(takes_ids=takes_ids, words_per_token=words_per_token, notes=[])


def shot(*times: float, sent: float = 0.0, tokens: int | None = None, sizes: list[int] | None = None, **more) -> Shot:
    """A response whose chunks arrived at these times."""
    made = Shot(0.0, 10, len(times), sent, done=times[-1] if times else sent, times=list(times), sizes=sizes)
    made.output_tokens = tokens
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3], 0.99, 3), ([4, 1, 3, 2], 0.5, 2.5), ([1, 2, 3, 4, 5], 0.25, 2), (range(101), 0.99, 99)],
)
def test_a_percentile_lies_between_its_neighbours(values, share, expected):
    assert figures.percentile(values, share) == expected


def test_the_reported_rate_is_that_of_the_intervals():
    assert serve.rate([Arrival(at, 1, 1) for at in fixed(4.0, 5)]) == 4.0
    assert serve.rate([Arrival(at, 1, 1) for at in (0.5, 1.5, 2.5)]) == 1.0
    assert serve.rate([Arrival(at, 1, 1) for at in (0.0, 0.0)]) is None


def test_poisson_arrivals_follow_the_seed_and_the_rate():
    times = poisson(4.0, 4000, seed=7)
    assert times == poisson(4.0, 4000, seed=7) != poisson(4.0, 4000, seed=8)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000, rel=0.1)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exp(-1), of no other process


def test_fixed_arrivals_are_even():
    assert fixed(4.0, 3) == [0, 0.25, 0.5]


def test_azure_traces_are_read_from_zero(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path, None)
    assert (first.at, first.input_len, first.output_len) == (0, 374, 44)
    assert second.at == pytest.approx(4.314579)
    assert len(read_trace(path, 1)) == 1


def test_mooncake_traces_keep_their_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    arrivals = read_trace(path, None)
    assert [arrival.at for arrival in arrivals] == [0, 1]
    prompts = Prompts(target(), seed=1)
    first, second = (prompts.traced(arrival).prompt for arrival in arrivals)
    assert len(first) == len(second) == 1100
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("a,b\n1,2\n", "there is no 'TIMESTAMP'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "is not a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "is not a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,1\n", "request 1 has a length below 1"),
        ('{"timestamp": 0, "input_length": 5}\n', "there is no 'output_length'"),
        ('{"timestamp": 0, "input_length": 5\n', "is not a trace"),
        (
            '{"timestamp": 9, "input_length": 5, "output_length": 1}\n'
            '{"timestamp": 8, "input_length": 5, "output_length": 1}\n',
            "request 2 is earlier than",
        ),
    ],
)
def test_an_invalid_trace_is_an_error_with_its_position(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(path, None)


def test_a_trace_that_does_not_exist(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", None)


def test_a_trace_is_scaled_and_cut_to_what_fits():
    arrivals = [Arrival(2.0, 1000, 100), Arrival(4.0, 10, 500), Arrival(6.0, 300, 100)]
    short = scaled(arrivals, time_scale=0.5, length_scale=0.1, max_len=40)
    assert [(a.at, a.input_len, a.output_len) for a in short] == [(1, 30, 10), (2, 1, 20), (3, 30, 10)]
    assert [a.is_cut for a in short] == [True, True, False]  # the last one fits exactly


def test_prompts_differ_and_a_seed_repeats_them():
    one, same, other = Prompts(target(), 5), Prompts(target(), 5), Prompts(target(), 6)
    first, second = one.ask(40, 1).prompt, one.ask(40, 1).prompt
    assert first != second
    assert first == same.ask(40, 1).prompt != other.ask(40, 1).prompt
    assert len(first) == 40
    assert set(first) <= set(IDS)


def test_prompts_share_the_prefix_that_they_name():
    prompts = Prompts(target(), 5)
    one, two = (prompts.shared(40, 1, "system", 30).prompt for _ in range(2))
    assert one[:30] == two[:30]
    assert one[30:] != two[30:]


def test_text_prompts_have_the_words_that_make_the_tokens():
    assert len(Prompts(target(takes_ids=False, words_per_token=0.5), 1).ask(40, 1).prompt.split(" ")) == 20
    words = Prompts(target(takes_ids=False, words_per_token=0.5), 1, words=[" a", " b"]).ask(40, 1).prompt
    assert len(words) == 80  # each exactly one token


def test_a_run_is_summed_up():
    run = Run([shot(1.0, 1.1, 1.4, sent=0.5, tokens=3), shot(error="no", sent=0.5)], wall=2.0)
    result = figures.summarize(run)
    assert (result["requests"], result["failed"], result["output_tokens"], result["output_tok_s"]) == (2, 1, 3, 1.5)
    assert result["ttft_p50_s"] == 0.5
    assert result["itl_p50_s"] == pytest.approx(0.2)
    assert result["itl_max_s"] == pytest.approx(0.3)
    assert result["decode_tok_s"] == pytest.approx(5)
    assert result["tpot_p50_s"] == pytest.approx(0.2)


def test_tokens_that_arrive_together_take_as_long_as_the_wait_for_them():
    read = 15e-6  # between two chunks of one read
    burst = shot(*(at + index * read for at in (1.0, 1.4, 1.8) for index in range(8)))
    assert burst.tokens == 24
    assert burst.time_per_token == pytest.approx(0.05, rel=1e-3)
    assert figures.summarize(Run([burst], 2.0))["itl_p50_s"] == pytest.approx(read)
    assert any("21 of 23 gaps between chunks are within one read" in note for note in figures.notes(target(), [burst]))
    assert shot(1.0, 1.0 + read).time_per_token is None  # all at once


@pytest.mark.parametrize(
    ("tokens", "sizes", "rate"),
    [
        (32, None, 50),
        (32, [8, 24], 75),
        (None, [8, 24], 75),
        (0, None, 1 / 0.32),
        (8, [8, 24], None),
        (None, None, 3.125),
    ],
)
def test_the_rate_after_the_first_chunk_counts_its_tokens_or_estimates_them(tokens, sizes, rate):
    assert shot(1.0, 1.32, tokens=tokens, sizes=sizes).decode_rate == (None if rate is None else pytest.approx(rate))


def test_a_response_without_streaming_has_no_time_per_token():
    run = Run([shot(1.0, tokens=3, streamed=False)], wall=1.0)
    result = figures.summarize(run)
    assert result["ttft_p50_s"] is result["itl_p50_s"] is result["decode_tok_s"] is None
    assert result["output_tok_s"] == 3


def test_tokens_are_those_of_usage_else_of_ids_else_of_chunks():
    assert shot(1, 2, tokens=7, sizes=[1, 2]).tokens == 7
    assert shot(1, 2, sizes=[1, 2]).tokens == 3
    assert shot(1, 2).tokens == 2
    assert shot(1, 2, tokens=0).tokens == 2


def test_the_spread_is_over_the_rounds_that_saw_a_figure():
    result = figures.spread([{"a": 1.0, "b": None}, {"a": 3.0, "b": 5.0}, {"a": 2.0, "b": None}])
    assert result["a"] == {"median": 2, "q1": 1.5, "q3": 2.5, "min": 1, "max": 3}
    assert result["b"]["median"] == 5
    assert figures.spread([{"a": None}]) == {}


def test_notes_report_what_differs_from_the_request():
    shots = [
        shot(1, 2, tokens=4, output_len=4, prompt_tokens=10, cached_tokens=6),
        shot(1, 2, tokens=4, output_len=8, prompt_tokens=40),
        shot(error="refused"),
    ]
    result = "\n".join(figures.notes(target(), shots))
    assert "within one read" not in result
    for part in (
        "1 of 3 requests failed: refused",
        "8 tokens came in 4 chunks",
        "1 of 2 outputs ended before",
        "6 of 50 prompt tokens came from a cache",
        "25 tokens on average instead of 10",
    ):
        assert part in result


def test_failures_are_counted_by_reason_and_the_most_frequent_are_named():
    reasons = ["busy", "lost", "busy", None, "late", "gone", "lost", "busy"]
    found = figures.outcome([shot(1, error=reason) for reason in reasons])
    assert found == {"sent": 8, "failed": 7, "errors": {"busy": 3, "lost": 2, "late": 1, "gone": 1}}
    assert figures.failures(found) == "7 of 8 requests failed: busy (3); lost (2); late (1); and 1 other reason"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "-"),
        (1.5, "s", "1.500 s"),
        (0.0123456, "s", "12.35 ms"),
        (0.0000456, "s", "45.60 µs"),
        (0, "", "0"),
        (12345.6, "", "12,346"),
        (0.00000703, "", "7.03e-06"),
        (3 << 30, "bytes", "3 GiB"),
        (0.5, "%", "50.0 %"),
    ],
)
def test_numbers_are_shown_with_units(value, unit, text):
    assert number(value, unit) == text


def test_a_table_is_aligned():
    assert (
        table(["", "x"], [["long name", "1"], ["b", "1,000"]]) == "               x\nlong name      1\nb          1,000"
    )


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1,,x", "1.5"])
def test_bad_lists_of_numbers(text):
    with pytest.raises(options.argparse.ArgumentTypeError):
        options.wholes(text)


def test_lists_of_numbers_rise():
    assert options.wholes("4,1, 2 2") == [1, 2, 4]
    assert options.positives("2,0.5") == [0.5, 2]
