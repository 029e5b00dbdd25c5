"""Fields of other servers that this one does not have.

They are known, so that whoever moves here is told which of his fields he must give up, and what they were for. Their
neutral values, which many clients send with every request, count as absent. A field that gets its effect moves from
here into the request models.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..http.fields import LABEL, MAX_LABEL, Wire, refused


class VllmFields(Wire):
    """What vLLM takes on chat and on completions."""

    early_stopping: Annotated[Any, refused(False)] = None
    ec_transfer_params: Annotated[Any, refused()] = None
    guided_choice: Annotated[Any, refused(hint="Send structured_outputs.choice.")] = None
    guided_decoding_backend: Annotated[Any, refused()] = None
    guided_grammar: Annotated[Any, refused(hint="Send structured_outputs.grammar.")] = None
    guided_json: Annotated[Any, refused(hint="Send structured_outputs.json.")] = None
    guided_regex: Annotated[Any, refused(hint="Send structured_outputs.regex.")] = None
    guided_whitespace_pattern: Annotated[Any, refused()] = None
    kv_transfer_params: Annotated[Any, refused()] = None
    length_penalty: Annotated[Any, refused(1, 1.0)] = None
    logits_processors: Annotated[Any, refused([])] = None
    logprob_token_ids: Annotated[Any, refused()] = None
    repetition_detection: Annotated[Any, refused()] = None
    request_id: Annotated[Any, refused(hint="Send the header X-Request-Id.")] = None
    return_mm_kwargs: Annotated[Any, refused(True)] = None
    return_token_offsets: Annotated[Any, refused(False)] = None
    return_tokens_as_token_ids: Annotated[Any, refused(False, hint="Ask for return_token_ids.")] = None
    routed_experts_prompt_start: Annotated[Any, refused(0)] = None
    session_id: Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL] = None
    """Accepted for routers before this server."""
    spaces_between_special_tokens: Annotated[Any, refused(True)] = None
    stream_interval: Annotated[Any, refused(1)] = None
    truncate_prompt_tokens: Annotated[Any, refused(hint="Shorten the prompt: what is too long gets a 400.")] = None
    truncation_side: Annotated[Any, refused()] = None
    use_beam_search: Annotated[Any, refused(False)] = None
    vllm_xargs: Annotated[Any, refused({})] = None
    watermarking: Annotated[Any, refused(False)] = None


class LlamaCppFields(Wire):
    """What llama.cpp's server takes on chat and on completions, beside what others have too."""

    adaptive_decay: Annotated[Any, refused(0.9)] = None
    adaptive_target: Annotated[Any, refused(-1, -1.0)] = None
    backend_sampling: Annotated[Any, refused(False)] = None
    cache_prompt: Annotated[
        Any, refused(True, hint="A cache_salt of its own keeps a prompt from the shared cache.")
    ] = None
    chat_format: Annotated[Any, refused()] = None
    chat_parser: Annotated[Any, refused()] = None
    dry_allowed_length: Annotated[Any, refused(2)] = None
    dry_base: Annotated[Any, refused(1.75)] = None
    dry_multiplier: Annotated[Any, refused(0, 0.0)] = None
    dry_penalty_last_n: Annotated[Any, refused(-1, 0)] = None
    dry_sequence_breakers: Annotated[Any, refused(["\n", ":", '"', "*"])] = None
    dynatemp_exponent: Annotated[Any, refused(1, 1.0)] = None
    dynatemp_range: Annotated[Any, refused(0, 0.0)] = None
    generation_prompt: Annotated[Any, refused("")] = None
    grammar: Annotated[Any, refused("", hint="Send structured_outputs.")] = None
    grammar_lazy: Annotated[Any, refused(False)] = None
    grammar_triggers: Annotated[Any, refused([])] = None
    id_slot: Annotated[Any, refused(-1)] = None
    json_schema: Annotated[Any, refused(hint="Send response_format.")] = None
    lora: Annotated[Any, refused([])] = None
    min_keep: Annotated[Any, refused(0)] = None
    mirostat: Annotated[Any, refused(0)] = None
    mirostat_eta: Annotated[Any, refused(0.1)] = None
    mirostat_tau: Annotated[Any, refused(5, 5.0)] = None
    n_cache_reuse: Annotated[Any, refused(0)] = None
    n_cmpl: Annotated[Any, refused(1, hint="Send n.")] = None
    n_discard: Annotated[Any, refused(0)] = None
    n_indent: Annotated[Any, refused(0)] = None
    n_keep: Annotated[Any, refused(0, -1)] = None
    n_predict: Annotated[Any, refused(-1, hint="Send max_tokens.")] = None
    n_probs: Annotated[Any, refused(0, hint="Send logprobs.")] = None
    parse_tool_calls: Annotated[Any, refused()] = None
    penalize_nl: Annotated[Any, refused(False)] = None
    post_sampling_probs: Annotated[Any, refused(False)] = None
    preserved_tokens: Annotated[Any, refused([])] = None
    reasoning_budget_end_tag: Annotated[Any, refused()] = None
    reasoning_budget_end_tags: Annotated[Any, refused()] = None
    reasoning_budget_message: Annotated[Any, refused("")] = None
    reasoning_budget_start_tag: Annotated[Any, refused()] = None
    reasoning_budget_tokens: Annotated[Any, refused(-1)] = None
    reasoning_control: Annotated[Any, refused(False)] = None
    reasoning_format: Annotated[Any, refused("auto")] = None
    repeat_last_n: Annotated[Any, refused(-1, hint="repetition_penalty looks at the whole prompt and output.")] = None
    response_fields: Annotated[Any, refused([])] = None
    return_progress: Annotated[Any, refused(False)] = None
    return_tokens: Annotated[Any, refused(False, hint="Ask for return_token_ids.")] = None
    samplers: Annotated[Any, refused()] = None
    sse_ping_interval: Annotated[Any, refused()] = None
    ttl: Annotated[Annotated[int, Field(ge=-1)] | None, LABEL] = None
    """Accepted: the model stays loaded in any case."""
    draft_model: Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL] = None
    """Accepted: it would change the speed and no token."""
    t_max_predict_ms: Annotated[Any, refused(-1, hint="Send the header X-Deadline-Ms.")] = None
    tfs_z: Annotated[Any, refused(1, 1.0)] = None
    timings_per_token: Annotated[Any, refused(False)] = None
    top_n_sigma: Annotated[Any, refused(-1, -1.0)] = None
    typical_p: Annotated[Any, refused(1, 1.0)] = None
    verbose: Annotated[Any, refused(False)] = None
    xtc_probability: Annotated[Any, refused(0, 0.0)] = None
    xtc_threshold: Annotated[Any, refused(0.1)] = None
