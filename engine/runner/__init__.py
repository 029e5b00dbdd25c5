"""The model's side of the engine: batches in, tokens out."""

from .runner import Runner, Step, build, pick_device, set_threads

__all__ = ["Runner", "Step", "build", "pick_device", "set_threads"]
