"""Telling values for every field of every request, a module per API.

EFFECTS: path -> field -> what asserts its effect on an Endpoint; LABELS: field -> a value that must change nothing;
SDK_TYPES: path -> the SDKs' types of its requests, whose fields the server must know, but for HEADERS; KNOWN: path ->
fields that clients know beside them; ENDPOINTS: path -> the Endpoint that reads its answers, where they are not
OpenAI's.
"""

from tests.server.api.effects import chat, completions, embeddings, messages, rerank, responses, tokens

MODULES = (chat, completions, embeddings, messages, rerank, responses, tokens)
EFFECTS = {path: fields for module in MODULES for path, fields in module.EFFECTS.items()}
KNOWN = {path: names for module in MODULES for path, names in getattr(module, "KNOWN", {}).items()}
ENDPOINTS = {path: kind for module in MODULES for path, kind in getattr(module, "ENDPOINTS", {}).items()}
SDK_TYPES = {path: types for module in MODULES for path, types in getattr(module, "SDK_TYPES", {}).items()}
HEADERS = messages.HEADERS
LABELS = {
    **responses.LABELS,
    **messages.LABELS,
    **chat.LABELS,
    "user": "Ann",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "12h", "prewarm": False},
    "prompt_cache_options.mode": "implicit",
    "prompt_cache_options.ttl": "30m",
    "prompt_cache_options.comparison_response_id": "resp_1",
    "session_id": "1",
    "store": False,
    "stream_options.include_obfuscation": True,
}
