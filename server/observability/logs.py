"""Log lines on stderr: text for people, JSON for collectors; structured fields through `extra={"fields": {...}}`."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import StepStats

from .line_writer import LineWriter

QUIET = ("uvicorn.error", "uvicorn.access", "httpx", "httpcore", "asyncio", "huggingface_hub")


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _word(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # Quoted where it would otherwise read as two fields or, with a line feed, as two lines.
    return json.dumps(text) if not text or not text.isprintable() or any(c in text for c in ' "=') else text


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 info request id=… prompt_tokens=…`"""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback if there is one."""
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        words = [when, record.levelname.lower(), message, *(f"{k}={_word(v)}" for k, v in fields(record).items())]
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return " ".join(words) + trace


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in fields(record).items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LineHandler(logging.Handler):
    """Passes formatted records to a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.write(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self.writer.close()
        super().close()


def configure(form: str, level: str) -> LineWriter:
    """Send all log lines of this process to stderr, from their own thread."""
    writer = LineWriter(sys.stderr)
    handler = LineHandler(writer)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    return writer


def dropped_lines() -> int:
    """Return the number of log lines dropped since the process was started."""
    return sum(each.writer.dropped for each in logging.getLogger().handlers if isinstance(each, LineHandler))


def request_line(**figures: Any) -> None:
    """Log the one line of a finished request: ids, counts and times, never content; None is left out."""
    shown = {k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items() if v is not None}
    logging.getLogger("pequod.request").info("request", extra={"fields": shown})


class StepLog:
    """Appends every engine step to a file, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError if it cannot be written."""
        # Line-buffered, so that the file has the last step even if the process is killed.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._writer = LineWriter(self._file)
        self._is_broken = False

    def write(self, stats: StepStats) -> None:
        """Append a step; if that fails, as on a full disk, the log ends and the server continues."""
        if self._is_broken or not stats.rows:  # without rows, nothing was computed
            return
        if self._writer.error is not None:
            self._is_broken = True
            logging.getLogger("pequod.server").error("the step log ends here: %s", self._writer.error.strerror)
            return
        self._writer.write(json.dumps({name: getattr(stats, name) for name in stats.__struct_fields__}))

    @property
    def dropped(self) -> int:
        """Steps that could not be written in time."""
        return self._writer.dropped

    def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
