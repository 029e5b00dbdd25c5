"""Tries, before a model is loaded, whether a GPU computes with quantized weights of some forms and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from ...attention.paged_gpu import MAX_ERROR, is_interpreted, lack
from ...kernels.launching import META, Compiling, Job
from . import scaled
from .form import Form
from .scaled import Narrow
from .tiles import CANDIDATES, MOST_ROWS, MOST_SLICES, TILES, candidates
from .weights import DTYPES, LOOKED_UP, GPUProduct, GPUWeight, random_weight, relative

TRIAL_ROWS = 1024  # of a large weight


def objection(
    shapes: Iterable[tuple[Form, int, int]], dtype: torch.dtype, device: torch.device, head: int
) -> str | None:
    """Return why a GPU cannot compute with weights of these forms, rows and columns, or None. The kernels are tried.

    `head`: the number of rows of a weight whose results are wide. The compiled kernels are kept, so this costs a start
    no more than their first use would.
    """
    if dtype not in DTYPES and not (is_interpreted() and dtype == torch.float32):
        name = str(dtype).removeprefix("torch.")
        return f"the Triton kernels for them compute in bfloat16 (`dtype=bfloat16`) and float16, not in {name}"
    if reason := lack():
        return reason
    shapes = list(dict.fromkeys(shapes))
    if device.type == "cuda":
        compiling = Compiling({"weights": list(jobs(shapes, dtype, head))}, device)
        compiling.wait("weights")
    for form, rows, columns in shapes:
        try:
            error = _error(form, rows, columns, dtype, device, wide=rows == head)
        except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
            first = (str(problem).strip().splitlines() or [""])[0]
            return f"the Triton kernels do not run on this device: {type(problem).__name__}: {first[:200]}"
        if not error < MAX_ERROR[dtype]:
            return f"the Triton kernels compute wrong results with {form.name} (relative error {error:.2g})"
    return None


def jobs(shapes: Iterable[tuple[Form, int, int]], dtype: torch.dtype, head: int) -> Iterator[Job]:
    """Yield what compiles the kernels for weights of these forms, rows and columns, each kernel once."""
    kinds, single = {}, {}  # a kernel for a single row is compiled for the number of columns
    for form, rows, columns in shapes:
        sizes = rows, columns, form.slices(columns)  # Triton compiles 1, multiples of 16 and others apart
        even = 0 if columns % form.slice else math.gcd(form.slices(columns), MOST_SLICES)
        kind = form, rows == head, even, tuple((size == 1, size % 16 == 0) for size in sizes)
        kinds[kind] = single[kind, columns] = rows, columns
    for ((form, wide, *_), _), (rows, columns) in single.items():
        product, x = _bare(form, rows, columns, dtype, wide=wide), torch.empty(1, columns, dtype=dtype, device=META)
        if product.parts[0].row(x) is not None:
            yield from (partial(product.multiply_in, tile, x) for tile in CANDIDATES[1])
    for (form, wide, *_), (rows, columns) in kinds.items():
        product = _bare(form, rows, columns, dtype, wide=wide)
        may_scale = not wide and product.parts[0].may_scale and scaled.objection(torch.device("cuda")) is None
        for tokens in CANDIDATES:
            if tokens > 1:
                tiles = candidates(tokens, form)
                x = torch.empty(tokens, columns, dtype=dtype, device=META)
                narrow = [each for each in scaled.CANDIDATES[tokens] if isinstance(each, Narrow)]
                tried = (tiles[0], *narrow) if may_scale else tiles
                yield from (partial(product.multiply_in, tile, x) for tile in tried)
        yield partial(product.lookup, torch.empty(LOOKED_UP, dtype=torch.int64, device=META))
        yield partial(product, torch.empty(MOST_ROWS + 1, columns, dtype=dtype, device=META))


def _bare(form: Form, rows: int, columns: int, dtype: torch.dtype, *, wide: bool) -> GPUProduct:
    """Return a product without memory."""
    return GPUProduct([GPUWeight(form, rows, columns, META)], None, dtype, wide=wide)


@torch.inference_mode()
def _error(form: Form, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, wide: bool) -> float:
    """Return the largest relative difference from torch's product with the same numbers, over the kernels' variants.

    Of a large weight some rows are tried, with all columns.
    """
    rows = rows if rows < 2 * TRIAL_ROWS else TRIAL_ROWS + rows % TRIAL_ROWS
    draw = torch.Generator(device).manual_seed(0)
    weight, plain = random_weight(form, rows, columns, draw)
    product = GPUProduct([weight], None, dtype, wide=wide)
    ids = torch.arange(min(rows, LOOKED_UP + 1), device=device)
    errors = [relative(product.lookup(ids), plain[ids])]
    for tokens in (1, *(most + 1 for most in TILES)):
        x = torch.randn(tokens, columns, generator=draw, device=device).to(dtype)
        errors.append(relative(product(x), x.float() @ plain.T))
    return max(errors)
