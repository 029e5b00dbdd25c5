"""The model's side of the engine: batches in, tokens out."""

from .runner import Runner, Step

__all__ = ["Runner", "Step"]
