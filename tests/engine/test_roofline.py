"""The roofline: work counted by hand for small shapes. Rates are measured, and not asserted."""

import io
import json
import sys

import pytest
import torch

from engine import ConfigError, Roofline, hub, models, roofline
from engine.bench import roofline as bench
from engine.config import EngineConfig
from engine.kernels.library import choose
from engine.models.layers import Linear
from engine.models.spec import read_spec

CPU = torch.device("cpu")
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "dtype": "bfloat16",
}
LAYER = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 4  # q, k and v, o, gate-up-down, norms


def spec_of(**changes):
    spec = read_spec({**SHAPE, **changes}, EngineConfig(model="x"))
    assert spec is not None
    return spec


def test_bytes_and_operations_of_a_shape():
    found = roofline.shape(spec_of(tie_word_embeddings=True))
    body = 2 * LAYER + 8
    assert found.weights_bytes == 2 * (body + 800)
    assert found.flops_per_token == 2 * body
    assert found.flops_per_logit == 2 * 800
    assert found.flops_per_pair == 2 * (2 * 4 * (4 + 4))
    assert found.kv_bytes_per_token == 2 * 2 * (2 * 2 * 4)


def test_a_table_of_embeddings_is_not_read_when_the_head_is_another():
    tied, untied = (roofline.shape(spec_of(tie_word_embeddings=each)) for each in (True, False))
    assert tied == untied


def test_model_with_experts_has_no_roofline():
    assert roofline.shape(spec_of(num_experts=8)) is None
    assert roofline.measure(spec_of(num_experts=8), CPU) is None


def test_step_time_is_the_slower_of_reading_and_computing():
    limit = Roofline(
        bytes_per_s=10.0, flops_per_s=100.0, pair_flops_per_s=20.0, weights_bytes=50, kv_bytes_per_token=5,
        flops_per_token=40, flops_per_pair=2, flops_per_logit=10,
    )  # fmt: skip
    assert limit.bytes(context=10) == 100
    assert limit.flops(tokens=3, pairs=10, logits=1) == 150
    assert limit.seconds(1, 10, 10, 1) == 10.0  # 100 bytes; 50 operations are done in 0.5 s, the pairs' 20 in 1 s
    assert limit.multiply_seconds(1, 10, 1) == 1.5
    assert limit.seconds(100, 10, 10, 1) == pytest.approx(41.1)
    assert limit.rows(2.0) == 20  # one takes 5 s, reading, and 20 take 20 * 50 operations


def test_both_rates_are_measured():
    found = roofline.measure(spec_of(), CPU)
    assert found.bytes_per_s > 1e6
    assert found.flops_per_s > 1e6
    assert found.weights_bytes == roofline.shape(spec_of()).weights_bytes


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_rate_of_the_kernels_is_used_if_they_compute(quantization, monkeypatch):
    try:
        kernels = choose("avx2", CPU, torch.bfloat16, quantized=quantization != "none").kernels
    except ConfigError as error:
        pytest.skip(str(error))
    spec = read_spec(SHAPE, EngineConfig(model="x", quantization=quantization))
    packed, pack = [], Linear.pack

    def noted(linear, kernels, *, quantization):
        packed.append(quantization and quantization.bits)
        pack(linear, kernels, quantization=quantization)

    monkeypatch.setattr(Linear, "pack", noted)
    monkeypatch.setattr(roofline, "matrix_rate", lambda *_: 1.0)
    assert roofline.measure(spec, CPU).flops_per_s == 1.0
    found = roofline.measure(spec, CPU, kernels)
    assert found.flops_per_s > 1e6
    assert found.pair_flops_per_s == (found.flops_per_s if quantization == "none" else 1.0)
    assert packed == [{"none": None, "int8": 8, "int4": 4}[quantization]]


def test_the_program_measures_again_for_each_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    monkeypatch.setattr(roofline, "BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "SHAPES", ((8, 16, 16),))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert bench.main(["--json", '{"model": "builtin"}']) == 0
    assert threads == [1], "a tiny model is computed by one thread, so its limit is that of one"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    spec = models.describe(hub.fetch("builtin", None, weights=False).path, EngineConfig(model="builtin"))
    assert lines[0]["weights_bytes"] == roofline.shape(spec).weights_bytes
    assert lines[0]["dtype"] == "float32"


@pytest.mark.parametrize("text", ["{", '{"model": "/no/such/folder"}', '{"model": "builtin", "device": "abacus"}'])
def test_what_cannot_be_measured_is_one_line(capsys, text):
    assert bench.main(["--json", text]) == 2
    assert list(json.loads(capsys.readouterr().out)) == ["error"]
