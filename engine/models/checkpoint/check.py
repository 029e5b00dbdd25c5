"""Compares a checkpoint with what config.json says of the native decoder."""

from __future__ import annotations

import torch

from ...kernels.library import Choice
from ...types import ModelError
from ..decoder import Decoder
from ..spec import ModelSpec
from . import multimodal
from .weights import Checkpoint

# Begin the names of tensors that checkpoints may have beside ours: of layers that predict further tokens, of vision.
BESIDE = "mtp.", "model.mtp_", "model.visual."


def check(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise ModelError unless a checkpoint has exactly the tensors of a model, in their shapes.

    Nothing is allocated, because the sizes in config.json may be arbitrarily large.
    """
    assert spec.decoder is not None
    tied, entries = spec.decoder.tied, checkpoint.entries
    prefix, head = multimodal.place(entries)
    model = Decoder(spec, torch.device("meta"), Choice(None, ""), tied=tied)
    targets = {prefix + name: target for name, target in model.targets().items()}
    if not tied or head in entries:
        targets[head] = model.head.weight
    checkpoint.check(targets)
    first, unused = len(spec.decoder.shapes), spec.decoder.unused_layers
    starts = [*BESIDE, *(f"{prefix}layers.{index}." for index in range(first, first + unused))]
    for index, shape in enumerate(spec.decoder.shapes):
        if shape.shares is not None:  # keys and values of its own, which no layer attends to
            names = "k_proj", "v_proj", "k_norm", "v_norm"
            starts += [f"{prefix}layers.{index}.self_attn.{name}." for name in names]
    for name in sorted(entries.keys() - targets.keys()):
        # An additional tensor means that config.json describes another model. These are harmless.
        module, _, last = name.rpartition(".")
        weight = targets.get(f"{module}.weight") if spec.method == "gptq" and last == "bias" else None
        if weight is not None and entries[name].shape == weight.shape[:1] and _is_zero(checkpoint, name):
            continue  # AutoGPTQ writes a bias for each linear layer
        of_another_part = spec.is_part and not name.startswith(prefix) and not name.endswith("lm_head.weight")
        if not (name.endswith("rotary_emb.inv_freq") or name.startswith(tuple(starts)) or of_another_part):
            raise ModelError(
                f"the checkpoint holds the tensor {checkpoint.original(name)}, which {spec.architecture} does not have"
            )


def _is_zero(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether all numbers of a tensor are 0."""
    try:
        return not checkpoint.rows(name, checkpoint.entries[name].shape[0]).float().any()
    finally:
        checkpoint.close()
