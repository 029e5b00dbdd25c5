"""Settings: every flag, PEQUOD_* variable and TOML key is one field of one class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, partial
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FilePath, model_validator

from .settings_values import (
    Bytes,
    Count,
    Device,
    DType,
    KeyFile,
    KVCacheDType,
    LoadFormat,
    MaxLength,
    Names,
    NewFile,
    Number,
    Quantization,
    ReasoningParser,
    Secret,
    Secrets,
    SocketPath,
    ToolParser,
    _generation_config,
    _root_path,
    read_keys,
)

if TYPE_CHECKING:
    from engine import EngineConfig

PREFIX = "PEQUOD_"
GGUF_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def setting(group: str, default: Any, description: str, metavar: str | None = None, **bounds: Any) -> Any:
    """A field of a group of `--help`."""
    return Field(default, description=description, json_schema_extra={"group": group, "metavar": metavar}, **bounds)


_model, _engine, _http, _limits, _logs = (
    partial(setting, group) for group in ("model", "engine", "http", "limits", "logs")
)

# Field of EngineConfig -> its setting. Messages of the engine name fields; `with_flags` replaces them.
ENGINE_SETTINGS = {
    "implementation": "model_impl",
    "attention": "attention_backend",
    "kv_dtype": "kv_cache_dtype",
    "max_len": "max_model_len",
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "long_prefill_tokens": "long_prefill_token_threshold",
    "policy": "scheduling_policy",
    "prefix_caching": "enable_prefix_caching",
    "num_blocks": "num_gpu_blocks_override",
} | {
    name: name
    for name in (
        "model", "revision", "device", "dtype", "load_format", "quantization", "weight_packing", "gguf_activations",
        "cpu_isa", "block_size", "kv_cache_memory", "gpu_memory_utilization", "threads", "async_scheduling",
        "enforce_eager", "logprobs_mode", "batch_invariant", "local_files_only",
    )
}  # fmt: skip
NAMED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")


class Settings(BaseModel):
    """All settings, validated and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = _model(
        "builtin",
        "same as the positional argument MODEL (default: smollm2 if it is installed, else builtin)",
        "MODEL",
        min_length=1,
        max_length=4096,
    )
    revision: str | None = _model(None, "branch, tag or commit of a model on the hub", min_length=1, max_length=256)
    served_model_name: Names = _model(
        [], "one or more names that requests may use; the metrics show the first (default: from MODEL)", "NAME"
    )
    chat_template: FilePath | None = _model(None, "Jinja file that replaces the model's chat template", "FILE")
    tool_call_parser: ToolParser = _model(
        "auto", "format of the model's tool calls: auto (detected from its chat template), none, or a name", "FORMAT"
    )
    reasoning_parser: ReasoningParser = _model(
        "auto", "format of the model's reasoning: auto (detected from its chat template), none, or a name", "FORMAT"
    )
    generation_config: Annotated[str, AfterValidator(_generation_config)] = _model(
        "auto",
        "source of sampling parameters that requests omit: auto (the model), engine (none), or a path",
        "auto|engine|PATH",
    )
    local_files_only: bool = _model(False, "use only models that are on this machine, and no network")

    device: Device = _engine("auto", "device to run on: auto, cpu, cuda or cuda:N", "DEVICE")
    dtype: DType = _engine("auto", "data type of weights and activations")
    load_format: LoadFormat = _engine(
        "auto", "weights to load: auto (the model's) or dummy (random ones, to measure speed)"
    )
    quantization: Quantization = _engine(
        "none",
        "round weights while loading: smaller, slightly less accurate; on a GPU faster for one sequence only",
    )
    weight_packing: Literal["auto", "none", "lossless"] = _engine(
        "auto",
        "compress bfloat16 weights on a CPU, with the same results; auto: where that is faster",
    )
    gguf_activations: Literal["auto", "int8", "int16"] = _engine(
        "auto",
        "rounding of activations on CPU for GGUF and quantized checkpoints; auto: int16 for small models",
    )
    model_impl: Literal["auto", "native", "transformers"] = _engine(
        "auto", "model code: native (ours), transformers (theirs, on our KV cache) or auto"
    )
    kv_cache_dtype: KVCacheDType = _engine(
        "auto", "data type of cached keys and values: auto (the model's), or int8 or fp8 with a scale for each"
    )
    attention_backend: str = _engine(
        "auto",
        "attention implementation: auto, cpu or triton (our kernels), or reference (torch)",
        "NAME",
        max_length=64,
    )
    cpu_isa: Literal["auto", "amx", "avx512bf16", "avx512", "avxvnni", "avx2", "torch"] = _engine(
        "auto", "instruction set of our CPU kernels; torch disables them (default: the best available)"
    )
    max_model_len: MaxLength = _engine(
        None, "maximum tokens of a prompt and its output (default: what the model and the KV cache allow)", "TOKENS"
    )
    max_num_seqs: Annotated[Number, Field(ge=1, le=65536)] | None = _engine(
        None, "maximum sequences per step (default: 32 to 256 on CPU, 256 on CUDA; at most the tokens of a step)", "N"
    )
    max_num_batched_tokens: Count | None = _engine(
        None, "maximum tokens per step (default: 256 on CPU, 8192 on CUDA; at least --max-num-seqs)", "TOKENS"
    )
    long_prefill_token_threshold: Count | None = _engine(
        None, "maximum tokens of one prompt per step while other sequences wait (default: half a step)", "TOKENS"
    )
    scheduling_policy: Literal["fcfs", "priority", "prefill-first", "static"] = _engine(
        "fcfs", "order in which running sequences get tokens (preemption: reversed); priority also sorts the queue"
    )
    async_scheduling: bool | None = _engine(
        None, "launch each step before the tokens of the one before it are collected (default: on CUDA)"
    )
    enforce_eager: bool = _engine(
        False, "do not replay steps from CUDA graphs, which takes less memory on CUDA and makes small steps slower"
    )
    batch_invariant: bool = _engine(
        False, "give a request the same bits in any batch, which costs speed on CUDA, or refuse to start"
    )
    enable_prefix_caching: bool = _engine(True, "reuse the cached blocks of prompts that begin alike")
    gpu_memory_utilization: float = _engine(
        0.9, "fraction of GPU memory to use", "SHARE", gt=0, le=1, allow_inf_nan=False
    )
    kv_cache_memory: Annotated[Bytes, Field(ge=1, le=2**50)] | None = _engine(
        None, "size of the KV cache on CPU, such as 4GiB (default: up to half of the RAM, less the weights)", "SIZE"
    )
    num_gpu_blocks_override: Count | None = _engine(
        None, "number of KV cache blocks, instead of as many as fit into memory", "N"
    )
    block_size: Number = _engine(16, "tokens per KV cache block", "TOKENS", ge=1, le=1024)
    threads: int | None = _engine(
        None, "number of torch threads on CPU (default: torch's choice; 1 for models below 64 MiB)", "N", ge=1, le=1024
    )
    seed: int | None = _engine(
        None, "makes the sampling of requests that send no seed repeatable", "SEED", ge=0, le=2**64 - 1
    )

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = _engine(
        "raw_logprobs",
        "log-probabilities of output tokens: raw (the model's own) or processed (those of the sampling)",
    )

    host: str = _http("127.0.0.1", "address to listen on", "ADDRESS", min_length=1, max_length=255)
    port: int = _http(8000, "port to listen on; 0 picks a free one", "PORT", ge=0, le=65535)
    uds: SocketPath | None = _http(None, "listen on this Unix socket instead of a port", "PATH")
    timeout_keep_alive: int = _http(
        75,
        "time before an idle connection is closed, which must exceed that of a load balancer in front",
        "SECONDS",
        ge=1,
        le=86400,
    )
    root_path: Annotated[str, AfterValidator(_root_path)] = _http(
        "", "path prefix under which a reverse proxy publishes the server", "PATH", max_length=1024
    )
    ssl_certfile: FilePath | None = _http(None, "TLS certificate (PEM)", "FILE")
    ssl_keyfile: FilePath | None = _http(None, "private key of the TLS certificate (PEM)", "FILE")
    api_key: Secrets = _http(
        [], "one or more API keys, of which clients must send one (default: no key is needed)", "KEY"
    )
    api_key_file: KeyFile | None = _http(
        None, "file with more API keys, one per line, each with an optional share weight: KEY weight=2", "FILE"
    )
    metrics_key: Secret | None = _http(
        None, "key for /metrics (default: any API key; without API keys, no key is needed)", "KEY"
    )
    public_metrics: bool = _http(False, "serve /metrics without a key, whatever keys are set")
    allowed_origins: Names = _http([], "browser origins that CORS allows (default: none)", "ORIGIN")
    allowed_hosts: Names = _http(
        [], "host names to accept in Host headers, * for any (default: those that DNS rebinding cannot use)", "HOST"
    )
    webui: bool = _http(True, "serve a chat page at /; without it / redirects to the API page at /docs")

    max_num_queued_reqs: int = _limits(
        256,
        "maximum sequences in the queue; beyond it requests get a 503, beyond a caller's share a 429",
        "N",
        ge=1,
        le=2**20,
    )
    max_body_bytes: Annotated[Bytes, Field(ge=1024, le=2**30)] = _limits(
        8 << 20, "maximum size of a request body, such as 8MiB", "SIZE"
    )
    request_timeout: float | None = _limits(
        None, "maximum duration of a request, which then gets a 504 (default: no limit)", "SECONDS", gt=0, le=86400 * 7
    )
    stall_seconds: float = _limits(
        60.0,
        "time without a heartbeat, or without a step while there is work, before the engine is restarted",
        "SECONDS",
        gt=0,
        le=86400,
    )
    drain_seconds: float = _limits(
        30.0, "time for running requests to finish after SIGTERM, SIGINT or SIGHUP", "SECONDS", ge=0, le=86400
    )
    response_store: NewFile | None = _limits(None, "SQLite file for stored responses (default: in memory)", "FILE")
    max_stored_responses: int = _limits(
        10_000,
        "maximum stored responses; beyond it the key with the most loses its least recently used one",
        "N",
        ge=1,
        le=2**31 - 1,
    )
    max_stored_bytes: Annotated[Bytes, Field(ge=1024, le=2**50)] = _limits(
        64 << 20,
        "maximum size of stored responses; beyond it the key with the most loses its least recently used",
        "SIZE",
    )
    ignore_fields: Names = _limits(
        [], "unknown request fields to drop instead of rejecting the request, such as a,b", "FIELD"
    )

    metrics_compat: Literal["vllm", "none"] = _logs(
        "vllm", "server whose metric names to expose in addition to our own"
    )
    step_log: NewFile | None = _logs(None, "file to which every engine step is appended as a line of JSON", "FILE")
    log_format: Literal["text", "json"] = _logs("text", "format of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = _logs("info", "minimum level of log lines")

    @model_validator(mode="after")
    def _belongs_together(self) -> Settings:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        return self

    @property
    def names(self) -> list[str]:
        """Names that requests may use for the model; the first is reported. A GGUF file gives its model its name."""
        path, is_file = GGUF_SUFFIX.subn("", self.model)
        return self.served_model_name or [path.rpartition("/")[2] if is_file else self.model]

    def accepts(self, name: str) -> bool:
        """Return whether a request may use a name for the model: also the path of its folder or file, or the last part
        of it, unless names are set."""
        others = [] if self.served_model_name else [self.model, self.model.rstrip("/").rpartition("/")[2]]
        return name in (*self.names, *others)

    @cached_property
    def keys(self) -> dict[str, float]:
        """The API keys in plain text, with the weights of their shares; empty if requests need no key."""
        keys = {key.get_secret_value(): 1.0 for key in self.api_key}
        return keys | (read_keys(self.api_key_file) if self.api_key_file is not None else {})

    @property
    def first_key(self) -> str | None:
        """An API key for our own clients."""
        return next(iter(self.keys), None)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def hosts(self) -> list[str] | None:
        """The names that a Host header may have besides IP addresses, without port; None: see `allows_any_host`."""
        if "*" in self.allowed_hosts or (not self.allowed_hosts and (self.uds is not None or not self.is_loopback)):
            return None
        return self.allowed_hosts or list(dict.fromkeys([*LOOPBACK, self.host]))

    @property
    def allows_any_host(self) -> bool:
        """Whether any Host is accepted if `hosts` is None; otherwise only names without a dot, besides IP addresses.

        A foreign web page can point its own name to this server (DNS rebinding) and read the responses. An API key
        prevents that, and a Unix socket is out of its reach.
        """
        return "*" in self.allowed_hosts or self.uds is not None or bool(self.keys)

    def engine_config(self) -> EngineConfig:
        """The engine's settings, not yet resolved for a device or a model."""
        from engine import EngineConfig

        return EngineConfig(**{field: getattr(self, name) for field, name in ENGINE_SETTINGS.items()})


FIELDS = Settings.model_fields
SECRET = frozenset({"api_key", "metrics_key"})
KEYS = SECRET | {"api_key_file"}


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def with_flags(text: object) -> str:
    """Replace the fields of EngineConfig that a message of the engine names with flags.

    `max_len` becomes --max-model-len, and `max_len=512` becomes --max-model-len 512.
    """

    def replacement(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in ENGINE_SETTINGS:
            return match[0]
        if value is not None and metavar(ENGINE_SETTINGS[name]) == "SIZE" and value.isdecimal():
            value = in_units(int(value))
        return flag(ENGINE_SETTINGS[name]) + ("" if value is None else f" {value}")

    return NAMED.sub(replacement, str(text))


def in_units(num_bytes: int) -> str:
    """Return a size as a setting may have it: 19GiB, 11MiB, or a number of bytes."""
    units = ((30, "GiB"), (20, "MiB"))
    return next((f"{num_bytes >> n}{unit}" for n, unit in units if num_bytes % (1 << n) == 0), str(num_bytes))


def _extra(name: str) -> dict[str, Any]:
    extra = FIELDS[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def group(name: str) -> str:
    """The group of a field: model, engine, http, limits or logs."""
    return str(_extra(name)["group"])


def metavar(name: str) -> str | None:
    """The placeholder of a field's value in `--help`; None: its choices."""
    value: str | None = _extra(name)["metavar"]
    return value


def shape(name: str) -> tuple[type, tuple[str, ...]]:
    """A field's plain type (bool, int, float, list or str) and, for a Literal, its choices."""
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
    """The environment variables that are settings, by their names as written.

    An empty variable counts as absent, as in compose files, except for a key: a server that was meant to require one
    must not start without it. PEQUOD_PORT=tcp://… is what Kubernetes sets for a service named pequod.
    """
    known = {PREFIX + name.upper(): name for name in FIELDS}
    return {
        variable: value
        for variable, value in environ.items()
        if (name := known.get(variable.upper()))
        and (value or name in KEYS)
        and not (name == "port" and value.startswith("tcp://"))
    }
