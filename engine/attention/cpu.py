"""Paged attention on the CPU by our own kernel: reads pages in place, and returns the same bits in any batch.

The kernel (engine/kernels/attention.cpp) stores and attends in one call; pages.h defines the layout of a block. Its
arguments are a `Call` per step and kind of layer, and pointers per layer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import EngineConfig
from ..kernels import build, library
from ..kernels.library import DTYPES, address, cache_dtypes
from ..kernels.structures import Call
from ..types import ConfigError
from .backend import LayerCache
from .cache_memory import request_huge_pages
from .layer import AttentionLayer
from .metadata import AttentionMeta

# As in attention_tasks.h: keys of a split, keys of a tile, maximum queries of a task, the multiple to which AMX rounds
# up the number of queries that have memory; and the maximum number of floats beside a query's sums.
SPLIT, TILE, TASK_QUERIES, ROUNDED, SUM_PADDING = 1024, 64, 96, 16, 48

# Of queries, keys and values: from one token to the next, and from one head to the next.
Strides = tuple[int, int, int, int, int, int]


def variant(isa: str) -> tuple[ctypes.CDLL, str]:
    """Return the kernels and the instruction set that a setting selects. Raises ConfigError if there are none."""
    if isa == "torch":
        raise ConfigError("`cpu_isa=torch` disables the CPU kernels")
    try:
        loaded, features = library.load_built()
    except (build.BuildError, OSError) as error:
        raise ConfigError(f"there are no CPU kernels: {error}") from None
    have = library.best_first(features)
    if not have:
        raise ConfigError("this processor has no AVX2")
    if isa not in ("auto", *have):
        raise ConfigError(f"this processor cannot run {isa}; it can run {', '.join(have)}")
    return loaded, have[0] if isa == "auto" else isa


class Plan:
    """A step in the kernel's form: a Call for each kind, group and stride of blocks of the layers.

    It is checked, so that the kernel stays within the tensors.

    The Calls point into the step's tensors, and are valid as long as the plan.
    """

    def __init__(self, meta: AttentionMeta) -> None:
        self.meta = meta
        self.tokens, rows = meta.query_start_list[-1], len(meta.seq_lens_list)
        for slots, table in (meta.tables(0), *meta.others):
            if len(meta.query_start_list) != rows + 1 or slots.shape != (self.tokens,) or table.shape[0] != rows:
                raise ValueError(f"the parts of a step of {rows} rows and {self.tokens} tokens do not fit each other")
            assert slots.is_contiguous() and table.is_contiguous()
        assert meta.query_start.is_contiguous() and meta.seq_lens.is_contiguous()
        self._calls: dict[tuple[AttentionLayer, int, int, Strides], tuple[Call, int]] = {}

    def call(self, cache: LayerCache, strides: Strides) -> int:
        """Return the address of the Call for a layer whose queries, keys and values have these strides."""
        block = cache.tensor.stride(0)
        key = cache.layer, cache.group, block, strides
        known = self._calls.get(key)
        if known is None:
            call = self._create(cache, block * cache.tensor.itemsize, strides)
            known = self._calls[key] = call, ctypes.addressof(call)
        return known[1]

    def _create(self, cache: LayerCache, block_bytes: int, strides: Strides) -> Call:
        meta, layer = self.meta, cache.layer
        slots, table = meta.tables(cache.group)
        return Call(
            query_start=meta.query_start.data_ptr(),
            seq_lens=meta.seq_lens.data_ptr(),
            block_table=table.data_ptr(),
            slots=slots.data_ptr(),
            rows=len(meta.seq_lens_list),
            width=table.shape[1],
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            block_size=cache.block_size,
            block_bytes=block_bytes,
            q_token=strides[0],
            q_head=strides[1],
            k_token=strides[2],
            k_head=strides[3],
            v_token=strides[4],
            v_head=strides[5],
            window=layer.window or 0,
            scale=layer.scale,
            softcap=layer.softcap or 0.0,
        )


class Paged:
    """Attention by the kernel: for float32 and bfloat16, and caches in these dtypes or int8.

    Several threads may call it at once if each has its own caches.
    """

    drawback = ""
    invariant = True
    capturable = False

    def __init__(self, kernels: ctypes.CDLL, isa: str) -> None:
        pointer = ctypes.c_void_p
        self.library = kernels
        # By the dtypes of the model and of the cache.
        self._attend = {
            (dtype, cache): library.find(kernels, isa, f"attend_{name}") for dtype, cache, name in cache_dtypes()
        }
        for function in self._attend.values():
            function.argtypes = [pointer] * 7 + [ctypes.c_int32]
        self._addresses = {key: address(function) for key, function in self._attend.items()}

    @classmethod
    def objection(
        cls,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        isa: str,
    ) -> str | None:
        if device.type != "cpu":
            return f"the device is {device}"
        if dtype not in DTYPES:
            return f"it computes in {' and '.join(DTYPES.values())}, not in {str(dtype).removeprefix('torch.')}"
        if cache_dtype not in (dtype, torch.int8):
            return f"it has no cache in {str(cache_dtype).removeprefix('torch.')} (`kv_dtype=int8` is as small)"
        try:
            variant(isa)
        except ConfigError as error:
            return str(error)
        return None

    @classmethod
    def workspace_bytes(
        cls, layers: Sequence[AttentionLayer], dtype: torch.dtype, cache_dtype: torch.dtype, config: EngineConfig
    ) -> int:
        """Count the sums of queries whose keys several threads share, and each thread's scratch memory; see
        attention_tasks.h."""
        assert config.max_len and config.max_batched_tokens
        tokens, splits, threads = config.max_batched_tokens, -(-config.max_len // SPLIT), config.threads
        threads = threads or os.cpu_count() or 1

        def of(layer: AttentionLayer) -> int:
            of_task = -(-max(TASK_QUERIES, layer.num_heads // layer.num_kv_heads) // ROUNDED) * ROUNDED
            # A task is divided if it is more than a quarter of a thread's share, so there are at most four per thread.
            tasks = 4 * threads
            shared = min(tokens * layer.num_heads + tasks * (ROUNDED - 1), tasks * of_task) * splits
            # Queries with up to eight bytes per number, two sums for each, and a tile of keys and of values.
            own = threads * (4 * of_task + 2 * TILE)
            return (shared + own) * (max(layer.head_dim, layer.v_head_dim) + SUM_PADDING) * 4

        return max(map(of, layers))

    @classmethod
    def as_cached(cls, layer: AttentionLayer) -> AttentionLayer:
        # A page has the numbers of keys paired along the head, and those of values along the tokens.
        return replace(layer, values_in_keys=False)

    @classmethod
    def create(cls, isa: str, *, invariant: bool = False) -> Paged:
        return cls(*variant(isa))

    def allocate(
        self,
        layer: AttentionLayer,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sinks: Tensor | None = None,
    ) -> LayerCache:
        layer = self.as_cached(layer)
        if dtype not in (*DTYPES, torch.int8) or device.type != "cpu":
            raise ValueError(f"no cache of {layer} in {dtype} on {device}")
        if layer.num_heads % layer.num_kv_heads or (sinks is not None and sinks.shape != (layer.num_heads,)):
            raise ValueError(f"the numbers of heads of {layer} do not fit each other")
        tensor = layer.empty_cache(num_blocks, block_size, dtype, device)
        request_huge_pages(tensor)
        return LayerCache(layer, block_size, tensor, None if sinks is None else sinks.detach().float().contiguous())

    def plan(self, meta: AttentionMeta) -> Plan:
        return Plan(meta)

    def kernel_address(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int | None:
        return self._addresses.get((dtype, cache_dtype))

    def attend(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        layer, tensor, sinks = cache.layer, cache.tensor, cache.sinks
        tokens, kv_heads, dim = plan.tokens, layer.num_kv_heads, layer.head_dim
        of_q, of_k, of_v = (tokens, layer.num_heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, layer.v_head_dim)
        if (q.shape, k.shape, v.shape) != (of_q, of_k, of_v):
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"q, k and v of {shapes} do not fit {layer} and a step of {plan.tokens} tokens")
        function = self._attend.get((q.dtype, tensor.dtype))
        if function is None or not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"{q.dtype}, {k.dtype} and {v.dtype} for a cache of {tensor.dtype}")
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(tokens, layer.num_heads, layer.v_head_dim, dtype=q.dtype)
        failed = function(
            plan.call(cache, (*_strides(q), *_strides(k), *_strides(v))),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            tensor.data_ptr(),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for attention's sums")
        return out


def _strides(x: Tensor) -> tuple[int, int]:
    token, head, _ = x.stride()
    return token, head
