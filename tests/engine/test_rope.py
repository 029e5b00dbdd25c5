"""Rotary frequencies against those of transformers, for every scaling and both forms of config.json."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine import ConfigError, EngineConfig
from engine.config import check, resolve
from engine.models.rope import TABLE, Rope, Rotary, frequencies, rotate
from engine.models.spec import ModelSpec, read_spec
from tests.models import BASE, ROPES

PLAIN = {"default": {"rope_type": "default"}, **ROPES}
EXTRA = {
    "yarn-factor-of-attention": {**ROPES["yarn"], "attention_factor": 0.7, "beta_fast": 20, "beta_slow": 2},
    "yarn-one-frequency": {**ROPES["yarn"], "beta_fast": 1.0, "beta_slow": 1.0},
    "longrope-factor-of-attention": {**ROPES["longrope"], "attention_factor": 1.3},
    "longrope-without-factor": {key: value for key, value in ROPES["longrope"].items() if key != "factor"},
    "llama3-as-released": {**ROPES["llama3"], "factor": 32.0, "original_max_position_embeddings": 128},
}


def spec(max_len: int | None = None, **source) -> ModelSpec:
    found = read_spec(
        {"architectures": ["LlamaForCausalLM"], **BASE, **source}, EngineConfig(model="", max_len=max_len)
    )
    assert found is not None and found.decoder is not None
    return found


@pytest.mark.parametrize("name", [*PLAIN, *EXTRA])
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_frequencies_equal_transformers(name, form):
    rope = {**PLAIN, **EXTRA}[name]
    theta = 50000.0
    source = (
        {"rope_scaling": rope, "rope_theta": theta}
        if form == "rope_scaling"
        else {"rope_parameters": {**rope, "rope_theta": theta}}
    )
    config = LlamaConfig(**BASE, rope_parameters={**rope, "rope_theta": theta})
    kind = rope["rope_type"]
    for length in (64, 256) if kind == "longrope" else (256, 700) if kind == "dynamic" else (256,):
        found, scale = frequencies(spec(length, **source).decoder.ropes[0], length)
        if kind == "default":
            expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            expected, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        assert torch.equal(found, expected)
        assert scale == factor


def test_old_config_key_type_is_read():
    assert spec(rope_scaling={"type": "linear", "factor": 2.0}).decoder.ropes[0].scaling == "linear"


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_su_is_the_older_name_of_longrope(key):
    rope = {name: value for name, value in ROPES["longrope"].items() if name != "rope_type"}
    assert spec(rope_scaling=rope | {key: "su"}).decoder.ropes == spec(rope_scaling=ROPES["longrope"]).decoder.ropes


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 256),
        (ROPES["linear"], 1024),
        (ROPES["dynamic"], 1024),
        (ROPES["yarn"], 256),
        ({**ROPES["yarn"], "original_max_position_embeddings": 256}, 1024),
        (ROPES["llama3"], 256),
        (ROPES["longrope"], 256),
    ],
)
def test_longest_sequence_depends_on_the_scaling(rope, longest):
    assert spec(rope_scaling=rope).max_len == longest
    assert spec(100, rope_scaling=rope).serve_len == 100
    assert spec(5000, rope_scaling=rope).serve_len == longest


def test_rotary_embeddings_for_fewer_tokens_than_the_model_length_are_refused():
    says = r"rotary embeddings for 16 tokens \(rope_len\) cannot serve a model length of 64"
    with pytest.raises(ConfigError, match=says):
        check(EngineConfig(model="m", max_len=64, rope_len=16))
    with pytest.raises(ConfigError, match=says):
        resolve(EngineConfig(model="m", rope_len=16), "cpu", 64)
    assert resolve(EngineConfig(model="m", max_len=16, rope_len=64), "cpu", 64).max_len == 16


@pytest.mark.parametrize("max_len", [16, 5000])
def test_tables_have_the_positions_of_requests_and_of_trials(max_len):
    rotary = Rotary(Rope(16, max_positions=16, query_beta=0.1), max_len, torch.float32, torch.device("cpu"))
    last = max(max_len, TABLE) - 1
    assert len(rotary.table(last + 1)) > last
    assert len(rotary.query_scales) > last // rotary.period


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotation_equals_transformers(dtype):
    config = LlamaConfig(**BASE, rope_parameters={**ROPES["yarn"], "rope_theta": 10000.0})
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, heads, 16, generator=draw, dtype=torch.float64).to(dtype) for heads in (4, 2))
    positions = torch.tensor([0, 1, 2, 200, 201, 5, 255])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    turn = Rotary(spec(rope_scaling=ROPES["yarn"]).decoder.ropes[0], 256, dtype, torch.device("cpu")).at(positions)
    assert torch.equal(rotate(q, *turn), want[0][0].transpose(0, 1))
    assert torch.equal(rotate(k, *turn), want[1][0].transpose(0, 1))
