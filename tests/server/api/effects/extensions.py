"""Names of fields that no SDK knows and that people send."""

# vLLM's protocol.py of chat and completions, llama.cpp's server-schema.cpp, both as of late 2026, and older names of
# vLLM's that clients still send.
NAMES = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens priority
    prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
    skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
    best_of early_stopping guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern logits_processors

    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser dry_allowed_length dry_base
    dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range generation_prompt grammar
    grammar_lazy grammar_triggers id_slot json_schema lora min_keep mirostat mirostat_eta mirostat_tau n_cache_reuse
    n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs preserved_tokens
    reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag
    reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields
    return_progress return_tokens samplers sse_ping_interval t_max_predict_ms timings_per_token top_n_sigma typical_p
    verbose xtc_probability xtc_threshold
"""
EXTENSIONS = [*NAMES.split(), "mm_payload", "return_weight_versions"]
# Of vLLM's further APIs.
SHARED = ["ec_transfer_params", "kv_transfer_params", "mm_payload", "return_mm_kwargs", "vllm_xargs", "watermarking"]
RESPONSES_NAMES = """
    cache_salt chat_template_kwargs enable_response_messages ignore_eos include_reasoning include_stop_str_in_output
    logit_bias media_io_kwargs min_p mm_processor_kwargs previous_input_messages priority repetition_penalty request_id
    seed session_id skip_special_tokens spaces_between_special_tokens stop structured_outputs top_k
"""
RESPONSES_EXTENSIONS = [*RESPONSES_NAMES.split(), *SHARED]
MESSAGES_EXTENSIONS = ["chat_template_kwargs", *SHARED]
