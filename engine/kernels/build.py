"""Compile the kernels and find the compiled library. Needs only the standard library, because the install runs this
file.

One shared library contains every variant. Its name has a hash of the sources and the compiler's options, so that a
library of other sources is never loaded. If Pequod was installed with a compiler, the library is beside the sources.
Otherwise (a checkout that was not installed, changed sources, a compiler installed later) it is compiled at the first
start, which takes up to a few minutes, into the user's cache directory. So is one that cannot be loaded, because it was
made on a machine with another C library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
GUARD = HERE / "guard.py"  # runs the compiler
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
# Instruction set -> its compiler options. AMX and AVX-VNNI are written in assembly, so they need no option.
VARIANTS = {
    "amx": ["-DISA_AMX", "-mfma", "-mf16c", *AVX512],
    "avx512bf16": ["-DISA_AVX512BF16", "-mfma", "-mf16c", *AVX512, "-mavx512bf16"],
    "avx512": ["-DISA_AVX512", "-mfma", "-mf16c", *AVX512],
    "avxvnni": ["-DISA_AVXVNNI", "-mfma", "-mf16c", "-mavx2"],
    "avx2": ["-DISA_AVX2", "-mfma", "-mf16c", "-mavx2"],
}
# Sources of every variant, and of those that have only some: in everything else they are the variant in BASES.
KERNELS = ("attention", "blocks", "delta", "layers", "logits", "lossless", "matmul", "quantized", "rounding")
OWN_KERNELS = {
    "amx": ("attention", "lossless", "matmul", "quantized", "trial"),
    "avxvnni": ("blocks", "quantized"),
}
BASES = {"amx": "avx512", "avxvnni": "avx2"}
EMULATED = ("amx", "avx512bf16", "avxvnni")  # variants whose instructions can be emulated
# Object -> its source and options. A source has one object for each variant.
OBJECTS = {
    f"{kernel}_{isa}": (f"{kernel}.cpp", options)
    for isa, options in VARIANTS.items()
    for kernel in OWN_KERNELS.get(isa, KERNELS)
} | {name: (f"{name}.cpp", []) for name in ("machine", "threads")}
# Results must not depend on the compiler: no reordering of sums, and multiply-adds are fused only where the source says
# so. gcc 12 warns about uninitialized variables in its own headers.
OPTIONS = ["-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-strict-aliasing"]
OPTIONS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
LINKED = ["-shared", "-fPIC", "-pthread", "-Wl,--as-needed"]
# Additional options for the compiler and the linker, for tests under a sanitizer. They are part of the library's hash.
FLAGS = "PEQUOD_KERNEL_FLAGS"
COMPILE_S = 1200
OTHER_CACHE = "set XDG_CACHE_HOME to another folder"
SCRATCH = ".compiling-"  # begins the names of directories for objects


class BuildError(Exception):
    """The kernels could not be compiled; the text is one sentence."""


def supported() -> str | None:
    """Return why the kernels do not support this machine, or None if they do."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return f"the CPU kernels are written for Linux on x86-64, and this is {system} on {machine}"
    return None


def compiler() -> list[str] | None:
    """Return the C++ compiler's command, $CXX or the first one found; None if there is none."""
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        return command if shutil.which(command[0]) else None
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else None


def variants(kernel: str) -> list[str]:
    """Return the variants that are compiled from this source, without those that use another's functions."""
    return [isa for isa in VARIANTS if kernel in OWN_KERNELS.get(isa, KERNELS)]


def file_name(*, emulate: str = "") -> str:
    """Return the file name of the library of these sources. `emulate`: see `compile_into`."""
    digest = hashlib.sha256(repr((OBJECTS, OPTIONS, LINKED, emulate, os.environ.get(FLAGS, ""))).encode())
    for source in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"pequod-kernels-{digest.hexdigest()[:16]}.so"


def compile_into(folder: Path, *, emulate: str = "") -> Path:
    """Compile the library into a directory and return its path; the file appears atomically. Raises BuildError.

    The caller holds the directory's lock.
    `emulate`: one of EMULATED, which is then built without its instructions, for tests on processors that lack them.
    That library has this variant alone, with what it calls of the one in BASES.
    """
    if reason := supported():
        raise BuildError(reason)
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found")
    more = shlex.split(os.environ.get(FLAGS, ""))
    for abandoned in folder.glob(f"{SCRATCH}*"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    # In the same directory, because only a rename within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        objects = {name: f"{scratch}/{name}.o" for name in (_emulating(emulate) if emulate else OBJECTS)}
        more += _of_assembler([*command, *more], Path(scratch))

        def one(name: str) -> None:
            source, options = OBJECTS[name]
            if emulate and name.endswith(f"_{emulate}"):
                options = [*(option for option in options if option != "-mavx512bf16"), "-DEMULATE"]
            _call([*command, *OPTIONS, *options, *more, "-c", str(HERE / source), "-o", objects[name]])

        with ThreadPoolExecutor(min(len(objects), os.cpu_count() or 1)) as pool:
            list(pool.map(one, objects))
        _call([*command, *LINKED, *more, *objects.values(), "-o", f"{scratch}/library.so"])
        target = folder / file_name(emulate=emulate)
        os.chmod(f"{scratch}/library.so", 0o755)
        os.replace(f"{scratch}/library.so", target)
    return target


def _of_assembler(command: list[str], scratch: Path) -> list[str]:
    """Return the options for what the assembler does not know: AVX-VNNI, before binutils 2.36."""
    (scratch / "probe.cpp").write_text('__asm__("{vex} vpdpbusd %ymm0, %ymm0, %ymm0");\n')
    try:
        _call([*command, "-c", str(scratch / "probe.cpp"), "-o", str(scratch / "probe.o")])
    except BuildError:
        return ["-DNO_AVX_VNNI"]
    return []


def _emulating(isa: str) -> list[str]:
    """Return the objects of a library that emulates a variant."""
    variants = [isa, BASES.get(isa)]
    own = {source for name, (source, _) in OBJECTS.items() if name.endswith(f"_{isa}")}
    return [
        name
        for name, (source, options) in OBJECTS.items()
        if not options or (source in own and name.rpartition("_")[2] in variants)
    ]


def library(*, emulate: str = "", beside: bool = False, broken: Path | None = None) -> Path:
    """Return the path of the library of these sources, compiling it if it does not exist. Raises BuildError.

    `emulate`: see `compile_into`. `beside`: compile it beside the sources, for the install, not into the cache
    directory. `broken`: a library that cannot be loaded, which counts as missing.
    """
    name = file_name(emulate=emulate)
    folder = HERE if beside else cache_folder()
    for path in (HERE / name, folder / name):
        if os.path.isfile(path) and path != broken:
            return path
    if reason := supported():
        raise BuildError(reason)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not beside and os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise BuildError(f"{folder} is on a file system that is mounted noexec; {OTHER_CACHE}")
        with _locked(folder / ".lock"):
            if folder / name == broken or not (folder / name).is_file():
                compile_into(folder, emulate=emulate)
    except OSError as error:
        remedy = "" if beside else f"; {OTHER_CACHE}"
        raise BuildError(f"{folder} cannot be written: {error.strerror}{remedy}") from None
    return folder / name


def cache_folder() -> Path:
    """Return the directory for libraries that are compiled at the first start.

    Machines with different C libraries may share a home, so each version has its own.
    """
    from ..user_cache import cache_root  # not at the head: the install runs this file outside of its package

    return cache_root() / "kernels" / ("".join(platform.libc_ver()) or "other")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file: if several processes start at once, one compiles and the others wait."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _call(command: list[str]) -> None:
    # A library that is preloaded here, such as a sanitizer's runtime, is not meant for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    guarded = [sys.executable, "-IS", str(GUARD), str(os.getpid()), str(COMPILE_S), *command]
    done = subprocess.run(guarded, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"the compiler {command[0]} failed: {lines[0].strip()}")
