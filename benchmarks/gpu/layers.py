"""The kernels of a decoder's layers beside attention: against torch in float64, and their speed beside a copy's.

    python -m benchmarks.gpu.layers --device cuda

Prints one line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention import AttentionLayer, AttentionMeta
from engine.attention.paged_gpu import HeadNorms, PagedGPU, Rotation, limitation
from engine.kernels.launching import use_device
from engine.models.gpu.executor import add_norm, gated
from engine.models.norms import RMSNorm
from engine.models.rope import Rope, Rotary, rotate
from engine.roofline import BYTES, read_rate

from .kernels import BLOCK, seconds_of
from .shapes import SHAPES

CALLS = 20  # in a CUDA graph: launching one kernel takes longer than most of these run


class Case:
    """One layer's activations of random numbers, for a model and a number of tokens."""

    def __init__(self, name: str, tokens: int, device: torch.device) -> None:
        shape, dtype = SHAPES[name], torch.bfloat16
        self.hidden, self.inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.layer = AttentionLayer(heads, kv_heads, dim, dim, scale=dim**-0.5)
        self.tokens, self.device = tokens, device

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.float32).to(dtype)

        self.x, self.added = numbers(tokens, self.hidden), numbers(tokens, self.hidden)
        self.qkv, self.gate_up = numbers(tokens, (heads + 2 * kv_heads) * dim), numbers(tokens, 2 * self.inner)
        self.norm, self.q_norm, self.k_norm = (RMSNorm(size, 1e-6, dtype, device) for size in (self.hidden, dim, dim))
        for norm in (self.norm, self.q_norm, self.k_norm):
            norm.weight.copy_(1 + 0.1 * numbers(len(norm.weight)))
        self.backend, blocks = PagedGPU(), -(-tokens // BLOCK)
        self.cache = self.backend.allocate(self.layer, blocks, BLOCK, dtype, device)
        self.plan = self.backend.plan(AttentionMeta.of([(list(range(blocks)), 0, tokens)], BLOCK, device))
        self.rotary, self.positions = Rotary(Rope(dim), tokens, dtype, device), torch.arange(tokens, device=device)

    def add_norm(self) -> Tensor:
        return add_norm(self.x, self.added, self.norm)

    def rotate_store(self) -> None:
        rotation = Rotation(self.positions, self.rotary.table(self.tokens))
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.norm.eps)
        self.backend.rotate_store(self.cache, self.qkv, rotation, norms, self.plan)

    def gate(self) -> Tensor:
        return gated(self.gate_up, "silu")

    def kernels(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """Return each kernel, and the bytes that it reads and writes."""
        row = self.tokens * self.x.itemsize
        heads = self.layer.num_heads + 2 * self.layer.num_kv_heads
        return {
            "add + RMSNorm": (self.add_norm, 4 * self.hidden * row),
            "norm + rotate + store": (self.rotate_store, 2 * heads * self.layer.head_dim * row),
            "SiLU-mul": (self.gate, 3 * self.inner * row),
        }

    def errors(self) -> dict[str, float]:
        """Return the relative error of each kernel."""
        total = self.x.double() + self.added.double()
        rounded = total.to(self.x.dtype).double()
        want = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + self.norm.eps) * self.norm.weight.double()
        found = {"add + RMSNorm": error(self.add_norm(), want), "add": error(self.x, total)}
        dim, heads, kv_heads = self.layer.head_dim, self.layer.num_heads, self.layer.num_kv_heads
        parts = self.qkv.double().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
        turn = tuple(part.double() for part in self.rotary.at(self.positions))
        q, k = (
            rotate(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double(), *turn)
            for x, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        self.rotate_store()
        stored = self.cache.tensor.unflatten(2, (2, BLOCK, dim)).permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : self.tokens]
        found |= {"queries": error(self.qkv[:, : heads * dim].unflatten(1, (-1, dim)), q)}
        found |= {"keys": error(stored[0], k), "values": error(stored[1], v)}
        gate, up = self.gate_up.double().chunk(2, dim=-1)
        return found | {"SiLU-mul": error(self.gate(), F.silu(gate) * up)}


def error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


def graphed(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a replay of CALLS calls; `work` itself without a GPU."""
    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    device = torch.device(args.device)
    use_device(device)
    if args.tiny and device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    names, sizes = (["tiny"], (3,)) if args.tiny else (["8B", "0.6B"], (64, 1, 8192))
    first = Case(names[0], sizes[0], device)
    why = limitation([first.layer], torch.bfloat16, device)
    if why is not None:
        print(json.dumps({"measurement": "all", "skipped": why}), flush=True)
        return
    copy = read_rate(device, BYTES // 64 if args.tiny else BYTES, 3)
    calls = CALLS if device.type == "cuda" else 1
    with torch.inference_mode():
        print(json.dumps({"measurement": "relative errors", **first.errors()}), flush=True)
        for name in names:
            for tokens in sizes:
                case = Case(name, tokens, device)
                for kernel, (work, moved) in case.kernels().items():
                    if time.perf_counter() + 2 > end:
                        return
                    took = seconds_of(graphed(work, device), device, 3 if args.tiny else 10) / calls
                    print(json.dumps({
                        "measurement": f"{kernel}, {name}, {tokens} tokens", "us": 1e6 * took,
                        "of_copy_rate": moved / took / copy,  # few tokens stay in the cache: it may be over 1
                    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
