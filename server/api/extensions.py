"""Fields of vLLM and llama.cpp that are not supported here.

They are listed so that an error can name them and what to send instead. Their neutral values, which many clients send
with every request, count as absent. A field that becomes supported moves to the request models.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ..http.fields import LABEL, MAX_LABEL, Refused, Wire, refused


def all_refused(names: str, mark: Refused) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), mark)


Session = Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL]


class VllmCommonFields(Wire):
    """Fields of vLLM's chat, completions, responses and messages."""

    unsupported: ClassVar[dict[str, Refused]] = {
        **all_refused("ec_transfer_params kv_transfer_params mm_payload", refused()),
        "return_mm_kwargs": refused(True),
        "vllm_xargs": refused({}),
        "watermarking": refused(False),
    }


class VllmFields(Wire):
    """Fields of vLLM's chat and completions."""

    unsupported: ClassVar[dict[str, Refused]] = {
        **all_refused("early_stopping return_token_offsets return_weight_versions use_beam_search", refused(False)),
        **all_refused(
            "guided_decoding_backend guided_whitespace_pattern logprob_token_ids repetition_detection truncation_side",
            refused(),
        ),
        "guided_choice": refused(hint="send structured_outputs.choice instead"),
        "guided_grammar": refused(hint="send structured_outputs.grammar instead"),
        "guided_json": refused(hint="send structured_outputs.json instead"),
        "guided_regex": refused(hint="send structured_outputs.regex instead"),
        "length_penalty": refused(1, 1.0),
        "logits_processors": refused([]),
        "request_id": refused(hint="send the header X-Request-Id instead"),
        "return_tokens_as_token_ids": refused(False, hint="send return_token_ids instead"),
        "routed_experts_prompt_start": refused(0),
        "spaces_between_special_tokens": refused(True),
        "stream_interval": refused(1),
        "truncate_prompt_tokens": refused(hint="shorten the prompt: one that is too long gets a 400"),
    }
    session_id: Session = None
    """Accepted for routers in front of this server."""


class LlamaCppFields(Wire):
    """Further fields of llama.cpp's chat and completions."""

    unsupported: ClassVar[dict[str, Refused]] = {
        **all_refused("adaptive_target top_n_sigma", refused(-1, -1.0)),
        **all_refused(
            "backend_sampling grammar_lazy penalize_nl post_sampling_probs reasoning_control return_progress "
            "timings_per_token verbose",
            refused(False),
        ),
        **all_refused(
            "chat_format chat_parser parse_tool_calls reasoning_budget_end_tag reasoning_budget_end_tags "
            "reasoning_budget_start_tag samplers sse_ping_interval",
            refused(),
        ),
        **all_refused("dry_multiplier dynatemp_range xtc_probability", refused(0, 0.0)),
        **all_refused("dynatemp_exponent tfs_z typical_p", refused(1, 1.0)),
        **all_refused("generation_prompt reasoning_budget_message", refused("")),
        **all_refused("grammar_triggers lora preserved_tokens response_fields", refused([])),
        **all_refused("id_slot reasoning_budget_tokens", refused(-1)),
        **all_refused("min_keep mirostat n_cache_reuse n_discard n_indent", refused(0)),
        **all_refused("mirostat_eta xtc_threshold", refused(0.1)),
        "adaptive_decay": refused(0.9),
        "cache_prompt": refused(True, hint="send a unique cache_salt to keep the prompt out of the shared cache"),
        "dry_allowed_length": refused(2),
        "dry_base": refused(1.75),
        "dry_penalty_last_n": refused(-1, 0),
        "dry_sequence_breakers": refused(["\n", ":", '"', "*"]),
        "grammar": refused("", hint="send structured_outputs.grammar instead, in Lark's syntax"),
        "json_schema": refused(hint="send response_format instead"),
        "mirostat_tau": refused(5, 5.0),
        "n_cmpl": refused(1, hint="send n instead"),
        "n_keep": refused(0, -1),
        "n_predict": refused(-1, hint="send max_tokens instead"),
        "n_probs": refused(0, hint="send logprobs instead"),
        "reasoning_format": refused("auto"),
        "repeat_last_n": refused(-1, hint="repetition_penalty covers all tokens"),
        "return_tokens": refused(False, hint="send return_token_ids instead"),
        "t_max_predict_ms": refused(-1, hint="send the header X-Deadline-Ms instead"),
    }
    ttl: Annotated[Annotated[int, Field(ge=-1)] | None, LABEL] = None
    """Accepted: the model always stays loaded."""
    draft_model: Annotated[Annotated[str, Field(max_length=MAX_LABEL)] | None, LABEL] = None
    """Accepted: it would only change the speed."""
