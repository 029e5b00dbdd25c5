"""Runs batches on the model: computes logits, and samples tokens."""

from .runner import Runner, Step

__all__ = ["Runner", "Step"]
