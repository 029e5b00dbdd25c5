"""The Triton kernels of multi-head latent attention in Triton's interpreter; test_paged_gpu.py runs this file.

    TRITON_INTERPRET=1 python -m pytest tests/engine/interpreted_latent.py

interpreted.py has attention itself, and interpreted_layers.py whole layers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionMeta
from engine.attention.paged_gpu import PagedGPU, Rotation
from engine.models.families.latent_shapes import LatentShape
from engine.models.gpu import heads as gpu_heads
from engine.models.gpu.heads import ANY, MANY, multiply
from engine.models.gpu.latent import GPULatent
from engine.models.mixers.latent_layer import ByTorch, LatentAttention
from engine.models.rope import Rope, Rotary
from tests.engine.interpreter import prepare
from tests.engine.test_attention import CPU, layer_of, spoil

prepare()


def apart(x: Tensor, before: int, after: int) -> Tensor:
    """Return the same heads between numbers of other ones, which are NaN and which nobody may read."""
    tokens, heads, width = x.shape
    room = torch.full((tokens, heads, before + width + after), math.nan, dtype=x.dtype)
    room[:, :, before : before + width] = x
    return room[:, :, before : before + width]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "sizes", [(1, 3, 24, 40), (3, 2, 64, 128), (70, 1, 33, 7), (0, 2, 16, 16), (5, 4, 512, 64)], ids=str
)
def test_each_head_is_multiplied_by_a_weight_of_its_own(sizes, dtype, tolerance):
    tokens, heads, size, width = sizes
    torch.manual_seed(width)
    x, weights = torch.randn(tokens, heads, width).to(dtype), torch.randn(heads, size, width).to(dtype)
    want = torch.einsum("hnk,thk->thn", weights.double(), x.double())
    room = torch.full((tokens, heads, size + 5), math.nan, dtype=dtype)
    found = multiply(apart(x, 3, 8), weights, room[..., 2 : size + 2])
    for each in (found, room[..., 2 : size + 2], multiply(x, weights)):
        assert (each.double() - want).abs().max() <= tolerance * width if tokens else each.shape == want.shape
    assert room[..., :2].isnan().all() and room[..., size + 2 :].isnan().all()


def test_many_tokens_have_larger_tiles_unless_each_must_be_as_it_is_alone(monkeypatch):
    """A row's bits are those that it has beside any others."""
    monkeypatch.setattr(gpu_heads, "MANY_TOKENS", 70)
    x, weights = torch.randn(80, 2, 96).bfloat16(), torch.randn(2, 40, 96).bfloat16()
    for tokens, uniform, tile in ((69, False, ANY), (70, False, MANY), (70, True, ANY)):
        assert gpu_heads.tile_of(x.dtype, tokens, uniform=uniform) == tile
    together = multiply(x, weights, uniform=True)
    for first, count in ((0, 1), (79, 1), (10, 3), (1, 79)):
        of = slice(first, first + count)
        assert torch.equal(multiply(x[of], weights, uniform=True), together[of])
    torch.testing.assert_close(multiply(x, weights), together)


def latent_of(shape: LatentShape, dtype: torch.dtype) -> LatentAttention:
    """Return a layer with random weights, as when they have been read."""
    layer = LatentAttention(shape, dtype, CPU, on_gpu=False)
    norms = [layer.norm.weight, *([] if layer.query_norm is None else [layer.query_norm.weight])]
    for each in (*layer._of_heads, *([] if layer.queries is None else [layer.queries])):
        each.weight.normal_(std=each.weight.shape[1] ** -0.5)
    for each in norms:
        each.uniform_(0.5, 1.5)
    layer.pack(None, None, {})
    assert isinstance(layer.absorb, ByTorch)
    return layer


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        LatentShape(heads=5, query_rank=0, rank=24, plain=12, rotated=8, value=20),
        LatentShape(heads=4, query_rank=20, rank=32, plain=16, rotated=8, value=12, in_two=True),
        LatentShape(heads=3, query_rank=0, rank=512, plain=16, rotated=64, value=16),
    ],
)
@pytest.mark.parametrize("turns", [False, True])
def test_tokens_attend_to_latents_as_in_torch(shape, is_interleaved, turns):
    """Chunks beside decodes, in a cache of which the rest is NaN. Scores are those of the heads' own keys and values,
    computed in float64 without a cache."""
    torch.manual_seed(shape.rank)
    latent, backend, length = latent_of(shape, torch.float32), PagedGPU(), 21
    sizes = {"group": shape.heads, "scale": (shape.plain + shape.rotated) ** -0.5}
    layer = layer_of(1, shape.key, shape.rank, values_in_keys=True, **sizes)
    cache = backend.allocate(layer, 8, 4, torch.float32, CPU)
    spoil(cache.tensor)
    rotary, blocks = Rotary(Rope(shape.rotated), 64, torch.float32, CPU), [5, 1, 7, 2, 0, 3]
    projected, found = torch.randn(length, sum(shape.rows)), []
    for first, last in ((0, 9), (9, 10), (10, length - 1), (length - 1, length)):
        plan = backend.plan(AttentionMeta.of([(blocks, first, last - first)], 4))
        rotation = Rotation(torch.arange(first, last), rotary.table(64), is_interleaved) if turns else None
        own = apart(projected[None, first:last], 0, 3)[0]
        found.append(GPULatent(latent, torch.float32).attend(own, rotation, backend, cache, plan))
    want = of_heads(latent, projected, rotary if turns else None, layer.scale, is_interleaved=is_interleaved)
    torch.testing.assert_close(torch.cat(found).double(), want, rtol=1e-4, atol=1e-5)


def of_heads(
    latent: LatentAttention, projected: Tensor, rotary: Rotary | None, scale: float, *, is_interleaved: bool
) -> Tensor:
    """Return what the heads of one sequence attend to, by the keys and values of each."""
    shape = latent.shape
    assert isinstance(latent.absorb, ByTorch) and isinstance(latent.expand, ByTorch)

    def turned(x: Tensor) -> Tensor:
        if rotary is None:
            return x
        angles = torch.arange(len(x))[:, None].double() * rotary.angles.double()
        numbers = torch.view_as_complex(
            x.unflatten(-1, (-1, 2)) if is_interleaved else torch.stack(x.chunk(2, -1), -1).contiguous()
        )
        numbers = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([numbers.real, numbers.imag], -1)

    q, lines, key = projected.split([shape.rows[0], shape.rank, shape.rotated], -1)
    if latent.queries is not None and latent.query_norm is not None:
        q = latent.queries(latent.query_norm(q))
    plain, rotated = q.double().unflatten(-1, (shape.heads, -1)).split([shape.plain, shape.rotated], -1)
    lines = latent.norm(lines).double()
    keys = torch.einsum("hrp,tr->thp", latent.absorb.weights.double(), lines)
    values = torch.einsum("hvr,tr->thv", latent.expand.weights.double(), lines)
    scores = torch.einsum("qhp,khp->hqk", plain, keys)
    scores = (scores + torch.einsum("qhp,kp->hqk", turned(rotated), turned(key.double()[:, None])[:, 0])) * scale
    weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1)
    return torch.einsum("hqk,khv->qhv", weights, values).flatten(1)
