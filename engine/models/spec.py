"""ModelSpec: a model's properties, read from its config.json, checked, with transformers' defaults for missing keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..attention import AttentionLayer
from ..config import EngineConfig
from ..files import read_json
from ..gguf import folder as gguf
from ..kernels.blocks import FORMATS, blocks_bytes
from ..kernels.matmul import quantized_bytes
from ..quantized.config import TypeOf, Weights, count_blocks, parse
from ..types import ConfigError, ModelError
from .experts import ExpertsSpec
from .families import FAMILIES, MODEL_TYPES, Family
from .layers import ACTIVATIONS
from .precision import head_bits, layer_bits
from .rope import MAX_NUMBER, SCALINGS, Rope, read_rope, rope_parameters

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SMALL_MODEL = 400_000_000  # parameters up to which activations have 16 bits, if weights are in blocks
# Bounds for the numbers in a config.json, needed if there is no checkpoint to compare them with. They are far above any
# published model's, yet allow a list with an item per layer, and a weight's size fits 64 bits.
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16  # also of head_dim
MAX_EXPERTS = 1 << 16  # of all layers
MAX_SIZE = 1 << 24  # of the vocabulary, the hidden state and the feed-forward layer


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
    is_joined: bool = False  # see Family
    experts: ExpertsSpec | None = None

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """Return the shape of a layer's experts; None: it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    def linears(self, num_layers: int, vocab_size: int) -> Iterator[Weights]:
        """Yield the names of the weights of each linear layer that may be quantized, the head's included, their rows
        and their columns."""
        for index in range(num_layers):
            yield from self.layer_linears(index)
        if not self.tied:
            yield ("lm_head.weight",), (vocab_size,), self.hidden_size

    def layer_linears(self, index: int) -> Iterator[Weights]:
        """Yield the same of one layer."""
        q, kv, hidden = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.hidden_size
        start = f"model.layers.{index}."
        if self.is_joined:
            yield (f"{start}self_attn.qkv_proj.weight",), (q + 2 * kv,), hidden
        else:
            yield tuple(f"{start}self_attn.{name}_proj.weight" for name in "qkv"), (q, kv, kv), hidden
        yield (f"{start}self_attn.o_proj.weight",), (hidden,), q
        experts = self.experts_of(index)
        inner, count = (self.intermediate_size, 1) if experts is None else (experts.inner, experts.count)
        mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if experts is None else experts.names[1:]
        for number in range(count):
            gate, up, down = (f"{start}{name.format(number)}.weight" for name in mlp)
            if self.is_joined:
                yield (f"{start}mlp.gate_up_proj.weight",), (2 * inner,), hidden
            else:
                yield (gate, up), (inner, inner), hidden
            yield (down,), (hidden,), inner

    def layer_numbers(self, index: int) -> int:
        """Return the number of a layer's weights that may be quantized."""
        return sum(sum(rows) * columns for _, rows, columns in self.layer_linears(index))


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
    quantization: str = (
        "none"  # of the weights in memory: a key of precision.BITS, gguf, or the method of the checkpoint
    )
    method: str = ""  # of a quantized safetensors checkpoint
    in_blocks: Mapping[str, int] = field(default_factory=dict)  # numbers of weights by their type of GGUF blocks
    dequantized: int = 0  # numbers of weights that are quantized in the checkpoint, and not in memory
    activation_bytes: int = 1  # of the activations' numbers in matmuls with weights in blocks
    kv_dtype: str = "auto"  # see EngineConfig

    @property
    def weights_bytes(self) -> int:
        plain = self.num_params * self.dtype.itemsize
        if self.in_blocks:
            stored = sum(blocks_bytes(kind, count, self.dtype) for kind, count in self.in_blocks.items())
            return plain - sum(self.in_blocks.values()) * self.dtype.itemsize + stored
        bits_of_head = head_bits(self.quantization)
        if bits_of_head is None or self.decoder is None:
            return plain
        shapes = [(self.vocab_size, self.decoder.hidden_size, bits_of_head)]
        values = self.decoder.num_kv_heads * self.decoder.head_dim
        for index in range(len(self.layers)):
            bits = layer_bits(self.quantization, index, len(self.layers))
            assert bits is not None
            (_, qkv, hidden), *others = self.decoder.layer_linears(index)
            shapes += [(sum(qkv) - values, hidden, bits.others), (values, hidden, bits.value)]
            for number, (_, rows, columns) in enumerate(others):  # output, then gate and up before each down
                is_down = number > 0 and number % 2 == 0
                shapes.append((sum(rows), columns, bits.down if is_down else bits.others))
        saved = (
            rows * columns * self.dtype.itemsize - quantized_bytes(rows, columns, bits)
            for rows, columns, bits in shapes
        )
        return plain - sum(saved)

    @property
    def loading_bytes(self) -> int:
        """The maximum memory that loading needs beside the quantized weights: for the plain head, or a plain layer.

        A model that is served in its checkpoint's dtype needs none: its weights are quantized in chunks as they are
        read.
        """
        if (
            head_bits(self.quantization) is None
            or self.decoder is None
            or self.dtype == DTYPES.get(stored_dtype(self.source))
        ):
            return 0
        layer = max(map(self.decoder.layer_numbers, range(len(self.layers))))
        return max(self.vocab_size * self.decoder.hidden_size, layer) * self.dtype.itemsize

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the weights, in sentences."""
        if self.dequantized:
            size, dtype = self.dequantized * self.dtype.itemsize, str(self.dtype).removeprefix("torch.")
            shown_size = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
            what = f"{self.dequantized:,} weights in {self.method}"
            return (f"{what} are dequantized while they are loaded, and take {shown_size} in {dtype}",)
        if self.quantization != "gguf":
            return ()
        types = self.source["quantization_config"]["types"]
        converted = sorted({*types} - {form.name for form in FORMATS.values()})
        if not converted:
            return ()
        return (f"weights in {', '.join(converted)} are converted to Q8_0, which needs more memory than the file",)

    def stored_as(self, type_of: TypeOf, scheme: Callable[[str], object]) -> ModelSpec:
        """Return the spec of a checkpoint with these quantized weights, see `count_blocks`."""
        assert self.decoder is not None
        linears = self.decoder.linears(len(self.layers), self.vocab_size)
        in_blocks, dequantized = count_blocks(linears, type_of, scheme)
        name = self.method if in_blocks else "none"
        return replace(self, quantization=name, in_blocks=in_blocks, dequantized=dequantized)

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
        parse(quantization)
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
    rope = read_rope(source, head_dim, _whole(source, "max_position_embeddings", family.max_positions))
    attention_bias = bool(source.get("attention_bias", False))
    decoder = DecoderSpec(
        hidden_size=hidden,
        intermediate_size=_whole(source, "intermediate_size", maximum=MAX_SIZE),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(source, "rms_norm_eps", family.norm_eps),
        activation=source.get("hidden_act") or "silu",
        rope=rope,
        tied=bool(source.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and bool(source.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        is_joined=family.is_joined,
        experts=None if family.experts is None else _experts(source, family.experts, num_layers),
    )
    vocab_size = _whole(source, "vocab_size", maximum=MAX_SIZE)
    num_params = _num_params(decoder, vocab_size, num_layers)
    method = _method(source)
    if method and config.quantization != "none":
        name = "a GGUF file" if method == "gguf" else f"this checkpoint ({method})"
        raise ConfigError(f"the weights of {name} are quantized: leave out `quantization={config.quantization}`")
    spec = ModelSpec(
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
        num_params=num_params,
        source=source,
        decoder=decoder,
        hidden_size=hidden,
        quantization="gguf" if method == "gguf" else config.quantization,
        method="" if method == "gguf" else method,
        in_blocks=source["quantization_config"]["numbers"] if method == "gguf" else {},
        activation_bytes=_activation_bytes(num_params, config),
        kv_dtype=config.kv_dtype,
    )
    if not spec.method:
        return spec
    stored = parse(source["quantization_config"])

    def type_of(name: str, columns: int) -> str | None:
        scheme = stored.scheme(name)
        return None if scheme is None else scheme.blocks_type(columns)

    return spec.stored_as(type_of, stored.scheme)


def _method(source: Mapping[str, Any]) -> str:
    """Return how the weights of a checkpoint are quantized according to config.json; empty: they are not."""
    found = source.get("quantization_config")
    return found["quant_method"] if found else ""


def _activation_bytes(num_params: int, config: EngineConfig) -> int:
    """Return the bytes of an activation in matmuls with weights in blocks. Two take up to twice the time of one in
    large batches; small models need them more, and have the time."""
    if config.gguf_activations == "auto":
        return 2 if num_params <= SMALL_MODEL else 1
    return 2 if config.gguf_activations == "int16" else 1


def _unsupported(source: Mapping[str, Any]) -> str | None:
    """Return why the native decoder cannot run a model of a known family, or None if it can."""
    activation = source.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        return f"the native implementation has no activation '{shown(activation)}'"
    if source.get("use_sliding_window") and architecture(source) == "Qwen3MoeForCausalLM":
        return "the native implementation has no sliding windows for Qwen3MoeForCausalLM"
    parameters = rope_parameters(source)
    if any(isinstance(value, dict) for value in parameters.values()):
        return "the native implementation has no rotary embeddings that differ by layer"
    scaling = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    if scaling not in SCALINGS:
        return f"the native implementation has no rotary scaling '{shown(scaling)}'"
    partial = parameters.get("partial_rotary_factor", source.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        return "the native implementation has no partial rotary embeddings"
    return None


def _windows(source: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    window = source.get("sliding_window", family.window or None)
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


def _experts(source: Mapping[str, Any], names: tuple[str, str, str, str], num_layers: int) -> ExpertsSpec:
    count = _whole(source, "num_experts" if "num_experts" in source else "num_local_experts", maximum=MAX_EXPERTS)
    if count * num_layers > MAX_EXPERTS:
        raise ModelError(f"config.json: {num_layers} layers of {count} experts are more than {MAX_EXPERTS} experts")
    only = source.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise ModelError(f"config.json: mlp_only_layers must be a list, not {shown(only)}")
    step = _whole(source, "decoder_sparse_step", 1)
    is_mixtral = architecture(source) == "MixtralForCausalLM"
    return ExpertsSpec(
        count=count,
        active=_whole(source, "num_experts_per_tok", maximum=count),
        inner=_whole(source, "intermediate_size" if is_mixtral else "moe_intermediate_size", maximum=MAX_SIZE),
        is_normalized=is_mixtral or bool(source.get("norm_topk_prob", False)),
        dense=frozenset(index for index in range(num_layers) if index in only or (index + 1) % step),
        names=names,
    )


def _num_params(decoder: DecoderSpec, vocab_size: int, num_layers: int) -> int:
    d, q, kv = decoder, decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    layer = 2 * d.hidden_size + (2 * d.head_dim if d.qk_norm else 0)
    layer += (q + 2 * kv if d.qkv_bias else 0) + (d.hidden_size if d.output_bias else 0)
    layer += 2 * d.intermediate_size + d.hidden_size if d.mlp_bias else 0
    layers = num_layers * layer
    for index in range(num_layers):
        experts = d.experts_of(index)
        layers += d.layer_numbers(index) + (experts.count * d.hidden_size if experts else 0)  # the router's
    return layers + vocab_size * d.hidden_size * (1 if d.tied else 2) + d.hidden_size


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
