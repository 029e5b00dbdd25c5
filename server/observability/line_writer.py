"""LineWriter: writes lines to a file from a thread of its own, so that a reader who does not read stops nobody else."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TextIO

MAX_LINES = 10_000  # that wait to be written; what comes after them is dropped and counted
CLOSE_S = 1.0  # for what waits at the end


class LineWriter:
    """Writes lines in their order. `write` never waits: beyond MAX_LINES it drops the line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._is_closed = False
        self.dropped = 0
        self.error: OSError | None = None  # that the last write has met; it is tried again with the next line
        # A daemon: a pipe that nobody reads must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="lines", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Have a line, without its end, written later."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most. What is written to the file afterwards goes there directly."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line + "\n")
                if self._lines.empty():
                    self._file.flush()
                self.error = None
            except (OSError, ValueError) as error:  # ValueError: the file is closed
                self.error = error if isinstance(error, OSError) else OSError(str(error))
                self.dropped += 1
