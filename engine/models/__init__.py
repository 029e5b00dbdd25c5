"""Models: describes and loads a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..config import EngineConfig
from ..files import shown
from ..gguf import folder as gguf
from ..kernels.library import Choice
from ..quantized.config import parse
from ..types import ConfigError, EngineError, ModelError
from .checkpoint import sublayers
from .checkpoint.dummy import DummyWeights
from .checkpoint.multimodal import text_part
from .checkpoint.regrouped import regroup
from .checkpoint.stacked import StackedCheckpoint
from .checkpoint.weights import Checkpoint
from .families import mixer_shapes
from .families.architectures import architecture, native_architecture
from .families.plain import FAMILIES
from .fitting import fit, product, with_dequantized
from .forward import Forward, Outputs
from .model import Model, Progress
from .spec import ModelSpec, read_config, read_spec, with_dtype, with_routers


def describe(folder: Path, config: EngineConfig) -> ModelSpec:
    """Return the spec of a folder, from its config.json and the settings. Raises ModelError and ConfigError."""
    source = read_config(folder)
    spec = _describe(folder, source, config, None)
    # That of a GGUF file has a list of the tensors, too.
    return _as_stored(spec, _checkpoint(folder, source)) if gguf.is_converted(folder) else spec


def examine(folder: Path, config: EngineConfig) -> tuple[ModelSpec, Checkpoint]:
    """Return the spec of a folder, and its checkpoint for `load`. Raises ModelError and ConfigError.

    The headers of the weights are read too, and compared with config.json.
    """
    if config.load_format == "dummy":
        spec = describe(folder, config)
        return spec, DummyWeights(folder, spec)
    source = read_config(folder)
    checkpoint = _checkpoint(folder, source)
    source = with_dtype(source, checkpoint)
    if source.get("quantization_config") and not gguf.is_converted(folder):
        from ..quantized.checkpoint import QuantizedCheckpoint

        quantized = QuantizedCheckpoint(checkpoint, parse(source["quantization_config"]))
        spec = _describe(folder, source, config, quantized)
        return spec.stored_as(quantized.blocks_type, quantized.scheme), quantized
    return _describe(folder, source, config, checkpoint), checkpoint


def _checkpoint(folder: Path, source: dict[str, Any]) -> Checkpoint:
    text = text_part(source)
    name = architecture(text) if text is not source else native_architecture(source)
    family = FAMILIES.get(name or "")
    if gguf.is_converted(folder):
        from ..gguf.checkpoint import GgufCheckpoint  # imports the gguf package

        converted = GgufCheckpoint(folder)
        if family is not None and family.has_sublayers:
            converted.rename(sublayers.renames(text))
        return converted
    if family is not None and family.experts is not None and family.experts.stacking is not None:
        return StackedCheckpoint(folder, family.experts, text.get("hidden_size"))
    checkpoint = Checkpoint(folder)
    if family is not None and family.has_sublayers:
        checkpoint.rename(sublayers.renames(text))
    elif family is not None and family.regroups:
        regroup(checkpoint, mixer_shapes.linear(text), family.renames)
    elif family is not None:
        checkpoint.rename(family.renames)
    return checkpoint


def _describe(folder: Path, source: dict[str, Any], config: EngineConfig, checkpoint: Checkpoint | None) -> ModelSpec:
    try:
        return _spec(folder, source, config, checkpoint)
    except (EngineError, ImportError):
        raise
    except Exception as error:  # a value of a type that no model has
        reason = shown(str(error) or type(error).__name__)
        raise ModelError(f"{folder / 'config.json'} holds a value that cannot be used ({reason})") from error


def _spec(folder: Path, source: dict[str, Any], config: EngineConfig, checkpoint: Checkpoint | None) -> ModelSpec:
    if config.implementation != "transformers":
        spec = read_spec(source, config, native_only=config.implementation == "native")
        if spec is not None:
            if checkpoint is not None:
                from .checkpoint.check import check

                spec = _as_stored(spec, checkpoint)
                check(spec, checkpoint)
            return spec
    if config.quantization != "none":
        raise ConfigError(
            f"`quantization={config.quantization}` is for the native implementation, and {architecture(source)} runs "
            "on transformers' code here: leave it out"
        )
    if source.get("quantization_config"):
        method = shown(source["quantization_config"]["quant_method"])
        raise ModelError(
            f"weights in {method} are for the native implementation, and {architecture(source)} runs on transformers' "
            "code here: use the unquantized version of the model"
        )
    from . import hf

    return hf.describe(folder, source, config, checkpoint)


def _as_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec with what the list of a checkpoint's tensors shows of its weights."""
    return with_dequantized(with_routers(spec, checkpoint), checkpoint)


def load(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    product: Choice,
    progress: Progress = lambda share: None,
    *,
    has_read: Callable[[], None] = lambda: None,
) -> Model:
    """Load a model that `examine` has described, on a device. Raises ModelError.

    `has_read` is called when the weights have been read, before the kernels of our decoder are tried on a GPU.
    """
    if spec.implementation == "native":
        from .decoder import Decoder

        return Decoder.load(spec, checkpoint, device, product, progress, has_read=has_read)
    from . import hf

    return hf.load(spec, checkpoint, device, product, progress)


__all__ = [
    "Forward",
    "Model",
    "ModelError",
    "ModelSpec",
    "Outputs",
    "Progress",
    "describe",
    "examine",
    "fit",
    "load",
    "product",
]
