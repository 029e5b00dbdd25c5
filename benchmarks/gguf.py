"""Measures how a GGUF file's perplexity on a text differs from that of its dequantized weights in transformers.

    python -m benchmarks.gguf FILE TEXT --json FILE

The first 50,000 characters of the text are read in windows of 512 tokens. transformers computes in float32 with the
weights that the gguf package reads from the file; Pequod computes with the blocks, in bfloat16 with activations of 8
and of 15 bits (`--gguf-activations`). `agreement` is the share of positions with the same most likely token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from engine.gguf.checkpoint import GgufCheckpoint
from engine.hub import fetch
from server.cli.bench.session import machine

from .quantization import Engine

CHARACTERS, WINDOW = 50_000, 512
VARIANTS = {
    name: {"dtype": "bfloat16", "gguf_activations": name, "max_len": WINDOW, "num_blocks": 64}
    for name in ("int8", "int16")
}


def windows(folder: Path, text: Path) -> list[Tensor]:
    """Return the token ids of the text, [WINDOW] each."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text()[:CHARACTERS], add_special_tokens=False).ids
    return [torch.tensor(ids[start : start + WINDOW]) for start in range(0, len(ids) - WINDOW + 1, WINDOW)]


def by_transformers(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the logits of transformers' model with dequantized weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = json.loads((folder / "config.json").read_text())
    source.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source)).float().eval()
    checkpoint = GgufCheckpoint(folder)
    state = {name: torch.empty(entry.shape) for name, entry in checkpoint.entries.items()}
    checkpoint.fill(state, lambda num_bytes: None)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()

    def logits(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(ids[None]).logits[0]

    return logits


def reading(logits: Callable[[Tensor], Tensor], texts: list[Tensor]) -> tuple[float, Tensor]:
    """Return the perplexity over the windows, and the most likely token after each of their tokens."""
    losses, best = [], []
    for ids in texts:
        found = logits(ids).float()
        losses.append(torch.nn.functional.cross_entropy(found[:-1], ids[1:]))
        best.append(found.argmax(-1))
    return torch.stack(losses).mean().exp().item(), torch.cat(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="GGUF file, or the name of a packaged model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    folder = fetch(given.file, weights=True).path
    texts = windows(folder, given.text)
    perplexity, best = reading(by_transformers(folder), texts)
    rows: dict[str, Any] = {"transformers, float32": {"perplexity": perplexity}}
    for name, settings in VARIANTS.items():
        engine = Engine(given.file, None, settings)
        perplexity, ours = reading(lambda ids, engine=engine: engine.logits(ids[None], 0, len(ids)), texts)
        rows[f"Pequod, {name}"] = {"perplexity": perplexity, "agreement": (ours == best).float().mean().item()}
    first = rows["transformers, float32"]["perplexity"]
    for name, row in rows.items():
        row["difference"] = row["perplexity"] / first - 1
        print(f"{name:<24} {row['perplexity']:8.3f} {row['difference']:+.3%}  {row.get('agreement', 1):.1%}")
    if given.json:
        figures = {"machine": machine(), "model": folder.name, "tokens": len(texts) * WINDOW, "rows": rows}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"written to {given.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
