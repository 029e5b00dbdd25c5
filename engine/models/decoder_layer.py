"""A layer of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .experts import Experts
from .forward import Forward
from .layers import Gated, InFile, Linear, Quantization, RMSNorm
from .precision import LayerBits
from .rope import rotate
from .spec import DecoderSpec, ModelSpec


class Layer:
    """Attention and a gated MLP or experts, each with a norm before it and a residual connection."""

    gate_up: Gated  # gate_up and down: of a layer without experts
    down: Linear

    def __init__(self, index: int, model: ModelSpec, spec: DecoderSpec, device: torch.device) -> None:
        self.index, self.spec = index, spec
        dtype = model.dtype
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.q_size, self.kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.attention_norm = RMSNorm(hidden, spec.norm_eps, dtype, device)
        self.qkv = Linear(self.q_size + 2 * self.kv_size, hidden, spec.qkv_bias, dtype, device)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype, device) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype, device) if spec.qk_norm else None
        self.output = Linear(hidden, self.q_size, spec.output_bias, dtype, device)
        self.mlp_norm = RMSNorm(hidden, spec.norm_eps, dtype, device)
        experts = spec.experts_of(index)
        if experts is not None:
            self.experts: Experts | None = Experts(hidden, experts, dtype, device, activation=spec.activation)
            return
        self.experts = None
        self.gate_up = Gated(inner, hidden, spec.mlp_bias, dtype, device, activation=spec.activation)
        self.down = Linear(hidden, inner, spec.mlp_bias, dtype, device)

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor], forward: Forward) -> Tensor:
        x = self.output(self.attend(self.attention_norm(x), turn, forward), residual=x)
        if self.experts is not None:
            return self.experts(self.mlp_norm(x), residual=x)
        return self.down(self.gate_up(self.mlp_norm(x)), residual=x)

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor], forward: Forward) -> Tensor:
        """Return the attention's output before the output projection: [tokens, heads * head_dim]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.spec.head_dim))
            for part in self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        return forward.attend(self.index, q, k, v).flatten(1)

    def parts(self) -> list[tuple[str, Linear, int, int]]:
        """Return (checkpoint name, linear layer, first row, end row) for each weight. Q, K and V are rows of one linear
        layer, and gate and up of another, also where the checkpoint has a tensor for each."""
        q, kv, inner = self.q_size, self.kv_size, self.spec.intermediate_size
        prefix = f"layers.{self.index}."
        attention: list[tuple[str, Linear, int, int]] = [
            (f"{prefix}self_attn.q_proj", self.qkv, 0, q),
            (f"{prefix}self_attn.k_proj", self.qkv, q, q + kv),
            (f"{prefix}self_attn.v_proj", self.qkv, q + kv, q + 2 * kv),
        ]
        if self.spec.is_joined:
            attention = [(f"{prefix}self_attn.qkv_proj", self.qkv, 0, q + 2 * kv)]
        attention.append((f"{prefix}self_attn.o_proj", self.output, 0, self.spec.hidden_size))
        if self.experts is not None:
            return attention + self.experts.parts(prefix)
        down = (f"{prefix}mlp.down_proj", self.down, 0, self.spec.hidden_size)
        if self.spec.is_joined:
            return [*attention, (f"{prefix}mlp.gate_up_proj", self.gate_up, 0, 2 * inner), down]
        return [
            *attention,
            (f"{prefix}mlp.gate_proj", self.gate_up, 0, inner),
            (f"{prefix}mlp.up_proj", self.gate_up, inner, 2 * inner),
            down,
        ]

    def targets(self) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        prefix = f"layers.{self.index}."
        targets = {
            "input_layernorm.weight": self.attention_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
        }
        if self.q_norm is not None and self.k_norm is not None:
            targets |= {"self_attn.q_norm.weight": self.q_norm.weight, "self_attn.k_norm.weight": self.k_norm.weight}
        targets = {prefix + name: target for name, target in targets.items()}
        for name, linear, begin, end in self.parts():
            targets[f"{name}.weight"] = linear.weight[begin:end]
            if linear.bias is not None:
                targets[f"{name}.bias"] = linear.bias[begin:end]
        return targets

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matmuls of a layer without experts."""
        return self.qkv, self.output, self.gate_up, self.down

    def pack(
        self, kernels: Kernels | None, bits: LayerBits | None, in_file: Mapping[Linear, InFile] | None = None
    ) -> None:
        """Pack the weights, after the norms have been read; `in_file` has the weights that are still in files."""
        in_file = in_file or {}
        for linear in self.linears if self.experts is None else (self.qkv, self.output):
            quantization = None if bits is None else self._quantization(linear, bits)
            linear.pack(kernels, quantization=quantization, in_file=in_file.get(linear))
        if self.experts is not None:
            self.experts.pack(kernels, bits, self.mlp_norm, in_file)
        for norm in (self.attention_norm, self.mlp_norm):
            norm.pack(kernels)

    def _quantization(self, linear: Linear, bits: LayerBits) -> Quantization:
        # A norm multiplies each column of x by its weight, so squared errors of the next weight count by its square.
        if linear is self.qkv:
            rows_in_8 = self.kv_size if bits.value > bits.others else 0
            return Quantization(bits.others, self.attention_norm.weight.float().square(), rows_in_8)
        if linear is self.output:
            return Quantization(bits.others)
        if linear is self.gate_up:
            return Quantization(bits.others, self.mlp_norm.weight.float().square())
        return Quantization(bits.down)
