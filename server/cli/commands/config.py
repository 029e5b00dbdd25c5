"""`pequod config show`: prints each setting, its value and its source."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ... import settings
from ...settings import Settings
from . import TITLES, Parser, add_settings, chat_model, settings_from

MASK = "***"


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod config show [MODEL] [flags]"
    parser.description = (
        "Show each setting, its value and its source: a flag, a PEQUOD_* variable, the TOML file of --config, or the"
        " default. Keys are masked. Accepts every flag of `pequod serve`."
    )
    parser.add_argument("action", nargs="?", choices=["show"], default="show", help="the only action is `show`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "model", "engine", "http", "limits", "logs")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings that `pequod serve` would use with the same flags."""
    loaded = settings_from(arguments, default_model=chat_model)
    shown = {name: plain(loaded.settings, name) for name in settings.FIELDS}
    if arguments.json:
        found = {name: {"value": value, "source": loaded.sources[name]} for name, value in shown.items()}
        print(json.dumps(found, ensure_ascii=False, indent=2))
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
    """Return a setting's value for JSON, with keys masked."""
    value = getattr(values, name)
    if name in settings.SECRET:
        return [MASK] * len(value) if isinstance(value, list) else value and MASK
    return str(value) if isinstance(value, Path) else value


def text(value: Any) -> str:
    """Return a value in TOML's form; `-` if it is not set."""
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
