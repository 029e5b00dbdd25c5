"""`pequod doctor`: checks what this machine can run, and suggests a repair for each problem."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import shlex
import shutil
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
from ..banner import EXACT, INEXACT, size
from ..machine import cpu_facts
from . import Failure, Parser, UsageError, add_settings, settings_from, wants_colour
from .serve import listen_tcp

if TYPE_CHECKING:
    from engine import EngineInfo

    from ...settings import Settings

COLOURS = {"ok": "32", "warn": "33", "fail": "31"}
TORCH_RELEASES = "torch>=2.11,<2.14"
PACKAGES = ("tokenizers", "safetensors", "transformers", "fastapi", "uvicorn")
# Instruction sets that matter for the speed of matrix products, as named in /proc/cpuinfo.
ISA = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
OPENMP = ("libgomp", "libiomp", "libomp")
GIB = 1 << 30
TORCH_S = 120.0
ENGINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `level` is ok, warn or fail; `fix` says what to do about the last two."""

    name: str
    level: str
    text: str
    fix: str = ""


def judge(name: str, is_ok: bool, text: str, fix: str, level: str = "warn") -> Finding:
    """Return a finding that is ok, or has `level` and a fix."""
    return Finding(name, "ok", text) if is_ok else Finding(name, level, text, fix)


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod doctor [MODEL] [flags]"
    parser.description = (
        "Check what this machine can run. The exit code is 1 if a check fails."
        " With MODEL, check the folder of that model too."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "model", "engine", extra=["host", "port"])


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as soon as it is known. Returns 1 if a check failed."""
    loaded = settings_from(arguments)
    found = []
    for finding in examine(loaded.settings, loaded.sources["model"] != "default"):
        found.append(finding)
        if not arguments.json:
            show(finding)
    levels = [finding.level for finding in found]
    if arguments.json:
        findings = [asdict(finding) for finding in found]
        print(json.dumps({"ok": "fail" not in levels, "findings": findings}, ensure_ascii=False))
    else:
        print(f"{levels.count('ok')} ok, {levels.count('warn')} warnings, {levels.count('fail')} failed")
    return int("fail" in levels)


def show(finding: Finding) -> None:
    """Print a finding, and its fix on the next line."""
    level = f"{finding.level:<4}"
    if wants_colour(sys.stdout):
        level = f"\033[{COLOURS[finding.level]}m{level}\033[0m"
    print(f"{level}  {finding.name:<10} {finding.text}")
    if finding.fix:
        print(f"{'':<16} fix: {finding.fix}")
    sys.stdout.flush()


def examine(settings: Settings, with_model: bool) -> Iterator[Finding]:
    """Yield all findings, those of the fast checks first."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield system()
    yield from cpu()
    yield memory()
    yield packages()
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


def system() -> Finding:
    name, machine = platform.system(), platform.machine()
    text = f"{name} {platform.release()} on {machine}"
    if (name, machine) in {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}:
        return Finding("system", "ok", text)
    fix = "use Linux on x86-64 or arm64, macOS on arm64, or WSL2 on Windows"
    return Finding("system", "fail" if name == "Windows" else "warn", f"{text}, not tested", fix)


def cpu() -> Iterator[Finding]:
    name, flags, cores = cpu_facts()
    extensions = " ".join(isa for isa in ISA if isa in flags) or "no vector extensions that Pequod uses"
    text = f"{name}, {cores} cores, {extensions}"
    is_old = platform.machine() == "x86_64" and bool(flags) and "avx2" not in flags
    yield judge("cpu", not is_old, text, "use a CPU with AVX2, which is several times faster")
    quota = cpu_quota()
    if quota is not None and quota < cores:
        yield Finding(
            "cpu limit",
            "warn",
            f"the container may use {quota:g} of {cores} cores; more threads than that wait for each other",
            f"serve with --threads {max(1, int(quota))}, or raise the container's CPU limit",
        )


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of cores whose time the control groups allow, None: no limit. `root` has /proc and /sys."""
    quotas = []
    with contextlib.suppress(OSError, ValueError):
        paths = [line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        group = root / "sys/fs/cgroup" / "".join(paths).lstrip("/")
        for folder in (group, *group.parents):
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max":
                    quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory() -> Finding:
    from engine import measure_memory

    machine = measure_memory("cpu")
    fix = "close other programs or raise the container's limit; torch alone uses 0.5 GiB"
    text = f"{size(machine.available)} free of {size(machine.total)}"
    return judge("memory", machine.available >= 2 * GIB, text, fix)


def packages() -> Finding:
    have, missing = [], []
    for name in PACKAGES:
        try:
            have.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("packages", "ok", ", ".join(have))


def compiler() -> Finding:
    from engine import cpp_compiler

    command = cpp_compiler()
    if command is None and (chosen := os.environ.get("CXX")):
        return Finding("compiler", "warn", f"CXX={chosen} is not there", "correct or unset CXX")
    text = "none for C++; only building the CPU kernels needs one"
    return Finding("compiler", "ok", text if command is None else shlex.join(command))


def port(settings: Settings) -> Finding:
    try:
        listen_tcp(settings.host, settings.port).close()
    except UsageError as error:
        return Finding("port", "warn", str(error), "stop the program that uses this one, or choose another with --port")
    return Finding("port", "ok", f"{settings.port} of {settings.host} is free")


def cache_folder() -> Path:
    """Return the folder in which huggingface_hub stores models."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(folder))  # Path.expanduser raises for a user without a home
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def disk() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if os.access(existing, os.W_OK) and existing.is_dir():
        yield Finding("cache", "ok", f"models from the hub are stored in {folder}")
    else:
        yield Finding("cache", "warn", f"{folder} cannot be written: no hub model can be downloaded", "set HF_HOME")
    free = shutil.disk_usage(existing).free
    yield judge("disk", free >= 5 * GIB, f"{size(free)} free there", "free some, or set HF_HOME to a larger disk")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        fix = "raise it: `ulimit -Hn 65536` as root, LimitNOFILE= in a systemd unit, or --ulimit nofile in Docker"
        return Finding("open files", "warn", f"at most {hard}, and each connection is one", fix)
    return Finding("open files", "ok", f"{soft} now; `pequod serve` raises the limit to 65536 if allowed")


def torch_facts() -> dict[str, Any] | Finding:
    """Return torch's facts, or a finding if it cannot be imported. A child process imports it: torch needs memory."""
    fix = f"pip install '{TORCH_RELEASES}' (without a GPU: from the CPU index, see torch's website)"
    try:
        done = run_python("-m", "engine.facts", timeout_s=TORCH_S)
    except subprocess.TimeoutExpired:
        return Finding("torch", "fail", f"was not imported within {TORCH_S:.0f} s", fix)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
        return Finding("torch", "fail", f"cannot be imported: {last[:200]}", fix)
    return json.loads(done.stdout.splitlines()[-1])


def torch_findings(torch: dict[str, Any]) -> Iterator[Finding]:
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU"
    text = f"{torch['version']}, {build} build, {torch['threads']} threads, {torch['cpu']} on the CPU"
    number = tuple(int(part) for part in torch["version"].split("+")[0].split(".")[:2])
    is_tested = (2, 11) <= number < (2, 14)
    yield judge("torch", is_tested, text if is_tested else f"{text}, not tested", f"pip install '{TORCH_RELEASES}'")
    for i, device in enumerate(torch["devices"]):
        yield gpu(i, device, torch["driver"])
    if torch["devices"]:
        yield triton(torch)
    elif torch["driver"] is None:
        yield Finding("gpu", "ok", "none; the CPU is used")
    elif torch["cuda"]:
        fix = "update the NVIDIA driver: `nvidia-smi` must work and show at least torch's CUDA version"
        yield Finding("gpu", "warn", f"there is one with driver {torch['driver']}, but torch cannot use it", fix)
    else:
        yield Finding("gpu", "warn", "there is one, but this torch is a CPU build", "pip install torch from PyPI")


def gpu(index: int, device: dict[str, Any], driver: str | None) -> Finding:
    text = f"cuda:{index} {device['name']}, compute capability {device['capability']}, driver {driver or 'unknown'}"
    if device["free"] is None:
        fix = "end the process that uses it exclusively: `nvidia-smi` lists them"
        return Finding("gpu", "fail", f"{text}: it cannot be used now", fix)
    fix = "end other programs on it, `nvidia-smi` lists them, or choose another GPU with --device"
    text += f", {size(device['free'])} free of {size(device['bytes'])}"
    return judge("gpu", device["free"] >= 0.8 * device["bytes"], text, fix)


def triton(torch: dict[str, Any]) -> Finding:
    """Return whether our GPU kernels can be compiled; Triton compiles a C function for each that starts it."""
    missing = {
        "Triton": (torch["triton"], "pip install triton"),
        "a C compiler": (torch["compiler"], "apt-get install gcc"),
        "Python's headers": (torch["headers"], "apt-get install python3-dev"),
    }
    fixes = [fix for has, fix in missing.values() if not has]
    absent = " and ".join(name for name, (has, _) in missing.items() if not has)
    if absent:
        text = f"without {absent} torch computes attention and the norms, slower"
        return Finding("triton", "warn", text, "; ".join(fixes))
    return Finding("triton", "ok", f"{torch['triton']}, with {torch['compiler']} and Python's headers")


def engine(settings: Settings) -> list[Finding]:
    """Start an engine, generate with the built-in model, and return what it reports."""
    from engine import ConfigError, EngineError

    began = time.monotonic()
    try:
        info, runtimes = asyncio.run(_generate(settings))
    except TimeoutError:
        text = f"generated nothing within {ENGINE_S:.0f} s"
        return [Finding("engine", "fail", text, "check with `top` what keeps the CPU busy")]
    except ConfigError as error:
        return [Finding("engine", "fail", with_flags(error), "change the setting that the message names")]
    except EngineError as error:
        return [Finding("engine", "fail", with_flags(error), "install Pequod again: make install")]
    seconds = time.monotonic() - began
    kernels = {"torch": "by torch", "triton": "by our own Triton kernels"}
    products = kernels.get(info.product, f"by our own kernels for {info.product}")
    if info.quantization != "none":
        products += f", with weights in {info.quantization}"
    sampling = kernels.get(info.sampling, f"by our own kernels for {info.sampling}")
    attention = f"computed by the {info.attention} backend, keys and values in {info.kv_dtype}"
    found = [
        Finding("engine", "ok", f"works on {info.device}; start, loading and generation took {seconds:.1f} s"),
        Finding("results", "ok", EXACT if info.exact else INEXACT),
        Finding("products", "warn", with_flags(info.product_note), with_flags(info.product_fix))
        if info.product_note
        else Finding("products", "ok", f"computed {products}"),
        Finding("attention", "ok", attention),
        Finding("sampling", "ok", f"computed {sampling}"),
        *([Finding("graphs", "ok", graphs(info.graphs, settings))] if info.device.startswith("cuda") else []),
        *(Finding("note", "ok", with_flags(note)) for note in info.notes),
    ]
    if runtimes is not None:
        fix = "several thread pools slow each other down: reinstall torch with pip only, and unset LD_PRELOAD"
        text = f"{len(runtimes)} runtime{'s' * (len(runtimes) != 1)} in the engine: {', '.join(runtimes)}"
        found.append(judge("openmp", len(runtimes) <= 1, text.removesuffix(": "), fix))
    return found


def graphs(captured: int, settings: Settings) -> str:
    """Return how steps are run on a GPU; `captured` sizes are in CUDA graphs."""
    if settings.enforce_eager:
        return "off (--enforce-eager): the kernels of each step are launched one by one"
    if not captured:
        return "none: the kernels of each step are launched one by one"
    return f"steps of {captured} sizes are replayed from CUDA graphs; an idle engine captures more"


async def _generate(settings: Settings) -> tuple[EngineInfo, list[str] | None]:
    """Generate some tokens; returns the engine's description and the OpenMP libraries in its process."""
    from engine import EngineConfig, EngineDied, EngineRequest, ProcessEngine, SamplingParams

    one = ProcessEngine(
        EngineConfig(
            model="builtin",
            device=settings.device,
            quantization=settings.quantization,
            kv_dtype=settings.kv_cache_dtype,
            cpu_isa=settings.cpu_isa,
            threads=settings.threads,
            enforce_eager=settings.enforce_eager,
            batch_invariant=settings.batch_invariant,
            num_blocks=128,  # those of a sequence of the built-in model's full length
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
    """Return the OpenMP runtimes mapped into a process, or None if the system does not show them."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return sorted(path for path in paths if Path(path).name.startswith(OPENMP))


def capacity(torch: dict[str, Any]) -> Finding:
    """Estimate the largest model: 2 bytes per parameter of the memory that the engine uses by default, less 5 %."""
    from engine import measure_memory

    machine = measure_memory("cpu")
    where, usable = "the CPU", min(machine.total * 0.5, machine.available * machine.share)
    if torch["devices"]:
        where, usable = "one GPU", max(device["bytes"] for device in torch["devices"]) * 0.9
    return Finding("can run", "ok", f"models up to about {usable * 0.95 / 2e9:.1f} B parameters in bfloat16 on {where}")


def model(settings: Settings) -> Iterator[Finding]:
    """Check that the model is complete and fits."""
    from engine import EngineError, fetch

    from ...tokenization.tokenizer import Tokenizer
    from .plan import make

    try:
        offline = settings.local_files_only
        folder = fetch(settings.model, settings.revision, weights=False, local_files_only=offline).path
    except EngineError as error:
        fix = "check the name or the folder; for hub models also the network and HF_TOKEN"
        yield Finding("model", "fail", with_flags(error), fix)
        return
    try:
        code, plan = make(settings.engine_config())
    except Failure as error:
        code, plan = 2, {"error": str(error)}
    if code == 0:
        text = f"{plan.get('architecture', 'it')} fits, with a KV cache of {plan.get('num_tokens', 0):,} tokens"
        yield Finding("model", "ok", text)
    else:
        fix = "; or ".join(plan.get("try", [])) or "choose another model"
        yield Finding("model", "fail", str(plan.get("error", "cannot be served")), fix)
    if not any(folder.glob("*.safetensors")):
        fix = "the first start downloads them; a local folder must have *.safetensors files"
        yield Finding("weights", "fail" if Path(settings.model).is_dir() else "warn", f"none in {folder}", fix)
    try:
        tokenizer = Tokenizer(folder)
    except EngineError as error:
        yield Finding("tokenizer", "fail", str(error), "download tokenizer.json from the model's page")
        return
    has_template = bool(tokenizer.templates or settings.chat_template)
    text = f"{tokenizer.vocab_size:,} tokens, {'with a' if has_template else 'no'} chat template"
    yield judge("tokenizer", has_template, text, "pass one with --chat-template FILE; completions work without")
