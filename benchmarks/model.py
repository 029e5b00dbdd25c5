"""Creates a model with the shape of Qwen3-0.6B, random bfloat16 weights and a tokenizer whose ids are all visible text.

    python -m benchmarks.model /tmp/qwen3-0.6b-random
    python -m benchmarks.model /tmp/qwen3-moe-random --experts

With --experts it is a Qwen3-MoE of 16 layers of 32 experts, of which a token has 4: 1.5 billion numbers.

Speed depends only on the shape. A random model samples ids from the whole vocabulary, and servers send chunks only for
visible text, so nearly every id must have some: besides the 256 bytes the tokens are words, " w258", " w259", ….
The tokenizer is a byte-level BPE, which other servers' converters support.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
EXPERTS = {
    "num_hidden_layers": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def words(size: int) -> Tokenizer:
    """Return a tokenizer of `size` ids: known words are one token, everything else is encoded as bytes."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # in byte-level vocabularies
    vocab = {text: i for i, text in enumerate(["<|endoftext|>", *characters, f"{space}w"])}
    vocab |= {f"{space}w{i}": i for i in range(len(vocab), size)}
    # Whole words match before any merge. The one merge is for readers that require merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(space, "w")], ignore_merges=True))
    split = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def make(folder: pathlib.Path, *, has_experts: bool = False) -> pathlib.Path:
    """Write the folder unless it exists; returns it."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ids = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    plain = Qwen3Config(**SHAPE, **ids, dtype="bfloat16")
    config = Qwen3MoeConfig(**{**SHAPE, **EXPERTS}, **ids, dtype="bfloat16") if has_experts else plain
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer = words(SHAPE["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    arguments = parser.parse_args()
    print(make(arguments.folder, has_experts=arguments.experts))
