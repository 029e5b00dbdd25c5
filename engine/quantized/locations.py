"""Where a checkpoint's quantization settings are, if not in `quantization_config` of its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..files import read_json
from ..models.checkpoint.weights import Checkpoint
from ..types import ModelError


class Found(NamedTuple):
    """Quantization settings as those of a `quantization_config`, and the name of the file that they were read from."""

    settings: object
    file: str


def find(folder: Path, source: Mapping[str, Any]) -> Found | None:
    """Return the quantization settings of a model folder, None if it has none. Raises ModelError.

    `source`: config.json. A key there, also one of its text part, comes before a file that the quantizing program has
    written beside it.
    """
    text = source.get("text_config")
    for part in (source, text if isinstance(text, Mapping) else {}):
        if settings := part.get("quantization_config") or _of_compressed_tensors(part):
            return Found(settings, "config.json")
    for file, read in BESIDE.items():
        if settings := read(folder / file):
            return Found(settings, file)
    return None


def _of_compressed_tensors(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `compression_config` that compressed-tensors wrote in 2024. It may be about the sparsity or the KV
    cache of plain weights."""
    found = part.get("compression_config")
    return found if isinstance(found, Mapping) and found.get("config_groups") else None


def _of_modelopt(path: Path) -> dict[str, Any] | None:
    found = (read_json(path) or {}).get("quantization")
    if not isinstance(found, Mapping) or not found.get("quant_algo"):  # the KV cache alone may be quantized
        return None
    return {**found, "quant_method": "modelopt"}


def _of_auto_gptq(path: Path) -> dict[str, Any] | None:
    found = _beside_packed(path)
    return {"quant_method": "gptq", **found} if _is_quantized(found.get("bits")) else None


def _of_auto_awq(path: Path) -> dict[str, Any] | None:
    found = _beside_packed(path)
    if not _is_quantized(found.get("w_bit")):
        return None
    return {**found, "quant_method": "awq", "bits": found["w_bit"], "group_size": found.get("q_group_size", 128)}


BESIDE = {
    "hf_quant_config.json": _of_modelopt,
    "quantize_config.json": _of_auto_gptq,
    "quant_config.json": _of_auto_awq,
}


def _beside_packed(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one unless weights beside it are packed. Programs that start from a
    quantized model, or set out to quantize one, leave such files beside plain weights."""
    return (read_json(path) or {}) if os.path.isfile(path) and _is_packed(path.parent) else {}


def _is_packed(folder: Path) -> bool:
    """Return whether a checkpoint holds weights as GPTQ and AWQ pack them."""
    try:
        return any(name.endswith(".qweight") for name in Checkpoint(folder).entries)
    except ModelError:  # raised again when the weights are read; a plan and dummy weights do without them
        return True


def _is_quantized(bits: object) -> bool:
    """Return whether a number of bits says that weights are quantized: they have fewer than 16."""
    return bits is not None and not (isinstance(bits, int) and bits >= 16)
