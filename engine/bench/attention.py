"""Measures the attention of one layer with the shape of Qwen3-0.6B, for `python -m engine.bench.kernels`.

The backend that `auto` selects on a CPU is called in turn with itself on an int8 cache, with the reference backend, and
with torch's attention over contiguous keys and values, which no server has. A sum over plain memory between them
measures the machine's current bandwidth, with which decode steps are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import AttentionLayer, AttentionMeta, choose, create
from .timing import interleaved

CPU = torch.device("cpu")
LAYER, BLOCK_SIZE = AttentionLayer(16, 8, 128, 128, scale=128**-0.5), 16
# Number of sequences; new tokens and total tokens of each.
STEPS = [(1, 1, 128), (1, 1, 1024), (1, 1, 4096), (1, 1, 16384), (16, 1, 512), (16, 1, 4096)]
STEPS += [(1, 512, 512), (1, 256, 4096)]
LARGE = 64 << 20  # bytes of keys and values, in several layers, that exceed every CPU cache
ORDINARY = 60  # fills the caches: an ordinary number in each dtype, and as bytes of a scale (0.01), so no subnormals
CHECKED = 200  # tokens that are compared with float64
HEADER = (
    f"{'attention':>18} {'ms':>9} {'int8 ms':>9} {'refer. ms':>9} {'sdpa ms':>9} {'ratio':>6} "
    f"{'GB/s':>6} {'of all':>6} {'int8':>6} {'GFLOP/s':>8} {'error':>8} {'int8':>8} invariant"
)


def measure(batch: int, new: int, context: int, *, isa: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Return one case: times in seconds, `gb_per_s` of keys and values read, errors relative to the largest number.

    `probe_gb_per_s` is the rate of a sum over memory that exceeds the caches, measured between the calls.
    """
    name = choose("auto", CPU, [LAYER], dtype, isa).name
    width = -(-context // BLOCK_SIZE)
    blocks = torch.randperm(batch * width).view(batch, width).tolist()
    meta = AttentionMeta.of([(row, context - new, new) for row in blocks], BLOCK_SIZE)
    q, k, v = _random(batch * new, dtype)
    size = batch * context * LAYER.numbers * dtype.itemsize
    copies = max(1, LARGE // size)

    def paged(name: str, cache_dtype: torch.dtype) -> Callable[[int], Tensor]:
        backend = create(name, isa)
        caches = [backend.allocate(LAYER, batch * width, BLOCK_SIZE, cache_dtype, CPU) for _ in range(copies)]
        for each in caches:
            each.tensor.fill_(ORDINARY)
        plan = backend.plan(meta)
        return lambda i: backend.attend(caches[i], q, k, v, plan)

    shape = copies, batch, LAYER.num_kv_heads, context, LAYER.head_dim
    keys, values = (torch.empty(shape, dtype=dtype).normal_() for _ in range(2))
    queries = q.view(batch, new, LAYER.num_heads, LAYER.head_dim).transpose(1, 2)
    seen = None if new == 1 else torch.ones(new, context, dtype=torch.bool).tril(context - new)

    def plain(i: int) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys[i], values[i], attn_mask=seen, enable_gqa=True)

    probed = torch.ones(LARGE // 8, dtype=torch.int64)
    cases = {
        "ours": paged(name, dtype),
        "int8": paged(name, torch.int8),
        "reference": paged("reference", dtype),
        "sdpa": plain,
        "probe": lambda _: probed.sum(),
    }
    times = interleaved(cases, copies, seconds)
    error, invariant = _checked(name, isa, dtype, dtype)
    int8_error, int8_invariant = _checked(name, isa, dtype, torch.int8)
    int8_size = batch * context * LAYER.bytes(torch.int8)
    pairs = batch * (new * (context - new) + new * (new + 1) // 2)
    return {
        "backend": name,
        "batch": batch,
        "new": new,
        "context": context,
        "seconds": times["ours"],
        "int8_seconds": times["int8"],
        "reference_seconds": times["reference"],
        "sdpa_seconds": times["sdpa"],
        "speedup": min(times["reference"], times["sdpa"]) / times["ours"],
        "gb_per_s": size / times["ours"] / 1e9,
        "int8_gb_per_s": int8_size / times["int8"] / 1e9,
        "probe_gb_per_s": probed.nbytes / times["probe"] / 1e9,
        "gflop_per_s": 4 * pairs * LAYER.num_heads * LAYER.head_dim / times["ours"] / 1e9,
        "error": error,
        "int8_error": int8_error,
        "invariant": invariant and int8_invariant,
    }


def formatted(line: dict[str, Any]) -> str:
    """Return the result of `measure` as a line below HEADER."""
    step = f"{line['batch']} x {line['new']} of {line['context']}"
    rates = (line[name] / line["probe_gb_per_s"] for name in ("gb_per_s", "int8_gb_per_s"))
    # Fraction of the memory's bandwidth, which does not limit chunks of prompts.
    share, int8_share = ("-" if line["new"] > 1 else f"{rate:.0%}" for rate in rates)
    return (
        f"{step:>18} {line['seconds'] * 1e3:9.3f} {line['int8_seconds'] * 1e3:9.3f} "
        f"{line['reference_seconds'] * 1e3:9.3f} {line['sdpa_seconds'] * 1e3:9.3f} {line['speedup']:6.2f} "
        f"{line['gb_per_s']:6.1f} {share:>6} {int8_share:>6} {line['gflop_per_s']:8.0f} "
        f"{line['error']:8.0e} {line['int8_error']:8.0e} {'yes' if line['invariant'] else 'no'}"
    )


def _random(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    heads = LAYER.num_heads, LAYER.num_kv_heads, LAYER.num_kv_heads
    q, k, v = (torch.randn(tokens, count, LAYER.head_dim) for count in heads)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@cache
def _checked(name: str, isa: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[float, bool]:
    """Return the error of a prompt's attention, and whether its last tokens have the same bits one by one."""
    backend, blocks = create(name, isa), list(range(-(-CHECKED // BLOCK_SIZE)))
    q, k, v = _random(CHECKED, dtype)
    pages = backend.allocate(LAYER, len(blocks), BLOCK_SIZE, cache_dtype, CPU)

    def part(start: int, end: int) -> Tensor:
        meta = AttentionMeta.of([(blocks, start, end - start)], BLOCK_SIZE)
        return backend.attend(pages, q[start:end], k[start:end], v[start:end], backend.plan(meta))

    whole, last = part(0, CHECKED), range(CHECKED - 5, CHECKED)
    alone = torch.cat([part(at, at + 1) for at in last])
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return ((whole.double() - want).abs().max() / want.abs().max()).item(), torch.equal(whole[last.start :], alone)
