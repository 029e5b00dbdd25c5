"""ModelSpec: a model's properties, read from its config.json, checked, with transformers' defaults for missing keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..attention import AttentionLayer
from ..bounds import MAX_HEADS, MAX_LAYERS, MAX_SIZE
from ..cache_groups import CacheGroups
from ..config import EngineConfig
from ..files import read_json, shown
from ..gguf import folder as gguf
from ..gguf.forms import FORMS, stored_type
from ..kernels.blocks import FORMATS, blocks_bytes
from ..kernels.matmul import quantized_bytes
from ..quantized import locations
from ..quantized.config import Scheme, TypeOf, count_blocks, parse
from ..types import ConfigError, ModelError
from .checkpoint import multimodal, sublayers
from .checkpoint.weights import Checkpoint, original
from .decoder_spec import DecoderSpec, LayerShape, sinks_name
from .families import expert_shapes, layer_kinds
from .families.architectures import architecture, native_architecture
from .families.keys import count_of, number, whole
from .families.plain import FAMILIES
from .gpu.form import ROUNDED, Form
from .gpu.weights import PIECE_NUMBERS
from .mixers.states import MixerShape
from .precision import head_bits, is_grouped, rounded_shapes

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SMALL_MODEL = 400_000_000  # parameters up to which activations have 16 bits, if weights are in blocks


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's properties that are known before its weights are read."""

    architecture: str
    implementation: str  # native | transformers
    vocab_size: int  # width of the logits
    max_len: int  # the model's maximum number of tokens
    serve_len: int  # the engine's: length-dependent rotary frequencies are computed for it
    dtype: torch.dtype
    layers: list[AttentionLayer]  # those that have keys and values of their own
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
    on_gpu: bool = False  # whether a GPU computes with the quantized weights
    coded: tuple[tuple[Form, int, int], ...] = ()  # of a quantized checkpoint, on a GPU: forms, rows and columns
    objection: str = ""  # why weights that a GPU could compute with are dequantized
    is_part: bool = False  # of a model that also reads images

    @property
    def weights_bytes(self) -> int:
        plain = self.num_params * self.dtype.itemsize + self._wide_routers * (4 - self.dtype.itemsize)
        if self.coded:
            saved = (
                rows * columns * self.dtype.itemsize - form.num_bytes(rows, columns)
                for form, rows, columns in self.coded
            )
            return plain - sum(saved)
        if self.in_blocks:
            stored = sum(blocks_bytes(kind, count, self.dtype) for kind, count in self.in_blocks.items())
            return plain - sum(self.in_blocks.values()) * self.dtype.itemsize + stored
        saved = (
            rows * columns * self.dtype.itemsize
            - (
                ROUNDED[bits].num_bytes(rows, columns)
                if self.on_gpu
                else quantized_bytes(rows, columns, bits, grouped=is_grouped(self.quantization, self.num_params))
            )
            for rows, columns, bits in self.rounded
        )
        return plain - sum(saved)

    @property
    def _wide_routers(self) -> int:
        """The number of weights and biases of routers in float32."""
        if (decoder := self.decoder) is None or (experts := decoder.experts) is None or not experts.wide_router:
            return 0
        layers = len(decoder.shapes) - len(experts.dense)
        return layers * experts.count * (decoder.hidden_size + experts.has_bias)

    @property
    def forms(self) -> list[tuple[Form, int, int]]:
        """How a GPU stores quantized weights: forms, rows and columns. Of a GGUF file only the types of its blocks are
        known, so each weight may have any of their forms."""
        if self.quantization != "gguf":
            return list(self.coded) or [(ROUNDED[bits], rows, columns) for rows, columns, bits in self.rounded]
        assert self.decoder is not None
        shapes = {(sum(rows), columns) for _, rows, columns in self.decoder.linears(self.vocab_size)}
        shapes.add((self.vocab_size, self.decoder.hidden_size))  # of the embedding
        names = sorted({stored_type(name) for name in self.in_blocks} & FORMS.keys())
        return [(FORMS[name], *shape) for name in names for shape in sorted(shapes)]

    @property
    def looked_up_bytes(self) -> int:
        """The size of the weights of which a token needs one row: tables of embeddings that are not the head's."""
        if self.quantization == "gguf":
            numbers = self.source["quantization_config"]["looked_up"].items()
            types = ((stored_type(kind) if self.on_gpu else kind, count) for kind, count in numbers)
            return sum(blocks_bytes(kind, count, self.dtype) for kind, count in types)
        assert self.decoder is not None
        table = 0 if self.decoder.tied else self.vocab_size * self.decoder.hidden_size
        return (self.decoder.looked_up + table) * self.dtype.itemsize

    @property
    def rounded(self) -> list[tuple[int, int, int]]:
        """The rows, columns and bits of the weights that `quantization` rounds while they are loaded."""
        if (decoder := self.decoder) is None:
            return []
        layers = [list(decoder.layer_linears(index)) for index in range(len(decoder.shapes))]
        values = [decoder.rows(index)[2] for index in range(len(decoder.shapes))]
        head = self.vocab_size, decoder.hidden_size
        return rounded_shapes(self.quantization, head, values, layers, self.num_params)

    @property
    def loading_bytes(self) -> int:
        """The maximum memory that loading needs beside the quantized weights: for the plain head, or a plain layer.

        On a CPU a model that is served in its checkpoint's dtype needs none: its weights are quantized in chunks as
        they are read.
        """
        is_read_in_chunks = not self.on_gpu and self.dtype == DTYPES.get(stored_dtype(self.source))
        if head_bits(self.quantization) is None or self.decoder is None or is_read_in_chunks:
            return 0
        layer = max(map(self.decoder.layer_numbers, range(len(self.decoder.shapes))))
        return max(self.vocab_size * self.decoder.hidden_size, layer) * self.dtype.itemsize

    @property
    def workspace_bytes(self) -> int:
        """The memory for weights that a step dequantizes, on a GPU: a part of one at a time."""
        if not self.on_gpu or self.decoder is None:
            return 0
        largest = max(
            sum(rows) * columns
            for index in range(len(self.decoder.shapes))
            for _, rows, columns in self.decoder.layer_linears(index)
        )
        return min(PIECE_NUMBERS, largest) * self.dtype.itemsize

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the weights, in sentences."""
        part = f"of {self.architecture} the text part is served: requests with images are refused"
        return (part, *self._weights_notes) if self.is_part else self._weights_notes

    @property
    def _weights_notes(self) -> tuple[str, ...]:
        if self.dequantized:
            size, dtype = self.dequantized * self.dtype.itemsize, str(self.dtype).removeprefix("torch.")
            shown_size = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
            what = f"{self.dequantized:,} weights in {self.method}"
            reason = f": {self.objection}" if self.objection else ""
            return (f"{what} are dequantized while they are loaded, and take {shown_size} in {dtype}{reason}",)
        if self.quantization != "gguf":
            return ()
        types = self.source["quantization_config"]["types"]
        converted = sorted({*types} - ({*FORMS} if self.on_gpu else {form.name for form in FORMATS.values()}))
        if not converted:
            return ()
        return (f"weights in {', '.join(converted)} are converted to Q8_0, which needs more memory than the file",)

    def stored_as(self, type_of: TypeOf, scheme: Callable[[str], object]) -> ModelSpec:
        """Return the spec of a checkpoint with these quantized weights, see `count_blocks`."""
        assert self.decoder is not None
        linears = self.decoder.linears(self.vocab_size)
        in_blocks, dequantized = count_blocks(linears, type_of, scheme)
        dequantized += sum(numbers for name, numbers in self.decoder.head_weights() if scheme(name))
        name = self.method if in_blocks else "none"
        return replace(self, quantization=name, in_blocks=in_blocks, dequantized=dequantized)

    @property
    def cache_dtype(self) -> torch.dtype:
        return CACHE_DTYPES.get(self.kv_dtype, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes(self.cache_dtype) for layer in self.layers)

    @property
    def attended(self) -> list[AttentionLayer]:
        """The attention of every layer, also of those that share the keys and values of another, but not of those
        without attention."""
        if (decoder := self.decoder) is None:
            return self.layers
        caches = zip(decoder.caches, decoder.shapes, strict=True)
        return [self.layers[index] for index, shape in caches if shape.mixer is None]

    @property
    def mixers(self) -> list[MixerShape]:
        """What the layers without attention have in its place."""
        shapes = () if self.decoder is None else self.decoder.shapes
        return [shape.mixer for shape in shapes if shape.mixer is not None]

    @property
    def state_bytes(self) -> int:
        """The size of a sequence's states in all layers; 0: there are none."""
        return sum(shape.num_bytes(self.dtype) for shape in self.mixers)

    @property
    def groups(self) -> CacheGroups:
        """The layers that share blocks. They do not depend on the memory."""
        windows = [layer.window for layer in self.layers]
        return CacheGroups.of(windows, self.serve_len, [layer.bytes(self.cache_dtype) for layer in self.layers])


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raises ModelError if it is missing or cannot be used."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    source = read_json(path)
    if source is None:
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    if gguf.is_converted(folder) or not (found := locations.find(folder, source)):
        return source
    parse(found.settings, found.file)
    return source | {"quantization_config": found.settings}


def choose_dtype(source: Mapping[str, Any], config: EngineConfig) -> torch.dtype:
    """Return the configured dtype; "auto" is the checkpoint's."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    name = stored_dtype(source)
    if name not in DTYPES:
        raise ModelError(f"config.json names the dtype '{shown(name)}'; choose one of {', '.join(DTYPES)} with `dtype`")
    return DTYPES[name]


def stored_dtype(source: Mapping[str, Any]) -> str:
    """Return the name of the checkpoint's dtype according to config.json."""
    # Quantized checkpoints without a name, such as gpt-oss, have their other weights in bfloat16.
    default = "bfloat16" if source.get("quantization_config") else "float32"
    return str(source.get("dtype") or source.get("torch_dtype") or default).removeprefix("torch.")


def with_dtype(source: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json with the dtype of the checkpoint if it names none: that of the embedding, or else of the first
    tensor of floating-point numbers, which transformers takes."""
    text, entries = multimodal.text_part(source), checkpoint.entries
    if text.get("dtype") or text.get("torch_dtype"):
        return source
    embedding = f"{multimodal.place(entries)[0]}embed_tokens.weight"
    dtypes = (entries[name].dtype for name in (embedding, *entries) if name in entries)
    found = next((dtype for dtype in dtypes if dtype in DTYPES.values()), None)
    return source if found is None else source | {"dtype": str(found).removeprefix("torch.")}


def with_routers(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec with routers in float32 if the checkpoint has one in float32 and the model's data type is
    narrower: rounded, it would choose other experts for some tokens."""
    if (decoder := spec.decoder) is None or (experts := decoder.experts) is None or spec.dtype.itemsize >= 4:
        return spec
    entries = checkpoint.entries
    prefix = multimodal.place(entries)[0]
    names = (f"{prefix}layers.{layer}.{experts.names[0]}.weight" for layer in range(len(decoder.shapes)))
    routers = [entries[name] for name in names if name in entries]
    # The numbers of GGUF blocks are of float32, too, and take fewer bytes.
    if not any(each.dtype == torch.float32 and each.num_bytes == 4 * prod(each.shape) for each in routers):
        return spec
    return replace(spec, decoder=replace(decoder, experts=replace(experts, wide_router=True)))


def serve_len(max_len: int, config: EngineConfig) -> int:
    """Return the length for which length-dependent frequencies are computed. It does not depend on the memory."""
    return config.rope_len or min(config.max_len or max_len, max_len)


def read_spec(source: dict[str, Any], config: EngineConfig, *, native_only: bool = False) -> ModelSpec | None:
    """Return the spec for the native decoder; None, or a ModelError if native_only, if it does not support the
    model."""
    whole_name = architecture(source)
    source = multimodal.text_part(source)
    name = architecture(source)
    is_part = name != whole_name
    if not is_part and (native := native_architecture(source)) != name:
        name = native or f"{name} of the type '{shown(source['model_type'])}'"
    family = FAMILIES.get(name)
    renames = () if family is None else family.renames
    if family is not None and family.has_sublayers:
        renames, source = sublayers.renames(source), sublayers.as_layers(source)
    if family is None:
        reason: str | None = f"the native implementation has no {name}; it has {', '.join(FAMILIES)}"
    else:
        reason = layer_kinds.unsupported(source, name, family)
    if family is None or reason is not None:
        if family is not None and family.mixer:  # transformers' interface is for attention alone
            raise ModelError(f"{reason}")
        if native_only:
            raise ModelError(f"{reason}; leave `implementation` to auto")
        return None
    heads = whole(source, "num_attention_heads", maximum=MAX_HEADS)
    omitted = heads if "num_key_value_heads" in source else family.kv_heads or heads  # null means: as many as heads
    kv_heads = whole(source, "num_key_value_heads", omitted, maximum=MAX_HEADS)
    hidden = whole(source, "hidden_size", maximum=MAX_SIZE)
    head_dim = whole(source, "head_dim", family.head_dim or max(1, hidden // heads), maximum=MAX_HEADS)
    num_layers = whole(source, "num_hidden_layers", maximum=MAX_LAYERS)
    plain = LayerShape(kv_heads, head_dim, layer_kinds.inner(source, family))
    rotates = layer_kinds.rotates(source, family, num_layers)
    windows = layer_kinds.windows(source, family, num_layers, rotates)
    shapes = layer_kinds.shapes(source, family, plain, windows)
    if uneven := next((shape for shape in shapes if (shape.heads or heads) % shape.kv_heads), None):
        own = uneven.heads or heads
        raise ModelError(f"config.json: {own} attention heads cannot share {uneven.kv_heads} key-value heads evenly")
    ropes, turns = layer_kinds.ropes(source, family, shapes, rotates, windows)
    # Where only some layers have scaled embeddings, max_position_embeddings is the scaled length already.
    max_len = ropes[0].longest if len(ropes) == 1 else ropes[0].max_positions
    dtype = choose_dtype(source, config)
    attention_bias = bool(source.get("attention_bias", family.attention_bias))
    decoder = DecoderSpec(
        hidden_size=hidden,
        num_heads=heads,
        shapes=shapes,
        norm_eps=number(source, family.eps_key, family.norm_eps),
        activation=layer_kinds.activation_of(source, family),
        ropes=ropes,
        turns=turns,
        tied=layer_kinds.is_tied(source, family),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and bool(source.get("mlp_bias", False)),
        qk_norm=family.qk_norm if source.get("use_qk_norm") or not family.may_norm_qk else "",
        turns_first=family.turns_first,
        norms_values=family.norms_values,
        is_interleaved=family.is_interleaved and source.get("rope_interleave") is not False,
        rotates_wide=family.rotates_wide,
        wide_angles=family.wide_angles,
        norms=family.norms,
        norm=family.norm,
        is_parallel=family.is_parallel,
        inputs=layer_kinds.inputs(source) if family.has_layer_inputs else None,
        scales_layers=family.scales_layers,
        scales=layer_kinds.scales(source, family, hidden, dtype),
        mlp=family.mlp,
        joins_qkv=family.joins_qkv,
        gates_attention=family.gates_attention,
        head_gate=layer_kinds.head_gate(source, family),
        has_sinks=family.has_sinks,
        unused_layers=count_of(source, "num_nextn_predict_layers", 0, maximum=MAX_LAYERS),
        experts=expert_shapes.experts(source, family, num_layers),
    )
    vocab_size = whole(source, "vocab_size", maximum=MAX_SIZE)
    num_params = decoder.num_params(vocab_size)
    method = _method(source)
    if method and config.quantization != "none":
        name = "a GGUF file" if method == "gguf" else f"this checkpoint ({method})"
        raise ConfigError(f"the weights of {name} are quantized: leave out `quantization={config.quantization}`")
    spec = ModelSpec(
        architecture=whole_name,
        implementation="native",
        vocab_size=vocab_size,
        max_len=max_len,
        serve_len=serve_len(max_len, config),
        dtype=dtype,
        layers=[
            AttentionLayer(
                shape.heads or heads,
                shape.kv_heads,
                shape.head_dim,
                shape.v_head_dim,
                scale,
                window,
                cap,
                sinks_name(index) if family.has_sinks else None,
                values_in_keys=shape.latent is not None,
            )
            for index, (shape, window) in enumerate(zip(shapes, windows, strict=True))
            for scale, cap in [layer_kinds.scores(source, family, shape, ropes[0])]
            if shape.shares is None and shape.mixer is None
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
        is_part=is_part,
    )
    if not spec.method:
        return spec
    stored = parse(source["quantization_config"])

    def type_of(name: str, columns: int) -> str | None:
        found = scheme(name)
        return None if found is None else found.blocks_type(columns)

    def scheme(name: str) -> Scheme | None:
        own = original(name, renames)
        if not is_part or not own.startswith("model."):
            return stored.scheme(own)
        # Which name such checkpoints have is not known yet; ignore lists use either prefix.
        found = [stored.scheme(prefix + own.removeprefix("model.")) for prefix in multimodal.NESTED]
        return None if None in found else found[0]

    return spec.stored_as(type_of, scheme)


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
