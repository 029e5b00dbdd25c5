"""All layers of a native decoder in one call of our kernels, from the embeddings to what the final norm takes.

The layers' own code (decoder_layer.py) says the same in torch. It computes where a part has no kernel, and is what the
tests hold this to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..attention import KVCache
from ..attention.cpu import Plan
from ..kernels import structures
from ..kernels.library import Kernels
from ..kernels.structures import Multiplied
from .decoder_layer import Layer
from .forward import Forward
from .rope import Rotary
from .spec import ModelSpec


class Stack:
    """The layers' weights as the kernels want them, and room for what lies between the parts. The model thread's."""

    def __init__(
        self, kernels: Kernels, model: ModelSpec, layers: Sequence[Layer], products: list[Multiplied], rotary: Rotary
    ) -> None:
        assert model.decoder is not None
        self._spec, self._rotary, self._kept = model.decoder, rotary, layers
        self._dtype, spec = model.dtype, model.decoder
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
    def of(cls, kernels: Kernels | None, model: ModelSpec, layers: Sequence[Layer], rotary: Rotary) -> Stack | None:
        """None where some part of the layers has no kernel."""
        parts = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        products = [product for part in parts if (product := part.multiplied()) is not None]
        if kernels is None or len(products) < len(parts):
            return None
        return cls(kernels, model, layers, products, rotary)

    def takes(self, cache: KVCache) -> bool:
        """Whether the cache is one that the kernels read."""
        return cache.dtype in self._compute and cache.backend.kernel_address(self._dtype, cache.dtype) is not None

    def __call__(self, x: Tensor, forward: Forward) -> Tensor:
        """The layers on x: [tokens, hidden], which is overwritten and given back."""
        positions, cache, stack = forward.positions, forward.cache, self._stack
        plan = cast(Plan, forward.plan)  # a backend with a kernel address plans so
        tokens, longest = plan.tokens, plan.meta.max_seq
        if x.shape != (tokens, self._spec.hidden_size) or x.dtype != self._dtype or positions.shape != (tokens,):
            raise ValueError(f"x of {tuple(x.shape)} in {x.dtype} and {tuple(positions.shape)} positions")
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
