"""The executor that computes all layers of a decoder in one call of our kernels (layers.cpp).

decoder_layer.py computes the same in torch: it is used if there is no kernel for a part of the layers, and it is the
tests' oracle.
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
    """An Executor. Owns the kernels' description of the layers, and the memory for intermediate results."""

    def __init__(
        self,
        kernels: Kernels,
        model: ModelSpec,
        embedding: Linear,
        layers: Sequence[Layer],
        rotaries: Sequence[Rotary],
        *,
        matmuls: list[list[Multiplied]],  # of each layer: QKV, output, and without experts gate and up, down
    ) -> None:
        assert model.decoder is not None
        self._dtype, spec, shape = model.dtype, model.decoder, model.decoder.shapes[0]
        self._embedding, self._rotaries = embedding, rotaries
        self._kept = layers  # keeps the weights alive, to which pointers refer
        # The first layer of each kind of attention and group of layers: a step has one Call for each. All layers have
        # one shape, see DecoderSpec.difference, and therefore their caches one stride.
        kind_of = list(zip(model.layers, model.groups.of_layer, strict=True))
        kinds = list(dict.fromkeys(kind_of))
        self._kinds = [kind_of.index(kind) for kind in kinds]
        mixtures = [None if layer.experts is None else layer.experts.mixture() for layer in layers]
        self._layers = (structures.Layer * len(layers))(
            *(
                structures.Layer(
                    *matmuls[index],
                    *[Multiplied()] * (4 - len(matmuls[index])),
                    None if mixture is None else ctypes.addressof(mixture),
                    *(
                        None if norm is None else norm.weight.data_ptr()
                        for norm in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
                    ),
                    kinds.index(kind_of[index]),
                    layer.turn,
                )
                for index, (layer, mixture) in enumerate(zip(layers, mixtures, strict=True))
            )
        )
        self._compute = {cache: call for (dtype, cache), call in kernels.layers.items() if dtype == self._dtype}
        self._stack = structures.Stack(
            layers=ctypes.addressof(self._layers),
            num_layers=len(layers),
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            turned=spec.ropes[0].head_dim,
            eps=spec.norm_eps,
        )
        q_size, kv_size, _ = spec.rows(0)
        line = q_size + 2 * kv_size
        self._widths = spec.hidden_size, line, q_size, shape.inner
        # A token's queries, keys and values are contiguous, in this order.
        self._strides = line, shape.head_dim, line, shape.head_dim, line, shape.head_dim
        self._memory = torch.empty(0, dtype=self._dtype)

    @classmethod
    def of(
        cls,
        kernels: Kernels | None,
        model: ModelSpec,
        embedding: Linear,
        layers: Sequence[Layer],
        rotaries: Sequence[Rotary],
    ) -> Fused | None:
        """Return the executor of these layers, or None if there is no kernel for some part of them."""
        assert model.decoder is not None
        if kernels is None or model.decoder.difference:
            return None
        if any(layer.experts is not None and layer.experts.mixture() is None for layer in layers):
            return None
        matmuls = []
        for layer in layers:
            found = [matmul for part in layer.linears if (matmul := part.multiplied()) is not None]
            if len(found) < len(layer.linears):
                return None
            matmuls.append(found)
        return cls(kernels, model, embedding, layers, rotaries, matmuls=matmuls)

    def takes(self, forward: Forward) -> bool:
        """Return whether the kernels can read the cache."""
        cache = forward.cache
        return cache.dtype in self._compute and cache.backend.kernel_address(self._dtype, cache.dtype) is not None

    def run(self, forward: Forward) -> Tensor:
        positions, cache, stack = forward.positions, forward.cache, self._stack
        plan = cast(Plan, forward.plan)  # a backend with a kernel address returns this kind of plan
        tokens, longest = plan.tokens, plan.meta.max_seq
        if forward.ids.shape != (tokens,) or positions.shape != (tokens,):
            shapes = tuple(forward.ids.shape), tuple(positions.shape)
            raise ValueError(f"ids and positions of {shapes} for a step of {tokens} tokens")
        x = self._embedding.rows(forward.ids)
        assert x.is_contiguous() and positions.is_contiguous()
        tables = [rotary.table(longest) for rotary in self._rotaries]
        angles = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
        calls = (ctypes.c_void_p * len(self._kinds))(
            *(plan.call(cache.layers[kind], self._strides) for kind in self._kinds)
        )
        caches = (ctypes.c_void_p * len(cache.layers))(*(layer.tensor.data_ptr() for layer in cache.layers))
        stack.normed, stack.line, stack.seen, stack.inner = self._addresses(tokens)
        stack.attend = cache.backend.kernel_address(self._dtype, cache.dtype)
        stack.threads = torch.get_num_threads()
        stack.tokens, stack.num_angles = tokens, min(map(len, tables))
        stack.positions, stack.angles, stack.x = positions.data_ptr(), ctypes.addressof(angles), x.data_ptr()
        stack.calls, stack.caches = ctypes.addressof(calls), ctypes.addressof(caches)
        failed = self._compute[cache.dtype](ctypes.addressof(stack))
        if failed == 1:
            raise MemoryError("no memory for the layers' sums")
        if failed:
            raise ValueError(f"there are positions outside of the {longest} tokens of the longest sequence")
        return x

    def _addresses(self, tokens: int) -> list[int]:
        """Return the addresses of the intermediate results, each on a cache line. The memory grows with the largest
        step."""
        sizes = [-(-tokens * width // 64) * 64 for width in self._widths]
        if self._memory.numel() < sum(sizes) + 64:
            self._memory = torch.empty(sum(sizes) + 64, dtype=self._dtype)
        address, addresses = -(-self._memory.data_ptr() // 64) * 64, []
        for size in sizes:
            addresses.append(address)
            address += size * self._memory.itemsize
        return addresses
