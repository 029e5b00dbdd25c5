"""Family: how an architecture of the native decoder differs from Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class NormNames(NamedTuple):
    """The names of a layer's norms in checkpoints: before and after attention, before and after the MLP.

    None: there is no such norm.
    """

    attention: str | None = "input_layernorm"
    attention_after: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_after: str | None = None


class NormKind(NamedTuple):
    """How a norm differs from x / rms(x), rounded to the model's dtype, times a weight, rounded again."""

    offset: float = 0.0  # added to the weight
    is_wide: bool = False  # multiplied by the weight in float32, and rounded once
    is_centered: bool = False  # LayerNorm: the mean is subtracted first


class Stacking(NamedTuple):
    """How the experts of a layer are one tensor in checkpoints: [experts, rows, columns]."""

    transposed: bool = False  # [experts, columns, rows]
    may_fit: bool = False  # or it is not transposed, as sizes then show: newer versions of transformers write both
    alternating: bool = False  # rows of gate and up alternate; else those of the gate are first
    # The last part of the name of a tensor with the rows of gate and up of each expert, which are two in the model; or
    # each expert has tensors of its own.
    divided: str = ""


class ExpertKeys(NamedTuple):
    """The experts of a family: the names of their tensors, and the keys of config.json that describe them."""

    # Of router, gate, up and down, the last three with {} for a number. If gate and up are one tensor, its name is that
    # of the gate, and up has none; if there is no gate, it has none.
    names: tuple[str, str, str, str]
    stacking: Stacking | None = None  # None: each expert has tensors of its own; else their names have no number
    inner: str = "moe_intermediate_size"
    active: str = "num_experts_per_tok"
    enabled: str = ""  # the key that says whether there are experts; empty: there are
    is_normalized: bool | None = None  # whether the weights of a token's experts add up to 1; None: norm_topk_prob
    normalizes: bool = False  # default of norm_topk_prob
    # Added to the sum by which they are then divided. The default only changes a sum of 0; the Triton kernel has no
    # other.
    epsilon: float = 1e-20
    # Weights are sigmoids times routed_scaling_factor; experts are chosen by them plus a bias, from the topk_group best
    # of n_group groups. Otherwise weights are a softmax.
    has_sigmoids: bool = False
    # With a softmax: weights are multiplied by routed_scaling_factor, and topk_method says whether experts are chosen
    # from the best groups.
    reads_topk_method: bool = False
    groups: tuple[int, int] = (1, 1)  # defaults of n_group and topk_group
    scale: float = 1.0  # default of the next key, whose value the weights are multiplied by
    scale_key: str = "routed_scaling_factor"
    corrects: bool = False  # with a softmax: experts are chosen by it plus a bias
    # Names of gate, up and down of the experts of all tokens, which are one MLP: of as many experts as the key
    # shared_count says, or of the size that the key shared_inner says.
    shared: tuple[str, str, str] | None = None
    shared_count: str = "n_shared_experts"
    num_shared: int = 1  # default of that key
    shared_inner: str = ""
    # The key of the size of vectors with which experts compute in place of the hidden state, and the names of the
    # projections to it and back; empty: they compute with the hidden state.
    latent_key: str = ""
    latent_names: tuple[str, str] = ("", "")
    shared_gate: str = ""  # the name of a projection to one number, by whose sigmoid that MLP's output is multiplied
    first_dense: int | None = None  # default of the next key: layers that have an MLP instead; None: it is not read
    first_dense_key: str = "first_k_dense_replace"
    step: str = "decoder_sparse_step"  # the key of n: of the layers after those, each n-th one of all has experts
    last: str = ""  # the key of the last layer that has experts; -1: the model's last one; empty: it is not read
    has_bias: bool = False  # of router and experts
    clamp: bool = False  # the gates are those of swiglu_limit and swiglu_alpha, see layers.Clamp
    is_beside: bool = False  # layers have experts and an MLP, each with norms of its own, see experts.Beside


class ScaleKey(NamedTuple):
    """A key of config.json whose value, raised to a power, is a scale."""

    name: str  # empty: the scale is the default
    default: float
    power: float = 1.0
    factor: tuple[str, float] | None = None  # another key and a power, by which the scale is multiplied; null: it is 1
    enabled: str = ""  # the key that says whether there is a scale; empty: there is


class HeadGate(NamedTuple):
    """A projection to gates, by which what each head attends to is multiplied."""

    name: str  # in checkpoints
    per_head: bool = False  # one number of each head, not one of each of its numbers
    is_softplus: bool = False  # the gate is the softplus of the projection, else its sigmoid
    key: str = ""  # the key of config.json that says per_head, see layer_kinds.head_gate; empty: none does


class ScaleKeys(NamedTuple):
    """The keys of a family's scales, see decoder_spec.Scales; None: the scale is 1, that of scores head_dim ** -0.5."""

    scores: ScaleKey | None = None
    embedding: ScaleKey | None = None
    residual: ScaleKey | None = None
    logits: ScaleKey | None = None


BEFORE = NormNames()
AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
ONCE = NormNames(mlp=None)
AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
JOINED_MLP = ("mlp.gate_up_proj", "", "mlp.down_proj")
UNGATED = "relu2"  # relu(x) ** 2: the activation of MLPs without a gate, see squared.py
PLAIN = NormKind()
UNSCALED = ScaleKeys()


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture of the native decoder differs from Llama, and the defaults of its config.json."""

    qkv_bias: bool | None = None  # None: the key attention_bias decides
    attention_bias: bool = False  # default of that key
    output_bias: bool | None = None
    qk_norm: Literal["", "head", "all"] = ""  # of each head of queries and keys, or of all heads together
    turns_first: bool = False  # they are rotated before these norms, which are of each head
    may_norm_qk: bool = False  # there are these norms if use_qk_norm says so
    norms_values: bool = False  # each head of values is divided by its root mean square
    mlp_bias: bool = False  # whether the key mlp_bias is read
    # The names of gate, up and down of a layer's MLP. If gate and up are one tensor, its name is that of the gate, and
    # up has none; if there is no gate, it has none.
    mlp: tuple[str, str, str] = MLP
    inner: str = "intermediate_size"
    adjusts_inner: bool = False  # the keys by which LFM2 computes that size from another are read
    renames: tuple[tuple[str, str], ...] = ()  # parts of tensors' names in checkpoints, and what Llama has for them
    has_sublayers: bool = False  # the keys and names of checkpoints are those that checkpoint/sublayers.py converts
    regroups: bool = False  # checkpoints order the rows before linear attention differently, see regrouped.py
    joins_qkv: bool = False  # Q, K and V are one tensor in checkpoints
    # Half of each query head's rows are its gate: what the head attends to is multiplied by the sigmoid of that.
    gates_attention: bool = False
    head_gate: HeadGate | None = None
    # What layers that layer_types names have in place of attention, see ../mixers; empty: none have.
    mixer: Literal["", "linear", "conv", "mamba"] = ""
    taps: int = 3  # default of conv_L_cache: tokens that a short convolution reads
    # Defaults of the keys of multi-head latent attention, see latent_shapes.py; None: it has another kind.
    latent: tuple[tuple[str, int], ...] | None = None
    latent_in_two: bool = False  # see LatentShape.in_two
    # Keys of config.json with the only value that the native decoder supports, their default; false values are alike.
    only: tuple[tuple[str, Any], ...] = ()
    head_dim: int | None = None  # None: hidden_size / heads
    kv_heads: int | None = None  # None: as many as heads
    heads_key: str = ""  # the key of a list with the number of each layer's query heads, if layers may differ
    max_positions: int = 2048
    # Default of sliding_window, on the layers that layer_types names, or else on every one; 0: none, None: the keys are
    # not read.
    window: int | None = None
    layer_windows: bool = False  # use_sliding_window and max_window_layers are read, too
    norm_eps: float = 1e-6
    eps_key: str = "rms_norm_eps"
    experts: ExpertKeys | None = None
    tied: bool = False  # default of tie_word_embeddings
    tied_key: str = "tie_word_embeddings"  # a key that comes before it
    theta: float = 10000.0  # default of rope_theta
    # Which layers have a rotary embedding: all, those of no_rope_layers or no_rope_layer_interval, those with a window,
    # those with a window if sliding_window is not null, else all, or all if position_embedding_type is "rope", else
    # none, or none.
    rotating: Literal["all", "listed", "windowed", "windowed_or_all", "named", "none"] = "all"
    is_interleaved: bool = False  # number 2i of a head is rotated with 2i + 1, not with i + head_dim / 2
    rotates_wide: bool = False  # in float32, rounded once
    # Queries are multiplied by 1 + beta * log(1 + floor(position / n)), for llama_4_scaling_beta and
    # original_max_position_embeddings of the rotary parameters.
    scales_queries: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()  # default of rope_parameters, those of layers without a window
    has_sinks: bool = False  # attention has a score for each head in the softmax that has no value
    wide_angles: bool = False  # cosines and sines in float32, so that a rotation is rounded once
    norms: NormNames = BEFORE
    norm: NormKind = PLAIN
    is_parallel: bool = False  # the MLP's input is that of attention
    layers_differ: bool = False  # the keys that layer_kinds.shapes reads are read; the last layer has no window
    has_layer_inputs: bool = False  # see layer_inputs.py; the keys of its sizes are read
    scales_layers: bool = False  # the result of each layer is multiplied by a weight of the checkpoint
    window_start: int | None = None  # without layer_types, default of max_window_layers, the first layer that has one
    # Without layer_types every n-th layer has no window: n is the next key, with this default.
    window_step: int | None = None
    window_step_key: str = "sliding_window_pattern"
    opens_full: bool = False  # full attention is the first of every n layers, not the last
    # Layers with a window have a rotary embedding of their own: key of its base, if there is one, and default.
    local_rope: tuple[str, float] | None = None
    # The key of a list with the base of each layer's rotary embedding, 0: it has none; empty: there is no such key.
    bases_key: str = ""
    # Default of partial_rotary_factor, the part of each head that is rotated; None: it must be 1.
    rotated_part: float | None = None
    rotated_key: str = ""  # of how many numbers these are, where partial_rotary_factor is missing
    scales: ScaleKeys = UNSCALED
    scales_by_size: bool = False  # embeddings are multiplied by sqrt(hidden_size), rounded to the model's dtype
    activation: tuple[str, str] = ("hidden_act", "silu")  # key and default
    # Defaults of attn_logit_softcapping and final_logit_softcapping; None: they are not read.
    caps: tuple[float | None, float | None] | None = None
