"""The input and the output of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..attention import KVCache, Plan
from .mixers.states import States


@dataclass(frozen=True, slots=True)
class Forward:
    """The input of one forward pass: the tokens of all rows of a step, one after the other, and their positions.

    The pass stores the tokens in the cache. An input of the whole step is a field of this class.
    """

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    plan: Plan  # the cache's plan of this step
    cache: KVCache
    logits_at: Tensor  # [n] int64, ascending indices of the tokens whose logits are needed; n may be 0
    states: States | None = None  # of models whose layers keep states
    hidden_at: Tensor | None = None  # [m] int64, the same for hidden states; None: none are needed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call AttentionBackend.attend for layer number `layer`."""
        return self.cache.attend(layer, q, k, v, self.plan)


class Outputs(NamedTuple):
    """The output of one forward pass."""

    logits: Tensor  # [n, vocab_size] in float32, or in float64 if the model runs in float64
    # [m, hidden_size] after the final norm, in the model's dtype; None if none were requested, or the model has none.
    hidden: Tensor | None = None
