"""Results for people and for programs."""

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
    """Columns, the first to the left and the others to the right."""
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
    """Four significant digits; seconds in the unit that reads best, bytes in GiB; `-` for what was not seen."""
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
    """(figure, label, unit) with the median and the quartiles of the rounds; figures that nobody saw are left out."""
    columns = ("median", "q1", "q3") if rounds > 1 else ("median",)
    rows = [
        [label, *(number(stats[name][column], unit) for column in columns)]
        for name, label, unit in labels
        if name in stats
    ]
    return table(("", "median", "quartile 1", "quartile 3") if rounds > 1 else ("", "measured"), rows)


def check(arguments: argparse.Namespace) -> None:
    """Say before anything is measured that results will have no place to go."""
    place = arguments.json
    if isinstance(place, Path) and not place.parent.is_dir():
        raise Failure(f"--json {place}: there is no folder {place.parent}")
    if getattr(arguments, "plot", None) is not None:
        from . import plots

        plots.require()
        try:
            arguments.plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failure(f"--plot {arguments.plot}: {error.strerror}") from None


def give(arguments: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print the text, or the result as JSON where that was asked for on standard output; write the file."""
    told = json.dumps(rounded(result), ensure_ascii=False)
    if arguments.json is None:
        print(told)
        return
    print(text)
    if arguments.json is not False:
        try:
            arguments.json.write_text(told + "\n", encoding="utf-8")
        except OSError as error:
            raise Failure(f"--json {arguments.json} cannot be written: {error.strerror}") from None
