"""Why the scheduler refuses a request that can never run. The server checks requests before, with better messages."""

from __future__ import annotations

from .types import EngineRequest, Pooling

POOLINGS = ("last", "mean", "logits")


def refusal(request: EngineRequest, max_len: int, vocab_size: int) -> str | None:
    """Return the reason, one sentence, or None if the request can run.

    max_len: tokens of prompt and output together.
    """
    length = len(request.prompt_ids) + len(request.output_ids)
    if not request.prompt_ids:
        return "the prompt has no tokens"
    if request.params.pooling is not None:
        reason = _pooling_refusal(request, request.params.pooling, max_len, vocab_size)
    elif length >= max_len:
        reason = f"the prompt has {length} tokens, and the model's limit is {max_len} for prompt and output together"
    elif request.params.max_tokens <= len(request.output_ids):
        reason = "there is no token left to sample"
    else:
        reason = None
    if reason is None and not all(0 <= token < vocab_size for token in (*request.prompt_ids, *request.output_ids)):
        reason = f"a token id is outside of [0, {vocab_size})"
    return reason


def _pooling_refusal(request: EngineRequest, pooling: Pooling, max_len: int, vocab_size: int) -> str | None:
    """Return the reason for a prompt to pool. It has no output, so it may have `max_len` tokens."""
    if pooling.kind not in POOLINGS:
        return f"unknown pooling {pooling.kind!r}; known: {', '.join(POOLINGS)}"
    if pooling.dimensions is not None and pooling.dimensions < 1:
        return "an embedding has at least one dimension"
    if (pooling.kind == "logits") != bool(pooling.token_ids):
        return "token_ids are for the pooling of logits, which needs at least one"
    if not all(0 <= token < vocab_size for token in pooling.token_ids):
        return f"token_ids of the pooling names a token outside of [0, {vocab_size})"
    if request.output_ids:
        return "a prompt to embed has no output"
    if len(request.prompt_ids) > max_len:
        return f"the prompt has {len(request.prompt_ids)} tokens, and the model's limit is {max_len}"
    return None
