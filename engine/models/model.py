"""What a loaded model is to the runner, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..kernels.library import Choice
from .spec import ModelSpec

Progress = Callable[[float], None]  # gets the share of the weights that is in place, 0 to 1


class Outputs(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # [n, vocab_size] in float32, or float64 where the model runs in it
    hidden: Tensor | None = None  # [m, hidden_size] behind the final norm, in the model's dtype; None: not asked or had


class Model(Protocol):
    """A loaded model. Nothing of it changes after loading; all state of a request is in the cache."""

    spec: ModelSpec
    num_params: int
    weights_bytes: int
    weights_hash: str
    product: Choice  # what computes the matrix products

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        meta: AttentionMeta,
        cache: KVCache,
        logits_at: Tensor,
        *,
        hidden_at: Tensor | None = None,
    ) -> Outputs:
        """Store the tokens (ids, positions: [tokens] int64) in the cache; give logits and hidden states of some.

        `logits_at` is [n] int64, rising places in the flattened line of tokens, n may be 0; `hidden_at` likewise [m].
        Where the spec has no hidden_size there are no hidden states to be had.
        """
