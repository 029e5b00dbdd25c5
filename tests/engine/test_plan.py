"""Memory planning: before loading, on many machines, and with impossible settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import machine_memory, memory, plan, roofline
from engine.build import build
from engine.config import EngineConfig
from engine.kernels.library import choose
from engine.machine_memory import Machine, measure
from engine.types import ConfigError
from tests.engine.test_build import tiny_llama

GB = 10**9
QWEN3 = {  # the shape of Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000,
}
PARAMS, KV = 596_049_920, 2 * 28 * 8 * 128 * 2


@pytest.fixture
def qwen3(tmp_path):
    """Return a folder that contains only config.json."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return str(tmp_path)


@pytest.fixture
def on(monkeypatch):
    """Simulate a machine with some memory."""

    def pretend(total, available=None, kind="cpu"):
        machine = Machine(kind, total, total if available is None else available)
        monkeypatch.setattr(machine_memory, "measure", lambda device: machine)
        monkeypatch.setattr("engine.build.pick_device", lambda name: torch.device(kind))

    return pretend


def answer(**config):
    return plan._result(json.dumps(config))


def ok(**config):
    found, code = answer(**config)
    assert code == 0, found
    return found


def impossible(**config):
    found, code = answer(**config)
    assert code == 2 and found["error"], found
    return found


# -- what fits ----------------------------------------------------------------------------------------------------


def test_half_of_the_memory_less_weights_and_activations_becomes_blocks(qwen3, on):
    on(64 * GB)
    found = ok(model=qwen3)
    assert (found["num_params"], found["weights_bytes"], found["kv_bytes_per_token"]) == (PARAMS, 2 * PARAMS, KV)
    assert (found["architecture"], found["dtype"], found["device"]) == ("Qwen3ForCausalLM", "bfloat16", "cpu")
    assert found["memory_bytes"] == 32 * GB
    room = 32 * GB - 2 * PARAMS - found["activation_bytes"]
    assert found["num_blocks"] == room // (16 * KV)
    assert found["num_tokens"] == 16 * found["num_blocks"]
    assert found["kv_cache_bytes"] == found["num_tokens"] * KV
    assert found["max_len"] == 40960 and found["notes"] == []
    assert found["full_length_users"] == round(found["num_tokens"] / 40960, 2)
    assert 0.05 * GB < found["activation_bytes"] < GB


@pytest.mark.parametrize(("quantization", "of_the_bytes"), [("int8", 0.502), ("int4", 0.366)])
def test_quantized_weights_leave_more_memory_for_the_cache(qwen3, on, quantization, of_the_bytes):
    on(64 * GB)
    if not choose("auto", torch.device("cpu"), torch.bfloat16).invariant:
        pytest.skip("no kernels here")
    plain, found = ok(model=qwen3), ok(model=qwen3, quantization=quantization)
    assert (plain["quantization"], found["quantization"]) == ("none", quantization)
    assert found["num_params"] == PARAMS
    assert found["weights_bytes"] / plain["weights_bytes"] == pytest.approx(of_the_bytes, abs=0.01)
    assert found["num_blocks"] > plain["num_blocks"]


def test_plain_weights_must_fit_beside_rounded_ones_where_they_are_converted(qwen3, on):
    if not choose("auto", torch.device("cpu"), torch.float32).invariant:
        pytest.skip("no kernels here")
    small = {"model": qwen3, "num_blocks": 32, "max_seqs": 1, "max_batched_tokens": 16}
    on(64 * GB)
    held = ok(**small, quantization="int8", dtype="float32")
    head = 4 * QWEN3["vocab_size"] * QWEN3["hidden_size"]
    assert held["memory_bytes"] < held["weights_bytes"] + head, "so the load needs more than what comes after it"

    on(64 * GB, (held["memory_bytes"] + 10**6) / 0.9)
    ok(**small, quantization="int8", dtype="bfloat16")  # as the file has them
    found = impossible(**small, quantization="int8", dtype="float32")
    assert "while they are rounded, 0.6 GB of plain ones" in found["error"]
    assert len(found["try"]) == 3 and found["try"][0].startswith("`dtype=bfloat16`")

    on(64 * GB, (held["weights_bytes"] + head + 10**6) / 0.9)
    assert ok(**small, quantization="int8", dtype="float32")["num_blocks"] == 32


def test_too_large_a_model_may_fit_in_8_bits(qwen3, on):
    on(2.2 * GB)
    found = impossible(model=qwen3, max_len=1024)
    assert any(line.startswith("`quantization=int8`: weights of 0.6 GB leave memory") for line in found["try"])
    assert not any("quantization" in line for line in impossible(model=qwen3, max_len=10**6, device="cpu")["try"])


def test_quantized_weights_on_a_gpu_need_memory_for_a_plain_head_while_they_are_rounded(qwen3, on, monkeypatch):
    monkeypatch.setattr("engine.models.gpu.weight_trial.objection", lambda *_: None)
    small = {"model": qwen3, "max_seqs": 1, "max_batched_tokens": 16, "max_len": 1024}
    on(24 * GB, kind="cuda")
    plain, found = ok(**small), ok(**small, quantization="int4")
    assert found["weights_bytes"] / plain["weights_bytes"] == pytest.approx(0.366, abs=0.01)
    dequantized = 2 * 2 * QWEN3["intermediate_size"] * QWEN3["hidden_size"]  # gate and up in bfloat16
    assert found["activation_bytes"] - plain["activation_bytes"] == dequantized

    head = 2 * QWEN3["vocab_size"] * QWEN3["hidden_size"]
    on(24 * GB, found["weights_bytes"] + head - 10**6, "cuda")
    assert "while they are rounded, 0.3 GB of plain ones" in impossible(**small, quantization="int4")["error"]

    on(1.3 * GB, kind="cuda")
    assert any(line.startswith("`quantization=int8`: weights of 0.6 GB") for line in impossible(**small)["try"])


def test_a_cache_of_int8_holds_more(qwen3, on):
    on(64 * GB)
    found = ok(model=qwen3, kv_dtype="int8", kv_cache_memory=GB)
    assert (found["kv_dtype"], found["kv_bytes_per_token"]) == ("int8", 28 * 2 * 8 * (128 + 4))
    assert found["num_blocks"] == GB // (16 * found["kv_bytes_per_token"])
    assert found["weights_bytes"] == 2 * PARAMS
    plain = ok(model=qwen3, kv_cache_memory=GB)
    assert plain["kv_dtype"] == "bfloat16" and found["num_tokens"] > 1.9 * plain["num_tokens"]


def test_memory_in_use_is_not_available(qwen3, on):
    on(64 * GB, 10 * GB)
    assert ok(model=qwen3)["memory_bytes"] == 9 * GB


def test_a_cache_grows_no_further_than_is_useful(qwen3, on):
    on(10_000 * GB)
    assert ok(model=qwen3, max_seqs=3, max_len=1000)["num_tokens"] == 2 * 3 * 1008, "in whole blocks"
    assert ok(model=qwen3, max_seqs=3, max_len=1000, block_size=1024)["num_blocks"] == 6, "rounded up"


def test_the_models_own_length_is_lowered_to_what_the_pool_holds(qwen3, on):
    on(8 * GB)
    found = ok(model=qwen3)
    assert 512 <= found["max_len"] == found["num_tokens"] < 40960
    assert found["notes"] == [
        f"max_model_len lowered from 40960 to {found['max_len']} tokens, the capacity of the KV cache"
    ]


def test_a_length_beyond_the_models_is_lowered_with_a_note(qwen3, on):
    on(64 * GB)
    found = ok(model=qwen3, max_len=50_000)
    assert found["max_len"] == 40960 and "the maximum of the model" in found["notes"][0]


def test_configured_blocks_and_bytes_are_exact(qwen3, on):
    on(64 * GB)
    found = ok(model=qwen3, num_blocks=40)
    assert (found["num_blocks"], found["max_len"]) == (40, 640)
    found = ok(model=qwen3, max_len=640, num_blocks=4)
    assert (found["num_blocks"], found["max_len"]) == (4, 64)
    found = ok(model=qwen3, kv_cache_memory=3 * GB)
    assert found["kv_cache_bytes"] <= 3 * GB < found["kv_cache_bytes"] + 16 * KV
    assert found["memory_bytes"] == found["weights_bytes"] + found["activation_bytes"] + found["kv_cache_bytes"]


def test_a_gpu_gives_its_share_less_what_is_in_use(qwen3, on):
    on(80 * GB, 78 * GB, "cuda")
    found = ok(model=qwen3, gpu_memory_utilization=0.5)
    assert found["memory_bytes"] == 38 * GB
    assert (found["max_seqs"], found["max_batched_tokens"]) == (256, 8192)
    room = 38 * GB - found["weights_bytes"] - found["activation_bytes"]
    assert found["num_blocks"] == room // (16 * KV)


def test_measured_activations_replace_the_estimate(qwen3, on):
    from engine import models
    from engine.attention.reference import Reference

    config = EngineConfig(model=qwen3)
    spec = models.describe(Path(qwen3), config)
    machine = Machine("cuda", 80 * GB, 80 * GB)
    small, large = (memory.arrange(spec, config, machine, Reference, size) for size in (GB, 2 * GB))
    assert small.num_blocks - large.num_blocks == pytest.approx(GB / (16 * KV), abs=1)


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 7}, {"kv_dtype": "int8", "kv_cache_memory": 50_000}, {"block_size": 4}]
)
def test_the_running_engine_is_what_was_planned(tmp_path, on, monkeypatch, settings):
    """Without what an engine alone measures: if this machine is fast enough, it runs more sequences, with more blocks.

    Both see the same memory, which other processes would change between them.
    """
    on(64 * GB)
    monkeypatch.setattr(roofline, "measure", lambda *_, **__: None)
    folder = tiny_llama(tmp_path)
    found = ok(model=folder, device="cpu", **settings)
    _, info, _ = build(EngineConfig(model=folder, device="cpu", **settings))
    for name in (
        "kv_dtype",
        "weights_bytes",
        "num_params",
        "kv_bytes_per_token",
        "num_blocks",
        "max_len",
        "dtype",
        "architecture",
    ):
        assert found[name] == getattr(info, name), name
    assert found["notes"] == list(info.notes)


def listed():
    """Return (folder, parameters) for the published shapes in the data's README."""
    place = os.environ.get("PEQUOD_TEST_DATA")
    if not place:
        return []
    table = (Path(place) / "configs" / "README.md").read_text()
    rows = re.findall(r"^\| ([\w.-]+) \|.*\| ([\d,]+) \|$", table, re.M)
    return [(Path(place) / "configs" / name, int(count.replace(",", ""))) for name, count in rows]


@pytest.mark.parametrize(
    ("folder", "count"),
    [pytest.param(*each, id=each[0].name) for each in listed()]
    or [pytest.param(None, 0, marks=pytest.mark.skip("PEQUOD_TEST_DATA is not set"))],
)
def test_published_shapes_have_their_parameters(folder, count, on):
    on(1000 * GB)
    source = json.loads((folder / "config.json").read_text())
    found = ok(model=str(folder))
    assert found["num_params"] == count
    plain = count * (4 if found["dtype"] == "float32" else 2)
    if source.get("quantization_config"):
        assert count // 2 < found["weights_bytes"] < plain
    else:
        assert found["weights_bytes"] == plain
    assert 0 < found["activation_bytes"] < 10 * GB


# -- what does not ------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit(qwen3, on):
    on(2 * GB)
    found = impossible(model=qwen3, dtype="float32")
    assert "weights of 2.4 GB" in found["error"] and "1.0 GB" in found["error"] and "50%" in found["error"]
    assert len(found["try"]) == 3
    assert any("machine with at least" in each for each in found["try"])


def test_a_request_that_does_not_fit_is_offered_the_length_that_does(qwen3, on):
    on(8 * GB)
    found = impossible(model=qwen3, max_len=40960)
    assert "one request of 40960 tokens needs 4.7 GB" in found["error"]
    assert len(found["try"]) == 3
    length = int(found["try"][0].removeprefix("`max_len=").split("`")[0])
    assert ok(model=qwen3, max_len=length)["max_len"] == length
    impossible(model=qwen3, max_len=length * 5 // 4)
    size = int(found["try"][1].removeprefix("`kv_cache_memory=").split("`")[0])
    ok(model=qwen3, max_len=length, kv_cache_memory=size)


def test_a_smaller_dtype_is_offered_where_it_helps(qwen3, on):
    on(4 * GB)
    found = impossible(model=qwen3, dtype="float32")
    assert any(each.startswith("`dtype=bfloat16`") for each in found["try"])
    ok(model=qwen3, dtype="bfloat16")


def test_an_int8_cache_is_offered_where_it_helps(qwen3, on):
    on(6 * GB, 6 * GB, "cuda")
    settings = {"model": qwen3, "max_len": 40960, "max_seqs": 4, "max_batched_tokens": 16}
    found = impossible(**settings)
    assert found["try"][1].startswith("`kv_dtype=int8`: a KV cache of "), found
    ok(**settings, kv_dtype="int8")


def test_a_cache_larger_than_memory(qwen3, on):
    on(64 * GB, 20 * GB)
    found = impossible(model=qwen3, kv_cache_memory=30 * GB)
    assert "30.0 GB as configured" in found["error"] and "18.0 GB" in found["error"]
    assert found["try"][0].startswith("remove `kv_cache_memory`") and len(found["try"]) == 3
    size = int(found["try"][1].removeprefix("at most `kv_cache_memory=").split("`")[0])
    assert size % (1 << 30) == 0 and size > 10 * GB
    ok(model=qwen3, kv_cache_memory=size)
    assert "a machine with at least 35 GB of memory" in found["try"][2]
    found = impossible(model=qwen3, num_blocks=1_000_000)
    assert found["try"][0].startswith("remove `num_blocks`") and len(found["try"]) == 3


def test_a_cache_too_small_for_a_page(qwen3, on):
    on(64 * GB)
    for size in (1, 16 * KV, 511 * KV):
        found = impossible(model=qwen3, kv_cache_memory=size)
        assert "512 tokens" in found["error"] and len(found["try"]) == 3


def test_a_gpu_in_use_is_offered_more_of_itself_or_the_cpu(qwen3, on):
    on(24 * GB, 2 * GB, "cuda")
    found = impossible(model=qwen3)
    assert "90% of the GPU's 24.0 GB, less the 22.0 GB in use" in found["error"]
    assert len(found["try"]) == 3
    on(8 * GB, 4 * GB, "cuda")
    found = impossible(model=qwen3, gpu_memory_utilization=0.7)
    assert found["try"][0].startswith("`gpu_memory_utilization=0.9")
    ok(model=qwen3, gpu_memory_utilization=float(found["try"][0].split("=")[1].rstrip("`")))


@pytest.mark.parametrize("total", [1, 10**6, GB, 3 * GB])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("settings", [{"max_len": 40960}, {"dtype": "float64"}, {"num_blocks": 9999}])
def test_there_are_always_three_suggestions(qwen3, on, total, kind, settings):
    on(total, total // 2, kind)
    assert len(impossible(model=qwen3, **settings)["try"]) == 3


def test_invalid_settings_and_folders_are_reported_in_one_sentence(tmp_path, on):
    on(64 * GB)
    assert str(tmp_path / "none") in impossible(model=str(tmp_path / "none"))["error"]
    assert "config.json" in impossible(model=str(tmp_path))["error"]
    assert "block size" in impossible(model=str(tmp_path), block_size=0)["error"]
    found, code = plan._result('{"model": 3}')
    assert code == 2 and "EngineConfig" in found["error"]
    assert plan._result("{")[1] == 2


def test_impossible_is_a_config_error_with_its_suggestions():
    error = memory.Impossible("it is too large", ["a", "b", "c"])
    assert isinstance(error, ConfigError)
    assert str(error) == "it is too large\ntry: a\ntry: b\ntry: c"


def test_the_command_prints_json_and_nothing_else(qwen3):
    def run(**config):
        command = [sys.executable, "-m", "engine.plan", "--json", json.dumps(config)]
        root = Path(plan.__file__).parent.parent
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        return json.loads(done.stdout), done.returncode

    found, code = run(model=qwen3, device="cpu", num_blocks=40)
    assert code == 0 and found["num_blocks"] == 40
    found, code = run(model=qwen3, device="cpu", num_blocks=10**9)
    assert code == 2 and len(found["try"]) == 3


# -- the machine --------------------------------------------------------------------------------------------------


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    9000000 kB\n"}


def test_memory_is_read_from_the_kernel(tmp_path):
    write(tmp_path, MEMINFO)
    assert measure("cpu", tmp_path) == Machine("cpu", 16_000_000 * 1024, 9_000_000 * 1024)


@pytest.mark.parametrize(("is_integrated", "available"), [(False, 2 * GB), (True, 9_000_000 * 1024)])
def test_a_gpu_that_shares_the_machines_memory_may_take_what_files_occupy(
    tmp_path, monkeypatch, is_integrated, available
):
    write(tmp_path, MEMINFO)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GB, 16 * GB))
    properties = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert measure("cuda:0", tmp_path) == Machine("cuda", 16 * GB, available)


def test_a_control_groups_limit_counts_also_when_a_parent_sets_it(tmp_path):
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "5\n",
            "sys/fs/cgroup/a/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/a/memory.current": f"{3 * GB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GB}\n",
        },
    )
    assert measure("cpu", tmp_path) == Machine("cpu", 4 * GB, 2 * GB)


def test_control_groups_of_version_1_count_too(tmp_path):
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/jobs/1\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            "sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/jobs/1/memory.usage_in_bytes": f"{3 * GB}\n",
            "sys/fs/cgroup/memory/jobs/1/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert measure("cpu", tmp_path) == Machine("cpu", 2 * GB, 0)


def test_a_machine_without_proc_still_has_memory(tmp_path):
    machine = measure("cpu", tmp_path)
    assert machine.total == machine.available > 0
