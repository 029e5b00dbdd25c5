"""Sources of settings, in order of precedence: flag, environment, TOML file, default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .settings import FIELDS, PREFIX, SECRET, Settings, environment, flag, metavar, shape
from .settings_values import SettingsError, hint, nearest

# The beginning of an error's type in pydantic -> our message.
MESSAGES = {
    "int_": "is not a whole number",
    "float_": "is not a number",
    "finite_number": "is not a number",
    "bool_": "must be true or false",
    "path_not_file": "is not a file",
    "string_too_short": "is empty",
    "string_too_long": "is too long",
}
# A setting's type -> types that TOML may have for it, and their description.
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    list: ((list,), "a list of strings"),
    str: ((str,), "a string in quotes"),
}


def misspelled(environ: Mapping[str, str]) -> list[str]:
    """Return a message for each PEQUOD_* variable that is not a setting but resembles one."""
    known = [*(name.upper() for name in FIELDS), "CONFIG"]
    names = [name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX)]
    close = [(name, nearest(name, known)) for name in names if name not in known]
    return [f"{PREFIX}{name} is not a setting; did you mean {PREFIX}{meant}?" for name, meant in close if meant]


def read_toml(path: Path) -> dict[str, Any]:
    """Read the values of a TOML file by field name; keys may be written with - or _."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a byte order mark
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            advice = hint(name, FIELDS, "`pequod config show` lists the keys")
            raise SettingsError(f"{path}: unknown key {key}{advice}")
        if name in values:
            raise SettingsError(f"{path}: {name} is set twice")
        _check_kind(path, key, name, value)
        values[name] = value
    return values


def _check_kind(path: Path, key: str, name: str, value: Any) -> None:
    """Raise SettingsError for a value of the wrong type: TOML has types, so a quoted number is a mistake."""
    kinds, wanted = KINDS[shape(name)[0]]
    if metavar(name) == "SIZE":
        kinds, wanted = (int, str), "a size such as 4GiB or a number"
    is_valid = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not is_valid or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        is_shown = name not in SECRET and not isinstance(value, dict) and len(text) <= 64
        raise SettingsError(f"{path}: {key} must be {wanted}" + (f", not {text}" if is_shown else ""))


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the source of each field's value."""

    settings: Settings
    sources: dict[str, str]


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Settings from flags, environment, TOML file and defaults, in this order. Raises SettingsError."""
    from_file = {} if config is None else read_toml(config)
    from_env = {variable.upper(): (variable, value) for variable, value in environment(os.environ).items()}
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in FIELDS:
        variable, value = from_env.get(PREFIX + name.upper(), (None, None))
        if name in flags:
            sources[name] = f"flag {flag(name)}"
            values[name] = flags[name]
        elif variable is not None:
            sources[name] = f"env {variable}"
            values[name] = value
        elif name in from_file:
            sources[name] = f"{config}: {name}"
            values[name] = from_file[name]
        else:
            sources[name] = "default"
    try:
        return Loaded(Settings(**values), sources)
    except ValidationError as error:
        raise SettingsError(_sentence(error.errors()[0], sources)) from None


def _sentence(error: ErrorDetails, sources: Mapping[str, str]) -> str:
    """Describe a validation error in one sentence: the source, the value, and what is allowed."""
    context = error.get("ctx", {})
    kind = error["type"]
    name = str(error["loc"][0]) if error["loc"] else ""
    if kind == "value_error":
        text = str(context["error"])
    elif fixed := next((text for prefix, text in MESSAGES.items() if kind.startswith(prefix)), None):
        text = fixed
    elif kind == "literal_error":
        choices = shape(name)[1]
        text = f"must be one of {', '.join(choices)}{hint(str(error['input']), choices)}"
    elif kind in ("greater_than_equal", "less_than_equal", "greater_than"):
        word = {"greater_than_equal": "at least", "less_than_equal": "at most", "greater_than": "above"}[kind]
        text = f"must be {word} {next(iter(context.values())):g}"
    else:
        text = "is not valid: " + error["msg"][:1].lower() + error["msg"][1:]
    if not name:
        return text
    where = sources[name].removeprefix("flag ").removeprefix("env ")
    shown = str(error["input"])
    value = "" if name in SECRET or len(shown) > 64 or kind.startswith("string_") else f" {shown}"
    if value and text.startswith("must "):
        text, semicolon, advice = text.partition("; ")
        return f"{where} {text}, not{value}{semicolon}{advice}"
    joint = ":" if value and not text.startswith("is ") else ""
    return f"{where}{joint}{value} {text}"
