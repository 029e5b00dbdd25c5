"""Draws results as PNGs, with the machine's limit where it is known. Imports matplotlib only when it draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..commands import Failure

SIZE = (7.0, 4.2)  # inches
COLOURS = {"schedule": "#9aa5b1", "prepare": "#62a8ac", "forward": "#2f5d8a", "sample": "#e0a458", "publish": "#c8553d"}
OURS, SECOND, LIMIT = "#2f5d8a", "#e0a458", "#555555"
LIMIT_LABEL = "limit of this machine"


def require() -> None:
    """Raise Failure if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise Failure("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # files only: there may be no screen


@contextlib.contextmanager
def _figure(path: Path, title: str, x: str, y: str) -> Iterator[Any]:
    """Yield the axes of a figure, which is written when the block ends. Raises Failure if it cannot be."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE, dpi=120, layout="constrained")
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        yield axes
        figure.savefig(path)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def throughput(path: Path, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Plot the tokens per second of all requests over the time per token of each request.

    A point has load, output_tok_s and tpot_p50_s, and limit_tok_s and limit_tpot_s if these are known.
    """
    with _figure(path, title, "time per token, median (ms)", "tokens/s of all requests") as axes:
        known = [point for point in points if point["tpot_p50_s"]]
        _labelled(axes, known, "tpot_p50_s", "output_tok_s", "o-", color=OURS, label="measured")
        if limits := [point for point in known if point.get("limit_tpot_s")]:
            style = {"color": LIMIT, "markersize": 4, "label": LIMIT_LABEL}
            _labelled(axes, limits, "limit_tpot_s", "limit_tok_s", "s--", **style)
            axes.set_xscale("log")
            axes.set_yscale("log")
            _plain(axes.xaxis)
            _plain(axes.yaxis)
        axes.legend(frameon=False)


def _labelled(axes: Any, points: Sequence[Mapping[str, Any]], x: str, y: str, marker: str, **style: Any) -> None:
    """Draw a line through points, with the load beside each; `x` is in seconds."""
    positions = [(1e3 * point[x], point[y]) for point in points]
    axes.plot([at[0] for at in positions], [at[1] for at in positions], marker, **style)
    for point, at in zip(points, positions, strict=True):
        axes.annotate(point["load"], at, xytext=(5, -11), textcoords="offset points", fontsize=8, color=style["color"])


def context(path: Path, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Plot the time per token and the longest gaps over the context length.

    A point has context, tpot_p50_s and itl_p99_s, and limit_tpot_s if it is known.
    """
    with _figure(path, title, "context length (tokens)", "time per token (ms)") as axes:
        known = [point for point in points if point["tpot_p50_s"]]
        x = [point["context"] for point in known]
        axes.plot(x, [1e3 * point["itl_p99_s"] for point in known], "^:", color=SECOND, label="99th percentile of gaps")
        axes.plot(x, [1e3 * point["tpot_p50_s"] for point in known], "o-", color=OURS, label="median")
        if limits := [point for point in known if point.get("limit_tpot_s")]:
            y = [1e3 * point["limit_tpot_s"] for point in limits]
            axes.plot([p["context"] for p in limits], y, "s--", color=LIMIT, markersize=4, label=LIMIT_LABEL)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x)
        _plain(axes.xaxis)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)


def phases(path: Path, title: str, steps: Mapping[str, Mapping[str, float]], limits: Mapping[str, float]) -> None:
    """Plot the phases of a decode step as a bar for each number of rows; `limits`: their minimum times, in seconds."""
    from matplotlib.patheffects import withStroke

    with _figure(path, title, "median time of a decode step (ms)", "") as axes:
        rows = list(steps)
        left = [0.0] * len(rows)
        for phase, colour in COLOURS.items():
            widths = [1e3 * steps[row][f"{phase}_s"] for row in rows]
            axes.barh(rows, widths, left=left, color=colour, label=phase, height=0.55)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, row in enumerate(rows):
            axes.annotate(f"{left[y]:.3g}", (left[y], y), xytext=(4, -3), textcoords="offset points", fontsize=8)
            if row in limits:
                label = LIMIT_LABEL if row == next(iter(limits)) else None
                at = 1e3 * limits[row]
                line = {
                    "color": "black",
                    "linewidth": 1.6,
                    "path_effects": [withStroke(linewidth=4, foreground="white")],
                }
                axes.plot([at, at], [y - 0.36, y + 0.36], label=label, **line)
        axes.set_yticks(range(len(rows)), [f"{row} row{'s' * (row != '1')}" for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.legend(
            frameon=False, ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), columnspacing=1.0
        )


def _plain(axis: Any) -> None:
    """Write numbers without exponents, also on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axis.get_scale() == "log" and axis.get_transform().base == 10:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
