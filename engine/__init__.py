"""Pequod's engine: token ids in, token ids out, by continuous batching over a paged KV cache.

This is the whole public surface. Importing it imports no torch, and the module of a name only when the name is used:
the process that renders templates, which starts often, needs a single function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Engine, EngineStatus, LocalEngine
    from .config import EngineConfig
    from .fair_lock import FairLock
    from .files import LIST_BYTES, read_file, read_json, read_text
    from .grammar import problem as grammar_problem
    from .grammar.trial import GrammarTrial
    from .hub import Folder, fetch
    from .memory import measure as measure_memory
    from .packaged import on_this_machine as packaged_models
    from .packaged import pull
    from .process import begin_child, spawn
    from .supervisor import Child, ProcessEngine
    from .types import (
        ConfigError,
        EngineDied,
        EngineError,
        EngineInfo,
        EngineRequest,
        ErrorCode,
        ModelError,
        Pooling,
        RequestError,
        RequestStats,
        Roofline,
        SamplingParams,
        StepStats,
        TokenDelta,
        TokenLogprob,
    )

# Module -> its exported names; those that have another name there are below.
_NAMES = {
    "client": ("Engine", "EngineStatus", "LocalEngine"),
    "config": ("EngineConfig",),
    "fair_lock": ("FairLock",),
    "files": ("LIST_BYTES", "read_file", "read_json", "read_text"),
    "grammar.trial": ("GrammarTrial",),
    "hub": ("Folder", "fetch"),
    "packaged": ("pull",),
    "process": ("begin_child", "spawn"),
    "supervisor": ("Child", "ProcessEngine"),
    "types": (
        "ConfigError", "EngineDied", "EngineError", "EngineInfo", "EngineRequest", "ErrorCode", "ModelError", "Pooling",
        "RequestError", "RequestStats", "Roofline", "SamplingParams", "StepStats", "TokenDelta", "TokenLogprob",
    ),
}  # fmt: skip
_PLACES = {name: (module, name) for module, names in _NAMES.items() for name in names} | {
    "grammar_problem": ("grammar", "problem"),
    "measure_memory": ("memory", "measure"),
    "packaged_models": ("packaged", "on_this_machine"),
}

if not TYPE_CHECKING:  # mypy would believe that every name is here

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, own = _PLACES[name]
        globals()[name] = value = getattr(import_module(f".{module}", __name__), own)
        return value


__all__ = [
    "LIST_BYTES",
    "Child",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDied",
    "EngineError",
    "EngineInfo",
    "EngineRequest",
    "EngineStatus",
    "ErrorCode",
    "FairLock",
    "Folder",
    "GrammarTrial",
    "LocalEngine",
    "ModelError",
    "Pooling",
    "ProcessEngine",
    "RequestError",
    "RequestStats",
    "Roofline",
    "SamplingParams",
    "StepStats",
    "TokenDelta",
    "TokenLogprob",
    "begin_child",
    "fetch",
    "grammar_problem",
    "measure_memory",
    "packaged_models",
    "pull",
    "read_file",
    "read_json",
    "read_text",
    "spawn",
]
