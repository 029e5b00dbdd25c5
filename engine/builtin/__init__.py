"""The small chat model that this repository makes and carries."""

from pathlib import Path


def path() -> Path:
    """The folder of the built-in model, laid out like a model from a hub."""
    return Path(__file__).parent / "model"
