"""Starts child processes that end with their parent."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import signal
import subprocess
import sys

# Variables that no child needs: other processes of the same user can read a process's environment.
SECRETS = ("PEQUOD_API_KEY", "PEQUOD_METRICS_KEY")
PR_SET_PDEATHSIG = 1
# New objects that start a garbage collection. A step of 256 rows makes a thousand lists and tuples before those of the
# step before are freed: at Python's 700 each step started one or two collections, which found nothing.
GC_THRESHOLD = 10_000


def child_environment() -> dict[str, str]:
    """Return the environment of a child that runs a module of ours: this process's own, without SECRETS.

    The child imports this package from the same path as the parent. It imports nothing from the current directory,
    which may be an untrusted model folder.
    """
    given = os.getenv("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(pathlib.Path(__file__).parent.parent), *filter(None, given)])  # an empty one is the cwd
    environment = {name: value for name, value in os.environ.items() if name.upper() not in SECRETS}
    return {**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def spawn(module: str, fd: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `python -m module fd parent_pid arguments…` with the socket `fd`. Raises OSError."""
    # The child inherits the mask: until `begin_child`, Ctrl-C would print a traceback of its imports.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(fd), str(os.getpid()), *arguments],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def freeze() -> None:
    """Exclude the objects of a loaded engine, which stay, from later garbage collections, and enable these."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()


def begin_child(*ignored: signal.Signals) -> tuple[int, list[str]]:
    """Initialize a process that `spawn` has started; returns its socket's descriptor and its arguments.

    From now on the kernel kills this process when its parent dies. Only Linux does; elsewhere a child ends when its
    socket is closed. `ignored` are signals that a terminal also sends to children, which only the parent should handle.
    """
    fd, parent_pid, *arguments = sys.argv[1:]
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which `spawn` has blocked
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent_pid):  # the parent died before prctl was called
        os._exit(1)
    return int(fd), arguments
