"""The commands of the command line, one file each, and what they share: flags made from the settings, and errors.

A command's module has `add_arguments(parser)` and `run(arguments) -> exit code`; it imports what it needs in `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ... import settings
from ...settings_sources import Loaded, load, misspelled
from ...settings_values import SettingsError, nearest, split
from ..argv import hide

TITLES = {"model": "model", "engine": "engine", "http": "HTTP", "limits": "limits", "logs": "logs and metrics"}


class Command(Protocol):
    """What a module in this package offers."""

    add_arguments: Callable[[Parser], None]
    run: Callable[..., int]  # of the argparse.Namespace


class Group(Protocol):
    """What a module in this package offers whose command has parts, as `pequod bench latency`."""

    PARTS: dict[str, str]  # name -> summary
    part: Callable[[str], Command]


class UsageError(Exception):
    """The command line asks for something impossible; one sentence, exit code 2."""


class Failure(Exception):
    """The command could not do its work; one sentence, exit code 1."""


class Parser(argparse.ArgumentParser):
    """argparse with errors as UsageError and the nearest flag for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; those that were not given are absent. Flags may be written with _ for -."""
        arguments, rest = self.parse_known_intermixed_args([self._spelled(word) for word in argv])
        for word in rest:
            if word.startswith("-") and word != "-":
                name = word.split("=")[0]
                near = nearest(name, self._option_string_actions)
                hint = f"did you mean {near}?" if near else f"see `{self.prog} --help`"
                raise UsageError(f"unknown flag {name[:64]}; {hint}")
        if rest:
            raise UsageError(f"{rest[0][:64]!r} is one argument too many; see `{self.prog} --help`")
        return arguments

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        hyphened = name.replace("_", "-")
        return hyphened + equals + value if hyphened in self._option_string_actions else word


def _default(name: str, value: Any) -> str:
    if settings.metavar(name) == "SIZE":
        return f"{value >> 20}MiB"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _add_field(box: argparse._ArgumentGroup, name: str) -> None:
    field = settings.FIELDS[name]
    kind, choices = settings.shape(name)
    text = field.description or ""
    if "default" not in text and field.default is not None and kind is not list:
        text += f" (default: {_default(name, field.default)})" if field.default != "" else ""
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind is bool:
        box.add_argument(settings.flag(name), action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = settings.metavar(name) or ("|".join(choices) if choices else name.upper())
    if kind is list:
        # Several values after one flag, the flag several times, and a,b all mean the same.
        options |= {"action": "extend", "nargs": "+", "type": _items}
        box.add_argument(settings.flag(name), **options)
        return
    box.add_argument(settings.flag(name), **options)


def _items(word: str) -> list[str]:
    try:
        return split(word)
    except ValueError as error:
        # Without the word: it may be a key.
        raise argparse.ArgumentTypeError(f"the value {error}") from None


def add_settings(parser: Parser, *groups: str, model: bool = True, extra: Sequence[str] = ()) -> None:
    """Flags for all settings of the groups and for the named ones, --config, and MODEL as an argument."""
    if model:
        parser.add_argument(
            "positional_model", nargs="?", metavar="MODEL", default=None, help="model folder, hub id, or `builtin`"
        )
    box = parser.add_argument_group("settings")
    box.add_argument("--config", metavar="FILE", type=Path, default=None, help="TOML file with settings")
    for group, title in TITLES.items():
        names = [name for name in settings.FIELDS if settings.group(name) == group]
        names = [name for name in names if group in groups or name in extra]
        if names:
            box = parser.add_argument_group(title)
            for name in names:
                _add_field(box, name)


def settings_from(arguments: argparse.Namespace) -> Loaded:
    """The settings that the flags, the environment and the TOML file make together; keys leave the command line."""
    given = {name: value for name, value in vars(arguments).items() if name in settings.FIELDS}
    for name, value in given.items():
        if settings.shape(name)[0] is list:
            given[name] = [item for items in value for item in items]
    model = getattr(arguments, "positional_model", None)
    if model is not None:
        if given.get("model", model) != model:
            raise UsageError(f"two models are named, {model} and --model {given['model']}; name one")
        given["model"] = model
    config = arguments.config
    if config is None and os.environ.get("PEQUOD_CONFIG"):
        config = Path(os.environ["PEQUOD_CONFIG"])
    for sentence in misspelled(os.environ):
        warn(sentence)
    loaded = load(given, config)
    secrets = (*loaded.settings.api_key, loaded.settings.metrics_key)
    hide(secret.get_secret_value() for secret in secrets if secret is not None)
    if loaded.settings.local_files_only:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported, here and in the engine
    return loaded


def warn(sentence: str) -> None:
    """Tell a person something on stderr."""
    print(f"pequod: {sentence}", file=sys.stderr, flush=True)


def wants_colour(stream: Any) -> bool:
    """Whether a stream is a terminal that shows colours and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def execute(name: str, summary: str, command: Command, argv: Sequence[str], **given: object) -> int:
    """Parse and run one command, with what it is given beside its arguments.

    An error for a person is one sentence on stderr and an exit code.
    """
    parser = Parser(
        prog=f"pequod {name}", description=summary[:1].upper() + summary[1:] + ".", allow_abbrev=False, add_help=True
    )
    try:
        command.add_arguments(parser)
        return command.run(parser.parse(argv), **given)
    except (UsageError, SettingsError) as error:
        warn(str(error))
        return 2
    except Failure as error:
        warn(str(error))
        return 1
    except Exception as error:
        code = _engine_code(error)
        if code is None:
            raise
        warn(settings.with_flags(error))
        return code


def execute_group(name: str, summary: str, group: Group, argv: Sequence[str]) -> int:
    """Run one part of a command that has several."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: pequod {name} PART [...]\n\n{summary[:1].upper()}{summary[1:]}.\n")
        print("\n".join(f"  {part:<11} {text}" for part, text in group.PARTS.items()))
        print(f"\n`pequod {name} PART --help` lists the flags of a part.")
        return 0 if argv else 2
    part = argv[0]
    if part not in group.PARTS:
        near = nearest(part, group.PARTS)
        warn(
            f"pequod {name} has no part {part[:64]}; "
            + (f"did you mean {near}?" if near else f"see `pequod {name} --help`")
        )
        return 2
    return execute(f"{name} {part}", group.PARTS[part], group.part(part), argv[1:])


def _engine_code(error: Exception) -> int | None:
    """The exit code of an engine's error, without importing the engine for a command that did not use it."""
    if "engine" not in sys.modules:
        return None
    from engine import ConfigError, EngineError, ModelError, RequestError

    if isinstance(error, ModelError | ConfigError | RequestError):
        return 2
    return 1 if isinstance(error, EngineError) else None
