"""`pequod bench` as a command: flags, results, and each part once against the built-in model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.__main__ import main
from server.cli.bench import invariance, roofline, snapshot
from server.cli.bench.client import Shot
from server.cli.bench.limits import Probe
from server.cli.bench.processes import tree
from server.cli.bench.steps import StepLog, decoding, phases, prefilling
from server.cli.commands import Failure, bench
from tests.live import WAIT_S, eventually
from tests.server.cli.bench.test_client import Other

ROOT = Path(__file__).parents[4]
SMALL = ["--rounds", "1", "--warmup", "0"]


def test_without_a_part_the_parts_are_listed(pequod):
    code, out, _ = pequod()
    assert code == 2
    assert all(part in out for part in bench.PARTS)
    assert pequod("--help")[0] == 0


@pytest.mark.parametrize("part", bench.PARTS)
def test_each_part_has_help(part, capsys):
    with pytest.raises(SystemExit) as leave:
        main(["bench", part, "--help"])
    assert leave.value.code == 0
    assert f"usage: pequod bench {part}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latncy"], "no part latncy; did you mean latency?"),
        (["qqq"], "see `pequod bench --help`"),
        (["latency", "--ruonds", "3"], "unknown flag --ruonds; did you mean --rounds?"),
        (["latency", "--rounds", "0"], "0 is not a whole number of at least 1"),
        (["latency", "--rows", "1,x"], "x is not a whole number"),
        (["latency", "--json", "builtin"], "builtin does not end in .json"),
        (["latency", "--url", "nowhere"], "--url nowhere is not a URL"),
        (["serve", "--rate", "0"], "0 is not a number above 0"),
        (["serve", "--rate", "inf"], "inf is not a number above 0"),
        (["serve", "--arrivals", "bursts"], "bursts"),
        (["serve", "--trace", "no.csv", "--rate", "2"], "--trace has arrival times"),
        (["serve", "--trace", "no.csv"], "--trace no.csv cannot be read"),
        (["sweep", "--concurrency", ""], "is not a list such as"),
        (["snapshot"], "either --write or --check"),
        (["snapshot", "--check", "--write"], "either --write or --check"),
        (["snapshot", "--check", "--prompts", "x"], "--prompts needs --write"),
        (["snapshot", "--check", "--file", "no.json"], "there is no snapshot no.json"),
        (["snapshot", "--write", "--prompts", "no.txt"], "--prompts no.txt cannot be read"),
        (["roofline", "--url", "http://127.0.0.1:1"], "unknown flag --url"),
    ],
)
def test_invalid_flags_are_refused_before_anything_starts(pequod, argv, message):
    code, out, err = pequod(*argv)
    assert (code, out) == (2, "")
    assert message in err


def test_no_server_at_the_url(pequod):
    code, out, err = pequod("latency", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "no server responds at http://127.0.0.1:9" in err


def test_a_server_that_cannot_start_is_reported_with_its_last_lines(pequod, tmp_path):
    code, out, err = pequod("latency", str(tmp_path / "none"), "--json")
    assert (code, out) == (1, "")
    assert "the server ended with code 2" in err
    assert "not the name of a model on a hub" in err


def test_a_missing_output_folder_is_reported_before_measuring(pequod):
    code, _, err = pequod("latency", "--url", "http://127.0.0.1:9", "--json=/nowhere/x.json")
    assert code == 1
    assert "there is no folder /nowhere" in err


def test_plots_without_matplotlib_name_the_extra(pequod, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = pequod("sweep", "--plot", str(tmp_path), "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "pip install matplotlib" in err


def test_flags_of_the_kernels_reach_their_program(monkeypatch):
    seen = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: seen.append(words) or SimpleNamespace(returncode=7))
    assert main(["bench", "kernels", "--rows", "16,1", "--isa", "avx2", "--seconds", "0.1", "--json"]) == 7
    (words,) = seen
    assert words[1:] == ["-m", "engine.bench.kernels", "--isa", "avx2", "--rows", "1,16", "--seconds", "0.1", "--json"]


@pytest.mark.slow
def test_the_kernels_are_measured(monkeypatch, capfd):
    """Every line of the program, with small sizes: those of a model take half a minute."""
    program = pytest.importorskip("engine.bench.kernels")
    monkeypatch.setattr(program, "SHAPES", {"qkv": (96, 64), "head": (500, 64)})
    monkeypatch.setattr(program.attention, "STEPS", [(1, 1, 128), (3, 1, 100), (1, 40, 60)])
    monkeypatch.setattr(program.logits, "VOCAB", 1000)
    for module in (program, program.attention):
        monkeypatch.setattr(module, "LARGE", 1 << 16)
    assert program.main(["--rows", "1", "--isa", "torch", "--seconds", "0.001", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [line["shape"] for line in result["products"]] == ["qkv", "head"]
    assert len(result["attention"]) == 3 and len(result["logits"]) == 12
    assert all(line["error"] < 0.02 for line in result["products"] + result["attention"])


# With a running server


def test_latency_of_another_server_as_json(pequod, tmp_path):
    with Other(refuses=("ignore_eos",)).listening() as url:
        file = tmp_path / "result.json"
        code, out, err = pequod("latency", "--url", url, *SMALL, "--output-len", "6", f"--json={file}")
    assert code == 0
    assert "refuses ignore_eos" in err
    result = json.loads(file.read_text())
    assert result["server"]["model"] == "other"
    assert result["peak_bytes"] is None
    assert "steps" not in result  # only known of a Pequod started here
    (request,) = result["requests"]
    assert len(request["times"]) == request["output_tokens"] == 6
    assert "first token" in out


def test_json_on_standard_output_has_the_whole_result(pequod):
    with Other().listening() as url:
        code, out, _ = pequod("throughput", "--url", url, *SMALL, "--requests", "5", "--concurrency", "2", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["figures"]["requests"]["median"] == 5
    assert result["workload"]["concurrency"] == 2


def test_a_trace_against_a_live_pequod(pequod, server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 9000, "output_length": 8} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    code, out, err = pequod("serve", "--url", server.url, "--trace", str(trace), *SMALL, "--json")
    assert code == 0
    result = json.loads(out)
    assert [r["prompt_tokens"] for r in result["requests"][0]] == [2040] * 4
    assert result["figures"]["output_tokens"]["median"] == 32
    assert "4 of 4 requests were cut to the 2048 tokens that fit" in err


def test_rates_and_lengths_against_a_live_pequod(pequod, server, tmp_path):
    lengths = ["--input-len", "8", "--output-len", "4"]
    code, out, err = pequod(
        "sweep", "--url", server.url, *SMALL, *lengths, "--rate", "50", "--requests", "4", "--context", "16,5000",
        "--concurrency", "1,2", "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(out)
    assert [point["load"] for point in result["concurrency"]] == ["1", "2"]
    assert [point["load"] for point in result["rate"]] == ["50/s"]
    assert [point["context"] for point in result["context"]] == [16]
    assert "--context 5000 is left out" in err
    assert result["limit"] is None  # the machine of another server is not known


def test_a_sweep_of_its_own_server_stands_beside_the_limit(pequod):
    lengths = ["--input-len", "8", "--output-len", "4", "--rounds", "1", "--warmup", "0"]
    code, out, _ = pequod("sweep", "builtin", *lengths, "--concurrency", "1,4", "--context", "16,64", "--json")
    assert code == 0
    result = json.loads(out)
    for rate, seen in result["machine_limits"].items():
        assert len(seen) == 5, "once before, and once after each point"
        assert result["limit"][rate] == sorted(seen)[2] > 1e6
    one, four = (point["limit_tpot_s"] for point in result["concurrency"])
    near, far = (point["limit_tpot_s"] for point in result["context"])
    assert 0 < one < four and 0 < near < far
    assert all(point["limit_tok_s"] > 0 for point in result["concurrency"])
    assert all(point["limit_ttft_s"] > 0 for point in result["context"])


def test_a_machine_that_cannot_be_measured_any_more_costs_no_figures(pequod, monkeypatch):
    async def dies(_: Probe) -> None:
        raise Failure("the machine's limits could not be measured")

    monkeypatch.setattr(Probe, "measure", dies)
    code, out, err = pequod("sweep", "builtin", *SMALL, "--output-len", "4", "--concurrency", "1,2", "--json")
    assert code == 0 and "could not be measured" in err
    result = json.loads(out)
    assert [point["load"] for point in result["concurrency"]] == ["1", "2"]
    assert len(result["machine_limits"]["bytes_per_s"]) == 1, "the one that was measured before"


def test_the_key_of_a_server_started_here_is_not_in_the_result(pequod, tmp_path):
    (tmp_path / "my.toml").write_text(f'uds = "{tmp_path / "p.sock"}"\n')  # it listens on a port all the same
    words = ["--api-key", "canary", "--config", str(tmp_path / "my.toml")]
    code, out, err = pequod("throughput", "builtin", *SMALL, "--output-len", "4", "--requests", "2", *words, "--json")
    assert code == 0
    assert json.loads(out)["figures"]["requests"]["median"] == 2
    assert "canary" not in out + err


def test_requests_that_do_not_fit_are_refused_at_once(pequod, server):
    code, _, err = pequod("throughput", "--url", server.url, "--input-len", "2000", "--output-len", "100")
    assert code == 2
    assert "2100 tokens of prompt and output are more than the server's 2048" in err


def test_invariance_counts_and_judges(pequod, server):
    code, out, _ = pequod("invariance", "--url", server.url, "--requests", "6", "--output-len", "5", "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["requests_compared"], result["tokens"]) == (6, 30)
    assert result["exact"] is server.client.get("/version").json()["exact"]  # not where torch computes the products
    assert result["logprobs"] == 30 - result["tokens_differing"]
    assert not (result["exact"] and (result["tokens_differing"] or result["bits_differing"]))


def test_a_server_that_reports_exactness_and_differs_fails(pequod, monkeypatch):
    result = {
        "exact": True, "unit": "tokens", "tokens_differing": 0, "bits_differing": 1, "tokens": 5, "logprobs": 5,
        "logprobs_differing": 1, "largest_difference": 1e-7, "requests_differing": 1, "requests_compared": 1,
        "workload": {"requests": 1, "concurrency": 2}, "server": {"name": "x", "model": "y"},
    }  # fmt: skip

    async def measured(_):
        return result

    monkeypatch.setattr(invariance, "measure", measured)
    code, out, _ = pequod("invariance")
    assert code == 1
    assert "1 bits differ, in 1 of 5 log-probabilities" in out
    monkeypatch.setitem(result, "bits_differing", 0)
    assert pequod("invariance")[0] == 0


def test_two_completions_are_compared_bit_by_bit():
    def completed(ids, logprobs):
        shot = Shot(0, 1, 1, 0)
        shot.token_ids, shot.logprobs = ids, logprobs
        return shot

    one = completed([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    assert invariance.compare(one, one) == invariance.Difference(4, 0, 4, 0, 0, 0.0)
    other = completed([1, 2, 9], [-1.0, -2.000000238418579, -3.5])
    found = invariance.compare(one, other)
    assert (found.tokens, found.scored, found.logprobs, found.bits) == (2, 2, 1, 1)
    assert found.largest == pytest.approx(2.4e-7, rel=0.01)


# A Pequod of its own


@pytest.mark.slow
def test_steps_and_memory_of_a_pequod_started_here(pequod):
    code, out, _ = pequod(
        "latency", *SMALL, "--output-len", "1000", "--rows", "1,3", "--json", "--num-gpu-blocks-override", "256"
    )  # long enough that requests which are sent together overlap on a busy machine
    assert code == 0
    result = json.loads(out)
    assert set(result["steps"]) == {"1", "3"}
    one = result["steps"]["1"]
    assert one["steps"] == 999
    assert 0 < one["rest_s"] < one["step_s"]
    assert one["limit_s"] > 0
    assert result["peak_bytes"] > 50 << 20
    assert len(result["requests"]) == 1


def with_engine(pids: list[int]) -> list[int]:
    """Return these processes if one of them is an engine."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pids
    return []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ending_a_measurement_ends_its_server():
    command = [sys.executable, "-m", "server", "bench", "latency", "--rounds", "1000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        # Other children, such as the one that measures the machine, end before there is an engine.
        pids = eventually(lambda: with_engine(tree(process.pid)), 240)
        process.terminate()
        assert process.wait(WAIT_S) == 130
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


def test_sigterm_cancels_a_measurement_where_it_waits(pequod, monkeypatch):
    """Before, it goes on: a server that has just been started must get to where it is stopped in the end."""
    seen = []

    async def measured(_):
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append("started")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("stopped")

    monkeypatch.setattr(invariance, "measure", measured)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored here
    try:
        assert pequod("invariance") == (130, "", "")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["started", "stopped"]


INTERRUPTED = """
import sys
from server.__main__ import main
from server.cli.commands import bench

bench.part = lambda name: exec("raise KeyboardInterrupt")
sys.exit(main(["bench", "latency"]))
"""


def test_an_interrupt_in_code_that_was_a_string_has_the_same_exit_code(tmp_path):
    """As in the methods of a dataclass, during an import. Python notices it only in a program that `-m` has started."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 130


def test_roofline_of_the_builtin_model(pequod, monkeypatch):
    monkeypatch.setattr(roofline, "DECODED", 1000)  # so that two requests overlap on a busy machine
    code, out, _ = pequod("roofline", *SMALL, "--prefill", "40", "--rows", "2", "--context", "20", "--json")
    assert code == 0
    result = json.loads(out)
    prefill, decode = result["phases"]
    assert prefill["phase"] == "prefill 40 tokens"
    assert decode["phase"] == "decode 2 rows at 20"
    # Two rows whose context grows from 21 to 1019: the weights, and the cache of the middle.
    kv = decode["bytes"] - result["weights_bytes"]
    assert 2 * 21 * 5120 < kv < 2 * 1020 * 5120
    assert len(result["machine_limits"]["bytes_per_s"]) == 5
    assert all(phase["share"] > 0 for phase in result["phases"])


@pytest.mark.slow
def test_startup_of_the_builtin_model(pequod):
    code, out, _ = pequod("startup", *SMALL, "--json")
    assert code == 0
    (start,) = json.loads(out)["starts"]
    assert 0 < start["port_s"] <= start["ready_s"]
    assert start["first_token_s"] > 0


def test_the_committed_snapshot_of_the_builtin_model_holds(pequod, server):
    """Changes that preserve the mathematics leave these completions as they are; use `--write` after a training."""
    code, out, err = pequod(
        "snapshot", "--check", "--url", server.url, "--file", str(ROOT / "benchmarks/snapshots/builtin.json")
    )
    assert (code, err) == (0, "")
    assert out == f"{len(snapshot.PROMPTS)} of {len(snapshot.PROMPTS)} completions are the same, byte for byte\n"


def test_the_committed_snapshot_is_far_from_any_tie():
    answers = json.loads((ROOT / "benchmarks/snapshots/builtin.json").read_text())["answers"]
    assert min(entry["margin"] for entry in answers) > 20 * snapshot.SAFE_MARGIN
    assert [entry["prompt"] for entry in answers] == list(snapshot.PROMPTS)


def test_a_snapshot_reports_what_changed(pequod, server, tmp_path):
    prompts, file = tmp_path / "prompts.txt", tmp_path / "snapshots" / "s.json"
    prompts.write_text("What is 7 + 5?\n\nThe sea\n")
    common = ["snapshot", "--url", server.url, "--file", str(file), "--api", "completions"]
    code, out, err = pequod(*common, "--write", "--prompts", str(prompts), "--max-tokens", "6")
    assert code == 0
    assert "2 completions written" in out
    saved = json.loads(file.read_text())
    saved["answers"][1]["text"] = "Q" + saved["answers"][1]["text"][1:]
    saved["answers"][1]["sha256"] = "0" * 64
    file.write_text(json.dumps(saved))
    code, out, err = pequod("snapshot", "--url", server.url, "--file", str(file), "--check")
    assert code == 1
    assert out.startswith("1 of 2 completions are the same")
    assert "'The sea' differs at character 0: it was 'Q" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_hash": "f00"}, "was written for another weights_hash: f00"),
        ({"format": 99}, "has format 99"),
        ({"answers": [{"prompt": "x"}]}, "is not a snapshot"),
        ({"answers": 3}, "is not a snapshot"),
    ],
)
def test_a_snapshot_of_something_else(pequod, server, tmp_path, change, message):
    saved = json.loads((ROOT / "benchmarks/snapshots/builtin.json").read_text())
    file = tmp_path / "s.json"
    file.write_text(json.dumps(saved | change))
    code, _, err = pequod("snapshot", "--check", "--url", server.url, "--file", str(file))
    assert code in (1, 2)
    assert message in err


def test_a_step_log_is_read_as_it_grows(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    assert log.read() == []

    def line(rows, prompt, decode, **seconds):
        return json.dumps(
            {"time": 1.0, "rows": [[1, 1]] * rows, "prompt_tokens": prompt, "decode_tokens": decode,
             "output_tokens": rows, "context": 9, "pairs": 9, "logits": rows, "seconds": seconds}
        ) + "\n"  # fmt: skip

    half = line(2, 0, 2, forward=3.0, sample=1.0, masks=9.0)
    path.write_text(line(1, 8, 0, forward=2.0) + half[:10])
    first = log.read()
    assert [step.prompt_tokens for step in first] == [8]
    with path.open("a") as file:
        file.write(half[10:] + line(2, 0, 2, forward=5.0, sample=1.0) + line(2, 8, 1, forward=9.0))
    steps = log.read()
    assert len(steps) == 3
    assert log.read() == []
    assert len(decoding(steps, 2)) == 2
    assert len(prefilling(first + steps)) == 1
    found = phases(decoding(steps, 2))
    assert (found["step_s"], found["forward_s"], found["kernels_s"], found["rest_s"]) == (5.0, 4.0, 0.0, 1.0)
    path.write_text(path.read_text() + line(1, 0, 1, forward=5.0, sample=1.0, kernels=5.5))
    found = phases(log.read())
    assert (found["step_s"], found["kernels_s"], found["rest_s"]) == (6.0, 5.5, 0.5)
