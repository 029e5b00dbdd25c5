"""Child processes: how they are started, and how they end with their parent."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys

# What no child needs to know: a process's environment can be read by others of the same user.
SECRETS = ("PEQUOD_API_KEY", "PEQUOD_METRICS_KEY")
PR_SET_PDEATHSIG = 1


def spawn(module: str, fd: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `python -m module fd parent_pid arguments…` with the socket `fd`. Raises OSError when the system refuses.

    The child finds this very package, from whichever directory the parent was started, and gets no SECRETS. It imports
    nothing from that directory, which may be the folder of a model that a stranger made.
    """
    path = os.pathsep.join([str(pathlib.Path(__file__).parent.parent), *filter(None, [os.getenv("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name.upper() not in SECRETS}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(fd), str(os.getpid()), *arguments],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
    )


def begin_child(*ignored: signal.Signals) -> tuple[int, list[str]]:
    """What a process that `spawn` has started does first; returns its socket's descriptor and its arguments.

    From now on the system kills this process when its parent has died, whatever it is doing then. `ignored` are signals
    that a terminal sends to the parent's children too: the parent alone decides when they end. Only Linux kills
    orphans; elsewhere a child ends when it finds its socket closed.
    """
    fd, parent_pid, *arguments = sys.argv[1:]
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent_pid):  # it died before the system knew
        os._exit(1)
    return int(fd), arguments
