"""Products with quantized weights: their errors, and their speed beside a copy's and beside torch's with plain weights.

    python -m benchmarks.gpu.quantized --device cuda

Prints one line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.launching import use_device
from engine.models.gpu import scaled as fp8
from engine.models.gpu.form import ROUNDED, Form
from engine.models.gpu.measured_tiles import fastest
from engine.models.gpu.tiles import TILES, Tiles
from engine.models.gpu.weight_trial import objection
from engine.models.gpu.weights import GPUProduct, GPUWeight, random_weight, relative
from engine.roofline import BYTES, read_rate

from .kernels import seconds_of
from .shapes import SHAPES

FORMS = {
    "int4": ROUNDED[4],
    "int8": ROUNDED[8],
    "fp8": Form(8, is_float=True),
    "fp8 in blocks of 128": Form(8, 128, is_float=True),
    "int4 in groups of 128 with zero points": Form(4, 128, has_zeros=True, scale=torch.float16),
}
Product = Callable[[Tensor], Tensor]
# Bytes of the weights that are read one after another: more than caches hold.
ROTATED = 256 << 20


def shapes(name: str) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of a layer's weights."""
    shape = SHAPES[name]
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    return {
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "qkv": (q + 2 * kv, hidden),
        "output": (hidden, q),
    }


def rotated(products: list[Product], x: Tensor) -> Callable[[], Any]:
    """Return a function that multiplies by each weight, in a CUDA graph if there is a GPU."""

    def work() -> None:
        for product in products:
            product(x)

    if x.device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


tuned: dict[tuple[Form, int, int], Tiles] = {}  # the tiles of products


def made(form: Form | None, rows: int, columns: int, device: torch.device, size: int) -> tuple[list[Product], int]:
    """Return products with random weights that take `size` bytes together, and the bytes of one; None: plain ones."""
    if form is None:
        plain = torch.randn(rows, columns, device=device).bfloat16()
        copies = [plain.clone() for _ in range(max(1, -(-size // plain.nbytes)))]
        return [partial(F.linear, weight=each) for each in copies], plain.nbytes
    weight, _ = random_weight(form, rows, columns, torch.Generator(device).manual_seed(0), in_blocks=form.is_float)
    count = max(1, -(-size // weight.num_bytes))
    products = [scaled(copy.deepcopy(weight)) for _ in range(count)]
    tiles = tuned.get((form, rows, columns)) or fastest(products, torch.bfloat16)
    for product in products:
        product.parts[0].use(tiles)
    tuned[form, rows, columns] = tiles
    return [*products], weight.num_bytes


def scaled(weight: GPUWeight) -> GPUProduct:
    """Return a product, of several rows in fp8 if the weight is in fp8 and the GPU multiplies it."""
    product = GPUProduct([weight], None, torch.bfloat16)
    if product.can_scale and fp8.objection(weight.device) is None:
        kinds = (False, True)
        product.scale(by_torch={kind: fp8.objection_to_torch(weight.device, is_blocked=kind) is None for kind in kinds})
    return product


def errors(form: Form, rows: int, columns: int, device: torch.device) -> dict[str, float]:
    """Return the relative error for a few numbers of rows, beside that of torch with the weight in bfloat16."""
    draw = torch.Generator(device).manual_seed(0)
    weight, plain = random_weight(form, rows, columns, draw, in_blocks=form.is_float)
    product, found = scaled(weight), {}
    for tokens in (1, *(most + 1 for most in TILES)):
        x = torch.randn(tokens, columns, device=device).bfloat16()
        want = x.double() @ plain.double().T
        found[f"{tokens} rows"] = relative(product(x), want)
    return found | {"torch": relative(F.linear(x, plain.bfloat16()), want)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    device = torch.device(args.device)
    use_device(device)
    if args.tiny and device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    weights = shapes("tiny" if args.tiny else "8B")
    forms = dict(list(FORMS.items())[:3]) if args.tiny else FORMS
    usable: dict[str, Form | None] = {}
    for name, form in forms.items():
        began = time.perf_counter()
        rows, columns = weights["output"]
        why = objection([(form, rows, columns)], torch.bfloat16, device, head=0)
        trial = {"seconds": time.perf_counter() - began} if why is None else {"skipped": why}
        print(json.dumps({"measurement": f"{name}, trial", **trial}), flush=True)
        if why is None:
            usable[name] = form
            found = errors(form, rows, columns, device)
            print(json.dumps({"measurement": f"{name}, relative errors", **found}), flush=True)
    if not usable:
        return
    rate = read_rate(device, BYTES // 64 if args.tiny else BYTES, 3)
    size = 0 if args.tiny else ROTATED
    counts = (1,) if args.tiny else (1, 16, 4, 64, 256, 2048)
    with torch.inference_mode():
        for tokens in counts:
            for part, (rows, columns) in weights.items():
                x = torch.randn(tokens, columns, device=device).bfloat16()
                for name, kind in {**usable, "bf16, torch": None}.items():
                    if time.perf_counter() + 2 > end:
                        return
                    products, num_bytes = made(kind, rows, columns, device, size)
                    took = seconds_of(rotated(products, x), device, 1 if args.tiny else 10) / len(products)
                    print(json.dumps({
                        "measurement": f"{name}, {part}, {tokens} rows", "us": 1e6 * took,
                        "gb_per_s": num_bytes / took / 1e9, "of_copy_rate": num_bytes / took / rate,
                    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
