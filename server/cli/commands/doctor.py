"""`pequod doctor`: what this machine can run, each finding with its repair."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...child import run_python
from ...settings import with_flags
from ..machine import cpu_facts
from . import Failure, Parser, add_settings, settings_from, wants_colour

if TYPE_CHECKING:
    from engine import EngineInfo

    from ...settings import Settings

COLOURS = {"ok": "32", "warn": "33", "fail": "31"}
PACKAGES = ("tokenizers", "safetensors", "transformers", "fastapi", "uvicorn")
# Instructions that decide how fast a CPU multiplies matrices, as /proc/cpuinfo spells them.
ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
OPENMP = ("libgomp", "libiomp", "libomp")
GIB = 1 << 30
TORCH_S = 120.0
ENGINE_S = 120.0
TORCH = """
import json, sys
import torch
cuda = torch.version.cuda or torch.version.hip
devices = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    devices.append({"name": p.name, "bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"})
print(json.dumps({"version": torch.__version__, "cuda": cuda, "threads": torch.get_num_threads(),
    "cpu": torch.backends.cpu.get_cpu_capability(), "devices": devices}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `level` is ok, warn or fail; `fix` says what to do about the last two."""

    name: str
    level: str
    text: str
    fix: str = ""


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod doctor [MODEL] [flags]"
    parser.description = (
        "Check what this machine can run. Exit code 1 when a check fails."
        " With MODEL, check the folder of that model, too."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "model", "engine", extra=["host", "port"])


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, each as soon as it is known."""
    loaded = settings_from(arguments)
    found = []
    for finding in examine(loaded.settings, loaded.sources["model"] != "default"):
        found.append(finding)
        if not arguments.json:
            show(finding)
    failed = any(finding.level == "fail" for finding in found)
    if arguments.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, ensure_ascii=False))
        return int(failed)
    levels = [finding.level for finding in found]
    print(f"{levels.count('ok')} ok, {levels.count('warn')} to look at, {levels.count('fail')} failed")
    return int(failed)


def show(finding: Finding) -> None:
    """One finding on one line, its repair on the next."""
    level = f"{finding.level:<4}"
    if wants_colour(sys.stdout):
        level = f"\033[{COLOURS[finding.level]}m{level}\033[0m"
    print(f"{level}  {finding.name:<10} {finding.text}")
    if finding.fix and finding.level != "ok":
        print(f"{'':<16} fix: {finding.fix}")
    sys.stdout.flush()


def examine(settings: Settings, with_model: bool) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    yield python()
    yield system()
    yield from cpu()
    yield from memory()
    yield from packages()
    yield compiler()
    yield port(settings)
    yield from disk()
    yield open_files()
    torch = torch_facts()
    if isinstance(torch, Finding):
        yield torch
        return
    yield from torch_findings(torch)
    yield from engine(settings)
    yield capacity(torch)
    if with_model:
        yield from model(settings)


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def system() -> Finding:
    machine = platform.machine()
    told = f"{platform.system()} {platform.release()} on {machine}"
    known = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}
    if (platform.system(), machine) in known:
        return Finding("system", "ok", told)
    fix = "use Linux on x86-64 or arm64, macOS on arm64, or WSL2 on Windows"
    return Finding("system", "fail" if platform.system() == "Windows" else "warn", f"{told}, not tested", fix)


def cpu() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, flags = cpu_facts()
    have = [isa for isa in ISA if isa in flags]
    told = f"{name}, {cores} cores, {' '.join(have) or 'no vector instructions that matter'}"
    if platform.machine() == "x86_64" and flags and "avx2" not in flags:
        yield Finding("cpu", "warn", told, "a CPU with AVX2 is several times faster")
    else:
        yield Finding("cpu", "ok", told)
    quota = cpu_quota()
    if quota is not None and quota < cores:
        yield Finding(
            "cpu limit",
            "warn",
            f"the container may use {quota:g} of {cores} cores; more threads than that wait for each other",
            f"serve with --threads {max(1, int(quota))}, or raise the container's CPU limit",
        )


def cgroup(file: str) -> list[str]:
    """What this process's control group and its parents say in a file."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                folders = [own, *(parent for parent in own.parents if parent.is_relative_to("/sys/fs/cgroup"))]
                return [(folder / file).read_text().strip() for folder in folders if (folder / file).is_file()]
    return []


def cpu_quota() -> float | None:
    """Cores' worth of time that the control group may use; None: no limit."""
    pairs = [text.split() for text in cgroup("cpu.max")]
    return min((int(quota) / int(period) for quota, period in pairs if quota != "max"), default=None)


def memory_facts() -> tuple[int, int]:
    """Total and available bytes of memory, as the control group limits them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    limit = min((int(text) for text in cgroup("memory.max") if text.isdigit()), default=total)
    used = max((int(text) for text in cgroup("memory.current")[:1] if text.isdigit()), default=0)
    return min(total, limit), min(available, limit - used) if limit < total else available


def memory() -> Iterator[Finding]:
    from ..banner import size

    total, available = memory_facts()
    told = f"{size(available)} free of {size(total)}"
    if available < 2 * GIB:
        yield Finding(
            "memory", "warn", told, "close other programs or raise the container's limit; torch alone takes 0.5"
        )
    else:
        yield Finding("memory", "ok", told)


def packages() -> Iterator[Finding]:
    have, missing = [], []
    for name in PACKAGES:
        try:
            have.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", ", ".join(have))


def compiler() -> Finding:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return Finding(
        "compiler",
        "ok",
        f"{found}" if found else "none for C++; Pequod runs without one once its CPU kernels are built",
    )


def port(settings: Settings) -> Finding:
    where = f"{settings.port} of {settings.host}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        return Finding("port", "warn", f"{where} {reason}", "choose another with --port, or end what listens there")
    return Finding("port", "ok", f"{where} is free")


def cache_folder() -> Path:
    """Where huggingface_hub keeps models."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def disk() -> Iterator[Finding]:
    from ..banner import size

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if os.access(existing, os.W_OK) and existing.is_dir():
        yield Finding("cache", "ok", f"models from the hub go to {folder}")
    else:
        yield Finding("cache", "warn", f"{folder} cannot be written, so no hub model can be fetched", "set HF_HOME")
    free = shutil.disk_usage(existing).free
    if free < 5 * GIB:
        yield Finding("disk", "warn", f"{size(free)} free there", "make room, or set HF_HOME to a larger disk")
    else:
        yield Finding("disk", "ok", f"{size(free)} free there")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        fix = "raise it: `ulimit -Hn 65536` as root, LimitNOFILE= in a systemd unit, or --ulimit nofile in Docker"
        return Finding("open files", "warn", f"at most {hard}, each connection takes one", fix)
    return Finding("open files", "ok", f"{soft} now; serve raises it to as much as 65536")


def torch_facts() -> dict[str, Any] | Finding:
    """What torch says about itself, asked in a child so that this process stays small."""
    fix = "pip install 'torch>=2.11,<2.14' (without a GPU: from the CPU index that the torch website names)"
    try:
        done = run_python("-c", TORCH, timeout_s=TORCH_S)
    except subprocess.TimeoutExpired:
        return Finding("torch", "fail", f"was not imported after {TORCH_S:.0f} s", fix)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
        return Finding("torch", "fail", f"cannot be imported: {last[:200]}", fix)
    return json.loads(done.stdout.splitlines()[-1])


def torch_findings(torch: dict[str, Any]) -> Iterator[Finding]:
    from ..banner import size

    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU"
    told = f"{torch['version']}, {build} build, {torch['threads']} threads, {torch['cpu']} on the CPU"
    number = tuple(int(part) for part in torch["version"].split("+")[0].split(".")[:2])
    if (2, 11) <= number < (2, 14):
        yield Finding("torch", "ok", told)
    else:
        yield Finding("torch", "warn", f"{told}, not tested", "pip install 'torch>=2.11,<2.14'")
    if torch["devices"]:
        for i, device in enumerate(torch["devices"]):
            text = f"cuda:{i} {device['name']}, {size(device['bytes'])}, compute capability {device['capability']}"
            yield Finding("gpu", "ok", text)
    elif not Path("/dev/nvidiactl").exists():
        yield Finding("gpu", "ok", "none; the CPU computes")
    elif torch["cuda"]:
        fix = "update the NVIDIA driver: `nvidia-smi` must work and tell at least the CUDA version of torch"
        yield Finding("gpu", "warn", "there is one, and torch cannot use it", fix)
    else:
        yield Finding("gpu", "warn", "there is one, and this torch is a CPU build", "pip install torch from PyPI")


def engine(settings: Settings) -> Iterator[Finding]:
    """Let a real engine answer with the built-in model, and look at its process."""
    from engine import ConfigError, EngineError

    try:
        began = time.monotonic()
        info, runtimes = asyncio.run(_answer(settings))
        seconds = time.monotonic() - began
    except TimeoutError:
        yield Finding(
            "engine", "fail", f"gave no answer in {ENGINE_S:.0f} s", "look for what keeps the CPU busy: `top`"
        )
        return
    except ConfigError as error:
        yield Finding("engine", "fail", with_flags(error), "change the setting that it names")
        return
    except EngineError as error:
        yield Finding("engine", "fail", with_flags(error), "install Pequod again: make install")
        return
    yield Finding("engine", "ok", f"answers on {info.device}; start, built-in model and answer took {seconds:.1f} s")
    exact = "exact: a request gives the same bits alone and in any batch"
    yield Finding("results", "ok", exact if info.exact else "equal up to rounding between batches")
    if info.product_note:
        yield Finding("products", "warn", with_flags(info.product_note), with_flags(info.product_fix))
    else:
        own = f"by our own kernels for {info.product}" if info.product != "torch" else "by torch"
        weights = "" if info.quantization == "none" else f", of weights in {info.quantization}"
        yield Finding("products", "ok", f"computed {own}{weights}")
    kept = f"keys and values in {info.kv_dtype}"
    yield Finding("attention", "ok", f"computed by the {info.attention} backend, {kept}")
    samples = "by torch" if info.sampling == "torch" else f"by our own kernels for {info.sampling}"
    yield Finding("sampling", "ok", f"computed {samples}")
    if runtimes is None:
        return
    if len(runtimes) <= 1:
        yield Finding("openmp", "ok", f"{len(runtimes)} runtime in the engine" + "".join(f": {r}" for r in runtimes))
    else:
        fix = "two pools of threads slow each other down: reinstall torch by pip alone, unset LD_PRELOAD"
        yield Finding("openmp", "warn", f"{len(runtimes)} runtimes in the engine: {', '.join(runtimes)}", fix)


async def _answer(settings: Settings) -> tuple[EngineInfo, list[str] | None]:
    """The engine's description and the OpenMP libraries in its process, after it has drawn some tokens."""
    from engine import EngineConfig, EngineDied, EngineRequest, ProcessEngine, SamplingParams

    one = ProcessEngine(
        EngineConfig(
            model="builtin",
            device=settings.device,
            quantization=settings.quantization,
            kv_dtype=settings.kv_cache_dtype,
            cpu_isa=settings.cpu_isa,
            threads=settings.threads,
            num_blocks=64,
        )
    )
    try:
        await one.start()
        async with asyncio.timeout(ENGINE_S):
            info = await one.ready()
            request = EngineRequest(id=1, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4, temperature=0.0))
            async for delta in one.generate(request):
                if delta.error is not None:
                    raise EngineDied(delta.error)
        return info, openmp(one.pid)
    finally:
        await one.close()


def openmp(pid: int | None) -> list[str] | None:
    """The OpenMP runtimes mapped into a process; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return sorted(path for path in paths if Path(path).name.startswith(OPENMP))


def capacity(torch: dict[str, Any]) -> Finding:
    """How large a model may be: 2 bytes a parameter in what the engine takes by default, less some for the cache."""
    total, available = memory_facts()
    where, share = "the CPU", min(total * 0.5, available * 0.9)
    if torch["devices"]:
        where, share = "one GPU", max(device["bytes"] for device in torch["devices"]) * 0.9
    return Finding("can run", "ok", f"models up to about {share * 0.95 / 2e9:.1f} B parameters in bfloat16 on {where}")


def model(settings: Settings) -> Iterator[Finding]:
    """Whether the named model is whole and fits."""
    from engine import EngineError, fetch

    from ...tokenization.tokenizer import Tokenizer
    from .plan import make

    try:
        folder = fetch(settings.model, settings.revision, weights=False).path
    except EngineError as error:
        yield Finding(
            "model", "fail", with_flags(error), "check the name, the folder, and for hub models the network or HF_TOKEN"
        )
        return
    try:
        code, plan = make(settings.engine_config())
    except Failure as error:
        code, plan = 2, {"error": str(error)}
    if code == 0:
        told = f"{plan.get('architecture', 'it')} fits: {plan.get('num_tokens', 0):,} tokens of KV cache"
        yield Finding("model", "ok", told)
    else:
        fix = "; or ".join(plan.get("try", [])) or "choose another model"
        yield Finding("model", "fail", str(plan.get("error", "cannot be served")), fix)
    if not any(folder.glob("*.safetensors")):
        fix = "the first start fetches them; a local folder must hold *.safetensors"
        yield Finding("weights", "fail" if Path(settings.model).is_dir() else "warn", f"none in {folder}", fix)
    try:
        tokenizer = Tokenizer(folder)
    except EngineError as error:
        yield Finding("tokenizer", "fail", str(error), "fetch tokenizer.json from the model's page")
        return
    if tokenizer.templates or settings.chat_template:
        yield Finding("tokenizer", "ok", f"{tokenizer.vocab_size:,} tokens, with a chat template")
    else:
        fix = "give one with --chat-template FILE; completions work without"
        yield Finding("tokenizer", "warn", f"{tokenizer.vocab_size:,} tokens, no chat template", fix)
