"""Fields of other servers that this one does not have.

They are known, so that whoever moves here is told which of his fields he must give up, and what they were for. Their
neutral values, which many clients send with every request, count as absent. A field that gets its effect moves from
here into the request models.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ..http.fields import LABEL, MAX_LABEL, Refused, Wire, refused


class VllmFields(Wire):
    """What vLLM takes on chat and on completions."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "early_stopping": refused(False),
        "ec_transfer_params": refused(),
        "guided_choice": refused(hint="Send structured_outputs.choice."),
        "guided_decoding_backend": refused(),
        "guided_grammar": refused(hint="Send structured_outputs.grammar."),
        "guided_json": refused(hint="Send structured_outputs.json."),
        "guided_regex": refused(hint="Send structured_outputs.regex."),
        "guided_whitespace_pattern": refused(),
        "kv_transfer_params": refused(),
        "length_penalty": refused(1, 1.0),
        "logits_processors": refused([]),
        "logprob_token_ids": refused(),
        "repetition_detection": refused(),
        "request_id": refused(hint="Send the header X-Request-Id."),
        "return_mm_kwargs": refused(True),
        "return_token_offsets": refused(False),
        "return_tokens_as_token_ids": refused(False, hint="Ask for return_token_ids."),
        "routed_experts_prompt_start": refused(0),
        "spaces_between_special_tokens": refused(True),
        "stream_interval": refused(1),
        "truncate_prompt_tokens": refused(hint="Shorten the prompt: what is too long gets a 400."),
        "truncation_side": refused(),
        "use_beam_search": refused(False),
        "vllm_xargs": refused({}),
        "watermarking": refused(False),
    }
    session_id: Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL] = None
    """Accepted for routers before this server."""


class LlamaCppFields(Wire):
    """What llama.cpp's server takes on chat and on completions, beside what others have too."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "adaptive_decay": refused(0.9),
        "adaptive_target": refused(-1, -1.0),
        "backend_sampling": refused(False),
        "cache_prompt": refused(True, hint="A cache_salt of its own keeps a prompt from the shared cache."),
        "chat_format": refused(),
        "chat_parser": refused(),
        "dry_allowed_length": refused(2),
        "dry_base": refused(1.75),
        "dry_multiplier": refused(0, 0.0),
        "dry_penalty_last_n": refused(-1, 0),
        "dry_sequence_breakers": refused(["\n", ":", '"', "*"]),
        "dynatemp_exponent": refused(1, 1.0),
        "dynatemp_range": refused(0, 0.0),
        "generation_prompt": refused(""),
        "grammar": refused("", hint="Send structured_outputs."),
        "grammar_lazy": refused(False),
        "grammar_triggers": refused([]),
        "id_slot": refused(-1),
        "json_schema": refused(hint="Send response_format."),
        "lora": refused([]),
        "min_keep": refused(0),
        "mirostat": refused(0),
        "mirostat_eta": refused(0.1),
        "mirostat_tau": refused(5, 5.0),
        "n_cache_reuse": refused(0),
        "n_cmpl": refused(1, hint="Send n."),
        "n_discard": refused(0),
        "n_indent": refused(0),
        "n_keep": refused(0, -1),
        "n_predict": refused(-1, hint="Send max_tokens."),
        "n_probs": refused(0, hint="Send logprobs."),
        "parse_tool_calls": refused(),
        "penalize_nl": refused(False),
        "post_sampling_probs": refused(False),
        "preserved_tokens": refused([]),
        "reasoning_budget_end_tag": refused(),
        "reasoning_budget_end_tags": refused(),
        "reasoning_budget_message": refused(""),
        "reasoning_budget_start_tag": refused(),
        "reasoning_budget_tokens": refused(-1),
        "reasoning_control": refused(False),
        "reasoning_format": refused("auto"),
        "repeat_last_n": refused(-1, hint="repetition_penalty looks at the whole prompt and output."),
        "response_fields": refused([]),
        "return_progress": refused(False),
        "return_tokens": refused(False, hint="Ask for return_token_ids."),
        "samplers": refused(),
        "sse_ping_interval": refused(),
        "t_max_predict_ms": refused(-1, hint="Send the header X-Deadline-Ms."),
        "tfs_z": refused(1, 1.0),
        "timings_per_token": refused(False),
        "top_n_sigma": refused(-1, -1.0),
        "typical_p": refused(1, 1.0),
        "verbose": refused(False),
        "xtc_probability": refused(0, 0.0),
        "xtc_threshold": refused(0.1),
    }
    ttl: Annotated[Annotated[int, Field(ge=-1)] | None, LABEL] = None
    """Accepted: the model stays loaded in any case."""
    draft_model: Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL] = None
    """Accepted: it would change the speed and no token."""
