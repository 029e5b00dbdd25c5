"""Models whose layers keep states: what config.json may say, the memory for states, and prefixes through the engine."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from engine import EngineConfig, EngineRequest, LocalEngine, ModelError, SamplingParams, memory, models
from engine.attention import choose
from engine.machine_memory import Machine
from engine.models.families.architectures import MODEL_TYPES
from engine.models.mixers.states import ConvShape, LayerStates, LinearShape, Mamba2Shape, MixerShape, Segments
from engine.models.spec import ModelSpec, read_spec
from tests.models import MODELS, config, make, prompt

GB = 1 << 30
MAMBA = "granitemoehybrid-mamba"


def source(name: str, **changes: Any) -> dict[str, Any]:
    kind = MODEL_TYPES[MODELS[name][0]]
    found = {**config(name).to_dict(), "architectures": [kind], **changes}
    return {key: value for key, value in found.items() if value is not None}


def spec_of(name: str, **changes: Any) -> ModelSpec:
    found = read_spec(source(name, **changes), EngineConfig(model="", dtype="bfloat16"))
    assert found is not None
    return found


# -- config.json ----------------------------------------------------------------------------------------------------


def test_layer_types_or_an_interval_say_which_layers_have_linear_attention():
    def kinds(**changes: Any) -> str:
        spec = spec_of("qwen3_5_text", **changes).decoder
        assert spec is not None
        return "".join("a" if shape.mixer is None else "l" for shape in spec.shapes)

    assert kinds() == "lal"
    assert kinds(layer_types=None, num_hidden_layers=9, full_attention_interval=None) == "lllalllal"
    assert kinds(layer_types=["full_attention", "linear_attention", "linear_attention"]) == "all"


@pytest.mark.parametrize("kind", ["mamba", "linear_attention"])  # as the publisher has it, and transformers
def test_layer_types_say_which_layers_have_mamba(kind):
    types = [kind, "attention" if kind == "mamba" else "full_attention", kind]
    for changes in ({"layer_types": types}, {"layer_types": None, "layers_block_type": types}):
        spec = spec_of("granitemoehybrid-mamba", **changes).decoder
        assert spec is not None and [shape.mixer is None for shape in spec.shapes] == [False, True, False]


def test_the_sizes_of_mamba_layers_have_the_defaults_of_transformers():
    sizes = {"mamba_n_heads": 48, "mamba_d_state": 128, "hidden_size": 1536, "mamba_n_groups": 1}
    whole = {"mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_expand": 2, "mamba_d_conv": 4}
    limits = [0.0, {"__float__": "Infinity"}]  # as transformers writes it
    found = {
        spec_of("granitemoehybrid-mamba", **sizes, **changes).mixers[0]
        for changes in (
            {"mamba_d_head": 64, "time_step_limit": limits, **whole},
            {"mamba_d_head": "auto", "time_step_limit": [0, math.inf], **whole},
            {"mamba_d_head": None, "time_step_limit": None, **dict.fromkeys(whole)},
        )
    }
    assert found == {Mamba2Shape(1, 48, 128, 64, 4, has_bias=False, has_conv_bias=True, limits=(0.0, math.inf))}
    [shape] = found
    assert isinstance(shape, Mamba2Shape) and shape.channels == 3328 and shape.rows == (6448, 0, 0)


def test_the_intermediate_size_of_lfm2_is_computed_from_another():
    def inner(**changes: Any) -> int:
        spec = spec_of("lfm2", **changes).decoder
        assert spec is not None
        return spec.shapes[0].inner

    given = {"intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    assert inner(**given) == 8192, "that of LFM2-1.2B"
    assert inner(**given | {"intermediate_size": None, "block_ff_dim": 6656}) == 4608, "that of LFM2-350M"
    assert inner(**given | {"block_auto_adjust_ff_dim": False}) == 12288


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}, "layer_types must name all 3 layers"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "names no layer with full attention"),
        (
            "qwen3_5_text",
            {"layer_types": ["mamba", "conv", "full_attention"]},
            "layer_types names conv, which no layer",
        ),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "3 value heads of linear attention cannot share 2 key heads"),
        ("qwen3_5_text", {"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive whole number"),
        ("qwen3_5_text", {"linear_value_head_dim": 1 << 40}, "linear_value_head_dim must be at most 1024"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must be at most 64"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 2}, "full_attn_idxs must be a list, not 2"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": []}, "names no layer with full attention"),
        ("lfm2", {"conv_L_cache": -1}, "conv_L_cache must be a positive whole number"),
        ("lfm2", {"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier must be positive"),
        (MAMBA, {"layer_types": None}, "layer_types must name all 3 layers"),
        (MAMBA, {"layer_types": ["mamba"] * 3}, "names no layer with full attention"),
        (MAMBA, {"layer_types": ["mamba", "conv", "attention"]}, "layer_types names conv, which no layer"),
        (MAMBA, {"mamba_n_groups": 3}, "4 heads of Mamba cannot share 3 groups of states evenly"),
        (MAMBA, {"mamba_d_head": 64}, "mamba_expand makes 128 numbers of a token, not those of 4 heads of 64"),
        (MAMBA, {"mamba_d_head": "large"}, "mamba_d_head must be a positive whole number, not 'large'"),
        (MAMBA, {"mamba_d_state": 1 << 40}, "mamba_d_state must be at most 1024"),
        (MAMBA, {"mamba_d_conv": 0}, "mamba_d_conv must be a positive whole number"),
        (MAMBA, {"time_step_limit": 0.1}, "time_step_limit must be two numbers, not 0.1"),
        (MAMBA, {"time_step_limit": [0.1, "inf"]}, "time_step_limit must be a number, not 'inf'"),
        (MAMBA, {"time_step_limit": [2.0, 1.0]}, "time_step_limit must be a range of numbers from 0 on"),
        (MAMBA, {"time_step_limit": [math.inf, math.inf]}, "time_step_limit must be a range of numbers from 0 on"),
    ],
)
def test_what_no_model_has_is_refused(name, changes, says):
    with pytest.raises(ModelError, match=says):
        read_spec(source(name, **changes), EngineConfig(model=""))


@pytest.mark.parametrize(("name", "what"), [("qwen3_5_text", "linear attention"), (MAMBA, "layers of Mamba2")])
def test_another_activation_of_layers_with_states_is_refused(name, what):
    with pytest.raises(ModelError, match=f"no {what} with the activation 'gelu'"):
        read_spec(source(name, hidden_act="gelu"), EngineConfig(model=""))


def test_layers_that_predict_further_tokens_are_ignored(tmp_path):
    folder = make("qwen3_5_text", tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(4, 8)}, file)
    spec, _ = models.examine(folder, EngineConfig(model=str(folder)))
    assert spec.implementation == "native"


# -- memory ---------------------------------------------------------------------------------------------------------


def plan(spec: ModelSpec, available: int, **settings: Any) -> memory.Plan:
    device = torch.device("cpu")
    backend = choose("auto", device, spec.layers, spec.dtype, "auto", cache_dtype=spec.cache_dtype).backend
    machine = Machine("cpu", total=available, available=available)
    return memory.arrange(spec, EngineConfig(model="", dtype="bfloat16", **settings), machine, backend)


def test_a_state_is_a_window_and_a_matrix_for_each_head():
    linear, conv = LinearShape(16, 32, 128, 64, 4), ConvShape(2048, 3, has_bias=False)
    mamba = Mamba2Shape(1, 48, 128, 64, 4, has_bias=False, has_conv_bias=True, limits=(0.0, math.inf))
    sizes: list[tuple[MixerShape, int]] = [
        (linear, 3 * (2 * 2048 + 2048) * 2 + 32 * 128 * 64 * 4),
        (conv, 2 * 2048 * 2),
        (mamba, 3 * (3072 + 256) * 2 + 48 * 128 * 64 * 4),
    ]
    for shape, size in sizes:
        states = LayerStates.allocate(shape, 5, torch.bfloat16, torch.device("cpu"))
        assert shape.num_bytes(torch.bfloat16) == size
        assert 5 * size == states.windows.nbytes + states.matrices.nbytes


def test_memory_is_planned_for_the_states_of_all_sequences_and_their_snapshots():
    spec = spec_of("qwen3_5_text")
    found = plan(spec, 4 * GB, max_seqs=8)
    assert (found.config.max_seqs, found.config.num_snapshots) == (8, 16), "two for each, as requests are short"
    assert found.states_bytes == 24 * spec.state_bytes > 0
    assert plan(spec, 4 * GB, max_seqs=8, prefix_caching=False).config.num_snapshots == 0
    assert plan(spec, 4 * GB, max_seqs=8, num_blocks=64).config.num_snapshots == 16
    resolved = plan(spec, 4 * GB, max_seqs=8, num_snapshots=3, num_blocks=64)
    assert resolved.states_bytes == 11 * spec.state_bytes and resolved.notes == (), "as a restarted engine plans it"


def test_there_is_a_snapshot_for_each_thousand_tokens_of_the_cache():
    spec = spec_of("lfm2", max_position_embeddings=1 << 20)
    found = plan(spec, GB, max_seqs=2)
    assert found.config.num_snapshots is not None and found.config.num_snapshots > 100
    assert 1024 * found.config.num_snapshots < found.num_tokens, "the cache also has room for a request of full length"


def test_a_length_that_fits_without_snapshots_fits_with_them():
    big = spec_of("qwen3_5_text", linear_key_head_dim=512, linear_value_head_dim=512, max_position_embeddings=1 << 20)
    alone = plan(big, GB, max_seqs=2, prefix_caching=False)
    longest = plan(big, GB, max_seqs=2, max_len=alone.max_len)
    assert longest.max_len == alone.max_len and longest.config.num_snapshots == 0, "there is memory for nothing else"
    half = plan(big, GB, max_seqs=2, max_len=alone.max_len // 2)
    assert half.max_len == alone.max_len // 2 and half.config.num_snapshots
    assert plan(big, GB, max_seqs=2).max_len >= alone.max_len // 2, "snapshots take at most half if no length is set"


def test_fewer_sequences_run_if_their_states_do_not_fit():
    big = spec_of("qwen3_5_text", linear_num_value_heads=64, linear_key_head_dim=512, linear_value_head_dim=512)
    found = plan(big, 8 * GB, max_len=128)
    seqs = found.config.max_seqs
    assert seqs is not None and 1 <= seqs < 32
    assert f"max_num_seqs lowered from 32 to {seqs}, for whose states there is memory" in found.notes[0]
    assert found.config.num_snapshots is not None and found.config.num_snapshots >= seqs
    same = plan(big, 8 * GB, max_len=128, max_seqs=seqs)
    assert found == replaced(same, notes=found.notes), "also the activations are those of fewer sequences"
    with pytest.raises(memory.Impossible, match=r"and .* of states"):
        plan(big, 8 * GB, max_seqs=32)


def test_the_user_is_told_if_prefixes_are_hardly_cached():
    big = spec_of("qwen3_5_text", linear_num_value_heads=64, linear_key_head_dim=512, linear_value_head_dim=512)
    tight = plan(big, 8 * GB, max_seqs=26, max_len=128)
    snapshots = tight.config.num_snapshots
    assert snapshots is not None and 0 < snapshots < 26
    assert tight.notes == (
        f"prefixes are cached at the ends of {snapshots} prompts at most: there is no memory for more states",
    )


# -- through the engine ---------------------------------------------------------------------------------------------


async def ask(engine: LocalEngine, number: int, ids: list[int], count: int = 12) -> tuple[list[int], int]:
    """Return the tokens of a request, and how many of its prompt's were cached."""
    params = SamplingParams(max_tokens=count, temperature=0.0)
    tokens: list[int] = []
    cached = 0
    async for delta in engine.generate(EngineRequest(id=number, prompt_ids=tuple(ids), params=params)):
        tokens += delta.token_ids
        if delta.stats:
            cached = delta.stats.cached_tokens
    return tokens, cached


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", MAMBA])
async def test_the_turns_of_a_chat_continue_from_snapshots_with_the_same_tokens(tmp_path: Path, name):
    folder = make(name, tmp_path)
    base = EngineConfig(model=str(folder), device="cpu", max_len=256, num_blocks=128, debug=True)
    asked: list[list[int]] = []
    async with LocalEngine(base) as engine:
        told, expected = prompt(70, seed=4), []
        for turn, count in enumerate((80, 12, 12)):
            asked.append(list(told))
            tokens, cached = await ask(engine, turn, told, count)
            expected.append((tokens, cached))
            told += [*tokens, *prompt(5, seed=turn)]
    assert [cached for _, cached in expected] == [0, 128, 144], "at 64 tokens of an output, and at the end of a prompt"
    async with LocalEngine(replace(base, prefix_caching=False)) as engine:
        for turn, (ids, (tokens, _)) in enumerate(zip(asked, expected, strict=True)):
            assert await ask(engine, turn, ids, len(tokens)) == (tokens, 0)


async def test_requests_that_begin_alike_share_a_prefix_while_the_first_is_computed(tmp_path: Path):
    folder = make("qwen3_5_text", tmp_path)
    settings: dict[str, Any] = {"max_len": 256, "num_blocks": 256, "max_seqs": 8, "debug": True}
    shared = prompt(100, seed=9)
    asked = [[*shared, *prompt(9, seed=each)] for each in range(6)]
    async with LocalEngine(EngineConfig(model=str(folder), device="cpu", max_batched_tokens=32, **settings)) as engine:
        together = await asyncio.gather(*(ask(engine, each, ids) for each, ids in enumerate(asked)))
    async with LocalEngine(EngineConfig(model=str(folder), device="cpu", prefix_caching=False, **settings)) as engine:
        alone = [await ask(engine, each, ids) for each, ids in enumerate(asked)]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert sorted(cached for _, cached in together)[1:] >= [64] * 5, "of 96; what is nearer is not worth waiting for"


def test_segments_name_the_states_of_rows():
    segments = Segments.of([[(1, -1, 0)], [(3, 4, 9), (0, 9, 8), (2, 8, 4)], []])
    assert list(segments.each) == [(0, 1, -1, 0), (1, 4, 4, 9), (4, 4, 9, 8), (4, 6, 8, 4)]
    assert segments.row_start.tolist() == [0, 1, 4, 4] and not segments.are_single
    assert Segments.of([[(1, 3, 3)], [(1, -1, 0)]]).are_single
