"""Divides the machine's memory among weights, activations and the KV cache, and computes the number of blocks.

`engine.plan`, which loads nothing, and `engine.build`, which loads the model, use the same functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from . import graph_sizes
from .cache_groups import CacheGroups
from .config import EngineConfig, resolve
from .machine_memory import Machine
from .state_memory import num_states, plan_states
from .types import ConfigError, MemoryShort

if TYPE_CHECKING:
    from .attention import AttentionBackend
    from .models import ModelSpec

# Share of the machine's memory that a CPU engine may use. The rest is for the server's process, the page cache that the
# weights are read through, and other programs.
CPU_SHARE = 0.5
# The maximum size of the cache, in multiples of all sequences at full length: requests can use 1, and cached prefixes
# as much again. A larger cache for a tiny model would only waste memory.
USEFUL = 2
# If the user sets no length, the model's is lowered to what the pool holds, but not below this number of tokens: a
# server that cannot hold a page of text is useless.
MIN_TOKENS = 512
# The sampler's memory per logit: the logit and a copy (float32), the weight (int64), its sum and a filtered copy.
SAMPLER_BYTES = 4 + 4 + 8 + 8 + 8
# What the driver keeps of a CUDA graph, and of a launch in it, at most; the launches of a layer, and those more if it
# has experts, experts beside an MLP, norms of all heads together, or an input of its own; the workspace that cuBLAS
# allocates for the stream of the captures; and what the graphs' pool has more than its tensors at a time: torch takes
# 20 MiB for one of 1 to 10 MiB and 2 MiB for a smaller one, and what a graph leaves does not always suit the next one.
GRAPH_BYTES, LAUNCH_BYTES = 256 << 10, 16 << 10
LAYER_LAUNCHES, EXPERT_LAUNCHES, BESIDE_LAUNCHES, NORM_LAUNCHES, INPUT_LAUNCHES = 10, 3, 12, 2, 5
# More: of a layer with a mixer, of gated attention, of the scales of what is added to the residual stream, of latent
# attention; of an MLP of all tokens beside experts, and as many of its gate; one for the input of a router in float32;
# and of a step beside its layers: the embedding, its scale, and the last sum.
MIXER_LAUNCHES, GATE_LAUNCHES, SCALE_LAUNCHES, LATENT_LAUNCHES = 1, 1, 2, 5
SHARED_LAUNCHES, END_LAUNCHES = 3, 3
WORKSPACE_BYTES, POOL_BYTES = 32 << 20, 64 << 20
# The launches of the graphs of a number of drawing rows, and the tables of counts of a row, see TritonLogits.
DRAW_LAUNCHES, DRAW_TABLES = 48, 64 << 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How the memory is divided, and the resulting capacity."""

    config: EngineConfig  # resolved, with max_len lowered to what the pool holds
    memory_bytes: int  # the total budget
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int  # reserved for CUDA graphs
    kv_bytes_per_token: int  # in all layers
    num_blocks: int
    states_bytes: int  # of sequences, with snapshots
    notes: tuple[str, ...]
    groups: CacheGroups

    @property
    def max_len(self) -> int:
        assert self.config.max_len
        return self.config.max_len

    @property
    def num_tokens(self) -> int:
        block_size, chunk = self.config.block_size, self.config.max_batched_tokens
        assert chunk
        return self.groups.num_tokens(self.num_blocks, block_size, chunk, self.max_len)

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.groups.block_bytes(self.config.block_size, self.kv_bytes_per_token)

    @property
    def full_length_users(self) -> float:
        return self.num_tokens / self.max_len


@dataclass(frozen=True, slots=True)
class GraphReserve:
    """The maximum memory of CUDA graphs. Capturing ends where it is taken.

    Torch's allocator knows what it takes for the graphs. What the driver takes can be seen only in the device's free
    memory, which other processes change: so each graph counts as its maximum, whether or not it takes that much.
    """

    allocated: int = 0  # by torch, for all graphs
    draw_row: int = 0  # of that, for each drawing row
    step_graph: int = 0  # by the driver, for the graph of a step
    draw_graphs: int = 0  # by the driver, for the graphs of a number of drawing rows
    num_steps: int = 0
    num_draws: int = 0

    @property
    def total(self) -> int:
        return self.allocated + self.num_steps * self.step_graph + self.num_draws * self.draw_graphs


class Impossible(MemoryShort):
    """The settings need more memory than there is. Has the arithmetic in one sentence, and three alternatives."""

    def __init__(self, sentence: str, suggestions: list[str]) -> None:
        super().__init__("\n".join([sentence, *(f"try: {each}" for each in suggestions)]))
        self.sentence = sentence
        self.suggestions = suggestions


def activation_bytes(spec: ModelSpec, config: EngineConfig, backend: type[AttentionBackend]) -> int:
    """Return the estimated maximum memory of a step beside weights and cache, for a resolved config."""
    assert config.max_seqs and config.max_batched_tokens
    attention = backend.workspace_bytes(spec.layers, spec.dtype, spec.cache_dtype, config)
    rows = min(config.max_seqs, config.max_batched_tokens)
    step = config.max_batched_tokens * _token_bytes(spec) + attention + rows * spec.vocab_size * SAMPLER_BYTES
    return step + spec.workspace_bytes


def graph_reserve(spec: ModelSpec, config: EngineConfig, backend: type[AttentionBackend]) -> GraphReserve:
    """Return the maximum memory of the CUDA graphs of a resolved config."""
    from .models.mixers.mixer import gpu_limitation

    assert config.max_seqs and config.max_batched_tokens
    decoder = spec.decoder
    if config.device == "cpu" or config.enforce_eager or not backend.capturable:
        return GraphReserve()
    if decoder is None or any(gpu_limitation(shape, spec.dtype) for shape in spec.mixers):  # they are not captured
        return GraphReserve()
    sizes = graph_sizes.of(spec, config)
    of_layer = LAYER_LAUNCHES + NORM_LAUNCHES * (decoder.qk_norm == "all") + GATE_LAUNCHES * decoder.has_gates
    of_layer += INPUT_LAUNCHES * (decoder.inputs is not None) + MIXER_LAUNCHES * decoder.has_states
    of_layer += SCALE_LAUNCHES * (decoder.scales.residual != 1) + LATENT_LAUNCHES * bool(decoder.shapes[0].latent)
    if (experts := decoder.experts) is not None:
        of_layer += EXPERT_LAUNCHES + BESIDE_LAUNCHES * experts.is_beside + experts.wide_router
        of_layer += SHARED_LAUNCHES * (bool(experts.shared) + bool(experts.shared_gate))
    # The graphs share their intermediate results, and the copy of the hidden states that they return.
    shared = sizes.largest * (_token_bytes(spec) + decoder.hidden_size * spec.dtype.itemsize)
    # The logits stay in memory of their own; the head's result and the weights are intermediate results.
    draws = graph_sizes.draws(config.max_seqs, config.max_batched_tokens)
    draw_row = 3 * 4 * spec.vocab_size + DRAW_TABLES
    shared += draws[-1] * draw_row
    return GraphReserve(
        draw_row=draw_row,
        allocated=shared + spec.workspace_bytes + WORKSPACE_BYTES + POOL_BYTES,
        step_graph=GRAPH_BYTES + (of_layer * len(decoder.shapes) + END_LAUNCHES) * LAUNCH_BYTES,
        draw_graphs=GRAPH_BYTES + DRAW_LAUNCHES * LAUNCH_BYTES,
        num_steps=len(sizes.all),
        num_draws=len(draws),
    )


def _token_bytes(spec: ModelSpec) -> int:
    """Return the estimated memory of a token's intermediate results."""
    hidden, inner = widths(spec.source)
    size = spec.dtype.itemsize
    widest = max(spec.layers, key=lambda layer: layer.numbers)
    queries = max(layer.num_heads * layer.head_dim for layer in spec.layers)
    own = 0  # keys and values that layers share, and the layers' own inputs
    if (decoder := spec.decoder) is not None:
        shared = [shape for shape in decoder.shapes if shape.shares is not None]
        inner, own = decoder.widest, 2 * widest.numbers if shared else 0
        own += 3 * len(decoder.shapes) * decoder.inputs.size if decoder.inputs is not None else 0
        # Of latent attention the queries before they are multiplied, and what is multiplied after it.
        own += max((shape.latent.queries + shape.latent.seen for shape in decoder.shapes if shape.latent), default=0)
    # Residual, norm, output, and the norm's float32 copy; queries and attention's output; gate, up and their product.
    token = size * (4 * hidden + 2 * queries + widest.numbers + 3 * inner + own) + 4 * hidden
    if decoder is not None and (experts := decoder.experts) is not None:
        # Results of the experts, and in float32 their sum and the input of a router.
        token += (experts.active + 1) * size * hidden + (8 + 4 * experts.wide_router) * hidden
    if spec.mixers:  # what they read and return; and a float32 copy of what is convolved
        mixer = spec.mixers[0]
        token += size * (sum(mixer.rows) + mixer.seen) + 4 * mixer.channels
    return token


def widths(source: dict[str, Any]) -> tuple[int, int]:
    """Return the hidden size, and the width of the feed-forward layers that a token uses. Keys differ by
    architecture."""
    hidden = first(source, "hidden_size", "n_embd", "d_model") or 4096
    inner = first(source, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
    experts = first(source, "num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    if experts:
        inner = experts * (first(source, "moe_intermediate_size") or inner)
    return hidden, inner


def first(source: dict[str, Any], *names: str) -> int | None:
    """Return the value of the first of these keys that is an integer, in config.json or its text_config, or None."""
    nested = source.get("text_config")
    for mapping in (source, nested if isinstance(nested, dict) else {}):
        for name in names:
            if isinstance(mapping.get(name), int):
                return int(mapping[name])
    return None


def arrange(
    spec: ModelSpec,
    requested: EngineConfig,
    machine: Machine,
    backend: type[AttentionBackend],
    activations: int | None = None,
) -> Plan:
    """Divide the machine's memory. `requested` is not resolved; `activations`: their size, if it is known.

    A max_len that is set is kept or refused; otherwise the model's length is lowered to what the pool holds. If
    `num_blocks` is set, the pool has that size, and max_len is lowered to what it holds. Raises Impossible.
    """
    try:
        return _arrange(spec, requested, machine, backend, activations)
    except _Short as short:
        sentence, tries = short.sentence, _tries(spec, requested, machine, backend, short.memory_bytes)
    raise Impossible(sentence, tries[:3])


class _Short(Exception):
    def __init__(self, sentence: str, memory_bytes: int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.memory_bytes = memory_bytes  # that the settings would need in total


def _arrange(
    spec: ModelSpec,
    requested: EngineConfig,
    machine: Machine,
    backend: type[AttentionBackend],
    measured: int | None = None,
) -> Plan:
    config = resolve(requested, machine.kind, spec.max_len)
    assert config.max_len and config.max_seqs and config.max_batched_tokens
    weights, groups = spec.weights_bytes, spec.groups
    activations = activation_bytes(spec, config, backend) if measured is None else measured
    block_bytes = groups.block_bytes(config.block_size, spec.kv_bytes_per_token)
    blocks_for = partial(groups.blocks_for, block_size=config.block_size, chunk=config.max_batched_tokens)
    graphs = graph_reserve(spec, config, backend).total
    if graphs and spec.decoder is not None:  # they read angles of all positions, in float32
        graphs += sum(rope.head_dim for rope in spec.decoder.used_ropes) * config.max_len * 4
    fixed = weights + activations + graphs
    given = block_bytes * config.num_blocks if config.num_blocks else config.kv_cache_memory or 0  # bytes of the cache
    available = _usable(machine) if given else _budget(machine, config)
    most = 0 if given else USEFUL * config.max_seqs * blocks_for(config.max_len) * block_bytes
    seqs, request = config.max_seqs, blocks_for(config.max_len) * block_bytes
    config, notes = plan_states(spec, requested, config, available - fixed - given, cache=most, request=request)
    assert config.max_len and config.max_seqs and config.max_batched_tokens
    if config.max_seqs < seqs:  # which need less memory for activations, too
        fewer = structs.replace(requested, max_seqs=config.max_seqs)
        plan = _arrange(spec, fewer, machine, backend, measured)
        return replace(plan, notes=(notes[0], *plan.notes))
    states = num_states(config) * spec.state_bytes
    fixed += states
    parts = f"weights of {_gb(weights)} and {_gb(activations)} of activations"
    if others := [f"{_gb(size)} of {what}" for size, what in ((graphs, "CUDA graphs"), (states, "states")) if size]:
        parts = f"{', '.join([parts.replace(' and ', ', '), *others[:-1]])} and {others[-1]}"
    if requested.max_len and requested.max_len > spec.max_len:
        notes.append(
            f"max_model_len lowered from {requested.max_len} to {spec.max_len} tokens, the maximum of the model"
        )

    # While weights are quantized, loading needs memory for plain ones too. Cache and activations are allocated later.
    plain = spec.loading_bytes
    if plain and weights + plain > _usable(machine):
        raise _Short(
            f"weights of {_gb(weights)} and, while they are rounded, {_gb(plain)} of plain ones are more than the "
            f"{_gb(_usable(machine))} of memory that can be had now",
            weights + plain,
        )
    if config.num_blocks is not None or config.kv_cache_memory is not None:
        budget = _usable(machine)
        num_blocks = config.num_blocks or (config.kv_cache_memory or 0) // block_bytes
        if fixed + num_blocks * block_bytes > budget:
            raise _Short(
                f"{parts}, with a KV cache of {_gb(num_blocks * block_bytes)} as configured, are more than the "
                f"{_gb(budget)} of memory that can be had now",
                fixed + num_blocks * block_bytes,
            )
        budget = fixed + num_blocks * block_bytes
    else:
        budget = _budget(machine, config)
        useful = USEFUL * config.max_seqs * blocks_for(config.max_len)
        num_blocks = min((budget - fixed) // block_bytes, useful)
        if num_blocks <= 0:
            raise _Short(
                f"{parts} leave nothing for the KV cache of the {_gb(budget)} that may be used "
                f"({_share(machine, config)})",
                fixed + block_bytes * blocks_for(min(config.max_len, MIN_TOKENS)),
            )

    longest = groups.longest(num_blocks, config.block_size, config.max_batched_tokens)
    held = config.max_len if longest is None else longest
    needed = config.max_len if requested.max_len else min(config.max_len, MIN_TOKENS)
    if held < needed and (config.num_blocks is None or held == 0):
        raise _Short(
            f"after {parts} the KV cache is {_gb(num_blocks * block_bytes)} and holds {held} tokens "
            f"({spec.kv_bytes_per_token} bytes each), but one request of {needed} tokens needs "
            f"{_gb(blocks_for(needed) * block_bytes)}",
            fixed + block_bytes * blocks_for(needed),
        )
    if held < config.max_len:
        notes.append(f"max_model_len lowered from {config.max_len} to {held} tokens, the capacity of the KV cache")
        config = structs.replace(config, max_len=held)
    kv_bytes = spec.kv_bytes_per_token
    return Plan(config, budget, weights, activations, graphs, kv_bytes, num_blocks, states, tuple(notes), groups)


def _usable(machine: Machine) -> int:
    """Return the maximum that can be allocated now."""
    return int(machine.available * machine.share) if machine.kind == "cpu" else machine.available


def _budget(machine: Machine, config: EngineConfig) -> int:
    """Return the budget for weights, activations and cache together."""
    if machine.kind == "cpu":
        return min(int(machine.total * CPU_SHARE), _usable(machine))
    used = machine.total - machine.available
    return int(machine.total * config.gpu_memory_utilization) - used


def _share(machine: Machine, config: EngineConfig) -> str:
    if machine.kind == "cuda":
        return (
            f"{config.gpu_memory_utilization:.0%} of the GPU's {_gb(machine.total)}, less the "
            f"{_gb(machine.total - machine.available)} in use"
        )
    if _usable(machine) < machine.total * CPU_SHARE:
        return f"{machine.share:.0%} of the {_gb(machine.available)} of memory that are available now"
    return f"{CPU_SHARE:.0%} of this machine's {_gb(machine.total)} of memory"


def _tries(
    spec: ModelSpec, requested: EngineConfig, machine: Machine, backend: type[AttentionBackend], needed: int
) -> list[str]:
    """Return at least three changes that would help, the least disruptive first, each checked by the same arithmetic.

    `needed`: bytes that the settings would need in total.
    """
    config = resolve(requested, machine.kind, spec.max_len)
    assert config.max_len and config.max_seqs and config.max_batched_tokens
    tries = []

    def works(other: ModelSpec = spec, **changes: Any) -> Plan | None:
        try:
            return _arrange(other, structs.replace(requested, **changes), machine, backend)
        except (_Short, ConfigError):
            return None

    if requested.kv_cache_memory and (plan := works(kv_cache_memory=None)):
        tries.append(
            f"remove `kv_cache_memory`: the cache is then {_gb(plan.kv_cache_bytes)}, {plan.num_tokens} tokens"
        )
    if requested.num_blocks and (plan := works(num_blocks=None)):
        tries.append(f"remove `num_blocks`: there are then {plan.num_blocks} blocks, {plan.num_tokens} tokens")
    if requested.max_len and (plan := works(max_len=None, rope_len=None)) and plan.max_len < config.max_len:
        tries.append(f"`max_len={plan.max_len}`, a request of which length the KV cache then holds")
    if machine.kind == "cpu" and requested.num_blocks is None:
        cache = _cache_that_fits(spec, config, machine, backend)
        if cache != requested.kv_cache_memory and (plan := works(kv_cache_memory=cache)):
            most = "at most " * (cache < (requested.kv_cache_memory or 0))
            tries.append(f"{most}`kv_cache_memory={cache}`, which is free now and holds {plan.num_tokens} tokens")
    if machine.kind == "cuda":
        more = [share for share in (0.95, 0.98) if share > requested.gpu_memory_utilization]
        tries += [f"`gpu_memory_utilization={share}`" for share in more if works(gpu_memory_utilization=share)][:1]
        if (graphs := graph_reserve(spec, config, backend).total) and works(enforce_eager=True):
            tries.append(f"`enforce_eager`, which saves the {_gb(graphs)} of CUDA graphs and makes small steps slower")
    if spec.dtype.itemsize > 2 and (plan := works(_in_bfloat16(spec), dtype="bfloat16")):
        tries.append(
            f"`dtype=bfloat16`: weights of {_gb(plan.weights_bytes)} leave memory for {plan.num_tokens} tokens"
        )
    if spec.decoder is not None and spec.quantization == "none" and not spec.method:
        quantized = replace(spec, quantization="int8", on_gpu=machine.kind == "cuda")
        if _can_quantize(requested, spec, machine) and (plan := works(quantized, quantization="int8")):
            size = _gb(plan.weights_bytes)
            tries.append(f"`quantization=int8`: weights of {size} leave memory for {plan.num_tokens} tokens")
    if spec.kv_dtype == "auto" and (plan := works(replace(spec, kv_dtype="int8"), kv_dtype="int8")):
        tries.append(f"`kv_dtype=int8`: a KV cache of {_gb(plan.kv_cache_bytes)} holds {plan.num_tokens} tokens")
    small: dict[str, Any] = {
        "max_seqs": min(config.max_seqs, 4),
        "max_batched_tokens": min(config.max_batched_tokens, 64),
    }
    if works(**small):
        seqs, tokens = small.values()
        tries.append(f"`max_seqs={seqs}` `max_batched_tokens={tokens}`, so that a step takes less memory")

    # Alternatives that always exist: another machine, model or device.
    on_cpu = machine.share if requested.kv_cache_memory else CPU_SHARE  # half is only the default
    share = on_cpu if machine.kind == "cpu" else requested.gpu_memory_utilization
    where = "a machine" if machine.kind == "cpu" else "a GPU"
    tries.append(f"{where} with at least {_gb_up(needed / share)} of memory")
    params = (_budget(machine, requested) - (needed - spec.weights_bytes)) / 2
    if 1e6 <= params < spec.num_params:
        own = _count(spec.num_params)
        tries.append(f"a model of at most {_count(params)} parameters in bfloat16; this one has {own}")
    else:
        tries.append("`model=builtin`, which needs next to no memory")
    if machine.kind == "cpu":
        tries.append(f"`device=cuda` on a GPU with at least {_gb_up(needed / requested.gpu_memory_utilization)}")
    else:
        tries.append(f"`device=cpu` on a machine with at least {_gb_up(needed / CPU_SHARE)} of memory")
    return tries


def _cache_that_fits(spec: ModelSpec, config: EngineConfig, machine: Machine, backend: type[AttentionBackend]) -> int:
    """Return the size of a cache for one request of full length, or 90 % of what is free if more is configured."""
    assert config.max_len and config.max_batched_tokens
    free = 0.9 * (_usable(machine) - spec.weights_bytes - activation_bytes(spec, config, backend))
    block_bytes = spec.groups.block_bytes(config.block_size, spec.kv_bytes_per_token)
    full = block_bytes * (1 + spec.groups.blocks_for(config.max_len, config.block_size, config.max_batched_tokens))
    if (config.kv_cache_memory or 0) > free > 4 << 30:
        return int(free) >> 30 << 30
    return max(1, int(min(free, full + (1 << 20))) >> 20) << 20


def _can_quantize(requested: EngineConfig, spec: ModelSpec, machine: Machine) -> bool:
    """Return whether this machine supports quantized weights for a model."""
    import torch

    from .kernels.library import choose

    if machine.kind == "cuda":
        return spec.dtype in (torch.bfloat16, torch.float16)
    try:
        choose(requested.cpu_isa, torch.device("cpu"), spec.dtype, quantized=True)
    except ConfigError:
        return False
    return True


def _in_bfloat16(spec: ModelSpec) -> ModelSpec:
    import torch

    return replace(spec, dtype=torch.bfloat16)


def _gb_up(size: float) -> str:
    return f"{math.ceil(size / 1e9)} GB"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _count(params: float) -> str:
    return f"{params / 1e9:.1f} billion" if params >= 1e9 else f"{params / 1e6:.0f} million"
