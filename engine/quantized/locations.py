"""Where a checkpoint's quantization settings are, if not in `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json

# compressed-tensors wrote the second one in 2024.
KEYS = "quantization_config", "compression_config"


def find(folder: Path, source: Mapping[str, Any]) -> object:
    """Return the `quantization_config` of a model folder, None if it has none. Raises ModelError.

    `source`: config.json. A key there, also one of its text part, comes before a file that the quantizing program has
    written beside it.
    """
    text = source.get("text_config")
    for part in (source, text if isinstance(text, Mapping) else {}):
        for key in KEYS:
            if part.get(key):
                return part[key]
    return _of_modelopt(folder) or _of_auto_gptq(folder) or _of_auto_awq(folder)


def _of_modelopt(folder: Path) -> dict[str, Any] | None:
    found = (read_json(folder / "hf_quant_config.json") or {}).get("quantization")
    if not isinstance(found, Mapping) or not found.get("quant_algo"):  # the KV cache alone may be quantized
        return None
    return {**found, "quant_method": "modelopt"}


def _of_auto_gptq(folder: Path) -> dict[str, Any] | None:
    found = read_json(folder / "quantize_config.json") or {}
    return {"quant_method": "gptq", **found} if "bits" in found else None


def _of_auto_awq(folder: Path) -> dict[str, Any] | None:
    found = read_json(folder / "quant_config.json") or {}
    if "w_bit" not in found:
        return None
    return {**found, "quant_method": "awq", "bits": found["w_bit"], "group_size": found.get("q_group_size", 128)}
