"""Chooses the tiles of products with quantized weights on a GPU, by measurements on a model's own weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch

from ...attention.paged_gpu import MAX_ERROR
from . import scaled
from .scaled import GROUP, LOSS, ByTorch, Narrow
from .skinny import GAIN, MEASURED_BYTES, seconds
from .tiles import CANDIDATES, MOST_ROWS, TILES, TRIED_PLAIN_ROWS, AnyTile, Tiles, candidates
from .weights import GPUProduct, GPUWeight


def choose(products: Iterable[GPUProduct], dtype: torch.dtype) -> bool:
    """Let products use the fastest tiles, by measurements on some of each form and shape. Return whether torch's
    products in fp8 are right; one that is not is not used."""
    are_right = True
    known = sorted(products, key=lambda each: each.kind)
    for _, group in itertools.groupby(known, key=lambda each: each.kind):
        alike = list(group)
        weights = [part for each in alike for part in each.parts]
        if not _is_right(alike[0], dtype):
            are_right = False
            for weight in weights:
                if weight.is_by_torch:
                    weight.scale(by_torch=False)  # before torch's product is measured
        tiles = fastest(alike[: max(2, -(-MEASURED_BYTES // alike[0].num_bytes))], dtype)
        for weight in weights:
            weight.use(tiles)
    return are_right


@torch.inference_mode()
def fastest(products: Sequence[GPUProduct], dtype: torch.dtype) -> Tiles:
    """Return the fastest tiles of products of one form and shape; TILES where nothing can be measured.

    The kernels have been compiled, and TILES have been tried.
    """
    if not _is_measurable(products[0].parts[0]):
        return TILES
    with suppress(Exception):  # of a capture, or of Triton
        return {rows: _fastest(products, rows, dtype) for rows in CANDIDATES}
    return TILES


@torch.inference_mode()
def _is_right(product: GPUProduct, dtype: torch.dtype) -> bool:
    """Return whether torch's product in fp8 with a weight of this shape, if there is one, is that of the dequantized
    weight."""
    part = product.parts[0]
    if not any(each.is_by_torch for each in product.parts):
        return True
    x = torch.randn(MOST_ROWS + 1, part.columns, dtype=dtype, device=part.device)
    x *= 2.0 ** torch.arange(part.columns, device=part.device).div(GROUP, rounding_mode="floor").remainder(5)
    try:
        want = product.multiply_in(None, x).double()
        return float((product(x).double() - want).norm() / want.norm()) < LOSS
    except Exception:  # of CUDA's libraries
        return False


def _is_measurable(weight: GPUWeight) -> bool:
    return not weight.is_uniform and weight.device.type == "cuda"


def _fastest(products: Sequence[GPUProduct], rows: int, dtype: torch.dtype) -> AnyTile | None:
    part = products[0].parts[0]
    first, *others = _candidates(part, rows, dtype)
    if rows >= TRIED_PLAIN_ROWS and not products[0].is_wide:
        others.append(None)
    x = torch.randn(rows, part.columns, dtype=dtype, device=part.device)
    if rows == 1 and part.row(x) is None:
        return first
    want = products[0].multiply_in(first, x).double()
    best = first
    shortest = seconds([partial(each.multiply_in, first, x) for each in products], part.device)
    for tile in others:
        with suppress(Exception):  # one that does not fit
            error = (products[0].multiply_in(tile, x).double() - want).norm() / want.norm()
            took = seconds([partial(each.multiply_in, tile, x) for each in products], part.device)
            most = LOSS if isinstance(tile, Narrow | ByTorch) else MAX_ERROR[dtype]
            if error < most and took * GAIN <= shortest:
                best, shortest = tile, took
    return best


def _candidates(weight: GPUWeight, rows: int, dtype: torch.dtype) -> list[AnyTile | None]:
    """Return the tiles that are measured. The first one has been tried."""
    first, *others = candidates(rows, weight.form)
    if rows == 1 or not weight.is_scaled:
        return [first, *others]
    is_by_torch = weight.is_by_torch and dtype == torch.bfloat16
    return [first, *(each for each in scaled.CANDIDATES[rows] if isinstance(each, Narrow) or is_by_torch)]
