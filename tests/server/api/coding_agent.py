"""The requests of a coding agent, with every field that Claude Code is publicly known to send; the texts are ours."""

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.280 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-api-key": "unused",
    "authorization": "Bearer unused",
}
PATH = "/v1/messages?beta=true"
MARK = {"type": "ephemeral"}
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
TOOLS = [
    {
        "name": "Bash",
        "description": "Executes a command in a shell.\n\n- Quote paths that hold spaces.\n- The time limit is in ms.",
        "input_schema": {
            "$schema": SCHEMA,
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command"},
                "timeout": {"type": "number", "description": "Milliseconds", "maximum": 600000},
                "run_in_background": {"type": "boolean"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
    },
    {
        "name": "TodoWrite",
        "description": "Keeps the list of what is to be done.",
        "input_schema": {
            "$schema": SCHEMA,
            "type": "object",
            "properties": {
                "todos": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "content": {"type": "string", "minLength": 1},
                            "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                        },
                        "required": ["content", "status"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": ["todos"],
            "additionalProperties": False,
        },
    },
    {
        "name": "mcp__issues__search",
        "description": "Searches issues.",
        "input_schema": {"type": "object", "properties": {"query": {"type": "string", "format": "uri"}}},
        "cache_control": MARK,
    },
]
REQUEST = {
    "model": "fake",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.280.0d9; cc_entrypoint=cli; cch=fa690;"},
        {"type": "text", "text": "You are an agent that works in a terminal.", "cache_control": {**MARK, "ttl": "1h"}},
        {"type": "text", "text": "Be brief.", "cache_control": {**MARK, "scope": "global"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date is set.\n</system-reminder>"},
                {"type": "text", "text": "How many files are here?", "cache_control": MARK},
            ],
        }
    ],
    "tools": TOOLS,
    "metadata": {
        "user_id": '{"device_id":"' + "0f" * 32 + '","account_uuid":"","session_id":"1c0f9b1e-0000-4000-8000-00000000"}'
    },
    "temperature": 1,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "stream": True,
}
# What follows when the tool has run, with a late message of the application itself.
NEXT = [
    {
        "role": "user",
        "content": [
            {"tool_use_id": "toolu_1", "type": "tool_result", "content": "41", "is_error": False, "cache_control": MARK}
        ],
    },
    {"role": "system", "content": [{"type": "text", "text": "9000 tokens left", "cache_control": MARK}]},
]
