"""The other kernels against torch, and the bits of their rows: RMSNorm, all layers of a decoder in one call, and the
angles of positions."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.attention import AttentionMeta, KVCache
from engine.attention.reference import Reference
from engine.batch import Batch, Entered, Row
from engine.kernels import library
from engine.kernels.library import Choice, Clock, Kernels
from engine.kernels.logits import NativeLogits
from engine.models import Forward
from engine.models.decoder import Decoder
from engine.models.executor import Eager
from engine.models.families.family import PLAIN, NormKind
from engine.models.fused import Fused
from engine.models.norms import RMSNorm, make_norm
from engine.models.rope import Rope, Rotary
from engine.models.spec import ModelSpec, read_spec
from engine.runner import Runner
from tests.engine.test_attention import spoil
from tests.engine.test_cpu_attention import backend
from tests.engine.test_kernels import kernels, needs_library

CPU = torch.device("cpu")
# Of the relative error: at most this, or this times what torch's own bfloat16 has.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TORCHS = 1.5
SIZES = [1, 5, 16, 33, 64, 130, 1000, 1024]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 4096,
    "head_dim": 16,
}
# Heads of every kind of width: whole vectors, parts of one, both; norms, biases and windows.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "head_dim": 80},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
    "qwen3-odd": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 66, "hidden_size": 33, "intermediate_size": 7},
    "qwen3-narrow": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 2, "num_key_value_heads": 1},
    "no-rope": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1, 0], "head_dim": 66},
    "scales": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.3,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "mlp_bias": True,
    },
    "partial": {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": 0.75,
        "head_dim": 80,
    },
    "windows": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}

pytestmark = [needs_library, pytest.mark.usefixtures("same_threads_after")]


@pytest.fixture(params=[isa for isa in library.ISAS if isa not in library.BASES])
def variant(request) -> Kernels:
    return kernels(request.param)


# -- RMSNorm ----------------------------------------------------------------------------------------------------------


KINDS_OF_NORMS = {"plain": PLAIN, "wide": NormKind(is_wide=True), "offset": NormKind(offset=1.0, is_wide=True)}
CENTERED = NormKind(is_wide=True, is_centered=True)


def norms(
    variant: Kernels, size: int, dtype: torch.dtype, eps: float = 1e-6, kind: NormKind = PLAIN
) -> tuple[RMSNorm, RMSNorm]:
    """Return the norm by the kernel and by torch."""
    ours, oracle = (make_norm(size, eps, dtype, CPU, kind) for _ in range(2))
    oracle.weight.normal_(1.0, 0.3)
    ours.weight.copy_(oracle.weight)
    ours.pack(variant)
    return ours, oracle


@pytest.mark.parametrize("kind", KINDS_OF_NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_norm_equals_torch(variant, dtype, size, kind):
    ours, oracle = norms(variant, size, dtype, kind=KINDS_OF_NORMS[kind])
    for rows in (0, 1, 7):
        for scale in (1.0, 1e-3, 1e15, 1e25, 1e-25, 1e-39):  # squares beyond float32, subnormals
            x = (torch.randn(rows, size) * scale).to(dtype)
            # A rounding may fall the other way: one unit behind the norm, one behind the weight.
            torch.testing.assert_close(ours(x), oracle(x), rtol=8 * torch.finfo(dtype).eps, atol=1e-37)


@pytest.mark.parametrize("kind", KINDS_OF_NORMS.values(), ids=KINDS_OF_NORMS)
def test_norms_with_weights_in_float32_are_rounded_once(variant, kind):
    """In bfloat16 few numbers differ from torch's, where a norm of another kind differs in every second one."""
    ours, oracle = norms(variant, 1000, torch.bfloat16, kind=kind)
    x = torch.randn(20, 1000).bfloat16()
    assert (ours(x) != oracle(x)).float().mean() < 0.01


@pytest.mark.parametrize("size", SIZES)
def test_centered_norm_equals_torch(variant, dtype, size):
    ours, oracle = norms(variant, size, dtype, kind=CENTERED)
    x = (torch.randn(7, size) + 3).to(dtype)
    torch.testing.assert_close(ours(x), oracle(x), rtol=4 * torch.finfo(dtype).eps, atol=2e-5)
    assert torch.equal(ours(x), torch.cat([ours(row[None]) for row in x]))


@pytest.mark.parametrize("kind", [*KINDS_OF_NORMS.values(), CENTERED], ids=[*KINDS_OF_NORMS, "centered"])
def test_nan_stays_in_its_row(variant, dtype, kind):
    ours, oracle = norms(variant, 40, dtype, kind=kind)
    x = torch.randn(4, 40).to(dtype)
    x[1, 3], x[2, 39] = math.nan, math.inf
    assert torch.equal(ours(x).isnan(), oracle(x).isnan())
    assert ours(x)[[0, 3]].isfinite().all()


@pytest.mark.parametrize("size", [33, 1024])
def test_norm_has_the_same_bits_in_any_batch_and_on_any_threads(variant, dtype, size):
    ours, _ = norms(variant, size, dtype)
    x = torch.randn(90, size).to(dtype)
    alone = torch.cat([ours(x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(ours(x), alone)
    assert torch.equal(ours(x.T.contiguous().T), alone)


@pytest.mark.parametrize("x", [torch.randn(2, 7), torch.randn(8), torch.randn(2, 8).double(), torch.randn(1, 2, 8)])
def test_norm_refuses_unsupported_tensors(variant, x):
    ours, _ = norms(variant, 8, torch.float32)
    with pytest.raises(ValueError, match=r"not \[rows, 8\]"):
        ours(x)


# -- all layers in one call -------------------------------------------------------------------------------------------


def spec_of(name: str, dtype: torch.dtype, **more: Any) -> ModelSpec:
    config = EngineConfig(model="random", dtype=str(dtype).removeprefix("torch."))
    spec = read_spec({**SHAPE, **MODELS[name], **more}, config)
    assert spec is not None and spec.decoder is not None
    return spec


def decoder(name: str, dtype: torch.dtype, variant: Kernels | None, weights: torch.dtype, **more: Any) -> Decoder:
    """Return a decoder with random weights that are exact in `weights`: the same for each dtype and variant."""
    spec = spec_of(name, dtype, **more)
    assert spec.decoder is not None
    made = Decoder(spec, CPU, Choice(variant), tied=spec.decoder.tied)
    generator = torch.Generator().manual_seed(1)
    for place in [*made.targets().values(), made.head.weight]:
        around = 1.0 if place.dim() == 1 else 0.0
        drawn = torch.randn(place.shape, generator=generator) * (0.3 if place.dim() == 1 else place.shape[-1] ** -0.5)
        place.copy_((drawn + around).to(weights))
    made.pack()
    return made


class Lines:
    """A decoder with a cache that computes steps of sequences."""

    def __init__(self, model: Decoder, isa: str | None, block_size: int = 16, held: torch.dtype | None = None) -> None:
        self.model, self.block_size = model, block_size
        self.cache = KVCache.allocate(
            Reference() if isa is None else backend(isa),
            model.spec.layers,
            num_blocks=40,
            block_size=block_size,
            dtype=held or model.spec.dtype,
            device=CPU,
        )
        for layer in self.cache.layers:
            spoil(layer.tensor)
        self.done: dict[int, int] = {}
        self.executors: set[type] = set()  # those that computed

    def step(self, rows: dict[int, list[int]]) -> Tensor:
        """Return the logits of all tokens."""
        table = [(list(range(10 * s, 10 * s + 10)), self.done.get(s, 0), len(ids)) for s, ids in rows.items()]
        self.done |= {s: self.done.get(s, 0) + len(ids) for s, ids in rows.items()}
        positions = [start + i for _, start, new in table for i in range(new)]
        ids = torch.tensor([token for line in rows.values() for token in line])
        meta = AttentionMeta.of(table, self.block_size)
        step = Forward(ids, torch.tensor(positions), self.cache.plan(meta), self.cache, torch.arange(len(ids)))
        self.executors.add(next(type(each) for each in self.model.executors if each.takes(step)))
        return self.model.forward(step).logits


def error(found: Tensor, want: Tensor) -> float:
    """Return the relative norm of the difference."""
    return ((found - want).norm() / want.norm()).item()


STEPS: list[dict[int, list[int]]] = [
    {0: list(range(30)), 1: [7]},
    {1: list(range(40, 20, -1)), 2: [1, 2, 3], 0: [49]},
    {2: [5], 0: [6], 1: [7]},
    {1: [0]},
]


@pytest.mark.parametrize("name", MODELS)
def test_layers_in_one_call_equal_torch(variant, dtype, name):
    model = decoder(name, dtype, variant, dtype)
    ours, oracle = Lines(model, variant.isa), Lines(decoder(name, torch.float64, None, dtype), None)
    torchs = Lines(decoder(name, dtype, None, dtype), None)
    for rows in STEPS:
        want = oracle.step(rows)
        assert error(ours.step(rows), want) < max(LIMITS[dtype], TORCHS * error(torchs.step(rows), want))
    assert ours.executors == {Fused} and oracle.executors == torchs.executors == {Eager}


@pytest.mark.parametrize("name", ["qwen3", "biases"])
def test_rotation_and_norms_are_rounded_as_in_torch(variant, name):
    """In bfloat16 the results differ by far less than one rounding step."""
    models = [decoder(name, torch.bfloat16, variant, torch.bfloat16) for _ in range(2)]
    del models[1].executors[0]
    one, other = (Lines(model, variant.isa) for model in models)
    for rows in STEPS:
        found, want = one.step(rows), other.step(rows)
        assert error(found, want) < 5e-3


@pytest.mark.parametrize("name", ["qwen3", "qwen3-odd", "biases"])
def test_layers_in_one_call_with_a_cache_of_int8(variant, dtype, name):
    """Compared with float64 layers, with an int8 cache and with an exact one."""
    ours = Lines(decoder(name, dtype, variant, dtype), variant.isa, held=torch.int8)
    oracle = Lines(decoder(name, torch.float64, None, dtype), None, held=torch.int8)
    exact = Lines(decoder(name, torch.float64, None, dtype), None)
    for rows in STEPS:
        found, same, want = ours.step(rows), oracle.step(rows), exact.step(rows)
        # A number near the middle between two whole ones may become either: a step of 1/127 in one place of many.
        assert error(found, same) < (4e-3 if dtype == torch.float32 else 0.03)
        assert error(found, want) < 0.05
    assert ours.executors == {Fused}


@pytest.mark.parametrize("held", [None, torch.int8], ids=["plain", "int8"])
def test_tokens_have_the_same_bits_in_any_schedule(variant, dtype, held):
    torch.set_num_threads(1)
    model, rng = decoder("qwen3", dtype, variant, dtype), random.Random(3)
    prompts = [[rng.randrange(50) for _ in range(length)] for length in (40, 23, 1)]
    line = Lines(model, variant.isa, held=held)
    alone = [torch.cat([line.step({s: [t]}) for t in ids]) for s, ids in enumerate(prompts)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        line, found = Lines(model, variant.isa, held=held), [[] for _ in prompts]
        while open_ := [s for s, ids in enumerate(prompts) if line.done.get(s, 0) < len(ids)]:
            rows = {s: prompts[s][line.done.get(s, 0) :][: rng.choice([1, 2, 30])] for s in open_ if rng.random() < 0.7}
            if rows:
                logits = line.step(rows)
                for s, part in zip(rows, logits.split([len(ids) for ids in rows.values()]), strict=True):
                    found[s].append(part)
        for want, parts in zip(alone, found, strict=True):
            assert torch.equal(torch.cat(parts), want)


def test_buffers_grow_with_the_step_and_are_kept(variant):
    line = Lines(decoder("llama", torch.float32, variant, torch.float32), variant.isa)
    first = line.step({0: [1, 2]})
    line.step({1: list(range(50)) * 2})
    line.done.clear()
    assert torch.equal(line.step({0: [1, 2]}), first)


def test_every_activation_has_a_kernel(variant):
    gelu = decoder("llama", torch.float32, variant, torch.float32, hidden_act="gelu")
    want = Lines(decoder("llama", torch.float64, None, torch.float32, hidden_act="gelu"), None).step(STEPS[0])
    line = Lines(gelu, variant.isa)
    assert error(line.step(STEPS[0]), want) < 1e-5 and line.executors == {Fused}


def test_layers_on_a_cache_without_a_kernel_compute_in_torch(variant):
    plain = decoder("llama", torch.float32, variant, torch.float32)
    on_reference, line = Lines(plain, None), Lines(plain, variant.isa)
    assert error(on_reference.step(STEPS[0]), line.step(STEPS[0])) < 1e-5
    assert on_reference.executors == {Eager} and line.executors == {Fused}


def test_mismatched_inputs_are_refused(variant):
    model = decoder("llama", torch.float32, variant, torch.float32)
    line, fused = Lines(model, variant.isa), model.executors[0]
    ids, meta = torch.arange(3), AttentionMeta.of([([0], 0, 3)], 16)

    def run(ids: Tensor, positions: Tensor) -> Tensor:
        return fused.run(Forward(ids, positions, line.cache.plan(meta), line.cache, ids))

    assert run(ids, torch.arange(3)).shape == (3, 48)
    for given in [
        (ids, torch.arange(4)),
        (torch.arange(4), torch.arange(4)),  # the step has 3
        (ids, torch.tensor([0, 1, 1 << 40])),
        (ids, torch.tensor([0, 1, -1])),
    ]:
        with pytest.raises(ValueError):
            run(*given)


# -- angles -----------------------------------------------------------------------------------------------------------


def test_angle_table_equals_single_positions(dtype):
    rotary = Rotary(Rope(head_dim=20, theta=100.0), 9000, dtype, CPU)
    for length in (1, 1024, 1025, 5000):
        table = rotary.table(length)
        assert len(table) >= length
        positions = torch.tensor([0, length // 2, length - 1])
        cos, sin = rotary.at(positions)
        assert torch.equal(table[positions, 0], cos[:, 0, :10].float())
        assert torch.equal(table[positions, 1], sin[:, 0, 10:].float())
    assert rotary.table(3) is rotary.table(5000)


# -- time -------------------------------------------------------------------------------------------------------------


def test_kernels_count_their_time(variant):
    clock = Clock([variant.library])
    seen = [clock.seconds()]
    ours, _ = norms(variant, 1000, torch.float32)
    model = decoder("llama", torch.float32, variant, torch.float32)
    for call in (
        lambda: ours(torch.randn(100, 1000)),
        lambda: NativeLogits(variant).best(torch.randn(3, 5000)),
        lambda: Lines(model, variant.isa).step({0: [1, 2, 3]}),
    ):
        call()
        seen.append(clock.seconds())
    assert sorted(set(seen)) == seen
    assert not Clock([]) and Clock([]).seconds() == 0.0


def test_step_reports_its_time_in_kernels(variant):
    model = decoder("llama", torch.float32, variant, torch.float32)
    wanted = EngineConfig(
        model="random", device="cpu", max_seqs=2, max_len=64, max_batched_tokens=64, block_size=16, attention="cpu"
    )
    runner = Runner(model, wanted, 8)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    tokens = runner.launch(Batch(1, [Row(1, 0, [1, 2, 3], [0], 1)], [Entered(1, params, 3, [])])).sample().result()
    assert 0 < tokens.seconds["kernels"] < tokens.seconds["forward"] + tokens.seconds["sample"]
