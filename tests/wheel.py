"""`make wheel-test`: the wheel is built, installed beside this environment's packages, and started from elsewhere.

A second environment sees the first one's packages through a .pth file, so that torch is not installed twice; Pequod
itself must come from the wheel, and nothing of this checkout may be needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
import zipfile

from engine.kernels import build

ROOT = pathlib.Path(__file__).parent.parent
CODE = "import server, engine, pequod; print(server.__file__, engine.__file__, pequod.__file__, sep=chr(10))"
READY_S = 240.0  # after an installation Python first compiles every module, those of torch too
KERNELS = "from engine.kernels import build; print(build.library())"


def main() -> int:
    beside()
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", scratch, "."]
        subprocess.run(command, cwd=ROOT, check=True)
        (wheel,) = place.glob("pequod-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        tops = {name.partition("/")[0] for name in names}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"server", "engine", "pequod.py"}, tops
        assert "engine/builtin/model/model.safetensors" in names, "the built-in model is not in the wheel"
        kernels = kernels_of(wheel, names)

        environment = place / "env"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        packages = pathlib.Path(
            subprocess.check_output(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            ).strip()
        )
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        found = subprocess.check_output([python, "-c", CODE], cwd=place, env=clean, text=True).split()
        assert all(path.startswith(str(packages)) for path in found), f"not from the wheel: {found}"
        if kernels:
            found_kernels = subprocess.check_output([python, "-c", KERNELS], cwd=place, env=clean, text=True).strip()
            assert found_kernels == str(packages / kernels), f"the wheel's kernels are not taken: {found_kernels}"
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files", flush=True)

        command = [python, "-m", "server", "complete", "builtin", "--prompt", "Hello", "--max-tokens", "8", "--json"]
        answer = json.loads(subprocess.check_output(command, cwd=place, env=clean, text=True))
        assert answer["generated_tokens"] > 0, answer
        serve(python, place, clean)
    print("the wheel works by itself")
    return 0


def beside() -> None:
    """Copy the kernels beside their sources, where a build finds them, if they have been compiled elsewhere."""
    with contextlib.suppress(build.BuildError):
        library = build.library()
        if library.parent != build.HERE:
            copy = build.HERE / f".{library.name}.{os.getpid()}"
            shutil.copy(library, copy)
            os.replace(copy, build.HERE / library.name)  # others may be about to load it


def kernels_of(wheel: pathlib.Path, names: list[str]) -> str | None:
    """The library in the wheel; None, and a wheel for any platform, where none could be built."""
    libraries = [name for name in names if name.endswith(".so")]
    if build.supported() or build.compiler() is None:
        assert not libraries and wheel.name.endswith("-py3-none-any.whl"), (wheel.name, libraries)
        return None
    (library,) = libraries
    assert library == f"engine/kernels/{build.file_name()}", library
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl"), wheel.name
    return library


def serve(python: pathlib.Path, place: pathlib.Path, environment: dict[str, str]) -> None:
    from tests.live import free_port

    port = free_port()
    command = [python, "-m", "server", "serve", "builtin", "--port", str(port)]
    process = subprocess.Popen(command, cwd=place, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + READY_S
    try:
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60) as ready:
                    if ready.status == 200:
                        break
            except OSError:
                time.sleep(0.1)
        else:
            raise AssertionError("the installed server did not become ready")
        for path in ("", "webui/page.js", "docs"):  # not Python, but parts of the package
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as page:
                assert page.status == 200 and len(page.read()) > 1000, path
        body = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 2?"}], "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "4" in json.load(answer)["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        assert process.wait(60) == 0, "the installed server did not end cleanly"


if __name__ == "__main__":
    sys.exit(main())
