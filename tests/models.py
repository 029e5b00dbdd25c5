"""Small models with random weights, one per architecture, made with transformers: what oracles compare with."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch

from engine import EngineConfig, models

VOCAB = 300
MAX_LEN = 256
BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 0.25 * i for i in range(8)],
    },
}
HEAD = {"head_dim": 16}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
# name -> (transformers model type, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BASE),
    "llama-bias": ("llama", {**BASE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    **{f"llama-{name}": ("llama", {**BASE, "rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {**BASE, "sliding_window": 8}),
    "mistral-full": ("mistral", {**BASE, "sliding_window": None}),
    "qwen2": ("qwen2", {**BASE, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {**BASE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**BASE, **HEAD, "head_dim": 32}),
    "qwen3-tied": ("qwen3", {**BASE, **HEAD, "tie_word_embeddings": True}),
    "phi3": ("phi3", {**BASE, "pad_token_id": None}),
    "phi3-longrope": (
        "phi3",
        {
            **BASE,
            "pad_token_id": None,
            "original_max_position_embeddings": 64,
            "rope_parameters": {k: v for k, v in ROPES["longrope"].items() if k != "factor"},
        },
    ),
    "mixtral": ("mixtral", {**BASE, **MOE}),
    "mixtral-window": ("mixtral", {**BASE, **MOE, "sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", {**BASE, **HEAD, **QWEN_MOE, "head_dim": 32}),
    "qwen3_moe-sparse": (
        "qwen3_moe",
        {**BASE, **HEAD, **QWEN_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    # Through transformers' own code
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": MAX_LEN}),
    "gemma2": ("gemma2", {**BASE, **HEAD, "sliding_window": 8}),
    "gemma3_text": ("gemma3_text", {**BASE, **HEAD, "sliding_window": 8, "num_hidden_layers": 6}),
    "gpt_oss": ("gpt_oss", {**BASE, **HEAD, **MOE, "sliding_window": 8, "pad_token_id": None}),
    "opt": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": MAX_LEN,
            "word_embed_proj_dim": 64,
        },
    ),
    "gpt_neox": ("gpt_neox", {k: v for k, v in BASE.items() if k != "num_key_value_heads"}),
}
KINDS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")
NATIVE = [name for name, (kind, _) in MODELS.items() if kind in KINDS]
FALLBACK = [name for name in MODELS if name not in NATIVE]
FLOAT32_ONLY = (
    "mixtral",
    "mixtral-window",
    "qwen3_moe",
    "qwen3_moe-sparse",
    "gpt_oss",
)  # transformers' grouped products of experts refuse float64


def config(name: str) -> Any:
    """The transformers configuration of a model."""
    from transformers import AutoConfig

    kind, settings = MODELS[name]
    return AutoConfig.for_model(kind, **copy.deepcopy(settings))  # it writes into nested settings


def make(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, shard: str | None = None
) -> Path:
    """Write a model folder (config.json and safetensors) unless it is there; gives the folder.

    Weights are drawn wider than at a training's start, so that greedy tokens differ and no two logits are close.
    """
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name)).to(dtype)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.15 if value.dim() > 1 else value + torch.randn_like(value) * 0.1)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return folder


def load_model(config: EngineConfig, folder: Path, progress: models.Progress = lambda share: None) -> models.Model:
    """The model of a folder on the CPU under these settings."""
    spec, checkpoint = models.examine(folder, config)
    device = torch.device("cpu")
    spec = models.fit(spec, config, device)
    return models.load(spec, checkpoint, device, models.product(config, spec, device), progress)


@functools.lru_cache(maxsize=4)
def oracle(folder: Path, dtype: torch.dtype, implementation: str = "sdpa") -> Any:
    """The folder as transformers runs it."""
    from transformers import AutoModelForCausalLM

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager" if kind in ("gpt_oss", "gemma2") else implementation
    )
    return model.eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that no model here treats as special."""
    return torch.randint(5, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
