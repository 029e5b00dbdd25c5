"""`guard.py PARENT SECONDS COMMAND...`: runs a compiler, and kills it when the parent dies or the time is over.

A compiler starts further programs, which would keep running: it gets a process group, and the whole group is killed.
Needs only the standard library, like build.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Return the compiler's exit code."""
    parent, seconds, *command = sys.argv[1:]
    try:
        compiler = subprocess.Popen(command, process_group=0)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def stop(signum: int, frame: FrameType | None) -> None:
        os.killpg(compiler.pid, signal.SIGKILL)
        print(f"error: stopped by {signal.Signals(signum).name}", file=sys.stderr)

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(each, stop)
    signal.alarm(int(seconds))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(parent):  # it died before prctl was called
        stop(signal.SIGTERM, None)
    return compiler.wait()


if __name__ == "__main__":
    sys.exit(main())
