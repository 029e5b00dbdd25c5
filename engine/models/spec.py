"""ModelSpec: a model's properties, read from its config.json, checked, with transformers' defaults for missing keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..attention import AttentionLayer
from ..config import EngineConfig
from ..files import read_json
from ..gguf import folder as gguf
from ..kernels.blocks import FORMATS, blocks_bytes
from ..kernels.matmul import quantized_bytes
from ..types import ConfigError, ModelError
from .layers import ACTIVATIONS
from .precision import BITS, layer_bits
from .rope import SCALINGS, Rope, frequencies

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SMALL_MODEL = 400_000_000  # numbers of a GGUF file up to which activations have 16 bits
# Bounds for the numbers in a config.json, needed if there is no checkpoint to compare them with. They are far above any
# published model's, yet allow a list with an item per layer, and a weight's size fits 64 bits.
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16  # also of head_dim
MAX_SIZE = 1 << 24  # of the vocabulary, the hidden state and the feed-forward layer
MAX_NUMBER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture of the native decoder differs from Llama, and the defaults of its config.json."""

    qkv_bias: bool | None = None  # None: the key attention_bias decides
    output_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False  # whether the key mlp_bias is read
    head_dim: int | None = None  # None: hidden_size / heads
    kv_heads: int | None = None  # None: as many as heads
    max_positions: int = 2048
    window: int | None = None  # default of sliding_window, on every layer
    layer_windows: bool = False  # use_sliding_window, max_window_layers and layer_types are read


FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, kv_heads=8, max_positions=131072, window=4096),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, head_dim=128, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
}
MODEL_TYPES = {  # for a config.json without `architectures`
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and the variants of a native decoder."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: Rope
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def layer_shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of the four weights of a layer: QKV, output, gate and up, down."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's properties that are known before its weights are read."""

    architecture: str
    implementation: str  # native | transformers
    vocab_size: int  # width of the logits
    max_len: int  # the model's maximum number of tokens
    serve_len: int  # the engine's: length-dependent rotary frequencies are computed for it
    dtype: torch.dtype
    layers: list[AttentionLayer]
    num_params: int
    source: dict[str, Any] = field(repr=False)  # config.json
    decoder: DecoderSpec | None = None  # if the implementation is native
    hidden_size: int = 0  # of the last hidden states; 0: not available
    quantization: str = "none"  # of the weights, see BITS
    activation_bytes: int = 1  # of the activations' numbers in matmuls with weights in GGUF blocks
    kv_dtype: str = "auto"  # see EngineConfig

    @property
    def weights_bytes(self) -> int:
        if self.quantization == "gguf":
            numbers = self.source["quantization_config"]["numbers"]
            return sum(blocks_bytes(kind, count, self.dtype) for kind, count in numbers.items())
        plain = self.num_params * self.dtype.itemsize
        _, head_bits = BITS[self.quantization]
        if head_bits is None or self.decoder is None:
            return plain
        shapes = [((self.vocab_size, self.decoder.hidden_size), head_bits)]
        (qkv, hidden), output, gate_up, down = self.decoder.layer_shapes
        values = self.decoder.num_kv_heads * self.decoder.head_dim
        for layer in range(len(self.layers)):
            bits = layer_bits(self.quantization, layer, len(self.layers))
            assert bits is not None
            shapes += [((qkv - values, hidden), bits.others), ((values, hidden), bits.value), (output, bits.others)]
            shapes += [(gate_up, bits.others), (down, bits.down)]
        saved = (
            rows * columns * self.dtype.itemsize - quantized_bytes(rows, columns, bits)
            for (rows, columns), bits in shapes
        )
        return plain - sum(saved)

    @property
    def loading_bytes(self) -> int:
        """The maximum memory that loading needs beside the quantized weights: for the plain head, or a plain layer.

        A model that is served in its checkpoint's dtype needs none: its weights are quantized in chunks as they are
        read.
        """
        if (
            self.quantization in ("none", "gguf")
            or self.decoder is None
            or self.dtype == DTYPES.get(stored_dtype(self.source))
        ):
            return 0
        layer = sum(rows * columns for rows, columns in self.decoder.layer_shapes)
        return max(self.vocab_size * self.decoder.hidden_size, layer) * self.dtype.itemsize

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the weights, in sentences."""
        quantization = self.source.get("quantization_config") or {}
        converted = sorted({*quantization.get("types", ())} - {form.name for form in FORMATS.values()})
        if not converted:
            return ()
        return (f"weights in {', '.join(converted)} are converted to Q8_0, which needs more memory than the file",)

    @property
    def cache_dtype(self) -> torch.dtype:
        return CACHE_DTYPES.get(self.kv_dtype, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes(self.cache_dtype) for layer in self.layers)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raises ModelError if it is missing or cannot be used."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    source = read_json(path)
    if source is None:
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    quantization = source.get("quantization_config")
    if quantization and not gguf.is_converted(folder):
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path} asks for {shown(method)} quantization, which is not supported; "
            "use the unquantized version of the model"
        )
    return source


def architecture(source: Mapping[str, Any]) -> str:
    """Return the name of the model class. Raises ModelError if config.json has none."""
    names = source.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return shown(names[0])
    model_type = source.get("model_type")
    if isinstance(model_type, str) and model_type:
        return MODEL_TYPES.get(model_type, shown(model_type))
    raise ModelError('config.json names no architecture; it needs "architectures" or "model_type"')


def choose_dtype(source: Mapping[str, Any], config: EngineConfig) -> torch.dtype:
    """Return the configured dtype; "auto" is the checkpoint's, or float32 if config.json names none."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    name = stored_dtype(source)
    if name not in DTYPES:
        raise ModelError(f"config.json names the dtype '{shown(name)}'; choose one of {', '.join(DTYPES)} with `dtype`")
    return DTYPES[name]


def stored_dtype(source: Mapping[str, Any]) -> str:
    """Return the name of the checkpoint's dtype according to config.json."""
    return str(source.get("dtype") or source.get("torch_dtype") or "float32").removeprefix("torch.")


def serve_len(max_len: int, config: EngineConfig) -> int:
    """Return the length for which length-dependent frequencies are computed. It does not depend on the memory."""
    return config.rope_len or min(config.max_len or max_len, max_len)


def read_spec(source: dict[str, Any], config: EngineConfig, *, native_only: bool = False) -> ModelSpec | None:
    """Return the spec for the native decoder; None, or a ModelError if native_only, if it does not support the
    model."""
    name = architecture(source)
    family = FAMILIES.get(name)
    reason = None
    if family is None:
        reason = f"the native implementation has no {name}; it has {', '.join(FAMILIES)}"
    else:
        reason = _unsupported(source)
    if family is None or reason is not None:
        if native_only:
            raise ModelError(f"{reason}; leave `implementation` to auto")
        return None
    heads = _whole(source, "num_attention_heads", maximum=MAX_HEADS)
    omitted = heads if "num_key_value_heads" in source else family.kv_heads or heads  # null means: as many as heads
    kv_heads = _whole(source, "num_key_value_heads", omitted, maximum=MAX_HEADS)
    hidden = _whole(source, "hidden_size", maximum=MAX_SIZE)
    head_dim = _whole(source, "head_dim", family.head_dim or max(1, hidden // heads), maximum=MAX_HEADS)
    num_layers = _whole(source, "num_hidden_layers", maximum=MAX_LAYERS)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, not {head_dim}")
    rope = _rope(source, head_dim, _whole(source, "max_position_embeddings", family.max_positions))
    attention_bias = bool(source.get("attention_bias", False))
    decoder = DecoderSpec(
        hidden_size=hidden,
        intermediate_size=_whole(source, "intermediate_size", maximum=MAX_SIZE),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(source, "rms_norm_eps", 1e-6),
        activation=source.get("hidden_act") or "silu",
        rope=rope,
        tied=bool(source.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and bool(source.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
    )
    vocab_size = _whole(source, "vocab_size", maximum=MAX_SIZE)
    return ModelSpec(
        architecture=name,
        implementation="native",
        vocab_size=vocab_size,
        max_len=rope.longest,
        serve_len=serve_len(rope.longest, config),
        dtype=choose_dtype(source, config),
        layers=[
            AttentionLayer(heads, kv_heads, head_dim, head_dim, head_dim**-0.5, window)
            for window in _windows(source, family, num_layers)
        ],
        num_params=_num_params(decoder, vocab_size, num_layers),
        source=source,
        decoder=decoder,
        hidden_size=hidden,
        quantization=_quantization(source, config),
        activation_bytes=_activation_bytes(source, config),
        kv_dtype=config.kv_dtype,
    )


def _quantization(source: Mapping[str, Any], config: EngineConfig) -> str:
    if not source.get("quantization_config"):
        return config.quantization
    if config.quantization != "none":
        raise ConfigError(f"the weights of a GGUF file are quantized: leave out `quantization={config.quantization}`")
    return "gguf"


def _activation_bytes(source: Mapping[str, Any], config: EngineConfig) -> int:
    """Return the bytes of an activation in matmuls with GGUF blocks. Two take up to twice the time of one in large
    batches; small models need them more, and have the time."""
    if config.gguf_activations == "auto":
        numbers: dict[str, int] = (source.get("quantization_config") or {}).get("numbers", {})
        return 2 if sum(numbers.values()) <= SMALL_MODEL else 1
    return 2 if config.gguf_activations == "int16" else 1


def _unsupported(source: Mapping[str, Any]) -> str | None:
    """Return why the native decoder cannot run a model of a known family, or None if it can."""
    activation = source.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        return f"the native implementation has no activation '{shown(activation)}'"
    parameters = _rope_parameters(source)
    if any(isinstance(value, dict) for value in parameters.values()):
        return "the native implementation has no rotary embeddings that differ by layer"
    scaling = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    if scaling not in SCALINGS:
        return f"the native implementation has no rotary scaling '{shown(scaling)}'"
    partial = parameters.get("partial_rotary_factor", source.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        return "the native implementation has no partial rotary embeddings"
    return None


def _rope_parameters(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_scaling, the old key, or else rope_parameters, as transformers does."""
    found = source.get("rope_scaling") or source.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ModelError("config.json: rope_scaling and rope_parameters must be objects")
    return found


def _rope(source: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    found = _rope_parameters(source)
    scaling = found.get("rope_type", found.get("type", "default")) or "default"
    theta = found.get("rope_theta") or source.get("rope_theta") or 10000.0
    original = found.get("original_max_position_embeddings")
    if scaling in ("llama3", "yarn", "longrope"):
        original = source.get("original_max_position_embeddings") or original or max_positions
    needed = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": (),
        "longrope": ("short_factor", "long_factor"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }.get(scaling, ())
    for key in needed:
        if found.get(key) is None:
            raise ModelError(f"config.json: rotary scaling {scaling!r} needs {key!r}")

    def optional(key: str) -> float | None:
        return None if found.get(key) is None else float(found[key])

    factors = {key: tuple(found.get(key) or ()) for key in ("short_factor", "long_factor")}
    if scaling == "longrope":
        for key, values in factors.items():
            if len(values) != head_dim // 2:
                raise ModelError(f"config.json: {key} must hold {head_dim // 2} numbers, not {len(values)}")
    try:
        rope = Rope(
            head_dim=head_dim,
            theta=float(theta),
            scaling=scaling,
            max_positions=max_positions,
            factor=optional("factor"),
            original_positions=None if original is None else int(original),
            attention_factor=optional("attention_factor"),
            beta_fast=float(found.get("beta_fast") or 32),
            beta_slow=float(found.get("beta_slow") or 1),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=bool(found.get("truncate", True)),
            low_freq_factor=float(found.get("low_freq_factor") or 1),
            high_freq_factor=float(found.get("high_freq_factor") or 4),
            short_factor=factors["short_factor"],
            long_factor=factors["long_factor"],
        )
        longest = rope.longest
    except (TypeError, ValueError, OverflowError):
        raise ModelError("config.json: a rotary parameter is not a number") from None
    if not 1 <= longest <= MAX_NUMBER:
        raise ModelError(f"config.json: the rotary parameters are for {longest:.3g} tokens, which no model takes")
    try:
        angles, scale = frequencies(rope, longest)
    except (TypeError, ValueError, ArithmeticError):
        angles, scale = torch.tensor([math.nan]), math.nan
    if not (angles.isfinite().all() and math.isfinite(scale)):
        raise ModelError("config.json: no angles can be computed from the rotary parameters")
    return rope


def _windows(source: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    window = source.get("sliding_window", family.window)
    if family.window is None or window is None:
        return (None,) * num_layers
    window = _whole(source, "sliding_window", window)
    if not family.layer_windows:
        return (window,) * num_layers
    if not source.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = source.get("layer_types")
    if kinds is None:
        first = _number(source, "max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types must name all {num_layers} layers")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"config.json: unknown layer type '{shown(sorted(map(str, unknown))[0])}'")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _num_params(decoder: DecoderSpec, vocab_size: int, num_layers: int) -> int:
    d, q, kv = decoder, decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    layer = sum(rows * columns for rows, columns in d.layer_shapes)
    layer += 2 * d.hidden_size + (2 * d.head_dim if d.qk_norm else 0)
    layer += (q + 2 * kv if d.qkv_bias else 0) + (d.hidden_size if d.output_bias else 0)
    layer += 2 * d.intermediate_size + d.hidden_size if d.mlp_bias else 0
    return num_layers * layer + vocab_size * d.hidden_size * (1 if d.tied else 2) + d.hidden_size


def _whole(source: Mapping[str, Any], key: str, default: int | None = None, *, maximum: int = MAX_NUMBER) -> int:
    value = source.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive whole number, not {shown(repr(value))}")
    if value > maximum:
        raise ModelError(f"config.json: {key} must be at most {maximum}, not {shown(value)}")
    return value


def _number(source: Mapping[str, Any], key: str, default: float) -> float:
    value = source.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ModelError(f"config.json: {key} must be a number, not {shown(repr(value))}")
    return float(value)


def shown(value: object) -> str:
    """Return a value of config.json for an error message: on one line, truncated."""
    text = " ".join(str(value).split())
    return text if len(text) <= 64 else f"{text[:61]}..."
