"""Measures how `--quantization` changes a trained model's perplexity on a text.

    python -m benchmarks.permuted smollm2 TEXT --out FOLDER --json FILE

The model is a Llama in a GGUF file. Its numbers lie on the grid of its blocks, which a format with the same groups
would reproduce for free. Therefore the columns are permuted, so that the model computes the same but other numbers
share a group, and written to FOLDER as a bfloat16 checkpoint, which is quantized while it is loaded. The first 50,000
characters of the text are read in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.gguf.checkpoint import GgufCheckpoint
from engine.hub import fetch
from server.cli.bench.session import machine

from .gguf import WINDOW, reading, windows
from .quantization import Engine

QUANTIZATIONS = ("none", "int8", "int4")


def permuted(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a Llama that computes the same, with the columns of all its linear layers permuted."""
    draw = torch.Generator().manual_seed(0)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    order, found = torch.randperm(hidden, generator=draw), dict(state)
    for name, weight in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "norm" in name:
            found[name] = weight[order]
        else:
            found[name] = weight[:, order]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("gate_proj", "up_proj"):
            within = torch.randperm(inner, generator=torch.Generator().manual_seed(layer + 1))
            found[f"{prefix}mlp.{name}.weight"] = found[f"{prefix}mlp.{name}.weight"][within]
        found[f"{prefix}mlp.down_proj.weight"] = found[f"{prefix}mlp.down_proj.weight"][:, within]
        of_head = torch.randperm(head, generator=draw)
        values, output = f"{prefix}self_attn.v_proj.weight", f"{prefix}self_attn.o_proj.weight"
        found[values] = found[values].unflatten(0, (kv_heads, head))[:, of_head].flatten(0, 1)
        found[output] = found[output].unflatten(1, (heads, head))[:, :, of_head].flatten(1)
    return found


def write(model: Path, folder: Path) -> None:
    """Write the permuted checkpoint of a model in a GGUF file, in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config", None)
    checkpoint = GgufCheckpoint(model)
    state = {name: torch.empty(entry.shape) for name, entry in checkpoint.entries.items()}
    checkpoint.fill(state, lambda num_bytes: None)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.bfloat16().contiguous() for name, weight in permuted(state, config).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="GGUF file, or the name of a packaged model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write the checkpoint")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    write(fetch(given.file, weights=True).path, given.out)
    texts, rows = windows(given.out, given.text), {}
    for name in QUANTIZATIONS:
        settings = {"dtype": "bfloat16", "quantization": name, "max_len": WINDOW, "num_blocks": 64}
        engine = Engine(str(given.out), None, settings)
        perplexity, best = reading(lambda ids, engine=engine: engine.logits(ids[None], 0, len(ids)), texts)
        if not rows:
            first, plain = perplexity, best
        rows[name] = {
            "weights_bytes": engine.info.weights_bytes,
            "perplexity": perplexity,
            "difference": perplexity / first - 1,
            "agreement": (best == plain).float().mean().item(),
        }
        print(f"{name:<5} {engine.info.weights_bytes / 1e6:6.1f} MB {perplexity:8.3f} {perplexity / first - 1:+.2%}")
    if given.json:
        figures = {"machine": machine(), "model": given.file, "tokens": len(texts) * WINDOW, "rows": rows}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"written to {given.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
