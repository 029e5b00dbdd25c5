"""Flags of vLLM, SGLang and llama.cpp that are called otherwise here, or are not needed."""

from __future__ import annotations

from collections.abc import Iterable

ONE_DEVICE = "a server uses one device"
ONE_TEXT = "models read text alone"
ALWAYS = "leave it out: it is always so"
RECOMPUTED = "a preempted sequence is computed again, and nothing is offloaded"
NEVER_LOGGED = "leave it out: prompts and texts are never logged"

FLAGS = {
    # vLLM
    "--enable-auto-tool-choice": "leave it out: tool calls are always parsed",
    "--enable-prompt-tokens-details": "leave it out: usage always has them",
    "-tp": ONE_DEVICE,
    "--tensor-parallel-size": ONE_DEVICE,
    "--pipeline-parallel-size": ONE_DEVICE,
    "--data-parallel-size": ONE_DEVICE,
    "--enable-expert-parallel": ONE_DEVICE,
    "--distributed-executor-backend": ONE_DEVICE,
    "--enable-chunked-prefill": ALWAYS,
    "--trust-remote-code": "code from a model folder is never run",
    "--swap-space": RECOMPUTED,
    "--cpu-offload-gb": RECOMPUTED,
    "--guided-decoding-backend": "leave it out: llguidance compiles all grammars",
    "--structured-outputs-config": "leave it out: llguidance compiles all grammars",
    "--enable-lora": "LoRA adapters are not supported",
    "--lora-modules": "LoRA adapters are not supported",
    "--speculative-config": "speculative decoding is not supported",
    "--limit-mm-per-prompt": ONE_TEXT,
    "--mm-processor-kwargs": ONE_TEXT,
    "--language-model-only": ALWAYS,
    "--chat-template-content-format": "leave it out: the chat template itself shows it",
    "--uvicorn-log-level": "use --log-level",
    "--enable-log-requests": NEVER_LOGGED,
    "--disable-log-requests": NEVER_LOGGED,
    "--no-enable-log-requests": NEVER_LOGGED,
    "--disable-log-stats": "leave it out: statistics are at /metrics",
    "--compilation-config": "use --enforce-eager to turn CUDA graphs off",
    "--download-dir": "set HF_HOME",
    "--hf-token": "set HF_TOKEN",
    "--task": "leave it out: one server generates and embeds",
    "--runner": "leave it out: one server generates and embeds",
    "--convert": "leave it out: one server generates and embeds",
    # SGLang
    "--model-path": "use --model",
    "--tp": ONE_DEVICE,
    "--tp-size": ONE_DEVICE,
    "--dp": ONE_DEVICE,
    "--dp-size": ONE_DEVICE,
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--context-length": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    # llama.cpp
    "-m": "use --model",
    "-hf": "use --model",
    "--hf-repo": "use --model",
    "-a": "use --served-model-name",
    "--alias": "use --served-model-name",
    "-c": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "-np": "use --max-num-seqs",
    "--parallel": "use --max-num-seqs",
    "-t": "use --threads",
    "-b": "use --max-num-batched-tokens",
    "--batch-size": "use --max-num-batched-tokens",
    "-ub": "use --max-num-batched-tokens",
    "--ubatch-size": "use --max-num-batched-tokens",
    "-ctk": "use --kv-cache-dtype",
    "-ctv": "use --kv-cache-dtype",
    "--cache-type-k": "use --kv-cache-dtype",
    "--cache-type-v": "use --kv-cache-dtype",
    "-ngl": "use --device: all layers run on one",
    "--gpu-layers": "use --device: all layers run on one",
    "--n-gpu-layers": "use --device: all layers run on one",
    "-fa": ALWAYS,
    "--flash-attn": ALWAYS,
    "-cb": ALWAYS,
    "--cont-batching": ALWAYS,
    "--jinja": ALWAYS,
}


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to do about a flag that a command with the engine's settings does not know; "" if nobody does."""
    return f"; {FLAGS[name]}" if name in FLAGS and "--max-model-len" in known else ""
