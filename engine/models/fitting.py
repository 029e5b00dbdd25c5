"""Fits the spec of a model to a device: which of its weights stay quantized there, and what computes its matmuls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..config import EngineConfig
from ..kernels.library import Choice, choose
from ..quantized.config import count_blocks, parse
from ..types import ConfigError
from .checkpoint.weights import Checkpoint
from .gpu import weight_trial
from .gpu.form import Form
from .gpu.weights import is_gpu
from .precision import BITS
from .spec import ModelSpec


def fit(spec: ModelSpec, config: EngineConfig, device: torch.device, checkpoint: Checkpoint | None = None) -> ModelSpec:
    """Return the spec of a model on a device. Raises ConfigError.

    Our kernels compute with quantized weights as they are stored; where there are none, weights are dequantized. The
    CPU kernels do not support float16, so bfloat16 replaces it unless the user has set it. `checkpoint`: the weights;
    None: only config.json has been read.
    """
    setting = _setting(config)
    if is_gpu(device, setting) and spec.quantization in BITS:
        if reason := weight_trial.objection(spec.forms, spec.dtype, device, spec.vocab_size):
            name = f"`quantization={spec.quantization}`"
            raise ConfigError(f"{name} makes weights that {device} cannot compute with, so leave it out: {reason}")
        return replace(spec, on_gpu=True)
    if is_gpu(device, setting) and spec.method:
        return _fit_gpu(spec, device, checkpoint)
    if is_gpu(device, setting) and spec.quantization == "gguf":
        return _fit_gguf(spec, device)
    if spec.method and config.load_format == "dummy":
        raise ConfigError(
            f"`load_format=dummy` makes {spec.method} weights on a GPU alone: remove quantization_config, or use auto"
        )
    if not (spec.method and spec.in_blocks):
        return spec
    dtype = torch.bfloat16 if config.dtype == "auto" and spec.dtype == torch.float16 else spec.dtype
    try:
        choose(setting, device, dtype, quantized=True)
    except ConfigError:
        if device.type == "cpu" and setting not in ("auto", "torch"):
            raise
        return _dequantized(spec)
    return replace(spec, dtype=dtype)


def with_dequantized(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec of a GGUF file with the numbers of weights that stay quantized in memory: where a layer
    multiplies by several weights at once, such as Q, K and V, and one of them is plain, the others are dequantized."""
    from ..gguf.checkpoint import GgufCheckpoint

    if not isinstance(checkpoint, GgufCheckpoint) or spec.decoder is None:
        return spec
    in_blocks = Counter(spec.in_blocks)
    for names, rows, columns in spec.decoder.linears(spec.vocab_size):
        kinds = [checkpoint.blocks_type(name) for name in names]
        if None in kinds:
            for kind, count in zip(kinds, rows, strict=True):
                if kind is not None:
                    in_blocks[kind] -= count * columns
    return replace(spec, in_blocks=dict(in_blocks))


def _fit_gpu(spec: ModelSpec, device: torch.device, checkpoint: Checkpoint | None) -> ModelSpec:
    """Return the spec of a quantized checkpoint on a GPU: with weights as they are stored, if that works there."""
    from ..quantized.checkpoint import QuantizedCheckpoint
    from ..quantized.forms import form_of

    assert spec.decoder is not None
    stored = checkpoint if isinstance(checkpoint, QuantizedCheckpoint) else parse(spec.source["quantization_config"])

    def form(weight: str, columns: int) -> Form | None:
        found = stored.scheme(weight)
        return None if found is None else form_of(found, columns)

    def name(weight: str, columns: int) -> str | None:
        found = form(weight, columns)
        return None if found is None else found.name

    linears = list(spec.decoder.linears(spec.vocab_size))
    coded: list[tuple[Form, int, int]] = []
    for names, rows, columns in linears:
        forms = [form(weight, columns) for weight in names]
        if None not in forms:
            coded += [(each, count, columns) for each, count in zip(forms, rows, strict=True) if each is not None]
    if not coded:
        return _dequantized(spec)
    if reason := weight_trial.objection(coded, spec.dtype, device, spec.vocab_size):
        return replace(_dequantized(spec), objection=reason)
    _, dequantized = count_blocks(linears, name, stored.scheme)
    dequantized += sum(numbers for name, numbers in spec.decoder.head_weights() if stored.scheme(name))
    return replace(
        spec, quantization=spec.method, in_blocks={}, dequantized=dequantized, coded=tuple(coded), on_gpu=True
    )


def _fit_gguf(spec: ModelSpec, device: torch.device) -> ModelSpec:
    """Return the spec of a GGUF file on a GPU."""
    from ..gguf.forms import stored_type

    in_blocks: Counter[str] = Counter()
    of_heads = spec.source["quantization_config"]["of_heads"]  # which are dequantized
    for name, count in spec.in_blocks.items():
        in_blocks[stored_type(name)] += count - of_heads.get(name, 0)
    if reason := weight_trial.objection(spec.forms, spec.dtype, device, spec.vocab_size):
        raise ConfigError(f"{device} cannot compute with weights of a GGUF file, so use safetensors: {reason}")
    return replace(spec, in_blocks=dict(in_blocks), on_gpu=True)


def _dequantized(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a quantized checkpoint whose weights are dequantized."""
    dequantized = spec.dequantized + sum(spec.in_blocks.values())
    return replace(spec, quantization="none", in_blocks={}, dequantized=dequantized)


def _setting(config: EngineConfig) -> str:
    return config.cpu_isa if config.products == "auto" else config.products


def product(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Choice:
    """Return what computes a model's matmuls on a device. Raises ConfigError if this machine cannot do that."""
    setting = _setting(config)
    chosen = choose(setting, device, spec.dtype, quantized=spec.quantization != "none" and not spec.on_gpu)
    return replace(chosen, is_uniform=config.batch_invariant and is_gpu(device, setting))
