"""`make image-test`: build the image, run it as docker/compose.yaml does, and check what its users rely on.

Works with docker, podman or buildah and needs only the standard library. Prints "skipped" with the step and the tool's
error where this machine cannot do it (exit code 0), and "failed" where the image is wrong (exit code 1).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
CLIENT = pathlib.Path(__file__).with_name("client.py").read_text()
# What compose.yaml sets for the container, as options of `docker run`; test_docker.py compares the two.
OPTIONS = ["--init", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
VOLUME = "/cache"
READY = ["python", "/opt/pequod/health.py", "/ready"]
STOP_S = 60  # compose.yaml's stop_grace_period
START_S = 300.0  # a cold file system reads the packages slowly


class Skipped(Exception):
    """This machine cannot do a step; the text is one sentence."""


class Failed(Exception):
    """The image is not as it should be; the text is one sentence."""


def call(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `given` is its standard input."""
    return subprocess.run(command, input=given, text=True, capture_output=True, check=False)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a command printed, from its errors where it printed any."""
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]


def must(step: str, error: type[Exception], *command: str) -> str:
    """The output of a command that must succeed."""
    done = call(*command)
    if done.returncode:
        raise error(f"{step}: {error_of(done)}")
    return done.stdout


class Docker:
    """A container through the command line that docker and podman share."""

    is_isolated = True

    def __init__(self, tool: str, image: str, build: list[str], run: list[str]) -> None:
        self.tool = tool
        self.image = image
        self.build_options = build
        self.run_options = run
        self.name = f"pequod-image-test-{secrets.token_hex(4)}"
        self.port = "8000"

    def fetch(self, base: str) -> None:
        if call(self.tool, "image", "inspect", base).returncode:
            must(f"the base image {base} cannot be fetched", Skipped, self.tool, "pull", base)

    def build(self, base: str) -> None:
        # podman writes the OCI format unless it is told otherwise, and that has no health check.
        form = ["--format", "docker"] if self.tool == "podman" else []
        self.call_build("build", *form, "-t", self.image, "--build-arg", f"PYTHON_IMAGE={base}")

    def call_build(self, *words: str) -> None:
        if subprocess.run([self.tool, *words, *self.build_options, str(ROOT)], check=False).returncode:
            raise Failed(f"{self.tool} could not build the image; its error is above")

    def config(self) -> dict[str, Any]:
        (found,) = json.loads(must("the image cannot be read", Failed, self.tool, "image", "inspect", self.image))
        # podman keeps the health check beside the configuration.
        return {"Healthcheck": found.get("Healthcheck")} | found["Config"]

    def layers(self) -> list[tuple[str, str]]:
        """The size of each layer and the instruction that made it, the base first."""
        form = ["history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", self.image]
        lines = must("the layers cannot be read", Failed, self.tool, *form).splitlines()
        pairs = [line.partition("\t") for line in reversed(lines)]
        return [(size, made) for size, _, made in pairs if size not in ("0B", "0 B")]

    def hardened(self, *words: str) -> list[str]:
        volume = ["--volume", f"{self.name}:{VOLUME}", "--env", f"PEQUOD_PORT={self.port}"]
        return [self.tool, "run", *OPTIONS, *volume, *self.run_options, *words]

    def once(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """A command in a container of its own."""
        options = ["--rm", "--interactive", "--network", "none", "--entrypoint", words[0]]
        return call(*self.hardened(*options, self.image, *words[1:]), given=given)

    def start(self) -> None:
        # No network: the built-in model needs none, and a machine without bridges and firewalls can run this.
        options = ["--detach", "--name", self.name, "--network", "none"]
        must("the server's container does not start", Failed, *self.hardened(*options, self.image))

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in the server's container."""
        return call(self.tool, "exec", "--interactive", self.name, *words, given=CLIENT)

    def beside(self, *words: str) -> list[str]:
        """The command line that runs a command in a container that outlives the server's and shares its network."""
        options = ["--rm", "--interactive", "--network", f"container:{self.name}", "--entrypoint", words[0]]
        return self.hardened(*options, self.image, *words[1:])

    def stop(self) -> int:
        """Stop the server as a user does; return its exit code."""
        must("the server's container does not stop", Failed, self.tool, "stop", "-t", str(STOP_S), self.name)
        return int(must("no exit code", Failed, self.tool, "inspect", "-f", "{{.State.ExitCode}}", self.name))

    def log(self) -> str:
        done = call(self.tool, "logs", self.name)
        return done.stdout + done.stderr

    def clean(self) -> None:
        call(self.tool, "rm", "--force", self.name)
        call(self.tool, "volume", "rm", "--force", self.name)


class Buildah(Docker):
    """A chroot through `buildah run`: the host's network and processes, a writable root, no volume at /cache."""

    is_isolated = False

    def __init__(self, tool: str, image: str, build: list[str], run: list[str]) -> None:
        super().__init__(tool, image, build, run)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = str(sock.getsockname()[1])
        self.process: subprocess.Popen[str] | None = None
        self.output = pathlib.Path(tempfile.gettempdir(), self.name)

    def fetch(self, base: str) -> None:
        if call(self.tool, "inspect", "--type", "image", base).returncode:
            must(f"the base image {base} cannot be fetched", Skipped, self.tool, "pull", base)

    def build(self, base: str) -> None:
        options = ["--isolation", "chroot", "--layers", "--format", "docker"]
        self.call_build("build", *options, "-t", self.image, "--build-arg", f"PYTHON_IMAGE={base}")

    def inspect(self) -> dict[str, Any]:
        shown = must("the image cannot be read", Failed, self.tool, "inspect", "--type", "image", self.image)
        return json.loads(shown)

    def config(self) -> dict[str, Any]:
        return self.inspect()["Docker"]["config"]

    def layers(self) -> list[tuple[str, str]]:
        shown = self.inspect()
        made = [entry["created_by"] for entry in shown["Docker"]["history"] if not entry.get("empty_layer")]
        sizes = [f"{layer['size'] / 1e6:,.1f} MB" for layer in json.loads(shown["Manifest"])["layers"]]
        return list(zip(sizes, made, strict=True))

    def command(self, *words: str) -> list[str]:
        options = ["--isolation", "chroot", "--mount", "type=tmpfs,dst=/tmp", "--env", f"PEQUOD_PORT={self.port}"]
        return [self.tool, "run", *options, *self.run_options, self.name, "--", *words]

    def once(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        call(self.tool, "from", "--name", self.name, self.image)
        return call(*self.command(*words), given=given)

    def start(self) -> None:
        config = self.config()
        with self.output.open("w") as output:
            command = self.command(*config["Entrypoint"], *config["Cmd"])
            self.process = subprocess.Popen(command, stdout=output, stderr=output, text=True)

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        return call(*self.command(*words), given=CLIENT)

    def beside(self, *words: str) -> list[str]:
        return self.command(*words)

    def stop(self) -> int:
        # A signal for buildah itself would kill what it runs.
        assert self.process is not None
        client(self, "stop")
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"the server runs on {STOP_S} s after SIGTERM; its log:\n{self.log()}") from None

    def log(self) -> str:
        return self.output.read_text()

    def clean(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.output.unlink(missing_ok=True)
        call(self.tool, "rm", self.name)


TOOLS: dict[str, type[Docker]] = {"docker": Docker, "podman": Docker, "buildah": Buildah}


def choose(names: list[str]) -> str:
    """The first tool that is installed and works; raises Skipped."""
    reasons = []
    for name in names:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        done = call(name, "info")
        if done.returncode == 0:
            return name
        reasons.append(f"{name} does not work here ({error_of(done)})")
    raise Skipped("; ".join(reasons))


def check(what: str, holds: bool, detail: object) -> None:
    """Print what was checked, or raise Failed."""
    if not holds:
        raise Failed(f"{what}: {detail}")
    print(f"ok       {what}: {detail}", flush=True)


def client(tool: Docker, *words: str) -> dict[str, Any]:
    """What client.py reports from inside of the server's container."""
    done = tool.inside("python", "-", *words)
    if done.returncode:
        raise Failed(f"client.py {words[0]} failed in the container: {error_of(done)}")
    return json.loads(done.stdout)


def check_contents(tool: Docker) -> dict[str, Any]:
    """The image without a server in it: its user, what that may write, no compiler; returns its configuration."""
    config = tool.config()
    user = config["User"].partition(":")[0]
    probe = tool.once("true")
    if probe.returncode:
        raise Skipped(f"a container cannot be started: {error_of(probe)}")
    done = tool.once("python", "-", "look", given=CLIENT)
    if done.returncode:
        raise Failed(f"Python does not run in the image: {error_of(done)}")
    seen = json.loads(done.stdout)
    check("it runs as the image's user, who is not root", str(seen["uid"]) == user != "0", f"uid {seen['uid']}")
    check("no compiler is in it", not seen["compilers"], ", ".join(seen["compilers"]) or "none found")
    written = seen["written"]
    may = {folder for folder, result in written.items() if result == "yes"}
    check("it writes to /tmp and /cache alone", may == {"/tmp", "/cache"}, written)
    if tool.is_isolated:
        check("its root is read-only", written["/"] == written["/opt/pequod"] == "EROFS", written["/"])
    else:
        print("not checked: a read-only root and no-new-privileges, which `buildah run` has no options for")
    form, *live = (config.get("Healthcheck") or {}).get("Test") or ["none"]
    check("it has a health check", form == "CMD", " ".join([form, *live]))
    for health in (live, READY):
        done = tool.once(*health)
        unhealthy = done.returncode == 1 and done.stdout.startswith(f"{health[-1]}: ")
        check(f"unhealthy without a server ({health[-1]})", unhealthy, done.stdout.strip() or error_of(done))
    return config | {"machine": seen["machine"]}


def check_server(tool: Docker, config: dict[str, Any]) -> None:
    """A server in a container: health, rights, an answer, and what computed it."""
    began = time.monotonic()
    tool.start()
    while (ready := tool.inside(*READY)).returncode:
        if time.monotonic() - began > START_S:
            raise Failed(f"not ready after {START_S:.0f} s: {error_of(ready)}; its log:\n{tool.log()}")
        time.sleep(0.2)
    check("healthy with a server (/ready)", True, f"{ready.stdout.strip()}, {time.monotonic() - began:.1f} s")
    live = tool.inside(*config["Healthcheck"]["Test"][1:])
    check("healthy with a server (/live)", live.returncode == 0, live.stdout.strip() or error_of(live))

    process = client(tool, "server")
    check("the server's user", str(process["uid"]) == config["User"].partition(":")[0], f"uid {process['uid']}")
    check("it has no capabilities", process["capabilities"] == 0, f"{process['capabilities']:#x}")
    if tool.is_isolated:
        check("it can gain no privileges", process["no_new_privileges"] == 1, process["no_new_privileges"])

    found = client(tool, "ask")
    check("it answers a chat", "12" in found["answer"], f"What is 7 + 5? {found['answer']}")
    kernels = {name: found["version"].get(name) for name in ("attention", "exact", "torch")}
    if config["machine"] == "x86_64":
        check("it uses the CPU kernels", kernels["exact"] is True and kernels["attention"] == "cpu", kernels)
    else:
        print(f"not checked: the CPU kernels, which are for x86_64 and not {config['machine']}")
    check("they come with the image", not found["compiled"], found["compiled"] or "nothing was compiled at the start")


def check_drain(tool: Docker, config: dict[str, Any]) -> None:
    """A signal while streams run: they end as they would have, and the exit code is 0."""
    command = tool.beside("python", "-", "drain", *READY)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as streaming:
        assert streaming.stdin is not None and streaming.stdout is not None
        streaming.stdin.write(CLIENT)
        streaming.stdin.close()
        if streaming.stdout.readline().strip() != "running":
            raise Failed("the streams did not start; their error is above")
        began = time.monotonic()
        code = tool.stop()
        seconds = time.monotonic() - began
        rest = streaming.stdout.read()
    if streaming.returncode:
        raise Failed(f"the streams did not end; their error is above, the server's log:\n{tool.log()}")
    found = json.loads(rest)
    after = found["chunks_while_unhealthy"]
    if after is None or after == 0:
        raise Failed(f"the streams ended before the signal had been taken, so nothing was drained: {found}")
    check("unhealthy while it drains (/ready)", after > 0, f"{after:,} of {found['chunks']:,} chunks came after that")
    check("every stream was completed", found["finished"] == ["length"] * found["streams"], found["finished"])
    check("it ended by itself", code == 0, f"{config.get('StopSignal', 'SIGTERM')}, exit code {code}, {seconds:.1f} s")


def show_sizes(tool: Docker) -> None:
    print(f"layers of {tool.image}, the base first:")
    for size, made in tool.layers():
        print(f"  {size:>10}  {' '.join(made.split())[:100]}")


def run(arguments: argparse.Namespace) -> None:
    name = choose([arguments.tool] if arguments.tool else list(TOOLS))
    tool = TOOLS[name](name, arguments.tag, shlex.split(arguments.build), shlex.split(arguments.run))
    print(f"with     {call(name, '--version').stdout.strip()}", flush=True)
    if not arguments.no_build:
        tool.fetch(arguments.base)
        began = time.monotonic()
        tool.build(arguments.base)
        check("the image builds", True, f"{tool.image} on {arguments.base}, {time.monotonic() - began:.0f} s")
    try:
        config = check_contents(tool)
        check_server(tool, config)
        check_drain(tool, config)
    finally:
        tool.clean()
    show_sizes(tool)


def main(argv: list[str] | None = None) -> int:
    default = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert default is not None
    parser = argparse.ArgumentParser(prog="make image-test", description="Build the image, run it, and check it.")
    parser.add_argument("--tool", choices=TOOLS, help="default: the first of them that works here")
    parser.add_argument("--base", default=default[1], help="the base image with Python in it (default: %(default)s)")
    parser.add_argument("--tag", default="pequod:cpu", help="the image's name (default: %(default)s)")
    parser.add_argument("--no-build", action="store_true", help="check the image that has the name, as it is")
    parser.add_argument("--build", default="", metavar="OPTIONS", help="more options for the build, as one word")
    parser.add_argument("--run", default="", metavar="OPTIONS", help="more options for each run, as one word")
    try:
        run(parser.parse_args(argv))
    except Skipped as error:
        print(f"skipped  {error}")
        return 0
    except Failed as error:
        print(f"failed   {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
