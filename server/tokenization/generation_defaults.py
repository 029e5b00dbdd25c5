"""Sampling defaults from a model's generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path

from engine import ConfigError, read_json

# The values that are used, with their type and the range of the API.
DEFAULTS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 1e-9, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-9, 2),
}

log = logging.getLogger("pequod.server")


def read_defaults(choice: str, folder: Path) -> dict[str, float | int]:
    """Read the file that --generation-config selects; {} if there is none."""
    if choice == "engine":
        return {}
    path = folder if choice == "auto" else Path(choice)
    path = path / "generation_config.json" if path.is_dir() else path
    read = read_json(path)
    if read is None:
        if choice != "auto":
            raise ConfigError(f"--generation-config {choice}: there is no generation_config.json")
        return {}
    defaults: dict[str, float | int] = {}
    for name, (kind, low, high) in DEFAULTS.items():
        value = read.get(name)
        if value is None or (name == "top_k" and value == 0):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            log.warning("%s: %s is not a number and is not used as a default", path, name)
        elif not low <= value <= high:
            log.warning("%s: %s is outside %g..%g and is not used as a default", path, name, low, high)
        else:
            defaults[name] = kind(value)
    return defaults
