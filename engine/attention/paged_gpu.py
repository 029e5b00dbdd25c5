"""Paged attention on a GPU, by our own Triton kernels."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import EngineConfig
from ..kernels.launching import gpu_kernels, launch
from . import gpu_plan
from .backend import AttentionBackend, LayerCache
from .gpu_cache import LOOP, WIDEST, WIDEST_REST, GPUCache, attend_constants, padded, warps
from .gpu_plan import FEW_ROWS, ITEM, Plan
from .gpu_shapes import MAX_GROUP, attend_shape, is_short, queries_of
from .layer import LARGEST, AttentionLayer, stored_size
from .metadata import AttentionMeta
from .reference import Reference

LEAST_CAPABILITY = 8, 0  # on older GPUs tiles of a chunk do not fit into shared memory, and there is no bfloat16
LARGE_MEMORY = 200 << 10  # bytes of shared memory of a multiprocessor
RESERVED_MEMORY = 1 << 10  # of it, for each program
# Per multiprocessor, of rows of one query and of longer ones: more than fit at a time, so that the last ones fill what
# the first have left.
PROGRAMS, CHUNK_PROGRAMS = 16, 6
# By dtype, the relative difference from the reference above which the kernels are not used.
MAX_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TRIAL_BLOCK = 16  # tokens per block in the trial
FP8_CAPABILITY = (8, 9)  # of GPUs that convert fp8
DEPENDENT_CAPABILITY = (9, 0)  # see `is_dependent`
DEPENDENT, NOT_DEPENDENT = {"DEPENDENT": True, "launch_pdl": True}, {"DEPENDENT": False}  # see `dependence`


class HeadNorms(NamedTuple):
    """The RMSNorms of each head's query and key, and whether its value is normalized."""

    q: Tensor  # [head_dim], the weight
    k: Tensor
    eps: float
    is_wide: bool = False  # multiplied by the weight in float32, and rounded once
    has_values: bool = False  # values are divided by their root mean square
    turns_first: bool = False  # queries and keys are rotated before


class Rotation(NamedTuple):
    """The rotary embedding of a step's tokens."""

    positions: Tensor  # [tokens] int64
    angles: Tensor  # [positions, 2, half of what is rotated] float32: cosines and sines, see Rotary.table
    is_interleaved: bool = False  # see Family
    is_wide: bool = False  # computed in float32, and rounded once
    query_scales: Tensor | None = None  # see Rotary
    period: int = 0  # positions with the same scale


class PagedGPU:
    """Attention on CUDA. Its workspace is reused from call to call: one instance, one stream.

    By default a token in a chunk is rounded otherwise than one alone. With `invariant` both have the same parts of a
    context and tiles of keys, a chunk's programs add up the parts one by one, and the weights of a row are added up by
    products, whose order is that of all tiles. Where it is not known that smaller tiles of queries give the same bits,
    see is_short, both have the same ones.
    """

    drawback = ""  # no backend is preferred to it
    capturable = True
    library: ctypes.CDLL | None = None

    def __init__(self, *, invariant: bool = False) -> None:
        self.invariant = invariant
        self._sums = torch.empty(0)
        self._weights = torch.empty(0)
        self._arrived = torch.empty(0)

    @classmethod
    def objection(
        cls,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        isa: str,
    ) -> str | None:
        if reason := limitation(layers, dtype, device):
            return reason
        is_fp8 = cache_dtype == torch.float8_e4m3fn and device.type == "cuda"
        if is_fp8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            return "this GPU does not convert fp8 (`kv_dtype=int8` is as small)"
        return trial(layers, dtype, cache_dtype, device)

    @classmethod
    def workspace_bytes(
        cls, layers: Sequence[AttentionLayer], dtype: torch.dtype, cache_dtype: torch.dtype, config: EngineConfig
    ) -> int:
        """Return the bytes of partial results and of work items."""
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        of_one, of_all = (gpu_plan.most_parts(rows, config.max_len) for rows in (1, config.max_seqs))
        parts = max(of_one, min(gpu_plan.MAX_PARTS, of_all))
        # A count for each program of a part, of which there are at most as many as heads.
        per_part = max(4 * layer.num_heads * (layer.v_head_dim + 3) for layer in layers)
        queries = (queries_of(layer, dtype, uniform=config.batch_invariant, is_large=True) for layer in layers)
        kinds = len({*zip((layer.window for layer in layers), queries, strict=True)})
        items = gpu_plan.most_parts(config.max_seqs, config.max_len) + config.max_batched_tokens
        return parts * per_part + kinds * items * ITEM * 4

    @classmethod
    def as_cached(cls, layer: AttentionLayer) -> AttentionLayer:
        return layer

    @classmethod
    def create(cls, isa: str, *, invariant: bool = False) -> PagedGPU:
        return cls(invariant=invariant)

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
        """Return a cache [blocks, kv_heads, bytes of a head's share of a block in the cache's dtype].

        A share is the keys, then the values, and with scales then the keys' scales and the values' scales. Values that
        are in the keys are not stored, and have no scales.
        """
        line = stored_size(layer.head_dim, dtype) + stored_size(layer.stored_v_dim, dtype)
        # A share's scales are aligned to four bytes.
        padding = -block_size * (layer.head_dim + layer.stored_v_dim) % 4 if dtype in LARGEST else 0
        tensor = torch.empty(num_blocks, layer.num_kv_heads, block_size * line + padding, dtype=dtype, device=device)
        return GPUCache(layer, block_size, tensor, None if sinks is None else sinks.float().contiguous())

    def plan(self, meta: AttentionMeta) -> Plan:
        return Plan(meta, uniform=self.invariant)

    def kernel_address(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int | None:
        return None

    def attend(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        assert isinstance(cache, GPUCache)
        kernels, layer = gpu_kernels("storing"), cache.layer
        width = padded(layer.head_dim)
        launch(kernels.store, (k.shape[0], layer.num_kv_heads),
            k, v, plan.tables(cache).slot_mapping, cache.tensor, cache.scales,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), *cache.strides,
            DIM=layer.head_dim, V_DIM=layer.stored_v_dim, DIM_P=width,
            V_DIM_P=padded(layer.v_head_dim), BLOCK=cache.block_size, SCALED=cache.is_scaled,
            num_warps=warps(width), enable_fp_fusion=False, **dependence(k.device),  # quantizing is exact
        )  # fmt: skip
        return self._attend(cache, q, plan)

    def attend_qkv(
        self,
        cache: LayerCache,
        # [tokens, (heads + n * kv_heads) * head_dim]; n = 2: keys and values; 1: keys alone, which are the values as
        # well before they are normalized and rotated; 0: the cache has both already
        qkv: Tensor,
        rotation: Rotation | None,  # None: nothing is rotated
        norms: HeadNorms | None,
        plan: Plan,
        *,
        gated: bool = False,  # in qkv each query is followed by a gate of the same size
    ) -> Tensor:
        """Normalize and rotate queries and keys, then do as `attend`; returns [tokens, heads, head_dim].

        The queries are rotated in place, in `qkv`.
        """
        self.rotate_store(cache, qkv, rotation, norms, plan, gated=gated)
        tokens, layer = qkv.shape[0], cache.layer
        heads, dim = layer.num_heads, layer.head_dim
        # Of the first columns; a slice and its shape would be two views.
        strides = qkv.stride()[0], dim * (1 + gated), 1
        return self._attend(cache, qkv.as_strided((tokens, heads, dim), strides), plan)

    def rotate_store(
        self,
        cache: LayerCache,
        qkv: Tensor,
        rotation: Rotation | None,
        norms: HeadNorms | None,
        plan: Plan,
        *,
        gated: bool = False,
    ) -> None:
        """Do all of `attend_qkv` that comes before attention."""
        assert isinstance(cache, GPUCache)
        kernels, layer = gpu_kernels("storing"), cache.layer
        tokens, columns = qkv.shape
        turn = rotation or Rotation(qkv, qkv)  # which are not read
        own = (columns // layer.head_dim - layer.num_heads * (1 + gated)) // layer.num_kv_heads
        launch(kernels.rotate_store, (tokens, layer.num_kv_heads),
            qkv, qkv if norms is None else norms.q, qkv if norms is None else norms.k, turn.positions, turn.angles,
            qkv if turn.query_scales is None else turn.query_scales,
            plan.tables(cache).slot_mapping, cache.tensor, cache.scales, 0.0 if norms is None else norms.eps,
            qkv.stride()[0], *cache.strides,
            constants=cache.rotate_constants, GATED=gated,
            OWN=own, NORM=norms is not None, WIDE=norms is not None and norms.is_wide,
            TURN_FIRST=norms is not None and norms.turns_first,
            NORM_VALUES=norms is not None and norms.has_values and own > 0,
            TURNED=0 if rotation is None else 2 * rotation.angles.shape[2], INTERLEAVED=turn.is_interleaved,
            WIDE_TURN=turn.is_wide, PERIOD=turn.period, enable_fp_fusion=False, **dependence(qkv.device),
        )  # fmt: skip

    def _attend(self, cache: LayerCache, q: Tensor, plan: Plan) -> Tensor:
        """Attend to what the cache holds; see `attend`."""
        assert isinstance(cache, GPUCache)
        kernels, layer, meta, uniform = gpu_kernels("attention"), cache.layer, plan.meta, self.invariant
        device, dtype, tokens = q.device, q.dtype, q.shape[0]
        out = q.new_empty(tokens, layer.num_heads, layer.v_head_dim)
        is_large, dependent = has_large_memory(device), dependence(device)
        queries, table = queries_of(layer, dtype, uniform=uniform, is_large=is_large), plan.tables(cache).block_table
        launches = plan.launches((layer.window, queries))
        at_once = 1 if not uniform or is_short(layer, dtype, device, is_scaled=cache.is_scaled) else queries
        kinds = ((launches.decodes, at_once, True), (launches.chunks, queries, False))
        traits = {"uniform": uniform, "is_scaled": cache.is_scaled, "is_large": is_large}
        for works, most, split in kinds:
            for work in works:
                shape = attend_shape(layer, dtype, most, min(tokens, FEW_ROWS + 1), is_chunk=not split, **traits)
                assert shape.skips != LOOP or gpu_plan.SPLIT % shape.keys == 0, "see _attended"
                beside = layer.num_kv_heads * shape.sharing
                self._reserve(work.num_parts, layer, beside, device)
                launch(kernels.attend, (beside, programs(work.max_items, beside, most, device)),
                    q, cache.tensor, cache.scales, table, work.table, meta.query_start, meta.seq_lens, out,
                    self._sums, self._weights, self._arrived, out if cache.sinks is None else cache.sinks,
                    layer.scale, layer.softcap or 0.0,
                    *q.stride()[:2], *cache.strides, layer.num_heads * layer.v_head_dim,
                    constants=attend_constants(
                        layer, most, shape, (cache.block_size, split, cache.sinks is not None),
                        uniform=uniform, is_scaled=cache.is_scaled,
                    ),
                    WIDEN=is_interpreted(), **dependent,
                )  # fmt: skip
        return out

    def _reserve(self, num_parts: int, layer: AttentionLayer, beside: int, device: torch.device) -> None:
        """Make sure that the workspace has room for the partial results of a launch. `beside`: programs of a part."""
        sums, weights, arrived = (
            num_parts * layer.num_heads * layer.v_head_dim,
            num_parts * layer.num_heads * 2,
            num_parts * beside,
        )
        if self._sums.numel() < sums or self._sums.device != device:
            self._sums = torch.empty(sums, dtype=torch.float32, device=device)
        if self._weights.numel() < weights or self._weights.device != device:
            self._weights = torch.empty(weights, dtype=torch.float32, device=device)
        if self._arrived.numel() < arrived or self._arrived.device != device:
            self._arrived = torch.zeros(arrived, dtype=torch.int32, device=device)


@functools.cache
def has_large_memory(device: torch.device) -> bool:
    """Return whether a GPU is a Hopper or a Blackwell of data centers, by its shared memory.

    On others the registers of a second loop over keys, or the memory of a deeper loop, do not suffice.
    """
    if device.type not in ("cuda", "meta"):  # in the interpreter
        return True
    # Without memory x is compiled for the current GPU, see launching.py.
    properties = torch.cuda.get_device_properties(None if device.type == "meta" else device)
    return properties.shared_memory_per_multiprocessor >= LARGE_MEMORY


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    if device.type not in ("cuda", "meta"):  # in the interpreter
        return LARGE_MEMORY
    properties = torch.cuda.get_device_properties(None if device.type == "meta" else device)
    return properties.shared_memory_per_multiprocessor - RESERVED_MEMORY


def programs(items: int, beside: int, queries: int, device: torch.device) -> int:
    """Return the number of programs that share the work items of a launch, of this many queries each, for each of the
    `beside` programs of an item."""
    if device.type != "cuda":
        return min(items, 3)
    most = PROGRAMS if queries == 1 else CHUNK_PROGRAMS
    return max(1, min(items, most * multiprocessors(device) // beside))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; without one some."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def dependence(device: torch.device) -> dict[str, Any]:
    """Return the options of a kernel that is launched before the one before it has ended, and waits for that itself.

    Before it waits it reads weights, and inputs that no kernel of the step writes; it neither reads a result nor writes
    anything. So what it does is in the order of the stream, whatever the kernel after it is.
    """
    return DEPENDENT if is_dependent(device) else NOT_DEPENDENT


@functools.cache
def is_dependent(device: torch.device) -> bool:
    """Return whether a GPU launches kernels before the one before it has ended."""
    if device.type not in ("cuda", "meta") or is_interpreted():
        return False
    # Without memory x is compiled for the current GPU, see launching.py.
    return torch.cuda.get_device_capability(None if device.type == "meta" else device) >= DEPENDENT_CAPABILITY


@functools.cache
def is_interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def limitation(layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot serve a model with these layers, before they are tried, or None."""
    if device.type != "cuda" and not is_interpreted():
        return "the Triton kernels need a CUDA device"
    if dtype not in MAX_ERROR:
        return f"the Triton kernels do not compute in {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        if layer.head_dim > WIDEST + WIDEST_REST or layer.v_head_dim > WIDEST:
            return f"the Triton kernels serve keys of up to {WIDEST + WIDEST_REST} numbers and values of up to {WIDEST}"
        if layer.num_heads // layer.num_kv_heads > MAX_GROUP:
            return f"the Triton kernels serve up to {MAX_GROUP} query heads per KV head"
    return lack()


def lack() -> str | None:
    """Return what this machine lacks to compile Triton kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    if is_interpreted():
        return None
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        least, own = ("{}.{}".format(*each) for each in (LEAST_CAPABILITY, capability))
        return f"the Triton kernels need a GPU of compute capability {least} (Ampere) or more, and this one has {own}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Triton needs Python's headers: install the package python3-dev"
    return None


def trial(
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool = False,
) -> str | None:
    """Compile and run the kernels for each kind of layer; return why they cannot be used, or None.

    The compiled kernels are kept, so this costs a start no more than their first use would.
    """
    for layer in dict.fromkeys(layers):
        try:
            error = _error(PagedGPU(invariant=invariant), layer, dtype, cache_dtype, device)
        except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
            first = (str(problem).strip().splitlines() or [""])[0]
            return f"the Triton kernels do not run on this device: {type(problem).__name__}: {first[:200]}"
        if not error < MAX_ERROR[dtype]:
            return f"the Triton kernels compute wrong results on this device (relative error {error:.2g})"
    return None


def _error(
    ours: PagedGPU, layer: AttentionLayer, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> float:
    """Return the relative difference from the reference, for a chunk of two tiles and then decodes of two parts: of one
    row, and of many that share the blocks."""
    draw = torch.Generator().manual_seed(0)
    length = gpu_plan.SPLIT + 2
    blocks = list(range(-(-length // TRIAL_BLOCK)))

    def numbers(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=draw).to(device, dtype)

    q = numbers(layer.num_heads, layer.head_dim)
    k = numbers(layer.num_kv_heads, layer.head_dim)
    v = k[..., : layer.v_head_dim] if layer.values_in_keys else numbers(layer.num_kv_heads, layer.v_head_dim)
    sinks = None if layer.sinks is None else torch.zeros(layer.num_heads, dtype=dtype, device=device)
    results = []
    with torch.inference_mode():
        backends: list[AttentionBackend] = [ours, Reference()]
        for backend in backends:
            cache = backend.allocate(layer, len(blocks), TRIAL_BLOCK, cache_dtype, device, sinks=sinks)
            pieces, many = [], [(blocks, first, 1) for first in range(length - FEW_ROWS - 1, length)]
            for rows in ([(blocks, 0, length - 1)], [(blocks, length - 1, 1)], many):
                plan = backend.plan(AttentionMeta.of(rows, TRIAL_BLOCK, device))
                of = slice(rows[0][1], rows[-1][1] + rows[-1][2])
                pieces.append(backend.attend(cache, q[of], k[of], v[of], plan).double())
            results.append(torch.cat(pieces))
    found, reference = results
    return float((found - reference).norm() / reference.norm())
