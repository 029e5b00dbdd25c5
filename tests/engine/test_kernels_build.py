"""Building the kernels' library: when it is compiled, where it is kept, and what a failed or stopped build leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.kernels import build, library

ROOT = build.HERE.parents[1]


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """Install a compiler that only records its calls, and an empty cache."""
    calls = tmp_path / "calls"
    calls.touch()
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.05\necho compiled > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(build.FLAGS, "-DSOMETHING_ELSE")  # what lies beside the sources was built without
    monkeypatch.setattr(build, "supported", lambda: None)
    return calls


def test_library_is_compiled_once(toolchain):
    path = build.library()
    assert path.parent == build.cache_folder() and path.read_text() == "compiled\n"
    calls = toolchain.read_text().splitlines()
    assert len(calls) == len(build.OBJECTS) + 2
    assert all("-DSOMETHING_ELSE" in call for call in calls)
    assert build.library() == path and len(toolchain.read_text().splitlines()) == len(calls)
    assert not [file for file in path.parent.iterdir() if file.name not in (path.name, ".lock")]


@pytest.mark.parametrize("knows", [True, False])
def test_avx_vnni_is_left_out_if_the_assembler_does_not_know_it(toolchain, tmp_path, knows):
    if not knows:
        works = (tmp_path / "compiler").read_text()
        (tmp_path / "compiler").write_text(works.replace("\n", '\ncase "$*" in *probe.cpp*) exit 1;; esac\n', 1))
    build.library()
    *calls, linked = toolchain.read_text().splitlines()
    assert "library.so" in linked
    assert {"-DNO_AVX_VNNI" in call for call in calls if "probe.cpp" not in call} == {not knows}


def test_one_of_several_processes_compiles(toolchain):
    found = []
    threads = [threading.Thread(target=lambda: found.append(build.library())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert len(toolchain.read_text().splitlines()) == len(build.OBJECTS) + 2


def test_library_name_depends_on_options_and_sources(monkeypatch, tmp_path):
    names = {build.file_name(), *(build.file_name(emulate=isa) for isa in build.EMULATED)}
    monkeypatch.setenv(build.FLAGS, "-fsanitize=address")
    names.add(build.file_name())
    for source in [*build.HERE.glob("*.cpp"), *build.HERE.glob("*.h")]:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.file_name() in names, "the place does not matter"
    (tmp_path / "work.h").write_text("// changed\n")
    names.add(build.file_name())
    assert len(names) == 3 + len(build.EMULATED)


@pytest.mark.parametrize("beside", [True, False])
def test_a_library_of_another_machine_is_compiled_again(toolchain, monkeypatch, tmp_path, beside):
    def load(path: Path) -> tuple[Path, int]:
        if path.read_text() != "compiled\n":
            raise OSError("version `GLIBC_2.99' not found")
        return path, 0

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(build, "HERE", tmp_path)
    cached = build.cache_folder() / build.file_name()
    foreign = tmp_path / cached.name if beside else cached
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("of another machine\n")
    assert library.load_built() == library.load_built() == (cached, 0)
    assert len(toolchain.read_text().splitlines()) == len(build.OBJECTS) + 2, "compiled once"


def test_a_library_that_cannot_be_loaded_is_compiled_once_more_at_most(toolchain, monkeypatch):
    def load(path: Path) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(library, "load", load)
    build.library()
    for _ in range(3):
        with pytest.raises(OSError, match="not permitted"):
            library.load_built()
    assert len(toolchain.read_text().splitlines()) == 2 * (len(build.OBJECTS) + 2)


def test_machines_with_different_c_libraries_share_no_library(monkeypatch):
    folders = set()
    for version in ("2.36", "2.41"):
        monkeypatch.setattr("platform.libc_ver", lambda version=version: ("glibc", version))
        folders.add(build.cache_folder().name)
    assert folders == {"glibc2.36", "glibc2.41"}


def test_missing_and_failing_compilers_are_reported(toolchain, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.library()
    (tmp_path / "broken").write_text("#!/bin/sh\necho 'a.cpp:1: error: no such header' >&2\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "broken"))
    with pytest.raises(build.BuildError, match=r"failed: a\.cpp:1: error: no such header"):
        build.library()
    assert list(build.cache_folder().iterdir()) == [build.cache_folder() / ".lock"]


def test_unwritable_cache_is_reported(toolchain, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"cannot be written: .*; set XDG_CACHE_HOME to another"):
        build.library()


def test_unsupported_machines_are_reported(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert build.supported() == "the CPU kernels are written for Linux on x86-64, and this is Linux on aarch64"
    with pytest.raises(build.BuildError, match="aarch64"):
        build.compile_into(Path("/"))


def test_a_killed_build_leaves_no_process_and_the_next_one_clears_its_files(toolchain, tmp_path):
    """The compiler and a program that it starts hold the pipe open: its end is theirs."""
    compiler, pipe = tmp_path / "compiler", tmp_path / "pipe"
    works = compiler.read_text()
    os.mkfifo(pipe)
    compiler.write_text(f"#!/bin/sh\nexec 9> {pipe}\nsleep 600 &\necho running >&9\nsleep 600\n")
    code = "from engine.kernels import build; build.supported = lambda: None; build.library()"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    with pipe.open() as running:
        assert running.readline() == "running\n"
        process.kill()
        process.wait()
        running.read()  # until none of them is left
    abandoned = list(build.cache_folder().glob(".compiling-*"))
    assert len(abandoned) == 1
    compiler.write_text(works)
    path = build.library()
    assert {file.name for file in path.parent.iterdir()} == {path.name, ".lock"}


def test_a_compiler_that_takes_too_long_is_killed(toolchain, monkeypatch, tmp_path):
    (tmp_path / "compiler").write_text("#!/bin/sh\nsleep 600\n")
    monkeypatch.setattr(build, "COMPILE_S", 1)
    with pytest.raises(build.BuildError, match="failed: error: stopped by SIGALRM"):
        build.library()


def test_nothing_is_compiled_onto_a_file_system_that_forbids_execution(toolchain, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(build.BuildError, match="is mounted noexec; set XDG_CACHE_HOME to another folder"):
        build.library()
    assert not toolchain.read_text()
    monkeypatch.setattr(library, "load", lambda _: pytest.fail("there is no library"))
    with pytest.raises(build.BuildError, match="noexec"):
        library.load_built()


def test_a_library_that_is_kept_where_execution_is_forbidden_is_not_compiled_again(toolchain, monkeypatch):
    def load(path: Path) -> None:
        raise OSError("failed to map segment from shared object")

    kept = build.library()
    calls = toolchain.read_text()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(library, "load", load)
    with pytest.raises(build.BuildError, match="noexec"):
        library.load_built()
    assert kept.is_file() and toolchain.read_text() == calls
