"""Steps that are replayed from graphs, in Triton's interpreter with a recorder instead of CUDA; test_graphs.py runs
this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_graphs.py
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine import EngineConfig, LocalEngine, Pooling, SamplingParams, memory
from engine.attention import gpu_plan, paged_gpu
from engine.attention.paged_gpu import PagedGPU
from engine.batch import Batch, Entered, Row
from engine.build import Built, build, describe, load
from engine.graph_sizes import Bucket, sizes
from engine.kernels.gpu import attention as attention_kernels
from engine.kernels.gpu import delta as delta_kernels
from engine.kernels.gpu import experts as expert_kernels
from engine.kernels.gpu import heads as head_kernels
from engine.kernels.gpu import latents as latent_kernels
from engine.kernels.gpu import layers as layer_kernels
from engine.kernels.gpu import mamba2 as mamba2_kernels
from engine.kernels.gpu import short_conv as conv_kernels
from engine.kernels.gpu import skinny as skinny_kernels
from engine.kernels.gpu import storing as storing_kernels
from engine.models import rope
from engine.models.checkpoint import dummy
from engine.models.executor import Eager
from engine.models.gpu import delta as gpu_delta
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import mamba2 as gpu_mamba2
from engine.models.gpu import short_conv as gpu_short_conv
from engine.models.gpu.experts import RoutedExperts
from engine.models.gpu.routing import Order
from engine.models.mixers.states import Segments
from engine.runner import Runner, Step, buffers, cuda_graphs, logits_choice, state_inputs
from engine.runner.state_inputs import StateInputs
from engine.scheduler import Scheduler
from engine.types import ConfigError, EngineRequest
from tests.engine.interpreter import prepare
from tests.engine.recorder import Freed, Recorder, Tape
from tests.engine.test_attention import spoil

prepare()
pytestmark = pytest.mark.usefixtures("recorder")


@pytest.fixture
def recorder(monkeypatch) -> Iterator[Recorder]:
    """What captures steps on a CPU instead of CUDA."""
    recorder = Recorder()
    monkeypatch.setattr(cuda_graphs, "device_for", lambda config: None if config.enforce_eager else recorder)
    for module in (paged_gpu, on_gpu):  # trials of the kernels, which other tests compare
        monkeypatch.setattr(module, "trial", lambda *_: None)
    monkeypatch.setattr(logits_choice, "choose", lambda *_: logits_choice.Choice("torch", None))  # ours are slower here
    monkeypatch.setattr(dummy, "STD", 0.4)  # so that tokens differ
    monkeypatch.setattr(rope, "TABLE", 4)  # so that the table of angles grows
    monkeypatch.setattr(gpu_plan, "SPLIT", 32)  # so that some decodes have two parts
    of_states = delta_kernels, conv_kernels, mamba2_kernels
    modules = attention_kernels, storing_kernels, *of_states, expert_kernels, layer_kernels, skinny_kernels
    modules += head_kernels, latent_kernels
    with recorder.kernels(*modules):
        yield recorder


def steps(tapes: list[Tape]) -> int:
    """Return how many of these captures compute layers."""
    return sum("attend" in tape.names for tape in tapes)


# Small, because the interpreter takes a millisecond for each program of a kernel.
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 8,
        "num_hidden_layers": 2,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    },
    "cohere2": {  # two groups of layers; the second one has no rotary embedding
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "sliding_window_pattern": 2,
        "sliding_window": 8,
        "num_hidden_layers": 2,
    },
    "gemma4": {  # layers of two sizes, of which the last one has the keys and values of the one before
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 8,
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "intermediate_size": 16,
        "attention_bias": True,
    },
    "youtu": {  # latent attention
        "architectures": ["YoutuForCausalLM"],
        "model_type": "youtu",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    },
    "deepseek_v3-groups": {  # experts in groups, and others of all tokens
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
    },
    "qwen3_5": {  # a layer that keeps states, and one with gated attention
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 2,
        "full_attn_idxs": [1],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 3,
        "mamba_n_groups": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {  # layers without an MLP, and with one that has no gate
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "MM-*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
}


def config_of(name: str, folder: Path, **settings: Any) -> EngineConfig:
    """Return the config of a model with random weights in this folder."""
    (folder / "config.json").write_text(json.dumps({**SHAPE, **MODELS[name]}))
    sizes = {"max_len": 64, "max_seqs": 5, "max_batched_tokens": 24, "num_blocks": 40, "block_size": 4}
    kinds = {"device": "cpu", "dtype": "float32", "cpu_isa": "torch", "attention": "triton", "load_format": "dummy"}
    return EngineConfig(model=str(folder), **{**sizes, **kinds, **settings})


def requests(seed: int) -> list[EngineRequest]:
    rng, found = random.Random(seed), []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.0, "presence_penalty": 1.0, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 2},
    ]
    for number in range(7):
        prompt = tuple(rng.randrange(96) for _ in range(rng.choice([1, 2, 7, 16, 30])))
        params = SamplingParams(max_tokens=rng.randint(1, 7), seed=number, **kinds[number % len(kinds)])
        found.append(EngineRequest(id=number + 1, prompt_ids=prompt, params=params))
    return found


def stored(batch: Batch, tables: dict[int, list[int]], block_size: int, num_groups: int) -> set[int]:
    """Return the slots of a batch's tokens; `tables` has the blocks of each sequence, one for each group of layers."""
    slots = set()
    for seq_id in batch.left:
        del tables[seq_id]
    for entered in batch.entered:
        tables[entered.seq_id] = []
    for row in batch.rows:
        blocks = tables[row.seq_id]
        blocks += row.new_block_ids
        for position in range(row.start, row.start + len(row.token_ids)):
            first = position // block_size * num_groups
            slots |= {block * block_size + position % block_size for block in blocks[first : first + num_groups]}
    return slots


class Trace:
    """An engine's loop on one thread, which checks what each step stores."""

    def __init__(self, built: Built, *, is_ahead: bool, capture_at: int | None = None) -> None:
        self.runner, self.is_ahead, self.capture_at = built.runner, is_ahead, capture_at
        info, has_states = built.info, bool(built.runner.model.spec.mixers)
        self.scheduler = Scheduler(
            built.config, info.num_blocks, info.vocab_size, groups=info.groups, has_states=has_states
        )
        self.sizes: list[Bucket] = []  # of the steps
        self.caches = [layer.tensor for layer in self.runner.cache.layers]
        with torch.inference_mode():
            for cache in self.caches:
                spoil(cache)

    def responses(self, seed: int, given: list[EngineRequest] | None = None) -> dict[int, list[Any]]:
        """Return the deltas of requests that arrive over time."""
        waiting, found = [*(given or requests(seed))], dict[int, list[Any]]()
        tables: dict[int, list[int]] = {}
        flight: tuple[Batch, Step] | None = None
        for number in range(1000):
            if waiting and number % 2 == 0:
                assert self.scheduler.add(waiting.pop(0)) is None
            batch = self.scheduler.schedule()
            if batch is None and flight is None and not waiting:
                return found
            launched = None
            if batch is not None:
                launched = batch, self.launched(batch, self.stored(batch, tables))
            due, flight = (flight, launched) if self.is_ahead else (launched, None)
            if due is not None:
                for delta in self.scheduler.update(due[0], due[1].result()):
                    found.setdefault(delta.id, []).append(delta)
        raise AssertionError("the requests did not end")

    def stored(self, batch: Batch, tables: dict[int, list[int]]) -> set[int]:
        return stored(batch, tables, self.runner.config.block_size, self.runner.cache.num_groups)

    def launched(self, batch: Batch, slots: set[int]) -> Step:
        counts = [len(row.token_ids) for row in batch.rows]
        if counts:
            self.sizes.append(Bucket(sum(counts), max(counts) > 1))
        if len(self.sizes) == self.capture_at:
            assert self.runner.graphs is not None
            while self.runner.graphs.capture_next():
                pass
        before = [cache.clone() for cache in self.caches]
        step = self.runner.launch(batch).sample()
        for old, cache, layer in zip(before, self.caches, self.runner.cache.layers, strict=True):
            is_new = ~old.eq(cache).logical_or(old.isnan() & cache.isnan())  # [blocks, kv_heads, numbers]
            dims = (layer.layer.head_dim, layer.layer.stored_v_dim)
            parts = is_new.any(1).split([layer.block_size * dim for dim in dims if dim], 1)
            by_slot = torch.stack([part.unflatten(1, (layer.block_size, -1)).any(2) for part in parts]).any(0)
            assert set(by_slot.flatten().nonzero().flatten().tolist()) <= slots
        return step


def tokens_and_logprobs(deltas: list[Any]) -> tuple[list[int], list[float]]:
    tokens = [token for delta in deltas for token in delta.token_ids]
    entries = [entry for delta in deltas for entry in (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))]
    return tokens, [number for entry in entries for number in (entry.logprob, *entry.top_logprobs)]


@pytest.mark.parametrize(
    "name, is_ahead",
    [
        ("ministral3", False),
        ("mistral", True),
        ("olmo2", True),
        ("cohere2", True),
        ("gemma4", True),
        ("gpt_oss", True),
        ("youtu", True),
        ("deepseek_v3-groups", True),
        ("qwen3_5", True),
        ("lfm2", False),
        ("granitemoehybrid", True),
        ("nemotron_h", True),
    ],
)
def test_replayed_steps_give_the_tokens_of_launched_ones(name, is_ahead, tmp_path, recorder, monkeypatch):
    """With chunks of prompts beside decodes, and with graphs that are captured between steps. The seed is one of which
    few steps have many sizes."""
    if name in ("ministral3", "cohere2"):
        monkeypatch.setattr(buffers, "SMALL", 16)  # the inputs of larger steps lie elsewhere
    config = config_of(name, tmp_path, async_scheduling=is_ahead)
    eager = Trace(build(replace(config, enforce_eager=True)), is_ahead=is_ahead)
    wanted = eager.responses(seed=4, given=requests(4)[:5])
    assert not recorder.replayed and eager.runner.graphs is None
    trace = Trace(build(config), is_ahead=is_ahead, capture_at=6)
    found = trace.responses(seed=4, given=requests(4)[:5])
    assert trace.sizes == eager.sizes and {size.has_chunks for size in trace.sizes} == {False, True}
    assert len({size.tokens for size in trace.sizes}) > 6
    assert steps(recorder.replayed) == len(trace.sizes) + steps(recorder.tapes), (
        "each graph is replayed once when it is captured"
    )
    assert found.keys() == wanted.keys()
    for number, deltas in wanted.items():
        tokens, logprobs = tokens_and_logprobs(deltas)
        own_tokens, own_logprobs = tokens_and_logprobs(found[number])
        assert own_tokens == tokens
        assert own_logprobs == pytest.approx(logprobs, abs=1e-4)


WITH_STATES = ["qwen3_5", "lfm2", "granitemoehybrid"]


def related(seed: int) -> list[EngineRequest]:
    """Return requests whose prompts begin alike, so that sequences continue from snapshots of others."""
    rng, found = random.Random(seed), []
    shared = tuple(rng.randrange(96) for _ in range(24))
    for number in range(7):
        own = tuple(rng.randrange(96) for _ in range(rng.choice([1, 2, 7, 12])))
        params = SamplingParams(max_tokens=rng.randint(3, 16), seed=number, temperature=0.0, logprobs=1)
        prompt = shared[: rng.choice([8, 13, 20, 24])] + own
        found.append(EngineRequest(id=number + 1, prompt_ids=prompt, params=params))
    return found


@pytest.mark.parametrize(
    "name, sizes",  # segments per row, sequences, blocks
    [*((name, (4, 5, 18)) for name in WITH_STATES), ("lfm2", (1, 2, 40))],
)
def test_replayed_steps_continue_from_snapshots_and_after_preemptions(name, sizes, tmp_path, recorder, monkeypatch):
    """With little memory for segments some steps do not fit: they are launched."""
    per_row, max_seqs, num_blocks = sizes
    monkeypatch.setattr(state_inputs, "SEGMENTS_PER_ROW", per_row)
    restored, own, segments_of, of = [0], [0], StateInputs._segments, Segments.of

    def counted(self: StateInputs, row: Row, slot: int) -> list[tuple[int, int, int]]:
        restored[0] += row.snapshots is not None and row.snapshots[0] >= 0
        return segments_of(self, row, slot)

    def allocated(*args: Any) -> Segments:
        own[0] += 1
        return of(*args)

    config = config_of(name, tmp_path, async_scheduling=True, num_blocks=num_blocks, max_seqs=max_seqs)
    alone = replace(config, enforce_eager=True, prefix_caching=False, num_blocks=200)
    wanted = Trace(build(alone), is_ahead=True).responses(1, related(1))
    trace = Trace(build(config), is_ahead=True, capture_at=10)
    monkeypatch.setattr(StateInputs, "_segments", counted)
    monkeypatch.setattr(Segments, "of", allocated)
    found = trace.responses(1, related(1))
    assert restored[0] > 0 and len(recorder.replayed) > len(recorder.tapes)
    assert trace.scheduler.counters.preempted > 0 if per_row > 1 else own[0] > 0
    for number, deltas in wanted.items():
        tokens, logprobs = tokens_and_logprobs(deltas)
        own_tokens, own_logprobs = tokens_and_logprobs(found[number])
        assert own_tokens == tokens
        assert own_logprobs == pytest.approx(logprobs, abs=1e-4)


KERNELS = {
    "qwen3_5": (gpu_delta, "gated_delta", "linear attention token by token"),
    "lfm2": (gpu_short_conv, "gated_conv", "short convolutions"),
    "granitemoehybrid": (gpu_mamba2, "mamba2", "Mamba2 token by token"),
}


@pytest.mark.parametrize("name", WITH_STATES)
def test_layers_whose_kernels_fail_are_computed_by_torch_and_launched(name, tmp_path, recorder, monkeypatch):
    module, function, what = KERNELS[name]

    def broken(*_: Any) -> Tensor:
        raise RuntimeError("out of resource")

    wanted = Trace(build(config_of(name, tmp_path, enforce_eager=True)), is_ahead=False).responses(2, requests(2)[:4])
    monkeypatch.setattr(module, function, broken)
    config = config_of(name, tmp_path)
    built = build(config)
    note = f"torch computes {what}: the Triton kernels do not run on this device: RuntimeError: out of resource"
    assert built.info.product_note == note
    assert built.info.notes == ("there are no CUDA graphs: torch computes layers that keep states",)
    assert [type(each) for each in built.runner.model.executors] == [on_gpu.OnGPU, Eager]
    assert built.runner.graphs is None and not recorder.tapes
    found = Trace(built, is_ahead=False).responses(2, requests(2)[:4])
    assert {number: tokens_and_logprobs(deltas)[0] for number, deltas in found.items()} == {
        number: tokens_and_logprobs(deltas)[0] for number, deltas in wanted.items()
    }
    with pytest.raises(ConfigError, match=f"`batch_invariant` cannot be kept here, so leave it out: {note}"):
        build(replace(config, batch_invariant=True))


LENGTHS = [4, 17, 2, 32, 9]  # of sequences of which a step computes the last token


@torch.inference_mode()
def hidden(runner: Runner, lengths: list[int]) -> Tensor:
    """Return the hidden states of a step of decodes; what the sequences have stored before is random."""
    for layer in runner.cache.layers:
        layer.tensor.normal_(generator=torch.Generator().manual_seed(0))
    rows = []
    for number, length in enumerate(lengths):
        runner.inputs.enter(number)
        rows.append(Row(number, length - 1, [7 * number + 1], list(range(8 * number, 8 * number + 8)), 1))
    runner.inputs.append_blocks(rows)
    forward = runner.inputs.prepare(rows).forward
    found = next(each for each in runner.model.executors if each.takes(forward)).run(forward).clone()
    for number, _ in enumerate(lengths):
        runner.inputs.leave(number)
    return found


def test_rows_have_the_same_bits_whether_others_are_padding_or_not(tmp_path, recorder):
    """And if nothing is padded the bits are those of a step that is launched."""
    built, eager = (build(config_of("qwen3", tmp_path, enforce_eager=is_eager)) for is_eager in (False, True))
    for bucket, numbers in ((5, [5]), (4, [4, 3]), (2, [2]), (1, [1])):
        launched = hidden(eager.runner, LENGTHS[:bucket])
        for rows in numbers:
            replays = len(recorder.replayed)
            assert torch.equal(hidden(built.runner, LENGTHS[:rows]), launched[:rows])
            assert len(recorder.replayed) == replays + 1


def test_padding_reads_no_weights_of_experts(tmp_path, recorder, monkeypatch):
    """What attention returns for padding is whatever the memory has held before: it must choose no experts."""
    orders, arrange = [], RoutedExperts.arrange

    def arranged(self: RoutedExperts, chosen: Tensor) -> Order:
        orders.append((chosen, arrange(self, chosen)))
        return orders[-1][1]

    monkeypatch.setattr(RoutedExperts, "arrange", arranged)
    monkeypatch.setattr(recorder, "capture", lambda work: work)  # a replay computes again
    runner = build(config_of("gpt_oss", tmp_path)).runner
    orders.clear()
    hidden(runner, LENGTHS[:3])
    ((chosen, order),) = orders
    assert chosen.shape == (4, 2), "one token of the step is padding"
    assert set(order.owners.tolist()) - {-1} == set(chosen[:3].flatten().tolist())
    assert chosen[3].tolist() == [4, 4], "there are experts 0 to 3"


def test_embeddings_are_those_of_launched_steps(tmp_path, recorder):
    vectors = []
    for enforce_eager in (True, False):
        runner = build(config_of("llama", tmp_path, enforce_eager=enforce_eager)).runner
        params = SamplingParams(max_tokens=1, pooling=Pooling(kind="mean"))
        row = Row(1, 0, [4, 5, 6, 7, 8], [3, 1], 0, num_hidden=5, embeds=True)
        result = runner.launch(Batch(0, [row], [Entered(1, params, 5, [])])).sample().result()
        vectors.append(result.outcomes[0])
    assert len(recorder.replayed) == 1 + len(recorder.tapes)
    assert vectors[1].embedding == pytest.approx(vectors[0].embedding, abs=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [1, 3])
def test_a_capture_that_fails_ends_capturing_and_nothing_else(at, tmp_path, recorder, caplog):
    recorder.fails_at = at
    built = build(config_of("llama", tmp_path, async_scheduling=True))
    assert built.info.graphs == at - 1
    note = "other sizes of steps run without CUDA graphs: a step of 24 tokens could not be captured: OutOfMemoryError: "
    assert built.info.notes[-1].startswith(note if at == 1 else note.replace("24", "5"))
    assert built.info.notes[-1].endswith("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert caplog.messages == [built.info.notes[-1]]
    assert not built.runner.graphs.capture_next()  # type: ignore[union-attr]
    trace = Trace(built, is_ahead=True)
    before = steps(recorder.replayed)
    assert len(trace.responses(seed=2)) == 7
    assert 0 < steps(recorder.replayed) - before < len(trace.sizes) if at > 1 else not recorder.replayed


def test_capturing_ends_when_the_reserved_memory_is_taken(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(memory, "graph_reserve", lambda *_: memory.GraphReserve(allocated=100 << 20))
    recorder.bytes_per_graph = 40 << 20
    built = build(config_of("llama", tmp_path))
    assert built.info.graphs == 2
    assert built.info.notes == (
        "other sizes of steps run without CUDA graphs: 2 graphs take the 100 MiB that are reserved for them",
    )


@pytest.mark.parametrize(
    "attention, reason",
    [
        ("reference", "the attention backend needs the host in each layer"),
        ("triton", "torch computes the layers"),
    ],
)
def test_models_whose_steps_cannot_be_captured_have_a_note(attention, reason, tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(on_gpu, "trial", lambda *_: "a kernel failed")
    built = build(config_of("llama", tmp_path, attention=attention))
    assert built.runner.graphs is None and built.info.graphs == 0 and not recorder.tapes
    assert built.info.notes[-1] == f"there are no CUDA graphs: {reason}"


def test_a_capture_between_steps_attends_to_nothing(tmp_path, recorder, monkeypatch):
    """The last step's work names tokens that the captured step may not have."""
    runner = build(config_of("llama", tmp_path, max_seqs=25, max_batched_tokens=25)).runner
    graphs, launch, counts = runner.graphs, Tape.launch, []
    assert graphs is not None
    hidden(runner, LENGTHS)

    def counted(tape: Tape, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        if kernel.fn.__name__ == "attend":
            with _disable_current_modes():
                counts.append(int(args[4][0, 0]))
        launch(tape, kernel, grid, args, options)

    monkeypatch.setattr(Tape, "launch", counted)
    while graphs.capture_next():
        pass
    assert counts == [0] and not graphs.problem


def test_a_graph_whose_memory_was_replaced_is_not_replayed_unseen(tmp_path, recorder):
    """The recorder notices what would be a wrong result on a GPU."""
    runner = build(config_of("qwen3", tmp_path)).runner
    hidden(runner, LENGTHS[:2])
    backend = runner.cache.backend
    assert isinstance(backend, PagedGPU)
    backend._sums = backend._sums.clone()
    with pytest.raises(Freed, match="has been freed since the capture"):
        hidden(runner, LENGTHS[:2])


def test_a_step_whose_inputs_lie_elsewhere_is_launched(tmp_path, recorder):
    runner = build(config_of("qwen3", tmp_path)).runner
    graphs = runner.graphs
    assert graphs is not None
    runner.inputs.enter(1)
    runner.inputs.append_blocks([Row(1, 0, [5], [2], 1)])
    prepared = runner.inputs.prepare([Row(1, 0, [5], [], 1)])
    assert graphs.takes(prepared.forward)
    assert not graphs.takes(dataclasses.replace(prepared.forward, ids=prepared.forward.ids.clone()))
    other = dataclasses.replace(runner.cache)
    assert not graphs.takes(dataclasses.replace(prepared.forward, cache=other))


def test_a_step_that_the_captured_executor_declines_is_not_replayed(tmp_path, recorder, monkeypatch):
    runner = build(config_of("qwen3", tmp_path)).runner
    assert runner.graphs is not None
    runner.inputs.enter(1)
    runner.inputs.append_blocks([Row(1, 0, [5], [2], 1)])
    forward = runner.inputs.prepare([Row(1, 0, [5], [], 1)]).forward
    assert runner.graphs.takes(forward)
    monkeypatch.setattr(on_gpu.OnGPU, "takes", lambda self, forward: False)
    assert not runner.graphs.takes(forward)


def test_a_restarted_engine_captures_the_same_graphs(tmp_path, recorder):
    first = build(config_of("mistral", tmp_path))
    again = load(describe(first.config), again=True)
    assert again.config == first.config and again.info.graphs == first.info.graphs == 6
    assert hidden(again.runner, LENGTHS).equal(hidden(first.runner, LENGTHS))


async def test_an_idle_engine_captures_the_other_graphs(tmp_path, recorder):
    config = config_of("llama", tmp_path, max_batched_tokens=100)
    async with LocalEngine(config) as engine:
        at_start = engine.info.graphs
        while steps(recorder.tapes) < len(sizes(5, 100).all):
            await asyncio.sleep(0.05)
        assert at_start == len(sizes(5, 100).at_start) < steps(recorder.tapes)
        params = SamplingParams(max_tokens=3, temperature=0.0)
        request = EngineRequest(id=1, prompt_ids=(4, 5, 6), params=params)
        tokens = [token async for delta in engine.generate(request) for token in delta.token_ids]
        assert len(tokens) == 3 and len(recorder.replayed) == 2 * 3 + len(recorder.tapes), "and three heads"
