"""Paged attention in plain torch, for any device, float type and head sizes. The oracle of every faster backend.

A layer's cache is [blocks, kv_heads, block_size * (head_dim + v_head_dim)]: for each KV head the block's keys, then its
values, so that a KV head's part of a block is contiguous and can be gathered by one copy. Values that are in the keys
are not stored: they are views of the gathered keys. In a cache with scales the four bytes of a scale follow each key
and each value, which are dequantized after they are gathered.

Rows of one token (decode) with similar lengths are gathered together and computed as one batched matmul, which reads
each KV head's keys once for all query heads that share them. Other rows are computed one by one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import EngineConfig
from .backend import LayerCache
from .layer import LARGEST, AttentionLayer, stored_size
from .metadata import AttentionMeta

# Keys or values that are gathered at once, in numbers: 2**23 is 16 MiB of bfloat16, which is small compared with a
# model, and large enough for a gather to run at memory speed.
GATHER_NUMBERS = 1 << 23
# Scores that are materialized at once: 64 MiB of float32.
SCORE_NUMBERS = 1 << 24
TINY = torch.finfo(torch.float32).tiny  # the minimum scale


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one token whose lengths are within a factor of two, gathered as one padded batch."""

    tokens: Tensor  # [rows], indices into the step's tokens
    pages: Tensor  # [rows, kv_heads, blocks], indices of one head's parts of blocks, see Pages
    visible: Tensor | None  # [rows, 1, 1, blocks * block_size] bool; None: all of it
    hidden: Tensor | None  # indices of the others among the gathered [rows * kv_heads * blocks * block_size]


class Pages(NamedTuple):
    """The memory of a layer's cache as rows, of which some are the KV heads' parts of blocks: its pages.

    Rows overlap if the distance between blocks is no multiple of a page's size, see CacheGroups.
    """

    kv_heads: int
    step: int  # elements from one row to the next
    block: int  # rows from one block to the next
    head: int  # rows from one KV head to the next

    @classmethod
    def of(cls, cache: Tensor) -> Pages:
        block, head, _ = cache.stride()
        step = math.gcd(block, head)
        return cls(cache.shape[1], step, block // step, head // step)

    def rows(self, cache: Tensor) -> Tensor:
        """Return the rows of a cache, [rows, elements of a page]."""
        last = (cache.shape[0] - 1) * self.block + (self.kv_heads - 1) * self.head
        return cache.as_strided((last + 1, cache.shape[2]), (self.step, 1))

    def indices(self, blocks: Tensor) -> Tensor:
        """Convert block ids [rows, blocks] to indices of pages, [rows, kv_heads, blocks]."""
        return blocks[:, None, :] * self.block + torch.arange(self.kv_heads, device=blocks.device)[:, None] * self.head


class Plan:
    """What the layers of a step share, computed for the first layer of each kind."""

    def __init__(self, meta: AttentionMeta) -> None:
        self.meta = meta
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._decodes: dict[tuple[int, int | None, Pages, int, int], list[_Decode]] = {}

    def tables(self, group: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the blocks of a group of layers: each new token's, its offset in it, and the rows'."""
        known = self._tables.get((group, block_size))
        if known is None:
            slots, table = self.meta.tables(group)
            known = self._tables[group, block_size] = slots // block_size, slots % block_size, table
        return known

    def decodes(self, group: int, window: int | None, pages: Pages, block_size: int, max_keys: int) -> list[_Decode]:
        """Return the step's rows of one token, gathered together; see `_decode_rows`."""
        key = group, window, pages, block_size, max_keys
        known = self._decodes.get(key)
        if known is None:
            meta = replace(self.meta, block_table=self.tables(group, block_size)[2])
            known = self._decodes[key] = _decode_rows(meta, window, pages, block_size, max_keys)
        return known


class Reference:
    """Attention over gathered pages. Not thread-safe: calls reuse one workspace."""

    drawback = "torch computes attention, slower and with results that depend on the batch"
    invariant = False  # the rounding of torch's matmuls depends on the number of rows
    capturable = False  # it computes rows in a loop on the host
    library: ctypes.CDLL | None = None

    def __init__(self) -> None:
        self._space: dict[str, Tensor] = {}

    @classmethod
    def objection(
        cls,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        isa: str,
    ) -> str | None:
        return None

    @classmethod
    def workspace_bytes(
        cls, layers: Sequence[AttentionLayer], dtype: torch.dtype, cache_dtype: torch.dtype, config: EngineConfig
    ) -> int:
        """Count the gathered pages and the scores."""
        assert config.max_len and config.max_seqs and config.max_batched_tokens
        widest = max(layers, key=lambda layer: layer.numbers)
        everything = config.max_seqs * config.max_len * widest.numbers
        gathered = min(everything, max(config.max_len * widest.numbers, 2 * GATHER_NUMBERS))
        # With scales, keys or values in turn, or all numbers if values are in keys: the bytes, and twice float32 before
        # the model's dtype.
        extra = (9 if widest.values_in_keys else 5) if cache_dtype in LARGEST else 0
        scores = min(SCORE_NUMBERS, widest.num_heads * config.max_batched_tokens * config.max_len)
        return gathered * (dtype.itemsize + extra) + 3 * 4 * scores

    @classmethod
    def as_cached(cls, layer: AttentionLayer) -> AttentionLayer:
        return layer

    @classmethod
    def create(cls, isa: str, *, invariant: bool = False) -> Reference:
        return cls()

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
        return LayerCache(layer, block_size, layer.empty_cache(num_blocks, block_size, dtype, device), sinks)

    def plan(self, meta: AttentionMeta) -> Plan:
        return Plan(meta)

    def kernel_address(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int | None:
        return None

    def attend(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        layer, block_size, tensor, sinks, meta = cache.layer, cache.block_size, cache.tensor, cache.sinks, plan.meta
        head_dim, v_head_dim, window = layer.head_dim, layer.v_head_dim, layer.window
        block, offset, table = plan.tables(cache.group, block_size)
        pages = Pages.of(tensor)
        stored = [k] if layer.values_in_keys else [k, v]
        self._store(stored, tensor, block, offset)

        compute = partial(_attention, scale=layer.scale, softcap=layer.softcap)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        out = q.new_empty(q.shape[0], q.shape[1], v_head_dim)
        sink = None if sinks is None else sinks.view(kv_heads, group)

        max_keys = max(1, GATHER_NUMBERS // max(head_dim, v_head_dim))
        for decode in plan.decodes(cache.group, window, pages, block_size, max_keys):
            gathered = self._gather(tensor, decode.pages, stored)
            if decode.hidden is not None:
                # What follows a sequence's end may be NaN, and 0 * NaN is NaN: clear it, masking is not enough.
                for each in gathered:
                    each.view(-1, each.shape[3]).index_fill_(0, decode.hidden, 0)
            keys, values = gathered[0], gathered[-1][..., :v_head_dim]
            queries = q[decode.tokens].view(-1, kv_heads, group, head_dim)
            result = compute(queries, keys, values, decode.visible, sinks=None if sink is None else sink[:, :, None])
            out[decode.tokens] = result.reshape(-1, kv_heads * group, v_head_dim)

        for row, start in enumerate(meta.query_start_list[:-1]):
            end, length = meta.query_start_list[row + 1], meta.seq_lens_list[row]
            new = end - start
            if new == 1:
                continue
            # With a window, gather only the pages from the first one that the first query of a part attends to.
            step = max(1, SCORE_NUMBERS // (q.shape[1] * min(length, new + (window or length))))
            for a in range(0, new, step):
                b = min(a + step, new)
                first, last = length - new + a, length - new + b  # positions of the part's queries
                low = 0 if window is None else max(0, first - window + 1) // block_size
                high = -(-last // block_size)
                indices = pages.indices(table[row : row + 1, low:high].long())
                gathered = self._gather(tensor, indices, stored)
                keys, values = gathered[0], gathered[-1][..., :v_head_dim]
                have = last - low * block_size
                position = torch.arange(first, last, device=q.device)[:, None]
                key = torch.arange(low * block_size, last, device=q.device)
                seen = key <= position
                if window is not None:
                    seen &= key > position - window
                # [1, kv_heads, group * part, head_dim]: the query heads that share a KV head read its keys together.
                part_q = q[start + a : start + b].view(b - a, kv_heads, group, head_dim).permute(1, 2, 0, 3)
                result = compute(
                    part_q.reshape(1, kv_heads, group * (b - a), head_dim),
                    keys[:, :, :have],
                    values[:, :, :have],
                    seen.repeat(group, 1),
                    sinks=None if sink is None else sink.repeat_interleave(b - a, dim=1)[:, :, None],
                )
                result = result.view(kv_heads, group, b - a, v_head_dim).permute(2, 0, 1, 3)
                out[start + a : start + b] = result.reshape(b - a, kv_heads * group, v_head_dim)
        return out

    def _store(self, new: list[Tensor], cache: Tensor, block: Tensor, offset: Tensor) -> None:
        """Store the step's keys, and its values unless they are in the keys."""
        lines = [_indexable(quantize(x, cache.dtype) if cache.dtype in LARGEST else x) for x in new]
        sizes = [line.shape[2] for line in lines]
        block_size = cache.shape[2] // sum(sizes)
        parts = _indexable(cache).split([block_size * size for size in sizes], 2)
        for part, line, size in zip(parts, lines, sizes, strict=True):
            part.unflatten(2, (block_size, size))[block, :, offset] = line

    def _gather(self, cache: Tensor, pages: Tensor, new: list[Tensor]) -> list[Tensor]:
        """Return the keys of `pages`, and the values unless they are in the keys, [rows, kv_heads, tokens, dim].

        `new`: those of the step, of whose dtype they are.
        """
        sizes = [stored_size(x.shape[2], cache.dtype) for x in new]
        block_size = cache.shape[2] // sum(sizes)
        runs = Pages.of(cache).rows(cache).split([block_size * size for size in sizes], 1)
        rows, kv_heads, blocks = pages.shape
        gathered = []
        for name, run, size in zip(("keys", "values"), runs, sizes, strict=False):
            space = self._workspace(name, pages.numel() * run.shape[1], cache).view(-1, run.shape[1])
            torch.index_select(_indexable(run), 0, pages.reshape(-1), out=_indexable(space))
            part = space.view(rows, kv_heads, blocks * block_size, size)
            gathered.append(dequantize(part, new[0].dtype) if cache.dtype in LARGEST else part)
        return gathered

    def _workspace(self, name: str, numbers: int, like: Tensor) -> Tensor:
        # Allocating this size anew in each layer would cause page faults that cost more than the copy.
        space = self._space.get(name)
        if space is None or space.numel() < numbers or space.dtype != like.dtype or space.device != like.device:
            space = self._space[name] = torch.empty(numbers, dtype=like.dtype, device=like.device)
        return space[:numbers]


def quantize(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Quantize keys or values [..., dim] to a dtype of LARGEST, [..., dim + 4]; the last four are the scale's bytes."""
    wide, largest = x.float(), LARGEST[dtype]
    top = wide.abs().amax(-1, keepdim=True)
    small, finite = top < largest * TINY, top.isfinite()
    scale = (top / largest).masked_fill(small, 0).masked_fill(~finite, math.nan)
    # Not a Python number divided by `top`: torch would multiply by the reciprocal, which rounds twice.
    inverse = (torch.full_like(top, largest) / top).masked_fill(small | ~finite, 0)
    scaled = (wide * inverse).nan_to_num(0)
    if dtype == torch.int8:
        scaled = scaled.round()
    return torch.cat([scaled.clamp(-largest, largest).to(dtype), scale.view(dtype)], -1)


def dequantize(quantized: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values [..., dim] of what `quantize` has returned."""
    whole, scale = (
        quantized[..., :-4],
        quantized[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32),
    )
    wide = torch.promote_types(dtype, torch.float32)
    return (whole.to(wide) * scale).to(dtype)


def _indexable(x: Tensor) -> Tensor:
    """Return float8 numbers as bytes: torch does not index them on every device."""
    return x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x


def _decode_rows(
    meta: AttentionMeta, window: int | None, pages: Pages, block_size: int, max_keys: int
) -> list[_Decode]:
    """Return the step's rows of one token, in groups of similar length.

    A group is a single row, or gathers at most `max_keys` keys over its rows and KV heads.
    """
    starts, device = meta.query_start_list, meta.block_table.device
    spans = []  # (blocks to read, first block, row)
    for row, length in enumerate(meta.seq_lens_list):
        if starts[row + 1] - starts[row] == 1:
            low = 0 if window is None else max(0, length - window) // block_size
            spans.append((-(-length // block_size) - low, low, row))
    groups: list[list[tuple[int, int, int]]] = []
    for span in sorted(spans, reverse=True):
        # The first row of a group is its longest. Padding at most doubles a row's work.
        widest = groups[-1][0][0] if groups else 0
        if 2 * span[0] >= widest > 0 and (len(groups[-1]) + 1) * widest * block_size * pages.kv_heads <= max_keys:
            groups[-1].append(span)
        else:
            groups.append([span])
    decodes = []
    for group in groups:
        blocks = group[0][0]
        rows = torch.tensor([row for _, _, row in group], device=device)
        first = torch.tensor([low for _, low, _ in group], device=device)[:, None]
        column = (first + torch.arange(blocks, device=device)).clamp_max(meta.block_table.shape[1] - 1)
        position = first * block_size + torch.arange(blocks * block_size, device=device)
        visible = hidden = None
        if window is not None or any(meta.seq_lens_list[row] != blocks * block_size for _, _, row in group):
            lengths = meta.seq_lens[rows][:, None]
            visible = (position < lengths) & (position >= (0 if window is None else lengths - window))
            hidden = (~visible)[:, None].expand(-1, pages.kv_heads, -1).reshape(-1).nonzero().view(-1)
            visible = visible[:, None, None]
        decodes.append(
            _Decode(
                tokens=torch.tensor([starts[row] for _, _, row in group], device=device),
                pages=pages.indices(meta.block_table[rows[:, None], column].long()),
                visible=visible,
                hidden=hidden,
            )
        )
    return decodes


def _attention(
    q: Tensor,  # [batch, kv_heads, queries, head_dim]
    k: Tensor,  # [batch, kv_heads, keys, head_dim]
    v: Tensor,  # [batch, kv_heads, keys, v_head_dim]
    visible: Tensor | None,  # bool, broadcasts to [batch, kv_heads, queries, keys]
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [kv_heads, queries, 1]
) -> Tensor:
    """Compute softmax attention, with scores in float32 or wider; returns [batch, kv_heads, queries, v_head_dim]."""
    if softcap is None and sinks is None and q.shape[2] > 8 and q.shape[3] == v.shape[3]:
        # torch's fused kernel does not write the scores to memory. For few queries it is slow on CPUs.
        mask = None if visible is None else visible.expand(q.shape[0], 1, q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    batch, heads, queries, _ = q.shape
    scores = _matmul(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(batch, heads, queries, -1).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        scores = scores.masked_fill_(~visible, -math.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(batch, heads, queries, 1)], -1)
        weights = scores.softmax(-1)[..., :-1]
    weights = weights.to(v.dtype).flatten(0, 1)
    return torch.bmm(weights, v.flatten(0, 1)).view(batch, heads, queries, -1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 or wider. Scores rounded to 16 bits would change the weights by percents."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
