"""`pequod config show`: each setting, its value and where it came from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ... import settings
from ...settings import Settings
from . import TITLES, Parser, add_settings, settings_from

MASK = "***"


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod config show [MODEL] [flags]"
    parser.description = (
        "Show each setting, its value and where it came from: a flag, a PEQUOD_* variable, the TOML file of --config,"
        " or the default. Keys are masked. Takes every flag of `pequod serve`."
    )
    parser.add_argument("action", nargs="?", choices=["show"], default="show", help="what to do; only `show`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "model", "engine", "http", "limits", "logs")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings that `pequod serve` would use with the same flags."""
    loaded = settings_from(arguments)
    shown = {name: plain(loaded.settings, name) for name in settings.FIELDS}
    if arguments.json:
        print(
            json.dumps(
                {name: {"value": value, "source": loaded.sources[name]} for name, value in shown.items()},
                ensure_ascii=False,
                indent=2,
            )
        )
        return 0
    values = {name: text(value) for name, value in shown.items()}
    widths = max(map(len, values)), max(map(len, values.values()))
    for group in TITLES:
        print(f"# {TITLES[group]}")
        for name, value in values.items():
            if settings.group(name) == group:
                print(f"{name:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {loaded.sources[name]}")
    return 0


def plain(values: Settings, name: str) -> Any:
    """A setting's value as JSON has it, keys masked."""
    value = getattr(values, name)
    if name in settings.SECRET:
        return [MASK] * len(value) if isinstance(value, list) else value and MASK
    return str(value) if isinstance(value, Path) else value


def text(value: Any) -> str:
    """A value as a TOML file would have it; `-` for what is not set."""
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
