"""The checks of `pequod doctor`, on machines that pass them and on machines that do not."""

from __future__ import annotations

import json
import os
import pwd
import resource
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

import engine
from engine import ConfigError, EngineDied, EngineInfo, ModelError
from engine.facts import driver
from server import settings
from server.__main__ import main
from server.cli.commands import doctor
from server.cli.commands.doctor import Finding
from server.settings import Settings

TORCH = {"version": "2.13.0+cpu", "cuda": None, "threads": 2, "cpu": "AVX512", "devices": []}
TORCH |= {"driver": None, "triton": "3.6.0", "compiler": "/usr/bin/gcc", "headers": True}
GPU = {"name": "H200", "bytes": 140 << 30, "free": 139 << 30, "capability": "9.0"}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    for name in list(os.environ):
        if name.startswith(settings.PREFIX) or name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name)


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine without torch's start-up time: torch's facts and the engine's findings are given."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "torch_facts", lambda: TORCH)
    monkeypatch.setattr(doctor, "engine", lambda _: [Finding("engine", "ok", "works")])


def levels(findings) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_each_finding_that_is_not_ok_has_a_fix(healthy, capsys):
    code = main(["doctor", "--json", "--port", "0"])
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is (code == 0)
    names = [finding["name"] for finding in result["findings"]]
    assert names[:3] == ["python", "system", "cpu"]
    assert {"memory", "packages", "port", "cache", "disk", "open files", "torch", "engine", "can run"} <= set(names)
    assert all(finding["fix"] for finding in result["findings"] if finding["level"] != "ok")


def test_text_output_and_exit_code_0(healthy, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: Finding("memory", "warn", "little", "buy more"))
    assert main(["doctor", "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert "warn  memory     little\n" in out
    assert "fix: buy more\n" in out
    assert "0 failed" in out.splitlines()[-1]
    assert "\x1b" not in out


def test_a_failure_is_exit_code_1_and_skips_checks_that_depend_on_it(healthy, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "torch_facts", lambda: Finding("torch", "fail", "cannot be imported", "pip install it"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  torch" in out and "fix: pip install it" in out
    assert "engine" not in out


def test_a_torch_that_cannot_be_imported(monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nImportError: libtorch.so", stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    finding = doctor.torch_facts()
    assert isinstance(finding, Finding)
    assert (finding.level, finding.text) == ("fail", "cannot be imported: ImportError: libtorch.so")

    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    finding = doctor.torch_facts()
    assert isinstance(finding, Finding) and finding.level == "fail"


def test_a_child_reports_the_facts_of_torch():
    facts = doctor.torch_facts()
    assert isinstance(facts, dict)
    assert set(facts) == set(TORCH)
    assert levels(doctor.torch_findings(facts))["torch"] == "ok"


def test_torch_builds():
    with_driver = {**TORCH, "driver": "580.65.06"}
    assert levels(doctor.torch_findings({**TORCH, "version": "2.9.1"}))["torch"] == "warn"
    assert levels(doctor.torch_findings(TORCH))["gpu"] == "ok"
    assert levels(doctor.torch_findings(with_driver))["gpu"] == "warn"  # a GPU, and torch for CPUs
    assert levels(doctor.torch_findings({**with_driver, "cuda": "13.0"}))["gpu"] == "warn"  # a driver that is too old


def test_gpus():
    busy, unusable = {**GPU, "free": 50 << 30}, {**GPU, "free": None}
    torch = {**TORCH, "cuda": "13.0", "driver": "580.65.06", "devices": [GPU, busy, unusable]}
    found = list(doctor.torch_findings(torch))
    assert [finding.name for finding in found] == ["torch", "gpu", "gpu", "gpu", "triton"]
    assert [finding.level for finding in found] == ["ok", "ok", "warn", "fail", "ok"]
    assert found[1].text == ("cuda:0 H200, compute capability 9.0, driver 580.65.06, 139.0 GiB free of 140.0 GiB")


@pytest.mark.parametrize(
    "lacks, text, fix",
    [
        ({"triton": None}, "without Triton torch computes", "pip install triton"),
        ({"compiler": None}, "without a C compiler torch computes", "apt-get install gcc"),
        (
            {"compiler": None, "headers": False},
            "without a C compiler and Python's headers torch computes",
            "apt-get install gcc; apt-get install python3-dev",
        ),
    ],
)
def test_what_compiling_gpu_kernels_needs(lacks, text, fix):
    finding = doctor.triton({**TORCH, **lacks})
    assert (finding.level, finding.fix) == ("warn", fix) and finding.text.startswith(text)


def test_the_driver_is_found_in_the_kernels_own_words(tmp_path):
    file = tmp_path / "version"
    assert driver(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    )
    assert driver(file) == "580.65.06"
    file.write_text("")
    assert driver(file) is None


def test_capacity_counts_the_gpu_where_there_is_one():
    assert "59.9 B" in doctor.capacity({**TORCH, "devices": [{**GPU, "bytes": 140 * 10**9}]}).text
    assert "on the CPU" in doctor.capacity(TORCH).text


def test_a_container_with_less_time_than_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 1.5)
    found = {finding.name: finding for finding in doctor.cpu()}
    assert found["cpu limit"].level == "warn"
    assert "--threads 1" in found["cpu limit"].fix
    monkeypatch.setattr(doctor, "cpu_quota", lambda: None)
    assert "cpu limit" not in levels(doctor.cpu())


def test_the_least_quota_of_the_control_groups_counts(tmp_path):
    assert doctor.cpu_quota(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup/pod/container"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/old\n0::/pod/container\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert doctor.cpu_quota(tmp_path) is None
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert doctor.cpu_quota(tmp_path) == 1.5
    (group / "cpu.max").write_text("50000 100000\n")
    assert doctor.cpu_quota(tmp_path) == 0.5


def test_an_old_cpu(monkeypatch):
    monkeypatch.setattr(doctor, "cpu_facts", lambda: ("Old", {"sse2"}, 4))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert levels(doctor.cpu())["cpu"] == "warn"


def test_a_container_with_less_memory(monkeypatch):
    small = SimpleNamespace(total=3 << 30, available=1 << 30, share=0.9)
    monkeypatch.setattr(engine, "measure_memory", lambda _: small)
    assert (doctor.memory().level, doctor.memory().text) == ("warn", "1.0 GiB free of 3.0 GiB")
    assert "about 0.5 B parameters" in doctor.capacity(TORCH).text


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("tokenizers", "no-such-package"))
    finding = doctor.packages()
    assert (finding.level, finding.fix) == ("fail", "pip install no-such-package")


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert doctor.port(Settings(port=port)).level == "warn"
    assert doctor.port(Settings(port=port)).level == "ok"


def test_the_cache_folder_is_where_the_hub_library_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert doctor.cache_folder() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "/a")
    assert doctor.cache_folder() == Path("/a/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/b")
    assert doctor.cache_folder() == Path("/b")


def test_a_user_without_a_home_directory_has_the_cache_of_the_hub_library(monkeypatch):
    def none(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    assert doctor.cache_folder() == Path("~/.cache/huggingface/hub")
    assert levels(doctor.disk()).keys() == {"cache", "disk"}


def test_the_compiler_is_the_one_that_compiles_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/bin/true -m64")
    assert doctor.compiler() == Finding("compiler", "ok", "/bin/true -m64")
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    assert (doctor.compiler().level, doctor.compiler().fix) == ("warn", "correct or unset CXX")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.compiler() == Finding("compiler", "ok", "none for C++; only building the CPU kernels needs one")


async def test_the_engine_of_the_check_has_the_full_length_of_its_model():
    info, _ = await doctor._generate(Settings())
    assert info.max_len == 2048 and not [note for note in info.notes if "max_len" in note]


def test_a_cache_that_cannot_be_written_and_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert levels(doctor.disk()) == {"cache": "warn", "disk": "warn"}


def test_few_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert doctor.open_files().level == "warn"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert doctor.open_files().level == "ok"


def test_openmp_runtimes_are_counted_by_file(monkeypatch, tmp_path):
    maps = "\n".join(
        [
            "7f00-7f01 r-xp 00000000 08:01 1 /x/torch/lib/libgomp-a.so.1",
            "7f01-7f02 rw-p 00000000 08:01 1 /x/torch/lib/libgomp-a.so.1",
            "7f03-7f04 r-xp 00000000 08:01 2 /usr/lib/libomp.so.5",
            "7f05-7f06 r-xp 00000000 08:01 3 /usr/lib/libc.so.6",
            "7f07-7f08 rw-p 00000000 00:00 0 [heap]",
        ]
    )
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: maps)
    assert doctor.openmp(1) == ["/usr/lib/libomp.so.5", "/x/torch/lib/libgomp-a.so.1"]
    monkeypatch.undo()
    assert doctor.openmp(None) is None


def generate(monkeypatch, result):
    async def given(_):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(doctor, "_generate", given)
    return {finding.name: finding for finding in doctor.engine(Settings())}


def test_findings_of_a_working_engine(monkeypatch):
    info = EngineInfo(
        model="builtin", architecture="A", max_len=64, vocab_size=9, block_size=16, num_blocks=8, max_seqs=2,
        max_batched_tokens=8, dtype="float32", device="cpu", attention="reference", implementation="native",
        exact=False, num_params=5, weights_bytes=20, kv_bytes_per_token=4, weights_hash="h", load_seconds=0.1,
        torch="2", kv_dtype="float32",
    )  # fmt: skip
    found = generate(monkeypatch, (info, ["/a/libgomp.so.1"]))
    assert [finding.level for finding in found.values()] == ["ok"] * 6
    assert "rounding" in found["results"].text
    assert found["products"].text == "computed by torch"
    assert found["attention"].text == "computed by the reference backend, keys and values in float32"
    ours = structs.replace(info, product="avx512")
    assert "our own kernels for avx512" in generate(monkeypatch, (ours, None))["products"].text
    assert found["sampling"].text == "computed by torch"
    sampling = structs.replace(info, sampling="avx2")
    assert generate(monkeypatch, (sampling, None))["sampling"].text == "computed by our own kernels for avx2"
    rounded = structs.replace(ours, quantization="int8")
    assert generate(monkeypatch, (rounded, None))["products"].text.endswith("for avx512, with weights in int8")
    lost = structs.replace(info, product_note="no CPU kernels", product_fix="install g++ or set `dtype=bfloat16`")
    result = generate(monkeypatch, (lost, None))["products"]
    assert (result.level, result.text, result.fix) == ("warn", "no CPU kernels", "install g++ or set --dtype bfloat16")
    assert generate(monkeypatch, (info, ["/a/libgomp.so.1", "/b/libomp.so"]))["openmp"].level == "warn"
    assert "openmp" not in generate(monkeypatch, (info, None))
    on_gpu = generate(monkeypatch, (structs.replace(info, device="cuda:0", graphs=15), None))
    assert "graphs" not in found and on_gpu["graphs"].text.startswith("steps of 15 sizes are replayed from CUDA graphs")


def test_graphs_that_are_off_or_missing_are_reported():
    assert doctor.graphs(0, Settings(enforce_eager=True)).startswith("off (--enforce-eager)")
    assert doctor.graphs(0, Settings()).startswith("none: ")


def test_an_impossible_setting_is_named_as_a_flag(monkeypatch):
    found = generate(monkeypatch, ConfigError("`quantization=int8` needs kernels"))["engine"]
    assert (found.level, found.text) == ("fail", "--quantization int8 needs kernels")
    assert found.fix == "change the setting that the message names"


@pytest.mark.parametrize("error", [ModelError("no weights"), EngineDied("killed"), TimeoutError()])
def test_an_engine_that_fails_has_a_fix(monkeypatch, error):
    found = generate(monkeypatch, error)
    assert found["engine"].level == "fail" and found["engine"].fix


def test_a_named_model_is_checked(monkeypatch, tmp_path):
    def fetch(*_, **__):
        return SimpleNamespace(path=tmp_path)

    monkeypatch.setattr(engine, "fetch", fetch, raising=False)
    monkeypatch.setattr("server.cli.commands.plan.make", lambda _: (2, {"error": "too large", "try": ["a", "b", "c"]}))
    (tmp_path / "config.json").write_text("{}")
    found = {finding.name: finding for finding in doctor.model(Settings(model=str(tmp_path)))}
    assert (found["model"].level, found["model"].text) == ("fail", "too large")
    assert found["model"].fix == "a; or b; or c"
    assert found["weights"].level == "fail"
    assert found["tokenizer"].level == "fail"


def test_a_model_that_does_not_exist(monkeypatch):
    def fetch(*_, **__):
        raise ModelError("there is no such model")

    monkeypatch.setattr(engine, "fetch", fetch, raising=False)
    (finding,) = doctor.model(Settings(model="nobody/nothing"))
    assert (finding.level, finding.text) == ("fail", "there is no such model")
