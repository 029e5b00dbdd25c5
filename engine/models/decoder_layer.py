"""A layer of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..kernels.library import Kernels
from .decoder_spec import DecoderSpec, sinks_name
from .experts import Beside, Experts
from .forward import Forward
from .importance import after_norm
from .layer_inputs import LayerInput
from .layers import Gated, InFile, Linear, Quantization
from .mixers.latent_layer import LatentAttention
from .mixers.mixer import make_mixer
from .norms import RMSNorm, make_norm
from .precision import LayerBits
from .rope import Turn, rotate
from .sigmoid import gated
from .spec import ModelSpec
from .squared import Squared, first_layer

Kept = dict[int, tuple[Tensor, Tensor]]  # of a step: layer -> its keys and values, if later layers share them


class Layer:
    """Attention or a mixer, and an MLP, experts or neither, each with a residual connection and norms around it."""

    gate_up: Gated | Squared  # gate_up and down: of a layer with an MLP
    down: Linear

    def __init__(
        self, index: int, model: ModelSpec, spec: DecoderSpec, device: torch.device, *, cache: int, is_shared: bool
    ) -> None:
        """cache: the index of its keys and values, which later layers use as well if it `is_shared`."""
        self.index, self.spec = index, spec
        self.turn = spec.turns[index]  # the index of its rotary embedding; -1: it has none
        dtype = model.dtype

        def norm(name: str | None, size: int = spec.hidden_size) -> RMSNorm | None:
            return None if name is None else make_norm(size, spec.norm_eps, dtype, device, spec.norm)

        hidden, self.shape, self.rows = spec.hidden_size, spec.shapes[index], spec.rows(index)
        self.cache, self.is_shared = cache, is_shared
        (q_size, kv_size, _), dim, self.gates = self.rows, self.shape.head_dim, spec.gates(index)
        self._kernels: Kernels | None = None  # ours, once the layer is packed
        self.mixer = mixer = make_mixer(self.shape.mixer, hidden, spec.norm_eps, dtype, device)
        latent, on_gpu = self.shape.latent, model.on_gpu
        self.latent = None if latent is None else LatentAttention(latent, dtype, device, on_gpu=on_gpu)
        self.attention_norm, self.attention_after = norm(spec.norms.attention), norm(spec.norms.attention_after)
        of_qkv, of_output = spec.biases(index)
        self.qkv = Linear(self.gates + sum(self.rows), hidden, of_qkv, dtype, device)  # gates first
        self.q_norm = self.k_norm = self.v_norm = None
        if spec.qk_norm and mixer is None:
            together = spec.qk_norm == "all"
            self.q_norm = norm("q_norm", q_size if together else dim)
            self.k_norm = norm("k_norm" if kv_size else None, kv_size if together else dim)
        if spec.norms_values and kv_size:  # without a weight in checkpoints
            self.v_norm = make_norm(dim, spec.norm_eps, dtype, device, spec.norm)
            self.v_norm.weight.fill_(1)
        self.sinks = torch.empty(spec.heads(index), dtype=dtype, device=device) if spec.has_sinks else None
        self.output = Linear(hidden, spec.seen(index), of_output, dtype, device)
        self.output.scale = spec.scales.residual
        self.mlp_norm, self.mlp_after = map(norm, spec.norms_of(index)[2:])
        self.input = None if spec.inputs is None else LayerInput(spec, spec.inputs, dtype, device)
        self.scale = torch.empty(1, dtype=dtype, device=device) if spec.scales_layers else None
        experts, self.beside = spec.experts_of(index), None
        self.experts = None if experts is None else Experts(hidden, experts, dtype, device, activation=spec.activation)
        if self.experts is not None and self.experts.spec.is_beside:
            self.beside = Beside(hidden, self.experts, spec.norm_eps, dtype, device)
        self.has_mlp = self.shape.inner > 0 and (self.experts is None or self.beside is not None)
        if self.has_mlp:
            self.gate_up = first_layer(self.shape.inner, hidden, dtype, device, spec.activation, bias=spec.mlp_bias)
            self.down = Linear(hidden, self.shape.inner, spec.mlp_bias, dtype, device)
            self.down.scale = spec.scales.residual

    def __call__(
        self, x: Tensor, turn: Turn | None, forward: Forward, kept: Kept, own_input: Tensor | None = None
    ) -> Tensor:
        """Return [tokens, hidden_size] for x: [tokens, hidden_size]; `turn`: None: do not rotate."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = _add(self.output, self.attend(normed, turn, forward, kept), self.attention_after, x)
        if not self.spec.is_parallel:
            normed = x if self.mlp_norm is None else self.mlp_norm(x)
        if self.beside is not None:
            found = self.beside(self.down(self.gate_up(normed)), x)
            x = x + (found if self.mlp_after is None else self.mlp_after(found))
        elif self.experts is not None:
            after = self.mlp_after
            x = self.experts(normed, x) if after is None else x + after(self.experts(normed, torch.zeros_like(x)))
        elif self.has_mlp:
            x = _add(self.down, self.gate_up(normed), self.mlp_after, x)
        if self.input is not None and own_input is not None:
            x = self.input(x, own_input)
        return x if self.scale is None else x * self.scale

    def attend(self, x: Tensor, turn: Turn | None, forward: Forward, kept: Kept) -> Tensor:
        """Return what attention, or the mixer, reads, before the output projection: [tokens, its columns]."""
        if self.mixer is not None:
            return self.mixer(x, self.qkv(x), forward.states, self.cache)
        if self.latent is not None:
            scale = None if turn is None else turn.query_scale
            return self.latent(self.qkv(x), partial(self._turned, norm=None, turn=turn), scale, forward, self.cache)
        dim, (gate, *parts) = self.shape.head_dim, self.qkv(x).split([self.gates, *filter(None, self.rows)], dim=-1)
        q, *own = (part.unflatten(-1, (-1, dim)) for part in parts)
        q, gate = q.unflatten(1, (-1, 2)).unbind(2) if self.spec.gates_attention else (q, gate)
        q = self._turned(q, self.q_norm, turn)
        q = q if turn is None or turn.query_scale is None else q * turn.query_scale
        if self.shape.shares is not None:
            k, v = kept[self.shape.shares]  # written to the cache again, with the same bits
        else:
            k, v = self._turned(own[0], self.k_norm, turn), _norm(self.v_norm, own[-1])
        if self.is_shared:
            kept[self.index] = k, v
        seen = forward.attend(self.cache, q, k, v)
        return (gated(seen, gate, self.spec.head_gate, self._kernels) if self.spec.has_gates else seen).flatten(1)

    def _turned(self, x: Tensor, norm: RMSNorm | None, turn: Turn | None) -> Tensor:
        """Return queries or keys after their norm and their rotation: [tokens, heads, head_dim]."""
        x = _norm(None if self.spec.turns_first else norm, x)
        if turn is not None:
            part = _separated(x, turn.cos.shape[-1]) if self.spec.is_interleaved else x
            x = rotate(part.float() if self.spec.rotates_wide else part, turn.cos, turn.sin).to(x.dtype)
        return _norm(norm if self.spec.turns_first else None, x)

    def parts(self) -> list[tuple[str, Linear, int, int]]:
        """Return (checkpoint name, linear layer, first row, end row) for each weight. Q, K and V are rows of one linear
        layer, and gate and up of another, also where the checkpoint has a tensor for each."""
        prefix, inner, hidden = f"layers.{self.index}.", self.shape.inner, self.spec.hidden_size
        found: list[tuple[str, Linear, int, int]] = []
        projections = self.spec.projections(self.index)
        for (name, rows), end in zip(projections, accumulate(rows for _, rows in projections), strict=True):
            found.append((prefix + name, self.qkv, end - rows, end))
        found.append((prefix + self.spec.output_name(self.index), self.output, 0, hidden))
        if self.has_mlp:
            *first, down = filter(None, self.spec.mlp)
            rows = self.spec.first_rows(inner) // len(first)
            found += [(prefix + name, self.gate_up, rows * i, rows * (i + 1)) for i, name in enumerate(first)]
            found.append((prefix + down, self.down, 0, hidden))
        for part in (self.mixer, self.latent, self.experts, self.input):
            found += () if part is None else part.parts(prefix)
        return found

    def targets(self) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        prefix = f"layers.{self.index}."
        names = (*self.spec.norms, "self_attn.q_norm", "self_attn.k_norm")
        norms = zip(names, (*self.norms, self.q_norm, self.k_norm), strict=True)
        targets = {f"{prefix}{name}.weight": norm.weight for name, norm in norms if norm is not None}
        if self.sinks is not None:
            targets[sinks_name(self.index)] = self.sinks
        for part in (self.mixer, self.latent, self.experts, self.beside, self.input):
            targets |= {} if part is None else part.targets(prefix)
        if self.scale is not None:
            targets[f"{prefix}layer_scalar"] = self.scale
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
        """The matmuls of attention and of the MLP, if there is one; not those of experts."""
        return (self.qkv, self.output, self.gate_up, self.down) if self.has_mlp else (self.qkv, self.output)

    def pack(
        self, kernels: Kernels | None, bits: LayerBits | None, hidden: Tensor | None, in_file: Mapping[Linear, InFile]
    ) -> None:
        """Pack the weights, after the norms have been read; `in_file` has the weights that are still in files.

        `hidden`: the importance of the hidden state's numbers, see importance.py; None: all matter alike.
        """
        self._kernels = kernels
        quantizations = {} if bits is None else self._quantizations(bits, hidden, in_file)
        for linear in self.linears:
            linear.pack(kernels, quantization=quantizations.get(linear), in_file=in_file.get(linear))
        if self.mixer is not None:
            self.mixer.pack(kernels, in_file)
        if self.latent is not None:
            self.latent.pack(kernels, bits, in_file)
        if self.experts is not None:
            norm = self.mlp_norm if self.beside is None else self.beside.before
            self.experts.pack(kernels, bits, after_norm(norm, hidden), in_file)
        if self.beside is not None:
            self.beside.pack(kernels)
        if self.input is not None:
            self.input.pack(kernels, in_file)
        for norm in (*self.norms, self.q_norm, self.k_norm, self.v_norm):
            if norm is not None:
                norm.pack(kernels)

    def _quantizations(
        self, bits: LayerBits, hidden: Tensor | None, in_file: Mapping[Linear, InFile]
    ) -> dict[Linear, Quantization]:
        rows_in_8 = self.rows[2] if bits.value > bits.others else 0
        kind = partial(Quantization, grouped=bits.grouped)
        found = {
            self.qkv: kind(bits.others, after_norm(self.attention_norm, hidden), rows_in_8),
            self.output: kind(bits.others),
        }
        if self.has_mlp:
            columns = after_norm(self.mlp_norm or self.attention_norm, hidden)
            inner = self.gate_up.importance_after(columns, in_file.get(self.gate_up)) if bits.down < 8 else None
            found |= {self.gate_up: kind(bits.others, columns), self.down: kind(bits.down, inner)}
        return found


def _norm(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """Return the norm of each head of x, or of all heads together, or x itself: [tokens, heads, head_dim]."""
    return x if norm is None else norm(x.reshape(-1, len(norm.weight))).view(x.shape)


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
