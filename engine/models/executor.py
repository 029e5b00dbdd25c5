"""Executors: the ways to compute a decoder's hidden states. A model chooses them when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .decoder_layer import Layer
from .forward import Forward
from .layers import Linear
from .rope import Rotary


class Executor(Protocol):
    """Computes a step from token ids to what the final norm takes, and stores the tokens in the cache."""

    def takes(self, forward: Forward) -> bool:
        """Whether it can compute this step; its sizes, its cache and its plan may decide."""

    def run(self, forward: Forward) -> Tensor:
        """Return the hidden states of all tokens before the final norm: [tokens, hidden_size]."""


class Eager:
    """Layer by layer, as decoder_layer.py has them; takes every step."""

    def __init__(self, embedding: Linear, layers: Sequence[Layer], rotary: Rotary) -> None:
        self._embedding, self._layers, self._rotary = embedding, layers, rotary

    def takes(self, forward: Forward) -> bool:
        return True

    def run(self, forward: Forward) -> Tensor:
        x = self._embedding.rows(forward.ids)
        turn = self._rotary.at(forward.positions)
        for layer in self._layers:
            x = layer(x, turn, forward)
        return x
