"""The oracle's table on a CUDA device: the same code, the same tokens; and our kernels there. `make test-gpu`."""

import math
import pathlib
import random
import sys

import pytest
import torch

from engine import EngineConfig
from engine.attention import AttentionLayer, AttentionMeta
from engine.attention.paged_gpu import FP8_CAPABILITY, MAX_ERROR, PagedGPU
from engine.attention.reference import Reference
from engine.build import build
from engine.graph_sizes import sizes
from engine.models.gpu import delta as gpu_delta
from engine.models.gpu import mamba2 as gpu_mamba2
from engine.models.gpu import short_conv as gpu_short_conv
from engine.models.gpu.executor import OnGPU
from engine.models.mixers.states import ConvShape, LinearShape, Mamba2Shape, Segments
from engine.runner.graphs import Graphs
from engine.runner.logits import TorchLogits
from engine.runner.triton_logits import TritonLogits
from tests import oracle
from tests.engine.test_exact import serve
from tests.engine.test_logits import cases
from tests.models import FLOAT32_ONLY, MODELS, NATIVE, make

NUM_BLOCKS = 2048  # so that several tests can run at the same time
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["stories260k", "babyllama-char-940k"])
def test_trained_models_give_their_references(name, data, monkeypatch):
    monkeypatch.setenv("PEQUOD_ORACLE_DEVICE", "cuda")
    folder = data / "models" / name
    cases = oracle.referenced(folder)
    assert oracle.check(folder, "float32", cases) == dict.fromkeys(oracle.SITUATIONS, len(cases))


@pytest.mark.parametrize("name", list(MODELS))
def test_random_models_give_the_tokens_of_transformers(name, tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setenv("PEQUOD_ORACLE_DEVICE", "cuda")
    dtype = "float32" if name in FLOAT32_ONLY else "float64"
    cases = oracle.generated(name, tmp_path / name, dtype, seed=list(MODELS).index(name) + 1)
    found = oracle.check(tmp_path / name, dtype, cases, oracle.MAX_LEN.get(name))
    assert found == dict.fromkeys(oracle.SITUATIONS, len(cases))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NATIVE)
def test_our_kernels_compute_native_models(name, dtype, kv_dtype, tmp_path: pathlib.Path):
    """Each kernel is compared with torch when a model is loaded."""
    if kv_dtype == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU does not convert fp8")
    runner, info, _ = build(
        EngineConfig(
            model=str(make(name, tmp_path)),
            dtype=dtype,
            kv_dtype=kv_dtype,
            device="cuda",
            num_blocks=NUM_BLOCKS,
            max_batched_tokens=1024,
        )
    )
    assert (info.attention, info.sampling) == ("triton", "triton")
    assert info.product_note == ""
    assert [type(executor) for executor in runner.model.executors[:2]] == [Graphs, OnGPU]
    assert info.graphs == len(sizes(256, 1024).at_start) and not runner.graphs_note
    while runner.graphs.capture_next():
        pass
    assert runner.graphs.num_captured == len(sizes(256, 1024).all) and not runner.graphs_note


# Of attention to latents and of heads of 512 numbers, many of which share a KV head
SHARED_HEADS = {
    "GLM 4.7 Flash": AttentionLayer(20, 1, 576, 512, scale=576**-0.5, values_in_keys=True),
    "DeepSeek V3": AttentionLayer(128, 1, 576, 512, scale=576**-0.5, values_in_keys=True),
    "20 heads of 512": AttentionLayer(20, 1, 512, 512, scale=512**-0.5),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("held", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(SHARED_HEADS))
def test_our_attention_computes_many_large_heads_of_a_kv_head(name, dtype, held, invariant):
    """Chunks beside decodes, with contexts of several parts, as the reference does in float32."""
    if held == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU does not convert fp8")
    device, layer, block = torch.device("cuda"), SHARED_HEADS[name], 16
    cached = {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[held]
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randperm(3 * 50, generator=draw).tolist()
    ours, reference = PagedGPU(invariant=invariant), Reference()
    caches = [
        backend.allocate(layer, 3 * 50, block, held_as, device)
        for backend, held_as in ((ours, cached), (reference, torch.float32 if held == "auto" else cached))
    ]
    done = [0, 0, 0]
    for counts in ([300, 40, 700], [70, 1, 1], [1, 1, 1]):
        rows = [
            (blocks[50 * number : 50 * number + 50], first, count)
            for number, (first, count) in enumerate(zip(done, counts, strict=True))
        ]
        tokens, (heads, kv_heads) = sum(counts), (layer.num_heads, layer.num_kv_heads)
        sizes = (heads, layer.head_dim), (kv_heads, layer.head_dim), (kv_heads, layer.v_head_dim)
        q, k, v = (torch.randn(tokens, *size, generator=draw).to(device, dtype) for size in sizes)
        if layer.values_in_keys:
            v = k[..., : layer.v_head_dim]
        meta = AttentionMeta.of(rows, block, device)
        found = ours.attend(caches[0], q, k, v, ours.plan(meta))
        want = reference.attend(caches[1], q.float(), k.float(), v.float(), reference.plan(meta))
        assert float((found.double() - want.double()).norm() / want.double().norm()) < MAX_ERROR[dtype]
        done = [first + count for first, count in zip(done, counts, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_moe", "youtu", "qwen3_5_text", "lfm2", "granitemoehybrid-mamba", "nemotron_h"]
)
async def test_a_batch_invariant_engine_gives_the_same_bits_alone_and_in_any_batch(tmp_path, dtype, quantization, name):
    if quantization != "none" and dtype == "float32":
        pytest.skip("the kernels for quantized weights do not compute in float32")
    settings = {"device": "cuda", "dtype": dtype, "quantization": quantization, "batch_invariant": True}
    base = {"model": str(make(name, tmp_path)), "max_seqs": 8, "num_blocks": NUM_BLOCKS, **settings}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, enforce_eager=True), together=False)
    assert exact
    for changes in ({"enforce_eager": True}, {}, {"max_batched_tokens": 9}, {"num_blocks": 14}):
        found, _, _ = await serve(EngineConfig(**{**base, **changes}), together=True)
        assert found == alone


LINEAR = {
    "Qwen3.5 9B": LinearShape(16, 32, 128, 128, 4),
    "small": LinearShape(2, 4, 32, 16, 4),
    "tiled": LinearShape(2, 4, 32, 16, 4, is_tiled=True),
    "no powers of two": LinearShape(2, 4, 48, 80, 3),
    "largest": LinearShape(2, 2, 256, 256, 4),
    "heads of 8 and 12": LinearShape(2, 4, 8, 12, 4),
    "heads of 1 and 33": LinearShape(2, 2, 1, 33, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(LINEAR))
def test_our_kernels_compute_linear_attention(name, dtype):
    """A step is compared with torch, and a sequence has the same bits however it is divided, beside any others."""
    device, shape = torch.device("cuda"), LINEAR[name]
    assert gpu_delta.objection(shape, dtype, device) is None
    tokens = 200
    layer, qkvz, gates, whole = gpu_delta._tensors(shape, dtype, device, tokens, is_random=True)
    divided = type(whole)(*(each.clone() for each in whole))

    def read(states, rows, first: int, end: int) -> torch.Tensor:
        return gpu_delta.gated_delta(layer, qkvz[first:end], gates[first:end], states, Segments.of(rows, device))

    want = read(whole, [[(tokens, -1, 0)]], 0, tokens)
    found = [
        read(divided, [[(64, -1, 1), (33, 1, 0)], [(50, 3, 3)]], 0, 147)[:97],
        read(divided, [[(102, 0, 2), (0, 2, 0)]], 97, 199),
        read(divided, [[(1, 0, 0)]], 199, 200),
    ]
    assert torch.equal(torch.cat(found), want)
    assert all(torch.equal(ours[0], one[0]) for ours, one in zip(divided, whole, strict=True))


def mamba(*sizes: int, bias: bool = True, limits: tuple[float, float] = (0.0, math.inf)) -> Mamba2Shape:
    return Mamba2Shape(*sizes, has_bias=False, has_conv_bias=bias, limits=limits)


OTHERS = {
    "LFM2 1.2B": ConvShape(2048, 3, has_bias=False),
    "small convolution": ConvShape(48, 4, has_bias=True),
    "convolution without window": ConvShape(300, 1, has_bias=True),
    "Granite 4.0 H Micro": mamba(1, 64, 128, 64, 4),
    "Granite 4.0 H Small": mamba(1, 128, 128, 64, 4),
    "small Mamba2": mamba(2, 4, 32, 16, 4, limits=(0.01, 1.0)),
    "Mamba2 of no powers of two": mamba(3, 6, 9, 33, 3, bias=False),
    "largest Mamba2": mamba(1, 64, 256, 256, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(OTHERS))
def test_our_kernels_compute_short_convolutions_and_mamba2(name, dtype):
    """A step is compared with torch, and a sequence has the same bits however it is divided, beside any others."""
    device, shape = torch.device("cuda"), OTHERS[name]
    compute = gpu_mamba2.mamba2 if isinstance(shape, Mamba2Shape) else gpu_short_conv.gated_conv
    module = sys.modules[compute.__module__]
    assert module.objection(shape, dtype, device) is None
    tokens = 200
    layer, projected, whole = module._tensors(shape, dtype, device, tokens, is_random=True)
    divided = type(whole)(*(each.clone() for each in whole))

    def read(states, rows, first: int, end: int) -> torch.Tensor:
        return compute(layer, projected[first:end], states, Segments.of(rows, device))

    want = read(whole, [[(tokens, -1, 0)]], 0, tokens)
    found = [
        read(divided, [[(64, -1, 1), (33, 1, 0)], [(50, 3, 3)]], 0, 147)[:97],
        read(divided, [[(102, 0, 2), (0, 2, 0)]], 97, 199),
        read(divided, [[(1, 0, 0)]], 199, 200),
    ]
    assert torch.equal(torch.cat(found), want)
    assert all(torch.equal(ours[0], one[0]) for ours, one in zip(divided, whole, strict=True))


@pytest.mark.parametrize("size", [1, 257, 5000, 151_936])
def test_our_kernels_sample_the_tokens_of_the_cpu(size):
    """Also of many logits that are equal, and of steps that mix parameters."""
    device, rng = torch.device("cuda"), random.Random(size)
    torch.manual_seed(size)
    for rows in (1, 40, 200):
        x, params = cases(rng, size, rows)
        want = TorchLogits(size, torch.device("cpu")).sample(x, params)
        for _ in range(5):  # a race moves the result
            found = TritonLogits(size, device).sample(x.to(device), params)
            assert all(torch.equal(mine.cpu(), wanted) for mine, wanted in zip(found, want, strict=True))
        count, ids = min(size, 20), torch.arange(rows) % size
        columns = TritonLogits(size, device).distribution(x.to(device), count).columns(ids.to(device)).cpu()
        exact = TorchLogits(size, torch.device("cpu")).distribution(x.double(), count).columns(ids)
        torch.testing.assert_close(columns[:, : 1 + count], exact[:, : 1 + count], rtol=1e-6, atol=1e-6)
        order = (-x).sort(dim=1, stable=True).indices  # in float64 some log-probabilities are equal
        assert torch.equal(columns[:, 1 + count :], order[:, :count].double())
