"""LineWriter: writes lines to a file from its own thread, so that a blocked pipe does not block the server."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TextIO

MAX_LINES = 10_000  # in the queue; further lines are dropped and counted
CLOSE_S = 1.0  # to write the queued lines at the end


class LineWriter:
    """Writes lines in order. `write` never blocks: with MAX_LINES in the queue it drops the line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._is_closed = False
        self.dropped = 0
        self.error: OSError | None = None  # of the last write; the next line tries again
        # A daemon: a blocked pipe must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="lines", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line, given without its line end."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the queued lines, waiting for CLOSE_S at most."""
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
