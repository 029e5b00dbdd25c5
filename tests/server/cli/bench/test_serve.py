"""`pequod bench serve`: what it sends for a trace and for a rate, and what it reports of them."""

from __future__ import annotations

import json

import pytest

from tests.server.cli.bench.test_client import Other


@pytest.mark.parametrize("lengths", [(3, 5), (60, 400)])
def test_a_trace_is_warmed_up_with_its_own_lengths(pequod, tmp_path, lengths):
    """Also on a server that does not take the lengths of --input-len and --output-len."""
    trace, other = tmp_path / "trace.jsonl", Other(max_len=64)
    rows = [{"timestamp": at, "input_length": lengths[0], "output_length": lengths[1]} for at in (0, 10)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with other.listening() as url:
        code, out, err = pequod("serve", "--url", url, "--trace", str(trace), "--rounds", "1", "--json")
    assert code == 0
    _, warmup, *sent = [(len(body["prompt"]), body["max_tokens"]) for body in other.bodies]
    assert sent == [warmup] * 2 == [lengths if lengths == (3, 5) else (32, 32)] * 2
    assert ("2 of 2 requests were cut to the 64 tokens" in err) == (lengths == (60, 400))
    assert json.loads(out)["workload"]["rate"] == 100


def test_a_rate_is_reported_as_it_was_requested(pequod):
    lengths = ["--input-len", "4", "--output-len", "2", "--requests", "3"]
    with Other().listening() as url:
        code, out, _ = pequod("serve", "--url", url, *lengths, "--rate", "200", "--rounds", "2", "--json")
    assert code == 0
    assert json.loads(out)["workload"]["rate"] == 200
