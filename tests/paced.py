"""Runs `python -m server` with an engine that waits before each step for the seconds that the file PACE_FILE says.

With CHECK_S in the environment, the check of a grammar may take so many seconds of CPU time.

The same module is the engine's process, in the place of `python -m engine.worker`. See PacedServer in tests/live.py.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

PACE_FILE, CHECK_S = "PACE_FILE", "CHECK_S"


def slow_down() -> None:
    from engine.loop import EngineLoop, Flight

    path = pathlib.Path(os.environ[PACE_FILE])
    launch = EngineLoop._launch

    def paced(loop: EngineLoop, flight: Flight) -> None:
        time.sleep(float(path.read_text() or 0))  # it is empty for a moment while it is written
        launch(loop, flight)

    EngineLoop._launch = paced


if __name__ == "__main__":
    if sys.argv[1].isdigit():  # a socket: it is the engine's process
        from engine import worker

        slow_down()
        worker.main()
    else:
        from engine.supervisor import Child
        from server.__main__ import main

        Child.MODULE = "tests.paced"
        if CHECK_S in os.environ:
            from server.grammar import checker

            checker.SLOW_S = float(os.environ[CHECK_S])
        sys.exit(main())
