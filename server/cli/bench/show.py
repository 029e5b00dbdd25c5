"""Prints results as tables and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..commands import Failure
from .figures import rounded

Stats = dict[str, dict[str, float]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, the first to the left and the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def number(value: float | None, unit: str = "") -> str:
    """Return a value with four significant digits, seconds and bytes in a suitable unit; `-` for None."""
    if value is None:
        return "-"
    if unit == "s":
        scale, unit = (1.0, "s") if abs(value) >= 1 else (1e3, "ms") if abs(value) >= 1e-3 else (1e6, "µs")
        return f"{_digits(value * scale)} {unit}"
    if unit == "bytes":
        scale, unit = (1 << 30, "GiB") if abs(value) >= 1 << 30 else (1 << 20, "MiB")
        return f"{_digits(value / scale)} {unit}"
    if unit == "%":
        return f"{100 * value:.1f} %"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 1:
        return f"{value:.4g}"
    return f"{value:,.{max(0, 4 - len(str(int(abs(value)))))}f}"


def spread_table(stats: Stats, labels: Sequence[tuple[str, str, str]], rounds: int) -> str:
    """Return a table of labels (figure, label, unit) with medians and quartiles, without figures not observed."""
    columns = ("median", "q1", "q3") if rounds > 1 else ("median",)
    rows = [
        [label, *(number(stats[name][column], unit) for column in columns)]
        for name, label, unit in labels
        if name in stats
    ]
    return table(("", "median", "quartile 1", "quartile 3") if rounds > 1 else ("", "measured"), rows)


def check(arguments: argparse.Namespace) -> None:
    """Raise Failure before the measurement if its results cannot be written."""
    path = arguments.json
    if isinstance(path, Path) and not path.parent.is_dir():
        raise Failure(f"--json {path}: there is no folder {path.parent}")
    if getattr(arguments, "plot", None) is not None:
        from . import plots

        plots.require()
        try:
            arguments.plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failure(f"--plot {arguments.plot}: {error.strerror}") from None


def give(arguments: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print the text, or the result as JSON if --json has no file, else write the file as well."""
    encoded = json.dumps(rounded(result), ensure_ascii=False)
    if arguments.json is None:
        print(encoded)
        return
    print(text)
    if arguments.json is not False:
        try:
            arguments.json.write_text(encoded + "\n", encoding="utf-8")
        except OSError as error:
            raise Failure(f"--json {arguments.json} cannot be written: {error.strerror}") from None
