"""A layer of our own decoder: Llama, Mistral, Qwen2 and Qwen3 (dense), their differences in a DecoderSpec."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .forward import Forward
from .layers import Gated, InFile, Linear, RMSNorm
from .rope import rotate
from .spec import DecoderSpec, ModelSpec


class Layer:
    """One block: attention and a gated feed-forward part, each after a norm and added to what came in."""

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
        self.gate_up = Gated(inner, hidden, spec.mlp_bias, dtype, device, activation=spec.activation)
        self.down = Linear(hidden, inner, spec.mlp_bias, dtype, device)

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor], forward: Forward) -> Tensor:
        x = self.output(self.attend(self.attention_norm(x), turn, forward), residual=x)
        return self.down(self.gate_up(self.mlp_norm(x)), residual=x)

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor], forward: Forward) -> Tensor:
        """What the heads see, side by side: [tokens, heads * head_dim]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.spec.head_dim))
            for part in self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        return forward.attend(self.index, q, k, v).flatten(1)

    def parts(self) -> list[tuple[str, Linear, int, int]]:
        """Checkpoint names of the linears, which rows of which they are; q, k and v share one matrix, gate and up
        another."""
        q, kv, inner = self.q_size, self.kv_size, self.spec.intermediate_size
        prefix = f"layers.{self.index}."
        return [
            (f"{prefix}self_attn.q_proj", self.qkv, 0, q),
            (f"{prefix}self_attn.k_proj", self.qkv, q, q + kv),
            (f"{prefix}self_attn.v_proj", self.qkv, q + kv, q + 2 * kv),
            (f"{prefix}self_attn.o_proj", self.output, 0, self.spec.hidden_size),
            (f"{prefix}mlp.gate_proj", self.gate_up, 0, inner),
            (f"{prefix}mlp.up_proj", self.gate_up, inner, 2 * inner),
            (f"{prefix}mlp.down_proj", self.down, 0, self.spec.hidden_size),
        ]

    def places(self) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        prefix = f"layers.{self.index}."
        found = {
            "input_layernorm.weight": self.attention_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
        }
        if self.q_norm is not None and self.k_norm is not None:
            found |= {"self_attn.q_norm.weight": self.q_norm.weight, "self_attn.k_norm.weight": self.k_norm.weight}
        found = {prefix + name: place for name, place in found.items()}
        for name, linear, begin, end in self.parts():
            found[f"{name}.weight"] = linear.weight[begin:end]
            if linear.bias is not None:
                found[f"{name}.bias"] = linear.bias[begin:end]
        return found

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def pack(self, kernels: Kernels | None, bits: int | None, in_file: Mapping[Linear, InFile] | None = None) -> None:
        """`in_file`: of those linears whose weights are not here."""
        for linear in self.linears:
            linear.pack(kernels, bits=bits, in_file=(in_file or {}).get(linear))
        for norm in (self.attention_norm, self.mlp_norm):
            norm.pack(kernels)
