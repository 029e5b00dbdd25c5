"""The metadata of a GGUF file that describe its model, and what settings of several architectures are made of."""

from __future__ import annotations

import struct
from typing import Any

from ..bounds import MAX_LAYERS
from ..types import ModelError
from .reader import TYPES, Model

FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, as Llama 3.1 has them


class Keys:
    """The metadata of one architecture. Raises ModelError for a missing value or one of another type."""

    def __init__(self, model: Model) -> None:
        self.metadata, self.tensors = model.metadata, model.tensors
        name = model.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError("the GGUF file names no architecture: it has no general.architecture")
        self.architecture = name

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # one for each layer
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            state = "no" if value is None else "several values or no number as"
            raise ModelError(f"the GGUF file has {state} {self.architecture}.{key}")
        return value

    def whole(self, key: str, maximum: int, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number from `minimum` to `maximum`."""
        value = self.number(key, default)
        if not isinstance(value, int) or not minimum <= value <= maximum:
            name = f"{self.architecture}.{key}"
            raise ModelError(f"the GGUF file's {name} is not a whole number from {minimum} to {maximum}")
        return value

    def first(self, key: str, default: float | None = None) -> Any:
        """Return the same, of the first layer if there is a value for each."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            return self.number(key, default)
        if isinstance(value[0], bool) or not isinstance(value[0], int | float):
            raise ModelError(f"the GGUF file has no number as {self.architecture}.{key}")
        return value[0]

    def by_layer(self, key: str, count: int, default: int | None = None) -> list[int]:
        """Return a whole number for each of `count` layers; one that is not in a list is that of all."""
        value = self.get(key)
        found = value if isinstance(value, list) else [self.number(key, default)] * count
        if len(found) != count or not all(isinstance(each, int) and not isinstance(each, bool) for each in found):
            raise ModelError(f"the GGUF file's {self.architecture}.{key} is not a list of {count} whole numbers")
        return found

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Return a flag for each of `count` layers; None: the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(isinstance(each, bool) for each in value):
            raise ModelError(f"the GGUF file's {self.architecture}.{key} is not a list of {count} flags")
        return value

    def windowed(self, count: int, period: int) -> list[bool]:
        """Return of each of `count` layers whether it has a sliding window. A file has a list, or a number in place of
        `period`: every layer has one but each `period`-th. 0: every layer has one."""
        key = "attention.sliding_window_pattern"
        if isinstance(self.get(key), list):
            return self.flags(key, count) or []
        period = self.whole(key, MAX_LAYERS, period, minimum=0)
        return [not period or index % period < period - 1 for index in range(count)]

    def floats(self, name: str, count: int) -> list[float]:
        """Return the numbers of a tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"the GGUF file has no {name}")
        if TYPES[tensor.type].name != "F32" or tensor.shape != (count,):
            raise ModelError(f"the GGUF file's {name} is not a list of {count} numbers in F32")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def windows_of(size: int, has_window: list[bool]) -> dict[str, Any]:
    """Return the keys of config.json for a sliding window of some layers."""
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window]
    return {"sliding_window": size, "layer_types": kinds}
