"""EngineConfig: the settings of an engine. `resolve` replaces `auto` and None by values, once."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from .types import ConfigError

POLICIES = ("fcfs", "priority", "prefill-first", "static")
QUANTIZATIONS = ("none", "int8", "int4")
KV_DTYPES = ("auto", "int8", "fp8")
WEIGHT_PACKINGS = ("auto", "none", "lossless")
GGUF_ACTIVATIONS = ("auto", "int8", "int16")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
CPU_SEQS, CUDA_SEQS = 32, 256  # sequences per step; an engine may raise the first, see `_with_more_seqs` in build.py


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of one engine. None and "auto" are replaced when the engine is built, for the device and the model."""

    model: str  # local folder or hub id
    revision: str | None = None
    local_files_only: bool = False  # do not download the model
    load_format: str = "auto"  # auto: the model's safetensors files; dummy: random weights
    device: str = "auto"  # cpu | cuda | cuda:N
    dtype: str = "auto"
    quantization: str = "none"  # of the weights while they are loaded
    weight_packing: str = "auto"  # lossless: compress weights in bfloat16 for our CPU kernels; none: do not
    gguf_activations: str = "auto"  # int8 | int16: what activations are quantized to for weights in GGUF blocks
    implementation: str = "auto"  # native | transformers
    attention: str = "auto"
    kv_dtype: str = "auto"  # of the keys and values in the cache: auto (the model's dtype), int8 or fp8
    cpu_isa: str = "auto"  # instruction set of our CPU kernels; torch: do not use them
    products: str = "auto"  # what computes matmuls: torch or an instruction set; auto: as cpu_isa says
    max_len: int | None = None  # tokens of prompt plus output; None: the model's maximum
    # Length for which length-dependent rotary frequencies are computed, at least max_len; None: max_len.
    rope_len: int | None = None
    max_seqs: int | None = None
    max_batched_tokens: int | None = None  # token budget of one step
    long_prefill_tokens: int | None = None  # maximum for one prompt in a step while others wait; None: half of the step
    logprobs_mode: str = "raw_logprobs"  # the model's own | processed_logprobs: of the distribution that is sampled
    policy: str = "fcfs"
    async_scheduling: bool | None = None  # launch a step before the one before it is collected; None: unless on a CPU
    # Compute with kernels whose results have the same bits in any batch, or refuse to start.
    batch_invariant: bool = False
    enforce_eager: bool = False  # launch the kernels of every step one by one: no CUDA graphs
    prefix_caching: bool = True
    block_size: int = 16
    num_blocks: int | None = None  # None: what fits into memory
    num_snapshots: int | None = None  # of states, for cached prefixes, see snapshots.py; None: what fits into memory
    kv_cache_memory: int | None = None  # bytes, on CPU; None: a share of RAM
    gpu_memory_utilization: float = 0.9
    threads: int | None = None  # of torch on CPU; None: torch's choice
    debug: bool = False  # check the block invariants after every step


def check(config: EngineConfig) -> EngineConfig:
    """Return the config; raises ConfigError for a value that is invalid on every machine."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    need(config.policy in POLICIES, f"unknown scheduling policy {config.policy!r}; known: {', '.join(POLICIES)}")
    known = ", ".join(LOAD_FORMATS)
    need(config.load_format in LOAD_FORMATS, f"unknown load format {config.load_format!r}; known: {known}")
    need(config.dtype in DTYPES, f"unknown dtype {config.dtype!r}; known: {', '.join(DTYPES)}")
    need(
        config.quantization in QUANTIZATIONS,
        f"unknown quantization {config.quantization!r}; known: {', '.join(QUANTIZATIONS)}",
    )
    known = ", ".join(WEIGHT_PACKINGS)
    need(config.weight_packing in WEIGHT_PACKINGS, f"unknown weight packing {config.weight_packing!r}; known: {known}")
    known = ", ".join(LOGPROBS_MODES)
    need(config.logprobs_mode in LOGPROBS_MODES, f"unknown logprobs mode {config.logprobs_mode!r}; known: {known}")
    known = ", ".join(GGUF_ACTIVATIONS)
    need(config.gguf_activations in GGUF_ACTIVATIONS, f"unknown {config.gguf_activations!r}; known: {known}")
    known = ", ".join(KV_DTYPES)
    need(config.kv_dtype in KV_DTYPES, f"unknown dtype of the KV cache {config.kv_dtype!r}; known: {known}")
    need(1 <= config.block_size <= 1024, "the block size must be between 1 and 1024 tokens")
    need(config.max_len is None or config.max_len >= 1, "the model length must be at least 1 token")
    need(
        config.rope_len is None or config.rope_len >= (config.max_len or 1),
        f"rotary embeddings for {config.rope_len} tokens (rope_len) cannot serve a model length of "
        f"{config.max_len or 1}",
    )
    need(config.max_seqs is None or config.max_seqs >= 1, "at least 1 sequence must be able to run")
    need(
        config.max_batched_tokens is None or config.max_batched_tokens >= 1,
        "a step must be able to compute at least 1 token",
    )
    need(config.num_blocks is None or config.num_blocks >= 1, "the pool needs at least 1 block")
    need(config.num_snapshots is None or config.num_snapshots >= 0, "the number of snapshots must not be negative")
    need(0 < config.gpu_memory_utilization <= 1, "GPU memory utilization must be above 0 and at most 1")
    if config.max_seqs is not None and config.max_batched_tokens is not None:
        need(
            config.max_batched_tokens >= config.max_seqs,
            f"a step of {config.max_batched_tokens} tokens cannot serve {config.max_seqs} sequences one token each",
        )
    return config


def resolve(config: EngineConfig, device: str, model_max_len: int) -> EngineConfig:
    """Return the config with defaults for a device type ("cpu" or "cuda") and a model's maximum length."""
    on_cpu = device == "cpu"
    seqs = config.max_seqs or min(CPU_SEQS if on_cpu else CUDA_SEQS, config.max_batched_tokens or 1 << 30)
    budget = config.max_batched_tokens or max(256 if on_cpu else 8192, seqs)
    return check(
        replace(
            config,
            device=device if config.device == "auto" else config.device,
            async_scheduling=not on_cpu if config.async_scheduling is None else config.async_scheduling,
            max_seqs=seqs,
            max_batched_tokens=budget,
            max_len=min(config.max_len or model_max_len, model_max_len),
        )
    )
