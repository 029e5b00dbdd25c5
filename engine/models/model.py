"""Model: the interface of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from ..kernels.library import Choice
from .executor import Executor
from .forward import Forward, Outputs
from .spec import ModelSpec

Progress = Callable[[float], None]  # called with the fraction of the weights that has been read, from 0 to 1


class Model(Protocol):
    """A loaded model. All state of a request is in the cache."""

    spec: ModelSpec
    num_params: int
    weights_bytes: int  # without compression
    saved_bytes: int  # by compression
    weights_hash: str
    product: Choice  # the kernels that compute matmuls, or torch
    # Of our decoder, in order of preference: the first one that takes a step computes it. A runner may add its own.
    executors: list[Executor]
    sinks: Mapping[str, Tensor]  # the parameters that the spec's attention layers name as sinks

    def forward(self, forward: Forward) -> Outputs:
        """Store a step's tokens in the cache and return the logits and hidden states of some of them.

        A model whose spec has no hidden_size returns no hidden states.
        """
