"""Where settings come from: flag over environment over TOML file over default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from .settings import FIELDS, PREFIX, SECRET, Settings, environment, flag, metavar, shape
from .settings_values import SettingsError, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each PEQUOD_* variable that is no setting but looks like one."""
    known = [PREFIX + name.upper() for name in FIELDS] + [PREFIX + "CONFIG"]
    rest = [name for name in environ if name.startswith(PREFIX) and name not in known]
    close = [(name, nearest(name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known])) for name in rest]
    return [f"{name} is not a setting; did you mean {PREFIX}{meant}?" for name, meant in close if meant is not None]


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file by field name; keys may be written with - or _."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            close = nearest(name, FIELDS)
            hint = f"did you mean {close}?" if close else "`pequod config show` lists the keys"
            raise SettingsError(f"{path}: unknown key {key}; {hint}")
        if name in values:
            raise SettingsError(f"{path}: {name} is set twice")
        _check_kind(path, key, name, value)
        values[name] = value
    return values


def _check_kind(path: Path, key: str, name: str, value: Any) -> None:
    """TOML has types, so that a quoted number is a mistake and not a number."""
    kind = shape(name)[0]
    is_size = metavar(name) == "SIZE"
    wanted = {
        bool: "true or false",
        int: "a size such as 4GiB or a number" if is_size else "a whole number",
        float: "a number",
        list: "a list of texts",
        str: "a text in quotes",
    }[kind]
    if kind is bool:
        fits = isinstance(value, bool)
    elif isinstance(value, bool):
        fits = False
    elif kind is int:
        fits = isinstance(value, int) or (is_size and isinstance(value, str))
    elif kind is float:
        fits = isinstance(value, int | float)
    elif kind is list:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
    else:
        fits = isinstance(value, str)
    if not fits:
        raise SettingsError(f"{path}: {key} must be {wanted}{_told(name, value)}")


def _told(name: str, value: Any) -> str:
    if name in SECRET or isinstance(value, dict):
        return ""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return f", not {text}" if len(text) <= 64 else ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for each field, where its value came from."""

    settings: Settings
    sources: dict[str, str]


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Settings from flags, environment, TOML file and defaults, in that order; SettingsError names what is wrong."""
    from_file = {} if config is None else read_toml(config)
    from_env = {variable.upper(): variable for variable in environment(os.environ)}
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in FIELDS:
        variable = from_env.get(PREFIX + name.upper())
        if name in flags:
            sources[name] = f"flag {flag(name)}"
            values[name] = flags[name]
        elif variable is not None:
            sources[name] = f"env {variable}"
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
    """One sentence for a validation error: where, what, and what would do."""
    context = error.get("ctx", {})
    kind = error["type"]
    name = str(error["loc"][0]) if error["loc"] else ""
    if kind == "value_error":
        text = str(context["error"])
    elif kind.startswith("int_"):
        text = "is not a whole number"
    elif kind.startswith(("float_", "finite_number")):
        text = "is not a number"
    elif kind.startswith("bool_"):
        text = "must be true or false"
    elif kind == "literal_error":
        choices = shape(name)[1]
        close = nearest(str(error["input"]), choices)
        text = f"must be one of {', '.join(choices)}" + (f"; did you mean {close}?" if close else "")
    elif kind in ("greater_than_equal", "less_than_equal", "greater_than"):
        word = {"greater_than_equal": "at least", "less_than_equal": "at most", "greater_than": "above"}[kind]
        text = f"must be {word} {next(iter(context.values())):g}"
    elif kind in ("string_too_short", "string_too_long"):
        text = "is empty" if kind == "string_too_short" else "is too long"
    else:
        text = "is not valid: " + error["msg"][:1].lower() + error["msg"][1:]
    if not name:
        return text
    where = sources[name].removeprefix("flag ").removeprefix("env ")
    shown = str(error["input"])
    value = "" if name in SECRET or len(shown) > 64 or kind.startswith("string_") else f" {shown}"
    joint = ":" if value and not text.startswith("is ") else ""
    return f"{where}{joint}{value} {text}"
