"""The architectures of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..types import ModelError
from .keys import shown


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


class ExpertKeys(NamedTuple):
    """The experts of a family: the names of their tensors, and the keys of config.json that describe them."""

    # Of router, gate, up and down, the last three with {} for a number. If gate and up are one tensor, its name is that
    # of the gate, and up has none.
    names: tuple[str, str, str, str]
    stacking: Stacking | None = None  # None: each expert has tensors of its own; else their names have no number
    inner: str = "moe_intermediate_size"
    active: str = "num_experts_per_tok"
    enabled: str = ""  # the key that says whether there are experts; empty: there are
    is_normalized: bool | None = None  # whether the weights of a token's experts add up to 1; None: norm_topk_prob
    normalizes: bool = False  # default of norm_topk_prob
    # Weights are sigmoids times routed_scaling_factor; experts are chosen by them plus a bias, from the topk_group best
    # of n_group groups. Otherwise weights are a softmax.
    has_sigmoids: bool = False
    # Names of gate, up and down of the n_shared_experts experts of all tokens, which are one MLP.
    shared: tuple[str, str, str] | None = None
    first_dense: int = 0  # default of first_k_dense_replace: layers that have an MLP instead
    has_bias: bool = False  # of router and experts
    clamp: bool = False  # the gates are those of swiglu_limit and swiglu_alpha, see layers.Clamp
    is_beside: bool = False  # layers have experts and an MLP, each with norms of its own, see experts.Beside


class ScaleKey(NamedTuple):
    """A key of config.json whose value, raised to a power, is a scale."""

    name: str  # empty: the scale is the default
    default: float
    power: float = 1.0


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
PLAIN = NormKind()
UNSCALED = ScaleKeys()


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture of the native decoder differs from Llama, and the defaults of its config.json."""

    qkv_bias: bool | None = None  # None: the key attention_bias decides
    attention_bias: bool = False  # default of that key
    output_bias: bool | None = None
    qk_norm: Literal["", "head", "all"] = ""  # of each head of queries and keys, or of all heads together
    may_norm_qk: bool = False  # there are these norms if use_qk_norm says so
    norms_values: bool = False  # each head of values is divided by its root mean square
    mlp_bias: bool = False  # whether the key mlp_bias is read
    head_dim: int | None = None  # None: hidden_size / heads
    kv_heads: int | None = None  # None: as many as heads
    max_positions: int = 2048
    window: int | None = None  # default of sliding_window, on every layer; 0: none, None: the key is not read
    layer_windows: bool = False  # use_sliding_window, max_window_layers and layer_types are read
    norm_eps: float = 1e-6
    eps_key: str = "rms_norm_eps"
    # What is one tensor in checkpoints: gate and up; or gate and up, and Q, K and V.
    joined: Literal["", "gate_up", "all"] = ""
    experts: ExpertKeys | None = None
    tied: bool = False  # default of tie_word_embeddings
    theta: float = 10000.0  # default of rope_theta
    # Which layers have a rotary embedding: all, those of no_rope_layers or no_rope_layer_interval, or those with a
    # window.
    rotating: Literal["all", "listed", "windowed"] = "all"
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
    # layer_types is read, or else every n-th layer has no window: n is sliding_window_pattern, with this default.
    window_step: int | None = None
    # Layers with a window have a rotary embedding of their own: key of its base, if there is one, and default.
    local_rope: tuple[str, float] | None = None
    # Default of partial_rotary_factor, the part of each head that is rotated; None: it must be 1.
    rotated_part: float | None = None
    scales: ScaleKeys = UNSCALED
    scales_by_size: bool = False  # embeddings are multiplied by sqrt(hidden_size), rounded to the model's dtype
    activation: tuple[str, str] = ("hidden_act", "silu")  # key and default
    # Defaults of attn_logit_softcapping and final_logit_softcapping; None: they are not read.
    caps: tuple[float | None, float | None] | None = None


FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, kv_heads=8, max_positions=131072, window=4096),
    "Ministral3ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        head_dim=128,
        kv_heads=8,
        max_positions=262144,
        window=0,
        norm_eps=1e-5,
        scales_queries=True,
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm="head", head_dim=128, kv_heads=32, max_positions=32768, window=4096, layer_windows=True
    ),
    "Phi3ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        max_positions=4096,
        window=0,
        norm_eps=1e-5,
        joined="all",
        rotated_part=1.0,
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        kv_heads=4,
        max_positions=32768,
        window=0,
        layer_windows=True,
        tied=True,
        theta=2_000_000.0,
        rotating="listed",
    ),
    "Olmo2ForCausalLM": Family(
        norm_eps=1e-5,
        qk_norm="all",
        norms=AFTER,
        wide_angles=True,
        norm=NormKind(is_wide=True),
    ),
    "Olmo3ForCausalLM": Family(
        norm_eps=1e-5,
        qk_norm="all",
        norms=AFTER,
        wide_angles=True,
        norm=NormKind(is_wide=True),
        window=4096,
        window_step=4,
        theta=500_000.0,
        local_rope=("rope_theta", 500_000.0),
    ),
    "GraniteForCausalLM": Family(
        mlp_bias=True,
        scales=ScaleKeys(
            scores=ScaleKey("attention_multiplier", 1.0),
            embedding=ScaleKey("embedding_multiplier", 1.0),
            residual=ScaleKey("residual_multiplier", 1.0),
            logits=ScaleKey("logits_scaling", 1.0, -1.0),
        ),
    ),
    "Gemma2ForCausalLM": Family(
        head_dim=256,
        kv_heads=4,
        max_positions=8192,
        window=4096,
        window_step=2,
        tied=True,
        norms=AROUND,
        norm=NormKind(offset=1.0, is_wide=True),
        scales=ScaleKeys(scores=ScaleKey("query_pre_attn_scalar", 256.0, -0.5)),
        scales_by_size=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        caps=(50.0, 30.0),
    ),
    "Gemma3ForCausalLM": Family(
        head_dim=256,
        kv_heads=4,
        qk_norm="head",
        max_positions=131072,
        window=4096,
        window_step=6,
        theta=1_000_000.0,
        local_rope=("rope_local_base_freq", 10_000.0),
        tied=True,
        norms=AROUND,
        norm=NormKind(offset=1.0, is_wide=True),
        scales=ScaleKeys(scores=ScaleKey("query_pre_attn_scalar", 256.0, -0.5)),
        scales_by_size=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        caps=(None, None),
    ),
    "Gemma4ForCausalLM": Family(
        head_dim=256,
        kv_heads=4,
        qk_norm="head",
        norms_values=True,
        max_positions=131072,
        window=512,
        window_step=6,
        theta=1_000_000.0,
        local_rope=("", 10_000.0),
        scaling=(("rope_type", "proportional"), ("partial_rotary_factor", 0.25)),
        tied=True,
        norms=AROUND,
        norm=NormKind(is_wide=True),
        layers_differ=True,
        has_layer_inputs=True,
        scales_layers=True,
        scales=ScaleKeys(scores=ScaleKey("", 1.0)),
        scales_by_size=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        caps=(None, None),
        experts=ExpertKeys(
            ("router.proj", "experts.{}.gate_up_proj", "", "experts.{}.down_proj"),
            stacking=Stacking(),
            active="top_k_experts",
            enabled="enable_moe_block",
            is_normalized=True,
            is_beside=True,
        ),
    ),
    "Cohere2ForCausalLM": Family(
        max_positions=8192,
        window=4096,
        window_step=4,
        rotating="windowed",
        is_interleaved=True,
        rotates_wide=True,
        norm_eps=1e-5,
        eps_key="layer_norm_eps",
        norms=ONCE,
        is_parallel=True,
        norm=NormKind(is_wide=True, is_centered=True),
        tied=True,
        scales=ScaleKeys(logits=ScaleKey("logit_scale", 0.0625)),
    ),
    "Glm4ForCausalLM": Family(
        attention_bias=True,
        output_bias=False,
        head_dim=128,
        kv_heads=2,
        max_positions=131072,
        norm_eps=1.5625e-7,
        joined="gate_up",
        rotated_part=0.5,
        is_interleaved=True,
        norms=NormNames(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=8,
        max_positions=131072,
        window=0,
        norm_eps=1e-5,
        experts=ExpertKeys(
            (
                "block_sparse_moe.gate",
                "block_sparse_moe.experts.{}.w1",
                "block_sparse_moe.experts.{}.w3",
                "block_sparse_moe.experts.{}.w2",
            ),
            inner="intermediate_size",
            is_normalized=True,
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head",
        kv_heads=4,
        max_positions=32768,
        experts=ExpertKeys(
            ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
        ),
    ),
    "Qwen3VLMoeTextModel": Family(
        qk_norm="head",
        max_positions=128000,
        theta=500_000.0,
        experts=ExpertKeys(
            ("mlp.gate", "mlp.experts.{}.gate_up_proj", "", "mlp.experts.{}.down_proj"),
            stacking=Stacking(transposed=True, may_fit=True),
            is_normalized=True,
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        output_bias=False,
        kv_heads=8,
        qk_norm="head",
        may_norm_qk=True,
        max_positions=131072,
        norm_eps=1e-5,
        rotated_part=0.5,
        experts=ExpertKeys(
            ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
            normalizes=True,
            has_sigmoids=True,
            shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
            first_dense=1,
        ),
    ),
    "GptOssForCausalLM": Family(
        attention_bias=True,
        head_dim=64,
        kv_heads=8,
        max_positions=131072,
        window=128,
        window_step=2,
        norm_eps=1e-5,
        theta=150_000.0,
        scaling=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4096),
        ),
        has_sinks=True,
        norm=NormKind(is_wide=True),
        experts=ExpertKeys(
            ("mlp.router", "mlp.experts.{}.gate_up_proj", "", "mlp.experts.{}.down_proj"),
            stacking=Stacking(transposed=True, alternating=True),
            inner="intermediate_size",
            is_normalized=True,
            has_bias=True,
            clamp=True,
        ),
    ),
}
# The text parts of models that read images, as transformers names them.
FAMILIES["Glm4vTextModel"] = replace(
    FAMILIES["Glm4ForCausalLM"], qkv_bias=True, head_dim=None, max_positions=32768, norm_eps=1e-5, rotated_part=1.0
)
FAMILIES["Glm4vMoeTextModel"] = replace(
    FAMILIES["Glm4MoeForCausalLM"], attention_bias=True, qk_norm="", max_positions=65536
)
FAMILIES["Gemma4UnifiedForCausalLM"] = replace(
    FAMILIES["Gemma4ForCausalLM"], has_layer_inputs=False, experts=None, window=1024, max_positions=262144
)
# gpt-oss in GGUF files, in which each expert has tensors of its own, and gate and up are two.
FAMILIES["GptOssGguf"] = replace(
    FAMILIES["GptOssForCausalLM"],
    experts=ExpertKeys(
        ("mlp.router", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        inner="intermediate_size",
        is_normalized=True,
        has_bias=True,
        clamp=True,
    ),
)
MODEL_TYPES = {  # for a config.json without `architectures`
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}


def architecture(source: Mapping[str, Any]) -> str:
    """Return the name of the model class. Raises ModelError if config.json has none."""
    names = source.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return shown(names[0])
    model_type = source.get("model_type")
    if isinstance(model_type, str) and model_type:
        return MODEL_TYPES.get(model_type, shown(model_type))
    raise ModelError('config.json names no architecture; it needs "architectures" or "model_type"')
