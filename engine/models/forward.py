"""The input and the output of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..attention import KVCache, Plan


@dataclass(frozen=True, slots=True)
class Forward:
    """The input of one forward pass: a step's tokens, in one line of all rows, and where they stand.

    The pass stores the tokens in the cache. An input that concerns the whole step is a field of this class.
    """

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    plan: Plan  # the cache's plan of this step
    cache: KVCache
    logits_at: Tensor  # [n] int64, the ascending indices of the tokens whose logits are wanted; n may be 0
    hidden_at: Tensor | None = None  # [m] int64, the same for hidden states; None: none are wanted

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of layer number `layer`, as AttentionBackend.attend does."""
        return self.cache.attend(layer, q, k, v, self.plan)


class Outputs(NamedTuple):
    """The output of one forward pass."""

    logits: Tensor  # [n, vocab_size] in float32, or float64 where the model runs in it
    # [m, hidden_size] after the final norm, in the model's dtype; None where none were wanted or the model has none.
    hidden: Tensor | None = None
