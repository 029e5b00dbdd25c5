"""Telling values for every field of every request, a module per API.

EFFECTS: path -> field -> what asserts its effect on an Endpoint; LABELS: field -> a value that must change nothing;
KNOWN: path -> the fields that clients of that API know, which the server must know too.
"""

from . import chat, completions, embeddings, tokens

MODULES = (chat, completions, embeddings, tokens)
EFFECTS = {path: fields for module in MODULES for path, fields in module.EFFECTS.items()}
KNOWN = {path: names for module in MODULES for path, names in getattr(module, "KNOWN", {}).items()}
LABELS = {
    "user": "Ann",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "session_id": "1",
    "store": False,
    "stream_options.include_obfuscation": True,
}
