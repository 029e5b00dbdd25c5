"""The input that each layer of a decoder has of its own for a token: per-layer embeddings, as in Gemma 3n and Gemma 4.

A token has a row in a second table of embeddings, with a part for each layer. A projection of its embedding is added to
that. Each layer's part then gates a small feed-forward layer, whose result is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.library import Kernels
from ..kernels.structures import Gate
from .decoder_spec import DecoderSpec, InputsSpec
from .layers import ACTIVATIONS, GATES, InFile, Linear, gated
from .norms import make_norm
from .spec import ModelSpec


class LayerInputs:
    """Computes the inputs of all layers, before the first."""

    def __init__(self, model: ModelSpec, spec: DecoderSpec, inputs: InputsSpec, device: torch.device) -> None:
        self.size, self.num_layers = inputs.size, len(spec.shapes)
        width, dtype = self.num_layers * inputs.size, model.dtype
        self.table = Linear(inputs.vocab_size, width, False, dtype, device)
        self.table.row_scale = torch.tensor(inputs.size**0.5, dtype=dtype).item()
        self.projection = Linear(width, spec.hidden_size, False, dtype, device)
        self.projection.scale = spec.hidden_size**-0.5
        self.norm = make_norm(inputs.size, spec.norm_eps, dtype, device, spec.norm)
        # Checkpoint name -> a weight that stays as it is stored, if it is in blocks.
        self.in_files = {"per_layer_model_projection.weight": self.projection}
        if model.quantization == "gguf":
            self.in_files["embed_tokens_per_layer.weight"] = self.table
            if model.on_gpu:
                self.table.defer()

    def __call__(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """Return [layers, tokens, size] for ids: [tokens] int64, and their embeddings: [tokens, hidden_size]."""
        projected = self.norm(self.projection(embeddings).view(-1, self.size))
        both = (projected.view(len(ids), -1) + self.table.rows(ids)) * 2.0**-0.5
        return both.view(len(ids), self.num_layers, self.size).transpose(0, 1)

    def targets(self) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        return {
            "embed_tokens_per_layer.weight": self.table.weight,
            "per_layer_model_projection.weight": self.projection.weight,
            "per_layer_projection_norm.weight": self.norm.weight,
        }

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """Pack the weights, see Layer.pack. A plain table, of which a token needs one row, stays as it is."""
        self.projection.pack(kernels, in_file=in_file.get(self.projection))
        if (in_blocks := in_file.get(self.table)) is not None:
            self.table.pack(kernels, in_file=in_blocks)
        self.norm.pack(kernels)


class LayerInput:
    """x + norm(projection(activation(gate(x)) * the layer's input))."""

    def __init__(self, spec: DecoderSpec, inputs: InputsSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.gate = Linear(inputs.size, spec.hidden_size, False, dtype, device)
        self.projection = Linear(spec.hidden_size, inputs.size, False, dtype, device)
        self.norm = make_norm(spec.hidden_size, spec.norm_eps, dtype, device, spec.norm)
        self._activation, self._gate = ACTIVATIONS[spec.activation], Gate(GATES[spec.activation])
        self._kernels: Kernels | None = None

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        """Return [tokens, hidden_size] for x: [tokens, hidden_size], and the layer's input: [tokens, size]."""
        both = torch.cat([self.gate(x), own], -1)
        return x + self.norm(self.projection(gated(both, self._activation, self._gate, self._kernels)))

    def parts(self, prefix: str) -> list[tuple[str, Linear, int, int]]:
        """Return checkpoint names and places of the weights, as Layer.parts."""
        return [
            (f"{prefix}per_layer_input_gate", self.gate, 0, len(self.gate.weight)),
            (f"{prefix}per_layer_projection", self.projection, 0, len(self.projection.weight)),
        ]

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into; not those of the linear layers."""
        return {f"{prefix}post_per_layer_input_norm.weight": self.norm.weight}

    def pack(self, kernels: Kernels | None, in_file: Mapping[Linear, InFile]) -> None:
        """Pack the weights, see Layer.pack. They are small, and are not quantized."""
        self._kernels = kernels
        for linear in (self.gate, self.projection):
            linear.pack(kernels, in_file=in_file.get(linear))
        self.norm.pack(kernels)
