"""Models: a folder becomes something that computes logits over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..config import EngineConfig
from ..kernels.library import Choice, choose
from ..types import ConfigError, EngineError, ModelError
from .spec import ModelSpec, architecture, read_config, read_spec, shown
from .weights import Checkpoint

Progress = Callable[[float], None]  # gets the share of the weights that is in place, 0 to 1


class Outputs(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # [n, vocab_size] in float32, or float64 where the model runs in it
    hidden: Tensor | None = None  # [m, hidden_size] behind the final norm, in the model's dtype; None: not asked or had


class Model(Protocol):
    """A loaded model. Nothing of it changes after loading; all state of a request is in the cache."""

    spec: ModelSpec
    num_params: int
    weights_bytes: int
    weights_hash: str
    product: Choice  # what computes the matrix products

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        meta: AttentionMeta,
        cache: KVCache,
        logits_at: Tensor,
        *,
        hidden_at: Tensor | None = None,
    ) -> Outputs:
        """Store the tokens (ids, positions: [tokens] int64) in the cache; give logits and hidden states of some.

        `logits_at` is [n] int64, rising places in the flattened line of tokens, n may be 0; `hidden_at` likewise [m].
        Where the spec has no hidden_size there are no hidden states to be had.
        """


def describe(folder: Path, config: EngineConfig) -> ModelSpec:
    """Return what the folder's config.json says, under these settings. Raises ModelError, ConfigError."""
    return _describe(folder, read_config(folder), config, None)


def examine(folder: Path, config: EngineConfig) -> tuple[ModelSpec, Checkpoint]:
    """Return `describe`'s spec and the folder's weights, for `load`.

    The headers of the weights are read too, and no number is believed that their tensors contradict.
    """
    source = read_config(folder)
    checkpoint = Checkpoint(folder)
    return _describe(folder, source, config, checkpoint), checkpoint


def _describe(folder: Path, source: dict[str, Any], config: EngineConfig, checkpoint: Checkpoint | None) -> ModelSpec:
    try:
        return _spec(folder, source, config, checkpoint)
    except (EngineError, ImportError):
        raise
    except Exception as error:  # a value of another type than any model's
        reason = shown(str(error) or type(error).__name__)
        raise ModelError(f"{folder / 'config.json'} holds a value that cannot be used ({reason})") from error


def _spec(folder: Path, source: dict[str, Any], config: EngineConfig, checkpoint: Checkpoint | None) -> ModelSpec:
    wanted = config.implementation
    if wanted != "transformers":
        spec = read_spec(source, config, native_only=wanted == "native")
        if spec is not None:
            if checkpoint is not None:
                from . import decoder

                decoder.check(spec, checkpoint)
            return spec
    if config.quantization != "none":
        raise ConfigError(
            f"`quantization={config.quantization}` is for the native implementation, and {architecture(source)} runs "
            "on transformers' code here: leave it out"
        )
    from . import hf

    return hf.describe(folder, source, config, checkpoint)


def product(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Choice:
    """What computes a model's products on a device. Raises ConfigError for what this machine cannot do."""
    asked = config.cpu_isa if config.products == "auto" else config.products
    return choose(asked, device, spec.dtype, quantized=spec.quantization != "none")


def load(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    product: Choice,
    progress: Progress = lambda share: None,
) -> Model:
    """Build a model that `examine` has found on a device; its weights are streamed in. Raises ModelError."""
    if spec.implementation == "native":
        from .decoder import Decoder

        return Decoder.load(spec, checkpoint, device, product, progress)
    from . import hf

    return hf.load(spec, checkpoint, device, product, progress)


__all__ = ["Model", "ModelError", "ModelSpec", "Outputs", "Progress", "describe", "examine", "load", "product"]
