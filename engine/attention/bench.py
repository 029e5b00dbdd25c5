"""Measuring the attention of one layer of Qwen3-0.6B's shape, for `python -m engine.kernels.bench`.

What a CPU's `auto` means is called in turns with the reference backend, and with torch's attention over keys and
values that lie in one piece, which no server has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.timing import interleaved
from . import AttentionMeta, LayerKV, choose, select

CPU = torch.device("cpu")
HEADS, LAYER, BLOCK_SIZE = 16, LayerKV(8, 128, 128), 16
SCALE = LAYER.head_dim**-0.5
# Sequences, new tokens of each, tokens of each in all.
STEPS = [(1, 1, 512), (1, 1, 4096), (16, 1, 512), (16, 1, 4096), (1, 512, 512), (1, 256, 4096)]
LARGE = 64 << 20  # bytes of keys and values that no cache holds; there are as many layers as make them
CHECKED = 200  # tokens that are compared with float64
HEADER = (
    f"{'attention':>18} {'ms':>9} {'refer. ms':>9} {'sdpa ms':>9} {'ratio':>6} "
    f"{'GB/s':>6} {'GFLOP/s':>8} {'error':>8} invariant"
)


def measure(batch: int, new: int, context: int, *, isa: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """One step: times in seconds, `gb_per_s` of keys and values read, `error` relative to the largest number."""
    name = choose("auto", CPU, [LAYER], dtype, isa).name
    width = -(-context // BLOCK_SIZE)
    blocks = torch.randperm(batch * width).view(batch, width).tolist()
    meta = AttentionMeta.of([(row, context - new, new) for row in blocks], BLOCK_SIZE)
    q, k, v = _drawn(batch * new, dtype)
    size = batch * context * LAYER.numbers * dtype.itemsize
    copies = max(1, LARGE // size)

    def paged(name: str) -> Callable[[int], Tensor]:
        backend = select(name, isa)
        caches = [backend.allocate(LAYER, batch * width, BLOCK_SIZE, dtype, CPU).normal_() for _ in range(copies)]
        return lambda i: backend.attend(q, k, v, caches[i], meta, scale=SCALE)

    shape = copies, batch, LAYER.num_kv_heads, context, LAYER.head_dim
    keys, values = (torch.empty(shape, dtype=dtype).normal_() for _ in range(2))
    queries = q.view(batch, new, HEADS, LAYER.head_dim).transpose(1, 2)
    seen = None if new == 1 else torch.ones(new, context, dtype=torch.bool).tril(context - new)

    def plain(i: int) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys[i], values[i], attn_mask=seen, scale=SCALE, enable_gqa=True)

    times = interleaved({"ours": paged(name), "reference": paged("reference"), "sdpa": plain}, copies, seconds)
    error, invariant = _checked(name, isa, dtype)
    pairs = batch * (new * (context - new) + new * (new + 1) // 2)
    return {
        "backend": name,
        "batch": batch,
        "new": new,
        "context": context,
        "seconds": times["ours"],
        "reference_seconds": times["reference"],
        "sdpa_seconds": times["sdpa"],
        "speedup": min(times["reference"], times["sdpa"]) / times["ours"],
        "gb_per_s": size / times["ours"] / 1e9,
        "gflop_per_s": 4 * pairs * HEADS * LAYER.head_dim / times["ours"] / 1e9,
        "error": error,
        "invariant": invariant,
    }


def told(line: dict[str, Any]) -> str:
    """What `measure` found as a line below HEADER."""
    step = f"{line['batch']} x {line['new']} of {line['context']}"
    return (
        f"{step:>18} {line['seconds'] * 1e3:9.3f} {line['reference_seconds'] * 1e3:9.3f} "
        f"{line['sdpa_seconds'] * 1e3:9.3f} {line['speedup']:6.2f} {line['gb_per_s']:6.1f} {line['gflop_per_s']:8.0f} "
        f"{line['error']:8.0e} {'yes' if line['invariant'] else 'no'}"
    )


def _drawn(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(tokens, heads, LAYER.head_dim) for heads in (HEADS, LAYER.num_kv_heads, LAYER.num_kv_heads))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@cache
def _checked(name: str, isa: str, dtype: torch.dtype) -> tuple[float, bool]:
    """The error of a prompt's attention, and whether its last tokens have the same bits when they come one by one."""
    backend, blocks = select(name, isa), list(range(-(-CHECKED // BLOCK_SIZE)))
    q, k, v = _drawn(CHECKED, dtype)
    pages = backend.allocate(LAYER, len(blocks), BLOCK_SIZE, dtype, CPU)

    def part(start: int, end: int) -> Tensor:
        meta = AttentionMeta.of([(blocks, start, end - start)], BLOCK_SIZE)
        return backend.attend(q[start:end], k[start:end], v[start:end], pages, meta, scale=SCALE)

    whole, last = part(0, CHECKED), range(CHECKED - 5, CHECKED)
    alone = torch.cat([part(at, at + 1) for at in last])
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    return ((whole.double() - want).abs().max() / want.abs().max()).item(), torch.equal(whole[last.start :], alone)
