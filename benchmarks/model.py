"""A folder with the Qwen3-0.6B shape, random weights in bfloat16 and a tokenizer whose every id is visible text.

    python -m benchmarks.model /tmp/qwen3-0.6b-random

Speed depends on the shape alone. A random model draws ids from the whole vocabulary, and a server sends a chunk only
for visible text, so each id must have some: the tokenizer is whole words " w0", " w1", ….
"""

from __future__ import annotations

import json
import pathlib
import sys

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def make(folder: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Write the folder unless it is there; gives it back."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = Qwen3Config(**SHAPE, dtype="bfloat16", eos_token_id=0, bos_token_id=None, pad_token_id=0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f" w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token=" w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()  # without one, words come apart by a second space and are no prompt any more
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


if __name__ == "__main__":
    print(make(pathlib.Path(sys.argv[1])))
