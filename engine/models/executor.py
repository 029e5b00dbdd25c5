"""Executors: ways to compute a decoder's hidden states. A model chooses them when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .decoder_layer import Layer
from .forward import Forward
from .layers import Linear
from .rope import Rotary


class Executor(Protocol):
    """Computes the embedding and the layers of a step, and stores the tokens in the cache. The final norm and the head
    follow in `Decoder.forward`."""

    def takes(self, forward: Forward) -> bool:
        """Return whether it can compute this step, by the step's sizes, cache and plan."""

    def run(self, forward: Forward) -> Tensor:
        """Return the hidden states of all tokens before the final norm: [tokens, hidden_size]."""


class CapturedHead(Protocol):
    """Computes the final norm and the head of steps whose hidden states lie where it reads them."""

    def has_logits(self, hidden: Tensor, logits_at: Tensor) -> bool:
        """Return whether it can compute the logits of these tokens; hidden: the result of Executor.run."""

    def logits(self, rows: int) -> Tensor:
        """Return the logits of the first `rows` tokens of the step's logits_at: [rows, vocab_size] float32."""


class Eager:
    """Calls layer by layer, see decoder_layer.py; can compute every step."""

    def __init__(self, embedding: Linear, layers: Sequence[Layer], rotaries: Sequence[Rotary]) -> None:
        self._embedding, self._layers, self._rotaries = embedding, layers, rotaries

    def takes(self, forward: Forward) -> bool:
        return True

    def run(self, forward: Forward) -> Tensor:
        x = self._embedding.rows(forward.ids)
        turns = [rotary.turn(forward.positions) for rotary in self._rotaries]
        for layer in self._layers:
            x = layer(x, None if layer.turn < 0 else turns[layer.turn], forward)
        return x
