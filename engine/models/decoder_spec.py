"""DecoderSpec: the shape of a native decoder, and the weights that it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..quantized.config import Weights
from .experts import ExpertsSpec
from .families import BEFORE, PLAIN, NormKind, NormNames
from .rope import Rope


class Scales(NamedTuple):
    """Factors in a decoder. The scale of an attention layer's scores is in its AttentionLayer."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and the MLP add to the residual stream
    logits: float = 1.0
    cap: float | None = None  # logits become cap * tanh(logit / cap)


UNIT = Scales()


def sinks_name(layer: int) -> str:
    """Return the name of a layer's sinks in checkpoints, and in the spec of its attention."""
    return f"layers.{layer}.self_attn.sinks"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and the variants of a native decoder."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    ropes: tuple[Rope, ...]  # rotary embeddings that layers have; the first is the one for long sequences
    turns: tuple[int, ...]  # of each layer: the index of its rotary embedding, -1: it has none
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: Literal["", "head", "all"] = ""  # see Family
    joined: Literal["", "gate_up", "all"] = ""  # see Family
    is_interleaved: bool = False  # see Family
    rotates_wide: bool = False  # see Family
    wide_angles: bool = False  # see Family
    norms: NormNames = BEFORE
    norm: NormKind = PLAIN
    is_parallel: bool = False  # see Family
    scales: Scales = UNIT
    has_sinks: bool = False  # see Family
    unused_layers: int = 0  # in checkpoints after the others: they predict further tokens
    experts: ExpertsSpec | None = None

    @property
    def difference(self) -> str | None:
        """Return what these layers have that executors for Llama's layers cannot compute, or None."""
        if self.is_parallel:
            return "attention beside the MLP"
        if self.norms != BEFORE:
            return "norms after attention or the MLP"
        if self.norm != PLAIN:
            return "norms of another kind than RMSNorm"
        if self.qk_norm == "all":
            return "norms of all heads together"
        if self.has_sinks:
            return "attention sinks"
        if any(rope.query_beta for rope in self.ropes):
            return "queries that are scaled by their position"
        if self.is_interleaved or self.wide_angles:
            return "rotary embeddings of another kind than Llama's"
        return None

    @property
    def difference_on_gpu(self) -> str | None:
        """Return what these layers have that OnGPU cannot compute, or None."""
        if self.experts is not None:
            return "experts"
        if -1 in self.turns or self.ropes[0].head_dim != self.head_dim:
            return "layers or parts of heads without rotary embeddings"
        return self.difference

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """Return the shape of a layer's experts; None: it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    def linears(self, num_layers: int, vocab_size: int) -> Iterator[Weights]:
        """Yield the names of the weights of each linear layer that may be quantized, the head's included, their rows
        and their columns."""
        for index in range(num_layers):
            yield from self.layer_linears(index)
        if not self.tied:
            yield ("lm_head.weight",), (vocab_size,), self.hidden_size

    def layer_linears(self, index: int) -> Iterator[Weights]:
        """Yield the same of one layer."""
        q, kv, hidden = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.hidden_size
        start = f"model.layers.{index}."
        if self.joined == "all":
            yield (f"{start}self_attn.qkv_proj.weight",), (q + 2 * kv,), hidden
        else:
            yield tuple(f"{start}self_attn.{name}_proj.weight" for name in "qkv"), (q, kv, kv), hidden
        yield (f"{start}self_attn.o_proj.weight",), (hidden,), q
        for gates, down, inner in self._mlps(index):
            yield tuple(f"{start}{name}.weight" for name in gates), (2 * inner // len(gates),) * len(gates), hidden
            yield (f"{start}{down}.weight",), (hidden,), inner

    def _mlps(self, layer: int) -> Iterator[tuple[tuple[str, ...], str, int]]:
        """Yield the names of gate and up, that of down, and the intermediate size of a layer's MLP or experts."""
        experts = self.experts_of(layer)
        if experts is None:
            gates = ("mlp.gate_up_proj",) if self.joined else ("mlp.gate_proj", "mlp.up_proj")
            yield gates, "mlp.down_proj", self.intermediate_size
            return
        for number in range(experts.count):
            yield *experts.linears(number), experts.inner
        if experts.shared:
            yield experts.shared_names[:2], experts.shared_names[2], experts.shared

    def layer_numbers(self, index: int) -> int:
        """Return the number of a layer's weights that may be quantized."""
        return sum(sum(rows) * columns for _, rows, columns in self.layer_linears(index))

    def num_params(self, num_layers: int, vocab_size: int) -> int:
        """Return the number of all weights."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = sum(name is not None for name in self.norms) * self.hidden_size
        layer += {"": 0, "head": 2 * self.head_dim, "all": q + kv}[self.qk_norm]
        layer += (q + 2 * kv if self.qkv_bias else 0) + (self.hidden_size if self.output_bias else 0)
        layer += 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        layer += self.num_heads if self.has_sinks else 0
        layers = num_layers * layer
        for index in range(num_layers):
            experts = self.experts_of(index)
            layers += self.layer_numbers(index) + (experts.num_params(self.hidden_size) if experts else 0)
        return layers + vocab_size * self.hidden_size * (1 if self.tied else 2) + self.hidden_size
