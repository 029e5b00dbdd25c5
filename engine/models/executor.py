"""Executors: ways to compute a decoder's hidden states. A model chooses them when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .decoder_layer import Kept, Layer
from .forward import Forward
from .layer_inputs import LayerInputs
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

    def __init__(
        self,
        embedding: Linear,
        layers: Sequence[Layer],
        rotaries: Sequence[Rotary],
        inputs: LayerInputs | None = None,
    ) -> None:
        self._embedding, self._layers, self._rotaries, self._inputs = embedding, layers, rotaries, inputs

    def takes(self, forward: Forward) -> bool:
        return True

    def run(self, forward: Forward) -> Tensor:
        x = self._embedding.rows(forward.ids)
        turns = [rotary.turn(forward.positions) for rotary in self._rotaries]
        inputs = None if self._inputs is None else self._inputs(forward.ids, x)
        kept: Kept = {}
        for layer in self._layers:
            own_input = None if inputs is None else inputs[layer.index]
            x = layer(x, None if layer.turn < 0 else turns[layer.turn], forward, kept, own_input)
        return x
