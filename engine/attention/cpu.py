"""Paged attention on the CPU by our own kernel: reads the pages where they are, and gives the same bits in any batch.

The kernel (engine/kernels/attention.cpp) stores and attends in one call; pages.h has the layout of a block. Here is
what it is told: a `Call` per step and shape of layer, pointers per layer.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..kernels import build, library
from ..kernels.library import DTYPES, address, cache_dtypes
from ..kernels.structures import Call
from ..types import ConfigError
from . import AttentionMeta, LayerKV, held

# Of the processor's memory pages: one walk of their tables per 2 MB of keys and values instead of per 4 KB.
HUGE_PAGES, HUGE_BYTES = 14, 2 << 20


def variant(isa: str) -> tuple[ctypes.CDLL, str]:
    """The kernels and the instruction set that a setting means; ConfigError where there are none."""
    if isa == "torch":
        raise ConfigError("no CPU kernels are wanted (`cpu_isa=torch`)")
    try:
        loaded, features = library.load(build.library())
    except (build.BuildError, OSError) as error:
        raise ConfigError(f"there are no CPU kernels: {error}") from None
    have = library.best_first(features)
    if not have:
        raise ConfigError("this processor has no AVX2")
    if isa not in ("auto", *have):
        raise ConfigError(f"this processor cannot run {isa}; it can run {', '.join(have)}")
    return loaded, have[0] if isa == "auto" else isa


class Paged:
    """Attention by the kernel, for float32 and bfloat16, caches of these or of int8, and keys as long as values.

    Calls from several threads at once are fine where they have caches of their own.
    """

    invariant = True

    def __init__(self, kernels: ctypes.CDLL, isa: str) -> None:
        pointer = ctypes.c_void_p
        self.library = kernels
        # By the dtype of the model and that of the cache.
        self._attend = {
            (dtype, cache): getattr(kernels, f"attend_{name}_{isa}") for dtype, cache, name in cache_dtypes()
        }
        for function in self._attend.values():
            function.argtypes = [pointer] * 7 + [ctypes.c_int32]

    @classmethod
    def of(cls, isa: str) -> Paged:
        """The backend for a setting of the CPU kernels; ConfigError where there are none."""
        return cls(*variant(isa))

    def allocate(
        self, layer: LayerKV, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if dtype not in (*DTYPES, torch.int8) or device.type != "cpu" or layer.head_dim != layer.v_head_dim:
            raise ValueError(f"no cache of {layer} in {dtype} on {device}")
        # Not cleared: nothing that was not stored is ever read with effect.
        share = block_size * 2 * held(layer.head_dim, dtype)
        cache = torch.empty(num_blocks, layer.num_kv_heads, share, dtype=dtype, device=device)
        _advise(cache)
        return cache

    def function(self, dtype: torch.dtype, cache: torch.dtype) -> int:
        """Where the kernel is for a model's and a cache's dtype, for those that call it with `describe`'s Call."""
        return address(self._attend[dtype, cache])

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        shape = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), cache.shape, scale, window, softcap)
        found: tuple[Call, int] | None = meta.scratch.get(shape)
        if found is None:
            call = _call(q, k, v, cache, meta, scale=scale, window=window, softcap=softcap)
            found = meta.scratch[shape] = call, ctypes.addressof(call)
        if not q.dtype == k.dtype == v.dtype or (q.dtype, cache.dtype) not in self._attend:
            raise ValueError(f"{q.dtype}, {k.dtype} and {v.dtype} for a cache of {cache.dtype}")
        sinks = None if sinks is None else sinks.float().contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        failed = self._attend[q.dtype, cache.dtype](
            found[1],
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            cache.data_ptr(),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for attention's sums")
        return out


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Call:
    """Checked here, once per step, so that the kernel reads and writes within the tensors."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    wrong = k.shape != (tokens, kv_heads, head_dim) or v.shape != k.shape or heads % kv_heads
    wrong |= (
        cache.shape[1] != kv_heads or cache.shape[2] % (2 * held(head_dim, cache.dtype)) or not cache.is_contiguous()
    )
    if wrong:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, cache))
        raise ValueError(f"q, k, v and cache of {shapes} do not fit each other")
    call = describe(meta, tokens, heads, cache, head_dim, scale=scale, window=window, softcap=softcap)
    call.q_token, call.q_head = q.stride()[:2]
    call.k_token, call.k_head = k.stride()[:2]
    call.v_token, call.v_head = v.stride()[:2]
    return call


def describe(
    meta: AttentionMeta,
    tokens: int,
    heads: int,
    cache: Tensor,
    head_dim: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Call:
    """A step of so many tokens and the shape of a layer; the strides of q, k and v are for the caller to fill in.

    Like `meta` and `cache`, it is checked here so that the kernel stays within them.
    """
    rows = len(meta.seq_lens_list)
    wrong = meta.query_start_list[-1] != tokens or meta.slot_mapping.shape != (tokens,)
    wrong |= len(meta.query_start_list) != rows + 1 or meta.block_table.shape[0] != rows
    if wrong:
        raise ValueError(f"{tokens} tokens do not fit a step of {rows} rows and {meta.query_start_list[-1]} tokens")
    for part in (meta.query_start, meta.seq_lens, meta.block_table, meta.slot_mapping):
        assert part.is_contiguous()
    return Call(
        query_start=meta.query_start.data_ptr(),
        seq_lens=meta.seq_lens.data_ptr(),
        block_table=meta.block_table.data_ptr(),
        slots=meta.slot_mapping.data_ptr(),
        rows=rows,
        width=meta.block_table.shape[1],
        heads=heads,
        kv_heads=cache.shape[1],
        head_dim=head_dim,
        block_size=cache.shape[2] // (2 * held(head_dim, cache.dtype)),
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
    )


def _advise(cache: Tensor) -> None:
    """Ask for large memory pages where a cache is large; a kernel that has none says so, and nothing is lost."""
    start = -(-cache.data_ptr() // HUGE_BYTES) * HUGE_BYTES
    size = cache.data_ptr() + cache.nbytes - start
    if size >= HUGE_BYTES:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(start, size // HUGE_BYTES * HUGE_BYTES, HUGE_PAGES)
