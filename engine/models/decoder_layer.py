"""A layer of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .decoder_spec import DecoderSpec, sinks_name
from .experts import Experts
from .forward import Forward
from .layers import Gated, InFile, Linear, Quantization, RMSNorm, make_norm
from .precision import LayerBits
from .rope import Turn, rotate
from .spec import ModelSpec


class Layer:
    """Attention and a gated MLP or experts, each with a residual connection, and with a norm before it or after it."""

    gate_up: Gated  # gate_up and down: of a layer without experts
    down: Linear

    def __init__(self, index: int, model: ModelSpec, spec: DecoderSpec, device: torch.device) -> None:
        self.index, self.spec = index, spec
        self.turn = spec.turns[index]  # the index of its rotary embedding; -1: it has none
        dtype = model.dtype

        def norm(name: str | None, size: int = spec.hidden_size) -> RMSNorm | None:
            return None if name is None else make_norm(size, spec.norm_eps, dtype, device, spec.norm)

        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.q_size, self.kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.attention_norm, self.attention_after = norm(spec.norms.attention), norm(spec.norms.attention_after)
        self.qkv = Linear(self.q_size + 2 * self.kv_size, hidden, spec.qkv_bias, dtype, device)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            together = spec.qk_norm == "all"
            self.q_norm = norm("q_norm", self.q_size if together else spec.head_dim)
            self.k_norm = norm("k_norm", self.kv_size if together else spec.head_dim)
        self.sinks = torch.empty(spec.num_heads, dtype=dtype, device=device) if spec.has_sinks else None
        self.output = Linear(hidden, self.q_size, spec.output_bias, dtype, device)
        self.output.scale = spec.scales.residual
        self.mlp_norm, self.mlp_after = norm(spec.norms.mlp), norm(spec.norms.mlp_after)
        experts = spec.experts_of(index)
        if experts is not None:
            self.experts: Experts | None = Experts(hidden, experts, dtype, device, activation=spec.activation)
            return
        self.experts = None
        self.gate_up = Gated(inner, hidden, spec.mlp_bias, dtype, device, activation=spec.activation)
        self.down = Linear(hidden, inner, spec.mlp_bias, dtype, device)
        self.down.scale = spec.scales.residual

    def __call__(self, x: Tensor, turn: Turn | None, forward: Forward) -> Tensor:
        """Return [tokens, hidden_size] for x: [tokens, hidden_size]; `turn`: None: do not rotate."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = _add(self.output, self.attend(normed, turn, forward), self.attention_after, x)
        if not self.spec.is_parallel:
            normed = x if self.mlp_norm is None else self.mlp_norm(x)
        if self.experts is not None:
            return self.experts(normed, residual=x)
        return _add(self.down, self.gate_up(normed), self.mlp_after, x)

    def attend(self, x: Tensor, turn: Turn | None, forward: Forward) -> Tensor:
        """Return the attention's output before the output projection: [tokens, heads * head_dim]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.spec.head_dim))
            for part in self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm(self.q_norm, q), _norm(self.k_norm, k)
        if turn is not None:
            dtype = x.dtype
            if self.spec.is_interleaved:
                q, k = (_separated(part, turn.cos.shape[-1]) for part in (q, k))
            if self.spec.rotates_wide:
                q, k = q.float(), k.float()
            q, k = rotate(q, turn.cos, turn.sin).to(dtype), rotate(k, turn.cos, turn.sin).to(dtype)
            q = q if turn.query_scale is None else q * turn.query_scale
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
        if self.spec.joined == "all":
            attention = [(f"{prefix}self_attn.qkv_proj", self.qkv, 0, q + 2 * kv)]
        attention.append((f"{prefix}self_attn.o_proj", self.output, 0, self.spec.hidden_size))
        if self.experts is not None:
            return attention + self.experts.parts(prefix)
        down = (f"{prefix}mlp.down_proj", self.down, 0, self.spec.hidden_size)
        if self.spec.joined:
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
        names = (*self.spec.norms, "self_attn.q_norm", "self_attn.k_norm")
        norms = zip(names, (*self.norms, self.q_norm, self.k_norm), strict=True)
        targets = {f"{prefix}{name}.weight": norm.weight for name, norm in norms if norm is not None}
        if self.sinks is not None:
            targets[sinks_name(self.index)] = self.sinks
        if self.experts is not None and self.experts.correction is not None:
            targets[f"{prefix}{self.experts.spec.names[0]}.e_score_correction_bias"] = self.experts.correction
        for name, linear, begin, end in self.parts():
            targets[f"{name}.weight"] = linear.weight[begin:end]
            if linear.bias is not None:
                targets[f"{name}.bias"] = linear.bias[begin:end]
        return targets

    @property
    def norms(self) -> tuple[RMSNorm | None, ...]:
        """The norms of the hidden state, in the order of NormNames."""
        return self.attention_norm, self.attention_after, self.mlp_norm, self.mlp_after

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
            self.experts.pack(kernels, bits, _importance(self.mlp_norm), in_file)
        for norm in (*self.norms, self.q_norm, self.k_norm):
            if norm is not None:
                norm.pack(kernels)

    def _quantization(self, linear: Linear, bits: LayerBits) -> Quantization:
        if linear is self.qkv:
            rows_in_8 = self.kv_size if bits.value > bits.others else 0
            return Quantization(bits.others, _importance(self.attention_norm), rows_in_8)
        if linear is self.output:
            return Quantization(bits.others)
        if linear is self.gate_up:
            return Quantization(bits.others, _importance(self.mlp_norm or self.attention_norm))
        return Quantization(bits.down)


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """Return the norm of each head of x, or of all heads together: [tokens, heads, head_dim]."""
    return norm(x.reshape(-1, len(norm.weight))).view(x.shape)


def _separated(x: Tensor, rotated: int) -> Tensor:
    """Return heads with the numbers at even places before those at odd places, among the first `rotated` ones:
    [tokens, heads, head_dim].

    The scores of queries and keys whose numbers are ordered alike are the same.
    """
    first, others = x[..., :rotated], x[..., rotated:]
    return torch.cat([first[..., ::2], first[..., 1::2], others], -1)


def _add(linear: Linear, x: Tensor, norm: RMSNorm | None, residual: Tensor) -> Tensor:
    """Return the residual + norm(linear(x))."""
    return linear(x, residual=residual) if norm is None else residual + norm(linear(x))


def _importance(norm: RMSNorm | None) -> Tensor | None:
    """Return the importance of the columns of the weight after a norm, see Quantized.

    A norm multiplies each column of x by its weight, so squared errors of the next weight count by its square.
    """
    return None if norm is None else norm.gain.float().square()
