"""The small chat model that this repository trains and contains."""

from pathlib import Path


def path() -> Path:
    """Return the folder of the built-in model, which has the files of a hub model."""
    return Path(__file__).parent / "model"
