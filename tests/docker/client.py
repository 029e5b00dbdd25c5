"""The part of `image.py` that runs in a container: `python - MODE [WORD...]` with this file as its standard input.

Needs only the standard library; prints one JSON document. The server is addressed as 127.0.0.2, where it answers only
if it listens on every address, as it must for a published port to work.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from typing import Any

URL = f"http://127.0.0.2:{os.environ.get('PEQUOD_PORT', '8000')}"
COMPILERS = ["cc", "c++", "gcc", "g++", "clang", "clang++", "tcc", "cpp", "as", "ld"]
SERVER = b"/bin/pequod\0serve\0"  # how the server's command line ends
# One stream would do; this many keep a fast machine busy until the signal has arrived.
STREAMS = 4


def get(path: str) -> Any:
    with urllib.request.urlopen(URL + path, timeout=30) as response:
        return json.load(response)


def chat(body: dict[str, Any]) -> Any:
    data = json.dumps({"model": "builtin", "temperature": 0} | body).encode()
    request = urllib.request.Request(f"{URL}/v1/chat/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def written(folder: str) -> str:
    """Write a file into a folder; returns "yes", or the name of the error."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return "yes"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")


def look() -> dict[str, Any]:
    """The container as a process in it sees it."""
    return {
        "uid": os.getuid(),
        "machine": os.uname().machine,
        "compilers": [name for name in COMPILERS if shutil.which(name)],
        "written": {folder: written(folder) for folder in ("/", "/opt/pequod", "/tmp", "/cache")},
    }


def server() -> dict[str, int]:
    """The server's process id and rights, from /proc."""
    port = f"PEQUOD_PORT={os.environ['PEQUOD_PORT']}".encode()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            # Without a process namespace of its own the container sees the host's processes, too.
            if not (folder / "cmdline").read_bytes().endswith(SERVER):
                continue
            if port not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue
        status = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
        return {
            "pid": int(folder.name),
            "uid": int(status["Uid"]),
            "capabilities": int(status["CapEff"], 16),
            "no_new_privileges": int(status["NoNewPrivs"]),
        }
    raise LookupError("no server runs in this container")


def stop() -> dict[str, int]:
    """Send SIGTERM to the server, for a tool that cannot."""
    found = server()
    os.kill(found["pid"], signal.SIGTERM)
    return found


def ask() -> dict[str, Any]:
    """The answer to a question, what serves it, and which libraries were compiled since the container started."""
    with chat({"messages": [{"role": "user", "content": "What is 7 + 5?"}]}) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    compiled = [str(path) for folder in ("/cache", "/tmp") for path in pathlib.Path(folder).rglob("*.so")]
    return {"answer": answer, "version": get("/version"), "compiled": compiled}


def drain(*health: str) -> dict[str, Any]:
    """Stream until the server ends the streams; `health` is the command of the health check.

    Prints `running` after the first chunk, which is when the signal may come.
    """
    body = {"messages": [{"role": "user", "content": "Tell me a sea story."}], "n": STREAMS, "stream": True}
    chunks, finished, ended, unhealthy_at = 0, [], False, None

    def watch() -> None:
        nonlocal unhealthy_at
        while unhealthy_at is None and not ended:
            if subprocess.run(health, stdout=subprocess.DEVNULL, check=False).returncode == 1:
                unhealthy_at = chunks

    watcher = threading.Thread(target=watch)
    with chat(body | {"max_tokens": 1900, "ignore_eos": True}) as response:
        watcher.start()
        for line in response:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                chunks += 1
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConnectionError(event["error"]["message"])
                finished += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]
                if chunks == 1:
                    print("running", flush=True)
        else:
            raise ConnectionError(f"the stream was cut off after {chunks} chunks, {len(finished)} of {STREAMS} ended")
    ended = True
    watcher.join()
    after = None if unhealthy_at is None else chunks - unhealthy_at
    return {"chunks": chunks, "chunks_while_unhealthy": after, "finished": finished, "streams": STREAMS}


if __name__ == "__main__":
    modes = {"look": look, "server": server, "stop": stop, "ask": ask, "drain": drain}
    print(json.dumps(modes[sys.argv[1]](*sys.argv[2:])))
