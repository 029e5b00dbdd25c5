"""`pequod plan` computes, before anything is loaded, the numbers that the running server reports."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.live import Server

ROOT = pathlib.Path(__file__).parents[4]


def plan(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "server", "plan", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    # How many sequences a step may have is measured at each start, and on a busy machine not always the same.
    "settings",
    [["--max-num-seqs", "32"], ["--kv-cache-memory", "64MiB", "--max-num-seqs", "4"]],
    ids=["default", "small"],
)
def test_the_plan_is_what_the_server_does(settings):
    done = plan("builtin", "--json", *settings)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    with Server("builtin", *settings) as server:
        page = server.client.get("/metrics").text
        blocks = int(re.search(r'vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"', page)[1])
        weights = server.metric("pequod:memory_bytes", kind="weights")
        kv = server.metric("pequod:memory_bytes", kind="kv")
    assert planned["num_blocks"] == pytest.approx(blocks, rel=0.03)
    assert planned["num_tokens"] == planned["num_blocks"] * 16
    assert planned["weights_bytes"] == pytest.approx(weights, rel=0.03)
    assert planned["kv_bytes_per_token"] * planned["num_tokens"] == pytest.approx(kv, rel=0.03)
    assert planned["full_length_users"] == pytest.approx(planned["num_tokens"] / planned["max_len"], abs=1)


def test_an_impossible_plan_exits_2_with_three_suggestions():
    done = plan("builtin", "--kv-cache-memory", "1MiB", "--max-model-len", "2048")
    assert done.returncode == 2
    tries = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("try:")]
    assert len(tries) == 3
    assert "Traceback" not in done.stderr
