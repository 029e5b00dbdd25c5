"""Building an engine from a config: the device, what it refuses, and what the runner says that it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine import Roofline, machine_memory, memory, models, roofline
from engine.attention import AttentionLayer, choose
from engine.batch import Batch, Entered, Row
from engine.build import build, describe, load, pick_device
from engine.config import EngineConfig
from engine.kernels import library
from engine.machine_memory import Machine
from engine.models import hf
from engine.types import ConfigError, MemoryShort, ModelError, SamplingParams
from tests.engine.test_kernels import needs_library
from tests.engine.test_runner import GREEDY, step
from tests.models import make


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x", ""])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(ConfigError, match="unknown device"):
        pick_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="`device=cuda`"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("auto").type == "cuda"
    assert pick_device("cuda:0").index == 0
    assert current == [0, 0]
    with pytest.raises(ConfigError, match="1 CUDA"):
        pick_device("cuda:3")


def tiny_llama(folder, max_positions=64):
    """A folder with a random Llama of two layers."""
    hidden, inner, heads, kv_heads, vocab = 16, 32, 4, 2, 40
    source = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (hidden // heads * kv_heads, hidden),
            prefix + "self_attn.v_proj.weight": (hidden // heads * kv_heads, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    generator = torch.Generator().manual_seed(3)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source))
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return str(folder)


def test_build_gives_a_runner_that_knows_what_it_is(tmp_path):
    shares: list[float] = []
    runner, info, config = build(EngineConfig(model=tiny_llama(tmp_path), device="cpu"), shares.append)
    assert (info.architecture, info.implementation) == ("LlamaForCausalLM", "native")
    assert (
        info.attention
        == choose("auto", torch.device("cpu"), [AttentionLayer(2, 1, 8, 8, scale=8**-0.5)], torch.float32).name
    )
    assert (info.dtype, info.device, info.vocab_size, info.max_len) == ("float32", "cpu", 40, 64)
    assert info.num_params == 40 * 16 + 16 + 2 * (2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 32)
    assert info.weights_bytes == 4 * info.num_params
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 4 * 4
    assert info.num_blocks == 2 * config.max_seqs * 64 // 16, "twice what all sequences at full length can hold"
    assert info.exact == (info.attention == "cpu") and info.notes == () and info.torch == torch.__version__
    assert shares and shares[-1] == 1.0 and shares == sorted(shares)
    assert (config.max_batched_tokens, config.num_blocks) == (256, info.num_blocks)
    assert info.max_seqs == config.max_seqs and 32 <= config.max_seqs <= 256
    assert runner.config == config and runner.cache.layers[0].tensor.shape[0] == info.num_blocks
    got = step(runner, [Row(1, 0, [3, 1, 4], [0], 1)], [Entered(1, GREEDY, 3, [])])
    assert 0 <= got.outcomes[0].token_ids[0] < 40


@pytest.mark.parametrize(
    ("rows", "settings", "seqs"),
    [
        (15, {}, 32),
        (64, {}, 64),
        (127, {}, 64),
        (5000, {}, 256),
        (5000, {"max_batched_tokens": 48}, 48),
        (5000, {"max_batched_tokens": 24}, 24),
        (5000, {"max_seqs": 5}, 5),
        (5000, {"num_blocks": 6}, 256),
    ],
)
def test_a_fast_processor_runs_more_sequences_at_once(tmp_path, monkeypatch, rows, settings, seqs):
    """`rows` take twice as long as one."""
    limits = Roofline(
        bytes_per_s=1.0, flops_per_s=rows / 2, pair_flops_per_s=1.0, weights_bytes=1, kv_bytes_per_token=0,
        flops_per_token=1, flops_per_pair=1, flops_per_logit=0,
    )  # fmt: skip
    monkeypatch.setattr(roofline, "measure", lambda *_, **__: limits)
    _, info, config = build(EngineConfig(model=tiny_llama(tmp_path), device="cpu", **settings))
    assert info.max_seqs == config.max_seqs == seqs and config.max_batched_tokens >= seqs
    monkeypatch.undo()
    assert build(config).config.max_seqs == seqs, "what was measured first is kept"


def test_sequences_that_do_not_fit_into_memory_do_not_fail_the_start(tmp_path, monkeypatch):
    limits = Roofline(
        bytes_per_s=1.0, flops_per_s=5000.0, pair_flops_per_s=1.0, weights_bytes=1, kv_bytes_per_token=0,
        flops_per_token=1, flops_per_pair=1, flops_per_logit=0,
    )  # fmt: skip
    arrange = memory.arrange

    def short(spec, config, *more):
        if (config.max_seqs or 0) > 32:
            raise memory.Impossible("no memory", [])
        return arrange(spec, config, *more)

    monkeypatch.setattr(roofline, "measure", lambda *_, **__: limits)
    monkeypatch.setattr(memory, "arrange", short)
    assert build(EngineConfig(model=tiny_llama(tmp_path), device="cpu")).info.max_seqs == 32


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_load_describes_its_model_and_opens_its_weights_once(tmp_path, monkeypatch, implementation):
    """The description of one that transformers computes is a trial run."""
    calls = []
    counted = [(models, "read_config"), (models, "Checkpoint")]
    if implementation == "transformers":
        counted += [(hf, "try_without_weights"), (hf, "_read")]

    def count(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: calls.append(name) or function(*given))

    for module, name in counted:
        count(module, name)
    build(EngineConfig(model=tiny_llama(tmp_path), device="cpu", implementation=implementation))
    assert sorted(calls) == sorted(name for _, name in counted)


@needs_library
def test_the_sampling_kernels_do_not_depend_on_what_computes_the_products(tmp_path):
    """float16 has no product of ours; --cpu-isa torch alone has no kernels that sample either."""
    folder, drawn = tiny_llama(tmp_path), {}
    params = SamplingParams(max_tokens=9, seed=7, temperature=1.5, top_p=0.9, top_k=20, presence_penalty=0.5)
    for isa, sampling in (("auto", library.available()[0]), ("torch", "torch")):
        runner, info, _ = build(EngineConfig(model=folder, device="cpu", dtype="float16", cpu_isa=isa))
        assert (info.product, info.sampling) == ("torch", sampling)
        assert bool(runner.clock) == (isa == "auto"), "the time in kernels is counted"
        tokens = [3, 1, 4]
        for length in range(3, 12):
            enter = [Entered(1, params, 3, list(tokens))] if length == 3 else []
            start = 0 if enter else length - 1
            got = step(runner, [Row(1, start, tokens[start:], [0], 1)], enter)
            tokens += got.outcomes[0].token_ids
        drawn[isa] = tokens
    assert drawn["auto"] == drawn["torch"]
    assert len(set(drawn["auto"][3:])) > 1


def test_given_blocks_are_made_and_lower_the_length(tmp_path):
    _, info, config = build(EngineConfig(model=tiny_llama(tmp_path), device="cpu", num_blocks=3, max_len=60))
    assert (info.num_blocks, info.max_len, config.max_len) == (3, 48, 48)
    assert info.notes == ("max_model_len lowered from 60 to 48 tokens, the capacity of the KV cache",)


def test_what_memory_does_not_allow_is_a_config_error_with_ways_out(tmp_path):
    config = EngineConfig(model=tiny_llama(tmp_path), device="cpu", kv_cache_memory=128 * 16, max_len=64)
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert type(caught.value) is MemoryShort, "the wire knows no subclasses of it"
    assert str(caught.value).count("\ntry: ") == 3


def test_an_engine_that_replaces_another_waits_for_its_memory(tmp_path, monkeypatch):
    """A driver may still hold the memory of a GPU's process for moments after it has ended."""
    described = describe(EngineConfig(model=str(tiny_llama(tmp_path)), device="cpu", num_blocks=8))
    machines = [Machine("cpu", 1 << 30, available) for available in (0, 0, 1 << 30)]
    monkeypatch.setattr(machine_memory, "measure", lambda device: machines.pop(0))
    monkeypatch.setattr("engine.build.FREED_S", 0.05)
    assert load(described, again=True).info.num_blocks == 8
    assert not machines

    monkeypatch.setattr(machine_memory, "measure", lambda device: Machine("cpu", 1 << 30, 0))
    with pytest.raises(MemoryShort):
        load(describe(described.config), again=True)


def test_the_number_of_threads_is_set(tmp_path):
    before = torch.get_num_threads()
    try:
        build(EngineConfig(model=tiny_llama(tmp_path), device="cpu", threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_an_unknown_backend_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="known: auto, cpu, triton, reference"):
        build(EngineConfig(model=str(tmp_path / "nothing"), attention="magic"))


def test_an_fp8_cache_on_a_cpu_is_served_by_torch_with_a_note(tmp_path):
    built = build(EngineConfig(model=tiny_llama(tmp_path), device="cpu", kv_dtype="fp8"))
    assert (built.info.attention, built.info.kv_dtype) == ("reference", "float8_e4m3fn")
    assert built.info.kv_bytes_per_token == 2 * 2 * 2 * (4 + 4)
    if choose("auto", torch.device("cpu"), [AttentionLayer(2, 1, 8, 8, scale=1.0)], torch.float32).name == "cpu":
        assert "it has no cache in float8_e4m3fn (`kv_dtype=int8` is as small)" in built.info.notes[-1]
    got = step(built.runner, [Row(1, 0, [3, 1, 4], [0], 1)], [Entered(1, GREEDY, 3, [])])
    assert 0 <= got.outcomes[0].token_ids[0] < 40


def only_config(folder: Path) -> Path:
    """Delete a model's weights."""
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_neox"])
def test_dummy_weights_need_config_json_alone(tmp_path, name):
    """In our own decoder and in transformers' code; the same numbers each time, as a restarted engine needs."""
    folder = only_config(make(name, tmp_path, dtype=torch.bfloat16))
    config = EngineConfig(model=str(folder), load_format="dummy", num_blocks=8)
    outputs = []
    for _ in range(2):
        built = build(config)
        assert built.info.weights_hash == "dummy"
        assert built.config.load_format == "dummy", "a restarted engine loads the same"
        blocks = [0] * built.runner.cache.num_groups
        step = built.runner.launch(Batch(1, [Row(1, 0, [1, 2, 3], blocks, 1)], [Entered(1, GREEDY, 3, [])]))
        logits = step.outputs.logits.clone()
        assert logits.isfinite().all() and logits.std() > 0
        outputs.append(logits)
    assert torch.equal(*outputs)


def test_without_dummy_weights_missing_ones_are_an_error(tmp_path):
    folder = only_config(make("qwen3", tmp_path, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="holds no weights"):
        build(EngineConfig(model=str(folder), num_blocks=8))
    with pytest.raises(ConfigError, match="unknown load format 'gguf'; known: auto, dummy"):
        build(EngineConfig(model=str(folder), load_format="gguf"))
