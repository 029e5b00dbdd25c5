"""Settings: every flag, PEQUOD_* variable and TOML key of the product is one field of one class."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .settings_keys import read_keys
from .settings_values import (
    Bytes,
    Count,
    Device,
    DType,
    File,
    KeyFile,
    Names,
    NewFile,
    ReasoningParser,
    Secret,
    Secrets,
    SocketPath,
    ToolParser,
    _generation_config,
    _root_path,
)

if TYPE_CHECKING:
    from engine import EngineConfig

PREFIX = "PEQUOD_"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def setting(group: str, default: Any, description: str, metavar: str | None = None, **bounds: Any) -> Any:
    """A field with the group that `--help` lists it under."""
    return Field(default, description=description, json_schema_extra={"group": group, "metavar": metavar}, **bounds)


# Field of EngineConfig -> the setting that it is. The engine names fields in its sentences, see `with_flags`.
ENGINE_SETTINGS = {
    "model": "model",
    "revision": "revision",
    "device": "device",
    "dtype": "dtype",
    "quantization": "quantization",
    "implementation": "model_impl",
    "attention": "attention_backend",
    "kv_dtype": "kv_cache_dtype",
    "cpu_isa": "cpu_isa",
    "max_len": "max_model_len",
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "long_prefill_tokens": "long_prefill_token_threshold",
    "policy": "scheduling_policy",
    "prefix_caching": "enable_prefix_caching",
    "block_size": "block_size",
    "num_blocks": "num_gpu_blocks_override",
    "kv_cache_memory": "kv_cache_memory",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "threads": "threads",
}
NAMED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")


class Settings(BaseSettings):
    """Everything that can be set, validated; never changes after that."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=(), validate_default=False
    )

    model: str = setting(
        "model", "builtin", "same as the positional argument MODEL", "MODEL", min_length=1, max_length=4096
    )
    revision: str | None = setting(
        "model", None, "branch, tag or commit of a model on the hub", min_length=1, max_length=256
    )
    served_model_name: Names = setting(
        "model", [], "one or more names that requests may use; the metrics show the first (default: MODEL)", "NAME"
    )
    chat_template: File | None = setting("model", None, "Jinja file that replaces the model's chat template", "FILE")
    tool_call_parser: ToolParser = setting(
        "model",
        "auto",
        "format of the model's tool calls: auto (detected from its chat template), none, or a name",
        "FORMAT",
    )
    reasoning_parser: ReasoningParser = setting(
        "model",
        "auto",
        "format of the model's reasoning: auto (detected from its chat template), none, or a name",
        "FORMAT",
    )
    generation_config: Annotated[str, AfterValidator(_generation_config)] = setting(
        "model",
        "auto",
        "source of sampling parameters that requests omit: auto (the model), engine (none), or a path",
        "auto|engine|PATH",
    )
    local_files_only: bool = setting("model", False, "use only models that are on this machine, and no network")

    device: Device = setting("engine", "auto", "device to run on: auto, cpu, cuda or cuda:N", "DEVICE")
    dtype: DType = setting("engine", "auto", "data type of weights and activations")
    quantization: Literal["none", "int8", "int4"] = setting(
        "engine",
        "none",
        "quantize weights while loading, on CPU only: smaller and faster, slightly less accurate",
    )
    model_impl: Literal["auto", "native", "transformers"] = setting(
        "engine", "auto", "model code: native (ours), transformers (theirs, on our KV cache) or auto"
    )
    kv_cache_dtype: Literal["auto", "int8"] = setting(
        "engine", "auto", "data type of cached keys and values: auto (the model's), or int8 with a scale for each"
    )
    attention_backend: str = setting(
        "engine",
        "auto",
        "attention implementation: auto, cpu or triton (our kernels), or reference (torch)",
        "NAME",
        max_length=64,
    )
    cpu_isa: Literal["auto", "avx512bf16", "avx512", "avx2", "torch"] = setting(
        "engine", "auto", "instruction set of our CPU kernels; torch disables them (default: the best available)"
    )
    max_model_len: Count | None = setting(
        "engine",
        None,
        "maximum tokens of a prompt and its output (default: what the model and the KV cache allow)",
        "TOKENS",
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = setting(
        "engine", None, "maximum sequences per step (default: 16 on CPU, 256 on CUDA)", "N"
    )
    max_num_batched_tokens: Count | None = setting(
        "engine", None, "maximum tokens per step (default: 256 on CPU, 8192 on CUDA)", "TOKENS"
    )
    long_prefill_token_threshold: Count | None = setting(
        "engine",
        None,
        "maximum tokens of one prompt per step while other sequences wait (default: half a step)",
        "TOKENS",
    )
    scheduling_policy: Literal["fcfs", "priority", "prefill-first", "static"] = setting(
        "engine", "fcfs", "order in which waiting sequences are scheduled"
    )
    enable_prefix_caching: bool = setting("engine", True, "reuse the cached blocks of prompts that begin alike")
    gpu_memory_utilization: float = setting(
        "engine", 0.9, "fraction of GPU memory to use", "SHARE", gt=0, le=1, allow_inf_nan=False
    )
    kv_cache_memory: Annotated[Bytes, Field(ge=1, le=2**50)] | None = setting(
        "engine",
        None,
        "size of the KV cache on CPU, such as 4GiB (default: up to half of the RAM, less the weights)",
        "SIZE",
    )
    num_gpu_blocks_override: Count | None = setting(
        "engine", None, "number of KV cache blocks, instead of as many as fit into memory", "N"
    )
    block_size: int = setting("engine", 16, "tokens per KV cache block", "TOKENS", ge=1, le=1024)
    threads: int | None = setting(
        "engine", None, "number of torch threads on CPU (default: torch's choice)", "N", ge=1, le=1024
    )
    seed: int | None = setting(
        "engine", None, "makes the sampling of requests that send no seed repeatable", "SEED", ge=0, le=2**64 - 1
    )

    host: str = setting("http", "127.0.0.1", "address to listen on", "ADDRESS", min_length=1, max_length=255)
    port: int = setting("http", 8000, "port to listen on; 0 picks a free one", "PORT", ge=0, le=65535)
    uds: SocketPath | None = setting("http", None, "listen on this Unix socket instead of a port", "PATH")
    root_path: Annotated[str, AfterValidator(_root_path)] = setting(
        "http", "", "path prefix under which a reverse proxy publishes the server", "PATH", max_length=1024
    )
    ssl_certfile: File | None = setting("http", None, "TLS certificate (PEM)", "FILE")
    ssl_keyfile: File | None = setting("http", None, "private key of the TLS certificate (PEM)", "FILE")
    api_key: Secrets = setting(
        "http", [], "one or more API keys, of which clients must send one (default: no key is needed)", "KEY"
    )
    api_key_file: KeyFile | None = setting(
        "http", None, "file with more API keys, one per line, each with an optional share weight: KEY weight=2", "FILE"
    )
    metrics_key: Secret | None = setting(
        "http", None, "key for /metrics (default: any API key; without API keys, no key is needed)", "KEY"
    )
    public_metrics: bool = setting("http", False, "serve /metrics without a key, whatever keys are set")
    allowed_origins: Names = setting("http", [], "browser origins that CORS allows (default: none)", "ORIGIN")
    allowed_hosts: Names = setting(
        "http",
        [],
        "Host headers to accept, * for any (default: those that DNS rebinding cannot use)",
        "HOST",
    )

    max_num_queued_reqs: int = setting(
        "limits", 256, "maximum sequences in the queue; beyond it requests get a 503", "N", ge=1, le=2**20
    )
    max_body_bytes: Annotated[Bytes, Field(ge=1024, le=2**30)] = setting(
        "limits", 8 << 20, "maximum size of a request body, such as 8MiB", "SIZE"
    )
    request_timeout: float | None = setting(
        "limits",
        None,
        "maximum duration of a request, which then gets a 504 (default: no limit)",
        "SECONDS",
        gt=0,
        le=86400 * 7,
    )
    stall_seconds: float = setting(
        "limits",
        60.0,
        "time without a sign of life, or without a step while there is work, until the engine is restarted",
        "SECONDS",
        gt=0,
        le=86400,
    )
    drain_seconds: float = setting(
        "limits", 30.0, "time for running requests to finish after SIGTERM, SIGINT or SIGHUP", "SECONDS", ge=0, le=86400
    )
    response_store: NewFile | None = setting(
        "limits", None, "SQLite file for stored responses (default: in memory)", "FILE"
    )
    max_stored_responses: int = setting(
        "limits",
        10_000,
        "maximum stored responses; beyond it the key with the most loses its least recently used one",
        "N",
        ge=1,
        le=2**31 - 1,
    )
    max_stored_bytes: Annotated[Bytes, Field(ge=1024, le=2**50)] = setting(
        "limits",
        64 << 20,
        "maximum size of stored responses; beyond it the key with the most loses its least recently used",
        "SIZE",
    )
    ignore_fields: Names = setting(
        "limits", [], "unknown request fields to drop instead of rejecting the request, such as a,b", "FIELD"
    )

    metrics_compat: Literal["vllm", "none"] = setting(
        "logs", "vllm", "server whose metric names to expose in addition to our own"
    )
    step_log: NewFile | None = setting(
        "logs", None, "file to which every engine step is appended as a line of JSON", "FILE"
    )
    log_format: Literal["text", "json"] = setting("logs", "text", "format of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = setting("logs", "info", "minimum level of log lines")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments over the environment; `load` gives the TOML values as arguments where neither speaks."""
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {
            name.lower(): value for name, value in environment(os.environ).items() if value is not None
        }
        return init_settings, env_settings

    @model_validator(mode="after")
    def _belongs_together(self) -> Settings:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile beside it")
        return self

    @property
    def names(self) -> list[str]:
        """Names under which requests may ask for the model; the first is reported."""
        return self.served_model_name or [self.model]

    @cached_property
    def keys(self) -> dict[str, float]:
        """The API keys in plain text, with the weights of their shares; empty: none is asked for."""
        given = {key.get_secret_value(): 1.0 for key in self.api_key}
        return given | (read_keys(self.api_key_file) if self.api_key_file is not None else {})

    @property
    def first_key(self) -> str | None:
        """An API key for clients of our own."""
        return next(iter(self.keys), None)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def hosts(self) -> list[str] | None:
        """The hosts that a Host header may name, without port; None: see `takes_any_host`."""
        if "*" in self.allowed_hosts or (not self.allowed_hosts and (self.uds is not None or not self.is_loopback)):
            return None
        return self.allowed_hosts or list(dict.fromkeys([*LOOPBACK, self.host]))

    @property
    def takes_any_host(self) -> bool:
        """Whether any Host is answered where `hosts` lists none; else only IP addresses and names without a dot.

        A page of a stranger can have its own name point to this server (DNS rebinding), and then read what the server
        answers. An API key keeps it out, and a Unix socket is beyond its reach.
        """
        return "*" in self.allowed_hosts or self.uds is not None or bool(self.keys)

    def engine_config(self) -> EngineConfig:
        """The engine's part of the settings, not yet resolved for a device or a model."""
        from engine import EngineConfig

        return EngineConfig(**{field: getattr(self, name) for field, name in ENGINE_SETTINGS.items()})


FIELDS = Settings.model_fields
SECRET = frozenset({"api_key", "metrics_key"})
KEYS = SECRET | {"api_key_file"}


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def with_flags(text: object) -> str:
    """A sentence of the engine with a flag for each field of EngineConfig that it names.

    `max_len` becomes --max-model-len, and `max_len=512` becomes --max-model-len 512.
    """

    def spelled(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in ENGINE_SETTINGS:
            return found[0]
        return flag(ENGINE_SETTINGS[name]) + ("" if value is None else f" {value}")

    return NAMED.sub(spelled, str(text))


def group(name: str) -> str:
    """The group of a field: model, engine, http, limits or logs."""
    extra = FIELDS[name].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def metavar(name: str) -> str | None:
    """What `--help` shows in the place of a field's value; None: its choices."""
    extra = FIELDS[name].json_schema_extra
    assert isinstance(extra, dict)
    return None if extra["metavar"] is None else str(extra["metavar"])


def shape(name: str) -> tuple[type, tuple[str, ...]]:
    """A field's plain type (bool, int, float, list or str) and, of a closed set, its choices."""
    annotation = FIELDS[name].annotation
    while True:
        inner = [arg for arg in get_args(annotation) if arg is not NoneType]
        if annotation in (bool, int, float):
            assert isinstance(annotation, type)
            return annotation, ()
        if getattr(annotation, "__origin__", None) is list:
            return list, ()
        if getattr(annotation, "__origin__", None) is Literal:
            return str, tuple(inner)
        if not inner:
            return str, ()
        annotation = inner[0]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings among the environment's variables, by their names as written.

    An empty variable counts as absent, as compose files write it, but not for a key: a server that was meant to
    ask for one must not start open. PEQUOD_PORT=tcp://… is what Kubernetes sets for a service named pequod.
    """
    known = {PREFIX + name.upper(): name for name in FIELDS}
    found = {}
    for variable, value in environ.items():
        name = known.get(variable.upper())
        if name is None or (not value and name not in KEYS) or (name == "port" and value.startswith("tcp://")):
            continue
        found[variable] = value
    return found
