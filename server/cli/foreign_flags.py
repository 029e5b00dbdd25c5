"""Flags of vLLM, SGLang and llama.cpp that are called otherwise here, or are not needed."""

from __future__ import annotations

from collections.abc import Iterable

ONE_DEVICE = "leave it out: a server uses one device"
ONE_TEXT = "models read text alone"
ALWAYS = "leave it out: it is always so"
RECOMPUTED = "a preempted sequence is computed again, and nothing is offloaded"
NO_CODE = "code from a model folder is never run"
NEVER_LOGGED = "leave it out: prompts and texts are never logged"
ONE_SERVER = "leave it out: one server generates and embeds"
OWN_TOKENIZER = "leave it out: the model's own tokenizer is used"
MODEL_CONFIG = "change the model's config.json instead"
GRAPHS = "use --enforce-eager to turn CUDA graphs off"
DETECTED = "leave it out: the format of reasoning is detected, and --reasoning-parser overrides that"
SAMPLING = "clients send it with requests, and --generation-config names a file with defaults"
WEIGHT_FILES = "leave it out: how weights are read and kept in memory cannot be set"

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
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; --max-num-batched-tokens limits a step",
    "--num-scheduler-steps": "leave it out: each step is scheduled by itself",
    "--trust-remote-code": NO_CODE,
    "--code-revision": NO_CODE,
    "--swap-space": RECOMPUTED,
    "--cpu-offload-gb": RECOMPUTED,
    "--kv-offloading-size": RECOMPUTED,
    "--kv-cache-memory-bytes": "use --kv-cache-memory on a CPU, --gpu-memory-utilization on a GPU",
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
    "--compilation-config": GRAPHS,
    **dict.fromkeys(("-O", "-O0", "-O1", "-O2", "-O3"), GRAPHS),
    "--max-seq-len-to-capture": GRAPHS,
    "--cudagraph-capture-sizes": GRAPHS,
    "--max-cudagraph-capture-size": GRAPHS,
    "--download-dir": "set HF_HOME",
    "--hf-token": "set HF_TOKEN",
    "--task": ONE_SERVER,
    "--runner": ONE_SERVER,
    "--convert": ONE_SERVER,
    "--tokenizer": OWN_TOKENIZER,
    "--tokenizer-mode": OWN_TOKENIZER,
    "--tokenizer-revision": OWN_TOKENIZER,
    "--shutdown-timeout": "use --drain-seconds",
    "--rope-scaling": MODEL_CONFIG,
    "--hf-overrides": MODEL_CONFIG,
    "-q": "use --quantization, which a quantized checkpoint does not need",
    "--max-logprobs": "leave it out: the limits of requests are fixed",
    "--default-chat-template-kwargs": "clients send chat_template_kwargs with requests",
    "--override-generation-config": "use --generation-config, with a file",
    "--response-role": "leave it out: it is always assistant",
    "--enable-reasoning": DETECTED,
    "--allow-credentials": "leave it out: browsers send the API key in a header, without cookies",
    "--disable-uvicorn-access-log": "leave it out: uvicorn's access log is off",
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
    "--chat-template-file": "use --chat-template",
    "--reasoning-format": DETECTED,
    "--embedding": ONE_SERVER,
    "--embeddings": ONE_SERVER,
    "--pooling": "clients send pooling with requests for embeddings",
    "--metrics": "leave it out: /metrics is always served",
    "--timeout": "use --request-timeout, the limit of a whole request",
    "-n": "clients send max_tokens with requests",
    "--n-predict": "clients send max_tokens with requests",
    **dict.fromkeys(("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty"), SAMPLING),
    "--mlock": WEIGHT_FILES,
    "--no-mmap": WEIGHT_FILES,
}


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to do about a flag that a command with the engine's settings does not know; "" if nobody does."""
    return f"; {FLAGS[name]}" if name in FLAGS and "--max-model-len" in known else ""
