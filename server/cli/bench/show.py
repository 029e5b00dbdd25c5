"""Prints results as tables and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..commands import Failure, warn
from .figures import rounded

Stats = dict[str, dict[str, float]]
Result = dict[str, Any]
Labels = Sequence[tuple[str, str, str]]  # figure, label, unit


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, the first to the left and the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = []
    for line in lines:
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        shown.append("  ".join([line[0].ljust(widths[0]), *numbers]).rstrip())
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


def points_table(title: str, points: Sequence[Mapping[str, Any]], labels: Labels) -> str:
    """Return a table with a row for each point, named by its `load`, and a column for each label."""
    rows = [[point["load"], *(number(point.get(name), unit) for name, _, unit in labels)] for point in points]
    return table([title, *(label for _, label, _ in labels)], rows)


def spread_table(stats: Stats, labels: Labels, rounds: int) -> str:
    """Return a table of figures with medians and quartiles, without figures not observed."""
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


def server_and_model(result: Result) -> str:
    return f"{result['server']['name']}, {result['server']['model']}"


def figures_table(result: Result, workload: str, labels: Labels) -> str:
    """Return the figures as a table, after a description of the workload and before the server's peak memory."""
    title = f"{server_and_model(result)}: {workload}"
    lines = [title, spread_table(result["figures"], labels, result["workload"]["rounds"])]
    lines.append(f"failed requests: {result['failed']} of {result['sent']}")
    if result["peak_bytes"]:
        lines.append(f"peak memory of the server's processes: {number(result['peak_bytes'], 'bytes')}")
    return "\n".join(lines)


def report(
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, Result]],
    shown: Callable[[Result], str],
) -> Result:
    """Measure, print the notes on stderr and the result as a table or as JSON, and return the result.

    Raises Failure if the server was gone before the end or no request succeeded, after writing what was measured.
    """
    check(arguments)
    result = asyncio.run(measure(arguments))
    sent, failure = result.get("sent"), result.get("failure")
    if sent == 0 and failure is not None:
        raise Failure(failure)
    for note in dict.fromkeys(result.get("notes", ())):
        warn(note)
    write(arguments, result, shown(result))
    if failure is not None:
        raise Failure(failure)
    if sent and result["failed"] == sent:
        raise Failure("every request failed")
    return result


def write(arguments: argparse.Namespace, result: Result, text: str) -> None:
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
