"""DecoderSpec: the shape of a native decoder, and the weights that it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..quantized.config import Weights
from .experts import ExpertsSpec
from .families.family import BEFORE, MLP, PLAIN, UNGATED, HeadGate, NormKind, NormNames
from .families.latent_shapes import LatentShape
from .mixers.states import MixerShape
from .rope import Rope


class Scales(NamedTuple):
    """Factors in a decoder. The scale of an attention layer's scores is in its AttentionLayer."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and the MLP add to the residual stream
    logits: float = 1.0
    cap: float | None = None  # logits become cap * tanh(logit / cap)


UNIT = Scales()


class LayerShape(NamedTuple):
    """The sizes of a layer."""

    kv_heads: int
    head_dim: int
    inner: int  # intermediate size of the MLP; 0: the layer has neither MLP nor experts
    has_values: bool = True  # False: the projection of keys is that of values too
    shares: int | None = None  # the layer whose keys and values it attends to, in place of its own
    mixer: MixerShape | None = None  # what it has in place of attention, with a state in place of keys and values
    heads: int = 0  # of queries; 0: as many as the model has
    latent: LatentShape | None = None  # of multi-head latent attention; kv_heads is 1 then, and head_dim that of keys

    @property
    def v_head_dim(self) -> int:
        """The numbers of a value in the cache."""
        return self.head_dim if self.latent is None else self.latent.rank


class InputsSpec(NamedTuple):
    """The sizes of the inputs that each layer has of its own, see layer_inputs.py."""

    vocab_size: int
    size: int


def sinks_name(layer: int) -> str:
    """Return the name of a layer's sinks in checkpoints, and in the spec of its attention."""
    return f"layers.{layer}.self_attn.sinks"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and the variants of a native decoder."""

    hidden_size: int
    num_heads: int
    shapes: tuple[LayerShape, ...]  # of each layer
    norm_eps: float
    activation: str
    ropes: tuple[Rope, ...]  # rotary embeddings that layers have; the first is the one for long sequences
    turns: tuple[int, ...]  # of each layer: the index of its rotary embedding, -1: it has none
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: Literal["", "head", "all"] = ""  # see Family
    turns_first: bool = False  # see Family
    norms_values: bool = False  # see Family
    mlp: tuple[str, str, str] = MLP  # see Family
    joins_qkv: bool = False  # see Family
    gates_attention: bool = False  # see Family
    head_gate: HeadGate | None = None  # see Family
    is_interleaved: bool = False  # see Family
    rotates_wide: bool = False  # see Family
    wide_angles: bool = False  # see Family
    norms: NormNames = BEFORE
    norm: NormKind = PLAIN
    is_parallel: bool = False  # see Family
    inputs: InputsSpec | None = None
    scales_layers: bool = False  # see Family
    scales: Scales = UNIT
    has_sinks: bool = False  # see Family
    unused_layers: int = 0  # in checkpoints after the others: they predict further tokens
    experts: ExpertsSpec | None = None

    @property
    def difference(self) -> str | None:
        """Return what these layers have that executors for Llama's layers cannot compute, or None."""
        if self.experts is not None and self.experts.is_beside:
            return "experts beside an MLP"
        if self.inputs is not None:
            return "inputs of each layer's own"
        if self.has_states:
            return "layers that keep states"
        if any(shape.latent is not None for shape in self.shapes):
            return "multi-head latent attention"
        if self.has_gates:
            return "gates of attention"
        if any(shape.shares is not None for shape in self.shapes):
            return "layers that share keys and values"
        if len(set(self.shapes)) > 1:
            return "layers of several sizes"
        if not all(shape.inner for shape in self.shapes):
            return "layers without an MLP"
        if self.norms_values:
            return "norms of values"
        if self.turns_first:
            return "norms of queries and keys after their rotation"
        if self.scales_layers:
            return "scales of each layer's result"
        if self.is_parallel:
            return "attention beside the MLP"
        if self.qk_norm == "all":
            return "norms of all heads together"
        if any(rope.query_beta for rope in self.ropes):
            return "queries that are scaled by their position"
        if self.is_interleaved or self.wide_angles:
            return "rotary embeddings of another kind than Llama's"
        if self.norms != BEFORE:
            return "norms after attention or the MLP"
        if self.norm != PLAIN:
            return "norms of another kind than RMSNorm"
        return "attention sinks" if self.has_sinks else None

    @property
    def caches(self) -> tuple[int, ...]:
        """The index of each layer's keys and values among those of the layers that have their own, or of its states
        among those of the layers that keep states."""
        owners = [index for index, shape in enumerate(self.shapes) if shape.shares is None and shape.mixer is None]
        mixers = [index for index, shape in enumerate(self.shapes) if shape.mixer is not None]
        own = {index: place for each in (owners, mixers) for place, index in enumerate(each)}
        return tuple(own[index if shape.shares is None else shape.shares] for index, shape in enumerate(self.shapes))

    @property
    def has_gates(self) -> bool:
        """Whether what heads attend to is multiplied by gates."""
        return self.gates_attention or self.head_gate is not None

    @property
    def has_states(self) -> bool:
        """Whether there are layers that keep states in place of keys and values."""
        return any(shape.mixer is not None for shape in self.shapes)

    @property
    def used_ropes(self) -> list[Rope]:
        """The rotary embeddings that some layer has."""
        return [rope for turn, rope in enumerate(self.ropes) if turn in self.turns]

    def rows(self, layer: int) -> tuple[int, int, int]:
        """Return the rows of a layer's projections of queries, keys and values, or of those before its mixer; 0: there
        is none."""
        shape = self.shapes[layer]
        if (own := shape.mixer or shape.latent) is not None:
            return own.rows
        size = shape.kv_heads * shape.head_dim if shape.shares is None else 0
        return self.seen(layer) * (2 if self.gates_attention else 1), size, size if shape.has_values else 0

    def biases(self, layer: int) -> tuple[bool, bool]:
        """Return whether these projections of a layer have biases, and whether that of the output has one."""
        mixer = self.shapes[layer].mixer
        return (self.qkv_bias, self.output_bias) if mixer is None else (mixer.has_bias, mixer.has_bias)

    def seen(self, layer: int) -> int:
        """Return the numbers of a token that a layer's output projection multiplies."""
        shape = self.shapes[layer]
        own = shape.mixer or shape.latent
        return self.heads(layer) * shape.head_dim if own is None else own.seen

    def heads(self, layer: int) -> int:
        """Return the number of a layer's query heads."""
        return self.shapes[layer].heads or self.num_heads

    def gates(self, layer: int) -> int:
        """Return the rows of a layer's projection to gates, see HeadGate; 0: there is none."""
        if self.head_gate is None or self.shapes[layer].mixer is not None:
            return 0
        return self.heads(layer) if self.head_gate.per_head else self.seen(layer)

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """Return the shape of a layer's experts; None: it has an MLP alone."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    def norms_of(self, layer: int) -> NormNames:
        """Return the names of a layer's norms."""
        return self.norms if self.shapes[layer].inner else self.norms._replace(mlp=None, mlp_after=None)

    def first_rows(self, inner: int) -> int:
        """Return the rows of the first weight of an MLP of this size: of gate and up, or of up alone."""
        return inner if self.activation == UNGATED else 2 * inner

    def linears(self, vocab_size: int) -> Iterator[Weights]:
        """Yield the names of the weights of each linear layer that may be quantized, the head's included, their rows
        and their columns."""
        for index in range(len(self.shapes)):
            yield from self.layer_linears(index)
            yield from self._small_linears(index)
        if self.inputs is not None:
            width = len(self.shapes) * self.inputs.size
            yield ("model.per_layer_model_projection.weight",), (width,), self.hidden_size
        if not self.tied:
            yield ("lm_head.weight",), (vocab_size,), self.hidden_size

    def layer_linears(self, index: int) -> Iterator[Weights]:
        """Yield the same of one layer, without the small ones that only checkpoints quantize."""
        start, hidden = f"model.layers.{index}.", self.hidden_size
        names, rows = zip(*self.projections(index), strict=True)
        yield tuple(f"{start}{name}.weight" for name in names), rows, hidden
        yield (f"{start}{self.output_name(index)}.weight",), (hidden,), self.seen(index)
        for first, down, inner, width in self._mlps(index):
            of_each = self.first_rows(inner) // len(first)
            yield tuple(f"{start}{name}.weight" for name in first), (of_each,) * len(first), width
            yield (f"{start}{down}.weight",), (width,), inner
        if (experts := self.experts_of(index)) is not None and experts.latent:
            into, back = (f"{start}{name}.weight" for name in experts.latent_names)
            yield (into,), (experts.latent,), hidden
            yield (back,), (hidden,), experts.latent
        if (latent := self.shapes[index].latent) is not None and latent.query_rank:
            yield (f"{start}self_attn.q_b_proj.weight",), (latent.queries,), latent.query_rank

    def projections(self, layer: int) -> list[tuple[str, int]]:
        """Return the names and the rows of a layer's projections before attention, in the order of their results."""
        rows = self.rows(layer)
        if (own := self.shapes[layer].mixer or self.shapes[layer].latent) is not None:
            names = own.names[:-1]
        else:
            names = ("self_attn.qkv_proj",) if self.joins_qkv else tuple(f"self_attn.{each}_proj" for each in "qkv")
        if len(names) == 1:
            found = [(names[0], sum(rows))]
        else:
            found = [(name, count) for name, count in zip(names, rows, strict=False) if count]
        gates = self.gates(layer)
        return found if self.head_gate is None or not gates else [(self.head_gate.name, gates), *found]

    def output_name(self, layer: int) -> str:
        """Return the name of a layer's projection after attention."""
        own = self.shapes[layer].mixer or self.shapes[layer].latent
        return "self_attn.o_proj" if own is None else own.names[-1]

    def head_weights(self) -> Iterator[tuple[str, int]]:
        """Yield the names of the weights of each head, which stay in the model's data type, and their numbers."""
        for index, shape in enumerate(self.shapes):
            if shape.latent is not None and not shape.latent.in_two:
                yield f"model.layers.{index}.{shape.latent.head_names[0]}.weight", shape.latent.head_numbers

    def _small_linears(self, layer: int) -> Iterator[Weights]:
        """Yield the linear layers of a layer that `quantization` leaves plain: the router, and those of its input."""
        start, hidden = f"model.layers.{layer}.", self.hidden_size
        if (mixer := self.shapes[layer].mixer) is not None and mixer.small_names:
            yield tuple(f"{start}{name}.weight" for name in mixer.small_names), mixer.small_rows, hidden
        if (experts := self.experts_of(layer)) is not None:
            yield (f"{start}{experts.names[0]}.weight",), (experts.count,), hidden
            if experts.shared_gate:
                yield (f"{start}{experts.shared_gate}.weight",), (1,), hidden
        if self.inputs is not None:
            yield (f"{start}per_layer_input_gate.weight",), (self.inputs.size,), hidden
            yield (f"{start}per_layer_projection.weight",), (hidden,), self.inputs.size

    def _mlps(self, layer: int) -> Iterator[tuple[tuple[str, ...], str, int, int]]:
        """Yield the names of gate and up, that of down, the intermediate size, and the size of the input, of a layer's
        MLP or experts."""
        experts, hidden = self.experts_of(layer), self.hidden_size
        if self.shapes[layer].inner and (experts is None or experts.is_beside):
            yield tuple(filter(None, self.mlp[:2])), self.mlp[2], self.shapes[layer].inner, hidden
        if experts is None:
            return
        for number in range(experts.count):
            yield *experts.linears(number), experts.inner, experts.latent or hidden
        if experts.shared:
            yield *experts.shared_linears, experts.shared, hidden

    @property
    def widest(self) -> int:
        """The intermediate numbers of a token in the widest MLP, or in all of its experts."""
        experts, sizes = self.experts, [0]
        for index, shape in enumerate(self.shapes):
            own = self.experts_of(index)
            sizes += [shape.inner] if own is None or own.is_beside else []
        return max(sizes if experts is None else [*sizes, experts.active * experts.inner, experts.shared])

    def layer_numbers(self, index: int) -> int:
        """Return the number of a layer's weights that `quantization` rounds."""
        return sum(sum(rows) * columns for _, rows, columns in self.layer_linears(index))

    def multiplied_numbers(self, index: int) -> int:
        """Return the number of these weights by which a layer multiplies a token: those of its own experts."""
        numbers, experts = self.layer_numbers(index), self.experts_of(index)
        if experts is None:
            return numbers
        of_expert = (self.first_rows(experts.inner) + experts.inner) * (experts.latent or self.hidden_size)
        return numbers - (experts.count - experts.active) * of_expert

    def num_params(self, vocab_size: int) -> int:
        """Return the number of all weights."""
        hidden, inputs = self.hidden_size, 0 if self.inputs is None else self.inputs.size
        total = vocab_size * hidden * (1 if self.tied else 2) + hidden
        if self.inputs is not None:
            total += self.looked_up + len(self.shapes) * inputs * hidden + inputs
        for index, shape in enumerate(self.shapes):
            (q, k, v), experts = self.rows(index), self.experts_of(index)
            total += sum(name is not None for name in self.norms_of(index)) * hidden
            total += self.first_rows(shape.inner) + hidden if self.mlp_bias and shape.inner else 0
            if shape.mixer is not None:
                total += shape.mixer.others(hidden)
            elif shape.latent is not None:
                total += shape.latent.others
            else:
                total += {"": 0, "head": (1 + bool(k)) * shape.head_dim, "all": q + k}[self.qk_norm]
                total += (q + k + v if self.qkv_bias else 0) + (hidden if self.output_bias else 0)
                total += self.num_heads if self.has_sinks else 0
            total += (2 * inputs + 1) * hidden if inputs else 0
            total += self.scales_layers
            total += self.layer_numbers(index) + (experts.num_params(hidden) if experts else 0)
        return total

    @property
    def looked_up(self) -> int:
        """The numbers of the table of the layers' inputs, of which a token needs a row."""
        return 0 if self.inputs is None else self.inputs.vocab_size * len(self.shapes) * self.inputs.size
