"""`pequod bench` against servers that refuse requests or die: what was measured is reported all the same."""

from __future__ import annotations

import json

from tests.server.cli.bench.test_client import Other

SMALL = ["--rounds", "1", "--warmup", "0", "--output-len", "4"]


def test_a_sweep_records_a_load_that_is_refused_and_goes_on(pequod):
    other = Other(busy_after=2)  # the client's question and the first request
    with other.listening() as url:
        code, out, err = pequod("sweep", "--url", url, *SMALL, "--concurrency", "1,3", "--json")
    result = json.loads(out)
    assert code == 0
    assert [(point["load"], point["sent"], point["failed"]) for point in result["concurrency"]] == [
        ("1", 1, 0),
        ("3", 3, 3),
    ]
    assert result["concurrency"][1]["errors"] == {"the server responded with status 429: too busy": 3}
    assert (result["sent"], result["failed"]) == (4, 3)
    assert "3 of 4 requests failed: the server responded with status 429" in err


def test_a_sweep_whose_server_dies_keeps_the_points_before_it(pequod, tmp_path):
    file = tmp_path / "sweep.json"
    with Other(dies_after=2).listening() as url:
        code, out, err = pequod(
            "sweep", "--url", url, *SMALL, "--concurrency", "1,2", "--context", "4", f"--json={file}"
        )
    assert code == 1
    assert "the server died after 0 of 2 responses: it no longer responds" in err
    result = json.loads(file.read_text())
    assert [point["load"] for point in result["concurrency"]] == ["1"]
    assert result["context"] == []
    assert "the server died" in result["failure"]
    assert "tokens/s" in out


def test_a_server_that_dies_in_the_second_round_keeps_the_first(pequod):
    words = ["--rounds", "3", "--warmup", "0", "--output-len", "4", "--requests", "2"]
    with Other(dies_after=3).listening() as url:
        code, out, _ = pequod("throughput", "--url", url, *words, "--json")
    assert code == 1
    assert [len(each) for each in json.loads(out)["requests"]] == [2]


def test_a_server_that_dies_before_anything_is_measured_has_no_result(pequod):
    with Other(dies_after=1).listening() as url:
        code, out, err = pequod("latency", "--url", url, *SMALL, "--json")
    assert (code, out) == (1, "")
    assert "the server died after 0 of 1 responses" in err


def test_requests_that_all_fail_are_written_and_fail_the_command(pequod):
    with Other(busy_after=1).listening() as url:
        code, out, err = pequod("throughput", "--url", url, *SMALL, "--requests", "3", "--json")
    assert code == 1
    assert (json.loads(out)["sent"], json.loads(out)["failed"]) == (3, 3)
    assert err.count("3 of 3 requests failed: the server responded with status 429: too busy") == 1
    assert err.endswith("every request failed\n")


def test_the_table_has_the_failed_requests(pequod):
    with Other(busy_after=3).listening() as url:
        code, out, _ = pequod("throughput", "--url", url, *SMALL, "--requests", "5")
        assert "failed requests: 3 of 5" in out
    with Other(busy_after=2).listening() as url:
        _, out, _ = pequod("sweep", "--url", url, *SMALL, "--concurrency", "1,3")
    assert code == 0
    (head, *_, last) = out.splitlines()[2:]
    assert (head.split()[-1], last.split()[0], last.split()[-1]) == ("failed", "3", "3")


def test_a_completion_that_failed_is_no_snapshot(pequod, tmp_path):
    file = tmp_path / "snapshot.json"
    with Other(busy_after=1).listening() as url:
        code, _, err = pequod("snapshot", "--write", "--url", url, "--file", str(file))
    assert code == 1
    assert "1 of 1 requests failed" in err
    assert not file.exists()


def test_invariance_fails_if_requests_could_not_be_compared(pequod):
    words = ["--requests", "3", "--output-len", "4"]
    with Other(busy_after=5).listening() as url:  # the question, three requests alone and one of them together
        code, out, _ = pequod("invariance", "--url", url, *words)
    assert code == 1
    assert "0 of 8 characters differ" in out  # " a" for each token
    assert "0 of 1 requests have different responses; 2 of 3 could not be compared" in out
    with Other().listening() as url:
        assert pequod("invariance", "--url", url, *words)[0] == 0
