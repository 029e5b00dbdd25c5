"""Kernels that are compiled while weights are read, for a GPU that is not there; test_compiling.py runs this file in a
process without Triton's interpreter.

    python -m pytest tests/engine/compiled.py
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine import EngineConfig, compiling
from engine.attention import AttentionMeta, KVCache, paged_gpu
from engine.attention.paged_gpu import PagedGPU
from engine.compiling import jobs
from engine.kernels import launching
from engine.kernels.launching import META, Compiling
from engine.kernels.library import Choice
from engine.models import Forward
from engine.models.decoder import Decoder
from engine.models.families.family import BEFORE
from engine.models.gpu import delta as gpu_delta
from engine.models.gpu import executor as on_gpu
from engine.models.gpu import invariance, skinny, weight_trial
from engine.models.gpu import mamba2 as gpu_mamba2
from engine.models.gpu import short_conv as gpu_short_conv
from engine.models.gpu.coded import CodedRows
from engine.models.gpu.executor import OnGPU
from engine.models.gpu.form import ROUNDED, Form
from engine.models.gpu.gates import gate_constants
from engine.models.gpu.skinny import CANDIDATES, UNIFORM, Choices, Tiles, candidates
from engine.models.layers import InFile, Linear
from engine.models.mixers.mixer import gpu_jobs
from engine.models.mixers.states import ConvShape, LinearShape, Mamba2Shape, Segments
from engine.models.spec import ModelSpec, read_spec
from engine.runner.triton_logits import FIELDS, TritonLogits

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
WIDE_ROUTERS = "solar_open"  # a model with routers in float32
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    WIDE_ROUTERS: {
        "architectures": ["SolarOpenForCausalLM"],
        "model_type": "solar_open",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 2},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 8},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window_pattern": 2},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
    },
    "gemma4_moe": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 32,
    },
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window_pattern": 2},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 48,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "n_shared_experts": 0,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "youtu": {
        "architectures": ["YoutuForCausalLM"],
        "model_type": "youtu",
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    },
    "nemotron_h": {  # a layer without an MLP, and MLPs and experts without gates
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": None,
        "hybrid_override_pattern": "**-*E",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 8,
        "attention_bias": True,
    },
}


class Driver:
    """What Triton asks before it compiles for a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Triton compiles for a GPU, and launches nothing."""
    triton.runtime.driver.set_active(Driver())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch, "mm", lambda x, weight, out_dtype: (x @ weight).to(out_dtype))  # which a CPU cannot
    for module in (on_gpu, compiling):
        monkeypatch.setattr(module, "limitation", lambda *_: None)


class Compiled:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: None


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The names of kernels as they are compiled, which takes no time."""
    launching._compiled.cache_clear()
    names: list[str] = []

    def compile(self: Any, key: Any, signature: Any, device: int, *_: Any) -> Any:
        names.append(self.fn.__name__)
        self.device_caches[device][0][key] = kernel = Compiled()
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", compile)

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *args, **options: kernel.warmup(*args, grid=grid, **options)

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    for name in ("is_dependent", "has_large_memory"):
        monkeypatch.setattr(paged_gpu, name, lambda device: True)
    monkeypatch.setattr(skinny, "has_large_memory", lambda device: True)
    monkeypatch.setattr(skinny, "shared_memory", lambda device: 227 << 10)
    return names


def spec_of(name: str, **settings: Any) -> tuple[ModelSpec, EngineConfig]:
    config = EngineConfig(model="m", dtype="bfloat16", **settings)
    spec = read_spec({**SHAPE, **MODELS[name]}, config)
    assert spec is not None
    if name == WIDE_ROUTERS:
        assert spec.decoder is not None and spec.decoder.experts is not None
        experts = replace(spec.decoder.experts, wide_router=True)
        spec = replace(spec, decoder=replace(spec.decoder, experts=experts))
    return spec, config


@torch.inference_mode()
def serve(spec: ModelSpec, choices: Choices | None, *, is_uniform: bool, form: Form | None = None) -> None:
    """Launch what an engine launches: chunks beside decodes, decodes alone, the head, and all that samples.

    `form`: of quantized weights of layers.
    """
    model = Decoder(spec, CPU, Choice(None), tied=True)
    for linear in [] if form is None else quantized_linears(model):
        rows = CodedRows(form, tuple(linear.weight.shape), lambda: (None, iter(())), 0)
        linear.pack(None, in_file=InFile([rows], None))
    linears = {model.head, *(linear for layer in model.layers for _, linear, *_ in layer.parts())}
    for linear in linears:
        linear.allocate()
    for linear in linears if is_uniform else ():
        linear.unify(UNIFORM[0], spec.dtype)
    if is_uniform:
        choices = invariance.choices(spec)
    model.head._is_wide = is_uniform  # as on a GPU
    routers = [layer.experts.router for layer in model.layers if layer.experts is not None]
    for router in routers:
        router._is_wide = router.weight.dtype != torch.float32 and (is_uniform or router.bias is None)
    for norm in (model.norm, *(() if model.inputs is None else (model.inputs.norm,))):
        norm.use(partial(on_gpu.add_norm, added=None, norm=norm))
    backend = PagedGPU(invariant=is_uniform)
    cache = KVCache.allocate(
        backend, spec.layers, num_blocks=40, block_size=16, dtype=torch.bfloat16, device=CPU, sinks=model.sinks
    )
    executor = OnGPU(spec, model.embedding, model.layers, model.rotaries, model.inputs, choices=choices)
    longer = [[(list(range(40)), 0, count)] for count in (40, 120, 250, 500, 600) if is_uniform]  # for all tiles
    few = [[([1], 0, 9), ([2], 5, 1)], [([1], 9, 1)], [([1], 9, 1), ([3], 0, 1)], [(list(range(5)), 0, 70)]]
    for rows in (*few, *longer):
        positions = torch.cat([torch.arange(first, first + count) for _, first, count in rows])
        plan = cache.plan(AttentionMeta.of(rows, 16))
        hidden = executor.run(Forward(positions % spec.vocab_size, positions, plan, cache, positions))
        if is_uniform:
            model.project(hidden)
    sampling, x = TritonLogits(spec.vocab_size, CPU), torch.zeros(3, spec.vocab_size)
    sampling.best(x)
    for has_k, has_p in ((False, False), (True, True)):
        fields = torch.zeros(3 * FIELDS.itemsize // 8, dtype=torch.int64)
        sampling.draw(x, fields, has_k=has_k, has_p=has_p)
    sampling.distribution(x, 2)


def quantized_linears(model: Decoder) -> set[Linear]:
    routers = {layer.experts.router for layer in model.layers if layer.experts is not None}
    return {linear for layer in model.layers for _, linear, *_ in layer.parts()} - routers


@pytest.mark.parametrize("is_uniform", [False, True])
def test_jobs_do_not_make_torch_import_its_compiler(compiled, is_uniform):
    """As arithmetic with tensors on META does: the import takes over a second, beside all that compiles."""
    assert "sympy" not in sys.modules  # which it imports; this is the first test of the file
    # Without those of which torch multiplies by the weights of experts that are always used
    for name in MODELS.keys() - {"glm4_moe", "nemotron_h", WIDE_ROUTERS}:
        spec, config = spec_of(name, batch_invariant=is_uniform)
        for job in itertools.chain(*jobs(spec, config, CPU).values()):
            job()
    assert compiled and "sympy" not in sys.modules


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "mode",
    [
        "torch's products",
        "products of few rows",
        "other products of few rows",
        "batch-invariant",
        "batch-invariant, with sums in parts",
    ],
)
def test_what_the_jobs_compile_is_what_an_engine_launches(name, mode, compiled, monkeypatch):
    for kernel in triton_kernels():
        kernel.device_caches.clear()
    is_uniform = mode.startswith("batch-invariant")
    if mode.endswith("in parts"):  # as those of larger models
        monkeypatch.setattr(skinny, "QUARTERED", (64, 64))
        monkeypatch.setattr(skinny, "HALVED", (256, 64))
    spec, config = spec_of(name, batch_invariant=is_uniform)
    begun = jobs(spec, config, torch.device("cuda"))
    for members in begun.values():
        for job in members:
            launching._run(job, CPU)
    rotation = "rotate" if spec.decoder.shapes[0].latent is not None else "rotate_store"
    assert {"attend", rotation, "add_norm", "weigh", "pick", "collect"} <= set(compiled)
    compiled.clear()
    place = 0 if mode == "products of few rows" else -1
    tiles = {rows: Tiles(*(candidates(part, rows, META)[place] for part in Tiles._fields)) for rows in CANDIDATES}
    has_few = mode.endswith("products of few rows") and spec.decoder.norms == BEFORE  # see on_gpu.choose
    serve(spec, tiles if has_few else None, is_uniform=is_uniform)
    assert compiled == []


def test_the_kernels_of_quantized_weights_are_compiled_before_they_are_tried(compiled):
    for kernel in triton_kernels():
        kernel.device_caches.clear()
    dtype = torch.bfloat16
    shapes = [
        (ROUNDED[4], 96, 64),
        (ROUNDED[4], 96, 1024),
        (ROUNDED[4], 40, 64),
        (ROUNDED[8], 512, 64),
        (Form(8, 32, has_zeros=True), 64, 96),
    ]
    for job in weight_trial.jobs(shapes, dtype, head=512):
        launching._run(job, CPU)
    assert set(compiled) == {"multiply", "multiply_quantized", "dequantize"}
    compiled.clear()
    for form, rows, columns in shapes:
        weight_trial._error(form, rows, columns, dtype, CPU, wide=rows == 512)
    assert compiled == []


@pytest.mark.parametrize("is_uniform", [False, True])
@pytest.mark.parametrize(
    "name, form",
    [
        ("qwen3_moe", ROUNDED[4]),
        ("glm4_moe", Form(8, is_float=True)),
        ("youtu", ROUNDED[8]),
        ("nemotron_h", ROUNDED[4]),
        ("gpt_oss", Form(8, 32, has_zeros=True, scale=torch.float16)),
    ],
)
def test_the_kernels_of_quantized_models_are_compiled_before_they_are_launched(name, form, is_uniform, compiled):
    for kernel in triton_kernels():
        kernel.device_caches.clear()
    spec, config = spec_of(name, batch_invariant=is_uniform)
    model = Decoder(spec, META, Choice(None), tied=True)
    shapes = [(form, *linear.weight.shape) for linear in quantized_linears(model)]
    spec = replace(spec, coded=tuple(shapes), on_gpu=True)
    tried = weight_trial.jobs(shapes, torch.bfloat16, head=spec.vocab_size)
    begun = jobs(spec, config, torch.device("cuda"))
    for job in (*tried, *itertools.chain(*begun.values())):
        launching._run(job, CPU)
    compiled.clear()
    serve(spec, None, is_uniform=is_uniform, form=form)
    assert compiled == []


@pytest.mark.parametrize(
    "shape, compute, names",
    [
        (LinearShape(2, 4, 32, 16, 4), gpu_delta.gated_delta, ["convolve", "recur", "finish"]),
        (ConvShape(48, 3, has_bias=True), gpu_short_conv.gated_conv, ["convolve_gated", "keep_windows"]),
        (
            Mamba2Shape(1, 4, 32, 16, 4, has_bias=False, has_conv_bias=True, limits=(0.0, math.inf)),
            gpu_mamba2.mamba2,
            ["convolve_steps", "scan", "finish_groups"],
        ),
    ],
    ids=["linear attention", "short convolutions", "Mamba2"],
)
def test_the_kernels_of_layers_with_states_are_compiled_once_for_any_step(shape, compute, names, compiled):
    for kernel in triton_kernels():
        kernel.device_caches.clear()
    dtype = torch.bfloat16
    for job in gpu_jobs(shape, dtype):
        launching._run(job, CPU)
    assert compiled == names
    compiled.clear()
    for count in (1, 2, 16, 33):
        args = sys.modules[compute.__module__]._tensors(shape, dtype, CPU, 16 * count, is_random=False)
        segments = Segments.of([[(16, -1, 0)]] * count)
        compute(*args, segments)
        # Parts of a step's inputs are not aligned.
        parts = [torch.empty(count + 5, dtype=torch.int32)[first : first + count + 1] for first in range(1, 5)]
        unaligned = dict(zip(("row_start", "begin", "source", "target"), parts, strict=True))
        compute(*args, replace(segments, **unaligned))
    assert compiled == []


def test_a_kernel_is_looked_up_once_for_what_it_is_compiled_for(monkeypatch, compiled):
    """A launch finds by itself what Triton has compiled, and asks Triton whenever Triton might compile anew."""
    from engine.kernels.gpu import layers as kernels

    asked, constants = [], {"INNER": 64, "TILE": 64, **gate_constants("silu", None)}
    look_up = JITFunction.__getitem__

    def recorded(kernel: Any, grid: Any) -> Any:
        asked.append(grid)
        return look_up(kernel, grid)

    monkeypatch.setattr(JITFunction, "__getitem__", recorded)
    memory = torch.zeros(4096, dtype=torch.bfloat16)

    def gate(x: torch.Tensor, **options: Any) -> int:
        launching.launch(kernels.gate, (2, 1), x, memory, DEPENDENT=False, num_warps=1, **{**constants, **options})
        found = len(asked)
        asked.clear()
        return found

    assert [gate(memory), gate(memory), gate(memory[8:])] == [1, 0, 0]
    assert [gate(memory[1:]), gate(memory[3:])] == [1, 0], "another alignment"
    assert [gate(memory.float()), gate(memory.float())] == [1, 0], "another type"
    assert [gate(memory, INNER=128), gate(memory, INNER=128), gate(memory)] == [1, 0, 0], "another constant"

    def arrange(pairs: int) -> int:
        from engine.kernels.gpu import experts

        ints = torch.zeros(64, dtype=torch.int32)
        traits = {"EXPERTS": 4, "EXPERTS_P": 8, "TOKENS": 16, "TILE": 16, "DEPENDENT": False, "num_warps": 1}
        launching.launch(experts.arrange, (4,), ints, ints, ints, pairs, pairs, **traits)
        found = len(asked)
        asked.clear()
        return found

    assert [arrange(7), arrange(9)] == [1, 0]
    assert [arrange(1), arrange(16), arrange(32), arrange(1 << 40)] == [1, 1, 0, 1], "1, 16 and large ones are others"


def triton_kernels() -> list[Any]:
    names = (
        "attention", "delta", "experts", "heads", "latents", "layers", "logits", "mamba2", "matmul", "short_conv",
        "shortlist", "skinny", "storing",
    )  # fmt: skip
    modules = [launching.gpu_kernels(name) for name in names]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


def test_jobs_run_for_a_device_without_an_index(monkeypatch):
    """Which `cuda` is, and which torch.cuda.set_device refuses."""
    used, ran = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: used.append(int(index)))
    launching._run(lambda: ran.append(True), torch.device("cuda"))
    assert (used, ran) == ([0], [True])


def test_the_function_that_launches_a_kernel_is_compiled_with_it(monkeypatch):
    from engine.kernels.gpu import layers as kernels

    kernels.gate.device_caches.clear()
    made = []
    monkeypatch.setattr(Driver, "launcher_cls", lambda _, src, metadata: made.append(metadata.name), raising=False)
    on_gpu.gated(torch.empty(2, 64, dtype=torch.bfloat16, device=META), "silu")
    assert made == ["gate"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fusion_does_not_depend_on_the_default_of_triton(device):
    """Products and sums of a kernel are fused unless its launch says otherwise, whatever version compiles it."""
    asked = []

    class Kernel:
        arg_names = ("x",)

        def warmup(self, *_: Any, **options: Any) -> None:
            asked.append(options["enable_fp_fusion"])

        def __getitem__(self, grid: Any) -> Any:
            return self.warmup

    kernel, x = Kernel(), torch.empty(1, device=device)
    launching.launch(kernel, (1,), x)
    launching.launch(kernel, (1,), x, enable_fp_fusion=False)
    launching.launch(kernel, (1,), x, constants={"enable_fp_fusion": False})
    assert asked == [True, False, False]


def test_threads_that_compile_let_triton_hash_its_files_once(monkeypatch):
    from triton.runtime import cache

    hashed = []

    @functools.cache  # as Triton's own function has it
    def triton_key() -> str:
        hashed.append(True)
        time.sleep(0.05)  # in which the other threads would begin to hash
        return ""

    monkeypatch.setattr(cache, "triton_key", triton_key)
    begun = Compiling({"jobs": [lambda: None] * 8}, CPU)
    begun.wait("jobs")
    assert hashed == [True]


def test_a_job_that_fails_harms_no_other_and_kernels_are_compiled_in_threads():
    from engine.kernels.gpu import layers as kernels

    kernels.gate.device_caches.clear()
    x = torch.empty(2, 64, dtype=torch.bfloat16, device=META)
    begun = Compiling({"broken": [lambda: 1 / 0], "layers": [lambda: on_gpu.gated(x, "silu")]}, CPU)
    begun.wait("broken")
    begun.wait("layers")
    ((kernel,),) = [cache[0].values() for cache in kernels.gate.device_caches.values()]
    assert "sm_90" in kernel.asm["ptx"] and kernel.asm["cubin"]
