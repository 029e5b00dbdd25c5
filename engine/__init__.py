"""Pequod's engine: token ids in, token ids out, by continuous batching over a paged KV cache.

This is the whole public surface. Importing it imports no torch.
"""

from .client import Engine, EngineStatus, OpenRequest
from .config import EngineConfig
from .fair_lock import FairLock
from .files import LIST_BYTES, read_file, read_json, read_text
from .grammar import problem as grammar_problem
from .grammar.trial import GrammarTrial
from .hub import Folder, fetch
from .kernels.build import compiler as cpp_compiler
from .local import LocalEngine
from .machine_memory import measure as measure_memory
from .packaged import on_this_machine as packaged_models
from .packaged import pull
from .process import begin_child, spawn
from .supervisor import Child, ProcessEngine
from .tokenizer_files.byte_level import byte_characters
from .tokenizer_files.folder import MAX_BYTES as TOKENIZER_BYTES
from .tokenizer_files.folder import tokenizer_folder
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

__all__ = [
    "LIST_BYTES",
    "TOKENIZER_BYTES",
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
    "OpenRequest",
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
    "byte_characters",
    "cpp_compiler",
    "fetch",
    "grammar_problem",
    "measure_memory",
    "packaged_models",
    "pull",
    "read_file",
    "read_json",
    "read_text",
    "spawn",
    "tokenizer_folder",
]
