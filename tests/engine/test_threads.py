"""The kernels' thread pool: the same bits whichever threads take part, and its life cycle in a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import build
from engine.kernels.library import BASES, ISAS, Kernels
from engine.kernels.logits import NativeLogits
from engine.kernels.matmul import Packed, Quantized
from engine.models.norms import RMSNorm
from engine.runner.logits import ROW_PARAMS
from tests.engine.test_attention import Pool, layer_of
from tests.engine.test_cpu_attention import backend
from tests.engine.test_kernels import CPU, drawn, kernels, needs_library
from tests.engine.test_kernels_small import Lines, decoder

ROOT = Path(__file__).parents[2]
AS_THEY_CAN, NONE, ALL = 0, 1, 2  # pequod_joining

# With all helpers joining, each call waits until the machine has run every one of them.
pytestmark = [needs_library, pytest.mark.timeout(1200)]
PROGRAM_S = 1100.0


def joining(variant: Kernels) -> ctypes.c_int32:
    """Return the library's switch for which helpers join the caller."""
    return ctypes.c_int32.in_dll(variant.library, "pequod_joining")


@pytest.fixture(params=[isa for isa in ISAS if isa not in BASES])
def variant(request) -> Iterator[Kernels]:
    variant, threads = kernels(request.param), torch.get_num_threads()
    yield variant
    torch.set_num_threads(threads)
    joining(variant).value = AS_THEY_CAN


def results(variant: Kernels, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Return what each kernel computes, by name, from inputs large enough for it to use all threads.

    Memory that a kernel does not write holds NaN.
    """
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes
    try:
        x, weight = drawn(700, 300, dtype=dtype), drawn(600, 300, dtype=dtype)
        packed = {"product": Packed(variant, weight), "gated product": Packed(variant, weight, gated=True)}
        if variant.quantizes:
            packed |= {f"product of int{bits}": Quantized(variant, weight, bits=bits) for bits in (8, 4)}
        found = {
            name: [
                each.panels,
                *([] if each.scales is None else [each.scales]),
                *(each(x[:n]) for n in (1, 3, 40, 700)),
            ]
            for name, each in packed.items()
        }
        norm = RMSNorm(300, 1e-6, dtype, CPU)
        norm.pack(variant)
        found["norm"] = [norm(x)]
        for held in (dtype, torch.int8):
            line = Lines(decoder("qwen3", dtype, variant, dtype), variant.isa, held=held)
            found[f"layers, cache of {held}"] = [
                line.step({0: list(range(50)), 1: list(range(50))}),
                line.step({0: [3], 1: [4]}),
            ]
            pool = Pool(
                0,
                [2500, 90, 40, 7],
                layer_of(2, 64, 64, group=3),
                block_size=16,
                dtype=dtype,
                held=held,
                backend=backend(variant.isa),
            )
            found[f"attention, cache of {held}"] = attended(pool)
        rows = torch.randn(9, 8000)
        asked = np.zeros(9, dtype=ROW_PARAMS)
        asked["temperature"], asked["top_p"], asked["top_k"] = 1.0, 0.9, 500
        asked["u"] = np.linspace(0, 0.99, 9)
        native = NativeLogits(variant)
        distribution = native.distribution(rows, 5)
        found |= {
            "best": list(native.best(rows)),
            "sample": list(native.sample(rows, asked)),
            "distribution": [distribution.logs, distribution.values, distribution.ids],
        }
        return found
    finally:
        torch.use_deterministic_algorithms(False)


def attended(pool: Pool) -> list[Tensor]:
    """Return attention's output for prompts, for single tokens and for a chunk, and the cache."""
    from engine.attention import AttentionMeta

    found = []
    for counts in ([2400, 80, 30, 5], [1, 1, 1, 1], [99, 1, 9, 1]):
        table = [(pool.blocks[s], pool.done[s], n) for s, n in enumerate(counts)]
        meta = AttentionMeta.of(table, pool.block_size)
        q, k, v = (
            torch.cat([x[s][at : at + n] for s, (_, at, n) in enumerate(table)]) for x in (pool.q, pool.k, pool.v)
        )
        found.append(pool.cache.attend(0, q, k, v, pool.cache.plan(meta)))
        pool.done = [done + n for done, n in zip(pool.done, counts, strict=True)]
    return [*found, pool.cache.layers[0].tensor]


def differing(variant: Kernels, dtype: torch.dtype, threads: int) -> list[str]:
    """Return the names of the kernels whose bits differ from those of one thread."""
    torch.set_num_threads(1)
    want = results(variant, dtype)
    torch.set_num_threads(threads)
    found = results(variant, dtype)

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    same = {name: all(map(torch.equal, map(bits, want[name]), map(bits, found[name]))) for name in want}
    return [name for name, is_same in same.items() if not is_same]


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("which", [AS_THEY_CAN, NONE, ALL], ids=["as they can", "none", "all"])
def test_bits_do_not_depend_on_the_helpers_that_join(variant, dtype, which, threads):
    joining(variant).value = which
    assert differing(variant, dtype, threads) == []


# -- the process ------------------------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> str:
    """Return what a new interpreter prints that runs `code` with the names of this module."""
    command = [sys.executable, "-c", f"from tests.engine.test_threads import *\n{code}"]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("environment", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}], ids=str)
def test_openmp_settings_change_no_result(environment):
    code = "print(differing(kernels('avx2'), torch.float32, 2), differing(kernels('avx2'), torch.bfloat16, 5))"
    # The C library fills allocated memory with this byte.
    assert python(code, MALLOC_PERTURB_="165", **environment) == "[] []"


def test_a_forked_process_computes_with_threads_of_its_own():
    code = """
variant = kernels("avx2")
packed, x = Packed(variant, torch.randn(400, 300)), torch.randn(40, 300)
torch.set_num_threads(3)
joining(variant).value = ALL
want, stop = packed(x), threading.Event()

def compute():
    while not stop.is_set():
        packed(x)

computing = threading.Thread(target=compute)
computing.start()
for _ in range(20):  # while the other thread computes
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(packed(x), want) and len(helpers()) == 2 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end="")
stop.set()
computing.join()  # torch aborts a thread that still computes while the interpreter shuts down
"""
    assert python(code) == "0" * 20


def helpers() -> list[Path]:
    """Return the pool's threads of this process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread of something else that has ended meanwhile
            if (task / "comm").read_text() == "pequod-kernels\n":
                found.append(task)
    return found


def sleep_(tasks: list[Path]) -> bool:
    """Return whether all of these threads stop using CPU time within ten seconds."""
    for _ in range(100):
        before = [(task / "schedstat").read_text().split()[0] for task in tasks]
        time.sleep(0.1)
        if [(task / "schedstat").read_text().split()[0] for task in tasks] == before:
            return True
    return False


def test_helpers_are_started_when_first_needed_and_sleep_between_calls():
    code = """
variant = kernels("avx2")
torch.set_num_threads(1)
packed, x = Packed(variant, torch.randn(400, 300)), torch.randn(40, 300)
joining(variant).value = ALL
for threads in (1, 3, 2, 5):
    torch.set_num_threads(threads)
    packed(x)
    print(len(helpers()), sleep_(helpers()), end="; ")
blocked = {line.split()[1] for task in helpers() for line in (task / "status").read_text().splitlines()
           if line.startswith("SigBlk")}
print(all(int(mask, 16) >> signal - 1 & 1 for mask in blocked for signal in (1, 2, 15)))
"""
    assert python(code) == "0 True; 2 True; 2 True; 4 True; True"


def test_callers_on_several_threads_at_once(variant):
    """One of them uses the helpers, the others compute alone."""
    torch.set_num_threads(3)
    packed = [Packed(variant, drawn(400, 300, dtype=torch.float32)) for _ in range(3)]
    x = drawn(40, 300, dtype=torch.float32)
    want, wrong = [each(x) for each in packed], []

    def call(which: int) -> None:
        wrong.extend(which for _ in range(100) if not torch.equal(packed[which](x), want[which]))

    for value in (AS_THEY_CAN, ALL):
        joining(variant).value = value
        callers = [threading.Thread(target=call, args=[which]) for which in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


# -- the pool without kernels -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[[], ["-fsanitize=thread"]], ids=["plain", "ThreadSanitizer"])
def pool(request, tmp_path_factory) -> list[str]:
    """Return the command that runs pool.cpp."""
    program, compiler = tmp_path_factory.mktemp("pool") / "pool", build.compiler() or []
    sources = [ROOT / "tests/engine/pool.cpp", build.HERE / "machine.cpp"]
    options = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{build.HERE}", *request.param]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    built = subprocess.run(
        [*compiler, *options, *map(str, sources), "-o", str(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode and request.param and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # ThreadSanitizer does not work with every layout of randomized addresses.
    return ["env", "-u", "LD_PRELOAD", "setarch", "-R", str(program)]


@pytest.mark.parametrize("which", [AS_THEY_CAN, NONE, ALL], ids=["as they can", "none", "all"])
def test_each_part_is_computed_once(pool, which):
    done = subprocess.run([*pool, str(which)], capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
