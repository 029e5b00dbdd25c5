"""The executor that computes all layers of a decoder in one call of our kernels (layers.cpp).

The layers' own code (decoder_layer.py) says the same in torch. It computes where a part has no kernel, and is what the
tests hold this to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..attention.cpu import Plan
from ..kernels import structures
from ..kernels.library import Kernels
from ..kernels.structures import Multiplied
from .decoder_layer import Layer
from .forward import Forward
from .layers import Linear
from .rope import Rotary
from .spec import ModelSpec


class Fused:
    """An Executor. Holds the layers' weights as the kernels want them, and what lies between the layers' parts."""

    def __init__(
        self,
        kernels: Kernels,
        model: ModelSpec,
        embedding: Linear,
        layers: Sequence[Layer],
        rotary: Rotary,
        *,
        products: list[Multiplied],  # of each layer: qkv, output, gate and up, down
    ) -> None:
        assert model.decoder is not None
        self._dtype, spec = model.dtype, model.decoder
        self._embedding, self._rotary = embedding, rotary
        self._kept = layers  # whose weights are pointed to
        # The first layer of each kind of attention; a step has a Call for each of them.
        kinds = list(dict.fromkeys(model.layers))
        self._kinds = [model.layers.index(kind) for kind in kinds]
        self._layers = (structures.Layer * len(layers))(
            *(
                structures.Layer(
                    *products[4 * index : 4 * index + 4],
                    layer.attention_norm.weight.data_ptr(),
                    layer.mlp_norm.weight.data_ptr(),
                    None if layer.q_norm is None else layer.q_norm.weight.data_ptr(),
                    None if layer.k_norm is None else layer.k_norm.weight.data_ptr(),
                    kinds.index(model.layers[index]),
                )
                for index, layer in enumerate(layers)
            )
        )
        self._compute = {cache: call for (dtype, cache), call in kernels.layers.items() if dtype == self._dtype}
        self._stack = structures.Stack(
            layers=ctypes.addressof(self._layers),
            num_layers=len(layers),
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.norm_eps,
        )
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        line = q_size + 2 * kv_size
        self._widths = spec.hidden_size, line, q_size, spec.intermediate_size
        # Queries, keys and values lie side by side in a token's line.
        self._strides = line, spec.head_dim, line, spec.head_dim, line, spec.head_dim
        self._room = torch.empty(0, dtype=self._dtype)

    @classmethod
    def of(
        cls, kernels: Kernels | None, model: ModelSpec, embedding: Linear, layers: Sequence[Layer], rotary: Rotary
    ) -> Fused | None:
        """Return the executor of these layers, or None where some part of them has no kernel."""
        parts = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        products = [product for part in parts if (product := part.multiplied()) is not None]
        if kernels is None or len(products) < len(parts):
            return None
        return cls(kernels, model, embedding, layers, rotary, products=products)

    def takes(self, forward: Forward) -> bool:
        """Whether the cache is one that the kernels read."""
        held = forward.cache.dtype
        return held in self._compute and forward.cache.backend.kernel_address(self._dtype, held) is not None

    def run(self, forward: Forward) -> Tensor:
        positions, cache, stack = forward.positions, forward.cache, self._stack
        plan = cast(Plan, forward.plan)  # what a backend with a kernel address plans with
        tokens, longest = plan.tokens, plan.meta.max_seq
        if forward.ids.shape != (tokens,) or positions.shape != (tokens,):
            shapes = tuple(forward.ids.shape), tuple(positions.shape)
            raise ValueError(f"ids and positions of {shapes} for a step of {tokens} tokens")
        x = self._embedding.rows(forward.ids)
        assert x.is_contiguous() and positions.is_contiguous()
        angles = self._rotary.table(longest)
        calls = (ctypes.c_void_p * len(self._kinds))(
            *(plan.call(cache.layers[kind], self._strides) for kind in self._kinds)
        )
        caches = (ctypes.c_void_p * len(cache.layers))(*(layer.tensor.data_ptr() for layer in cache.layers))
        stack.normed, stack.line, stack.seen, stack.inner = self._places(tokens)
        stack.attend = cache.backend.kernel_address(self._dtype, cache.dtype)
        stack.threads = torch.get_num_threads()
        stack.tokens, stack.num_angles = tokens, len(angles)
        stack.positions, stack.angles, stack.x = positions.data_ptr(), angles.data_ptr(), x.data_ptr()
        stack.calls, stack.caches = ctypes.addressof(calls), ctypes.addressof(caches)
        failed = self._compute[cache.dtype](ctypes.addressof(stack))
        if failed == 1:
            raise MemoryError("no memory for the layers' sums")
        if failed:
            raise ValueError(f"there are positions outside of the {longest} tokens of the longest sequence")
        return x

    def _places(self, tokens: int) -> list[int]:
        """Where the parts of the room begin, which grows with the longest step; each begins on a cache line."""
        sizes = [-(-tokens * width // 64) * 64 for width in self._widths]
        if self._room.numel() < sum(sizes) + 64:
            self._room = torch.empty(sum(sizes) + 64, dtype=self._dtype)
        place, found = -(-self._room.data_ptr() // 64) * 64, []
        for size in sizes:
            found.append(place)
            place += size * self._room.itemsize
        return found
