"""Places inside of a request's objects and lists, by the paths of the table, and what fields there do to the prompt.

EXAMPLES: path -> bodies that together hold every object of a request, with all of its fields, those that are refused as
null. A place is where the first of them has it.
"""

from __future__ import annotations

import copy
import re

from tests.server.api.effects.endpoint import COUNT_TOKENS, MESSAGES, TEMPLATE, TOKENIZE
from tests.server.wire import CHAT, COMPLETIONS, RESPONSES

SEGMENT = re.compile(r"^(?P<name>\w+)(?P<list>\[)?(?:\]|[{\[]?(?P<tag>\w+)=(?P<kinds>[\w|]+)[}\]])?$")
SCHEMA = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
MARK = {"type": "ephemeral"}


def part(text, **more):
    return {"type": "text", "text": text, **more}


def chat_part(text):
    unknown = {
        "prompt_cache_breakpoint": MARK,
        "cache_control": MARK,
        "file": None,
        "image_url": None,
        "input_audio": None,
        "refusal": None,
    }
    return part(text, **unknown)


CALL = {
    "id": "call_7",
    "type": "function",
    "function": {"name": "look", "arguments": '{"far": true}', "parsed_arguments": {"far": True}},
    "index": 0,
}
LOGGED = {"id": "call_8", "type": "custom", "custom": {"name": "log", "input": "Fog."}, "index": 1}
FUNCTION = {"name": "look", "description": "Looks at the sea.", "parameters": SCHEMA, "strict": False}
TALK = [
    {"role": "system", "content": [chat_part("Be brief.")], "name": "owner", "cache_control": MARK},
    {"role": "user", "content": [chat_part("Is there fog?")], "name": "Ann", "cache_control": MARK},
    {
        "role": "assistant",
        "content": [chat_part("I look.")],
        "name": "Bob",
        "cache_control": MARK,
        "reasoning_content": "Fog is white.",
        "tool_calls": [CALL, LOGGED],
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
        "parsed": {"a": 1},
        "cot_id": None, "cot_summary": None, "provider_specific_fields": {"b": 2},
    },
    {"role": "tool", "content": [chat_part("No fog.")], "tool_call_id": "call_7", "name": "look",
     "cache_control": MARK},
    {"role": "tool", "content": "Logged.", "tool_call_id": "call_8"},
    {"role": "assistant", "content": "None.", "reasoning": "All is clear."},
    {"role": "assistant", "content": "No ship.", "reasoning_details": [
        {"type": "reasoning.text", "text": "Ships have lights.", "id": "a", "format": "unknown", "index": 0,
         "signature": "b"},
        {"type": "reasoning.summary", "summary": "It is dark."},
        {"type": "reasoning.encrypted", "data": "c"},
    ]},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
LOG = {
    "name": "log",
    "description": "Writes the log.",
    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "Fog."'}},
}
TEMPLATED = {
    "messages": TALK,
    "tools": [
        {"type": "function", "function": FUNCTION, "cache_control": MARK},
        {"type": "custom", "custom": LOG, "cache_control": MARK},
    ],
}
NAMED = {"type": "function", "function": {"name": "look"}}
NAMED_CUSTOM = {"type": "custom", "custom": {"name": "log"}}

KEPT = {"status": "completed"}
ITEMS = [
    {
        "type": "message", "role": "user", "id": "msg_1", **KEPT, "phase": None,
        "content": [{"type": "input_text", "text": "Is there fog?", "prompt_cache_breakpoint": MARK}],
    },
    {
        "type": "reasoning", "id": "rs_1", **KEPT, "encrypted_content": None, "summary": [],
        "content": [{"type": "reasoning_text", "text": "Fog is white."}],
    },
    {
        "type": "message", "role": "assistant", "id": "msg_2", **KEPT, "phase": "commentary",
        "content": [
            {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "Not far."},
        ],
    },
    {
        "type": "function_call", "id": "fc_1", **KEPT, "call_id": "call_7", "name": "look",
        "arguments": '{"far": true}', "async": None, "async_": None, "caller": None,
        "namespace": None,
    },
    {
        "type": "function_call_output", "id": "fco_1", **KEPT, "call_id": "call_7", "caller": None, "name": None,
        "namespace": None, "output": [{"type": "input_text", "text": "No fog.", "prompt_cache_breakpoint": MARK}],
    },
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "All is clear."}]},
    {
        "type": "custom_tool_call", "id": "ctc_1", **KEPT, "call_id": "call_8", "name": "log", "input": "Fog.",
        "async": None, "async_": None, "caller": None,
        "namespace": None,
    },
    {
        "type": "custom_tool_call_output", "id": "ctco_1", **KEPT, "call_id": "call_8", "caller": None, "name": None,
        "output": [{"type": "input_text", "text": "Logged.", "prompt_cache_breakpoint": MARK}],
    },
    {"role": "user", "content": "And now?"},
]  # fmt: skip
FLAT = {
    "type": "function", **FUNCTION, "async": None, "allowed_callers": None, "defer_loading": None,
    "output_schema": None,
}  # fmt: skip

CUSTOM = {
    "type": "custom", "name": "log", "description": "Writes the log.", "async": None, "allowed_callers": None,
    "defer_loading": None, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "Fog."'},
}  # fmt: skip
SEA = {"type": "namespace", "name": "sea", "description": "Of the sea.", "tools": [FLAT, CUSTOM]}
ADDED = {"type": "additional_tools", "id": "at_1", "role": "developer"}


def block(text):
    return part(text, cache_control=MARK, citations=None)


TURNS = [
    {"role": "user", "content": [block("Is there fog?")]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Fog is white.", "signature": "abc", "cache_control": MARK},
            {"type": "redacted_thinking", "data": "abc", "cache_control": MARK},
            block("I look."),
            {
                "type": "tool_use", "id": "toolu_7", "name": "look", "input": {"far": True}, "cache_control": MARK,
                "caller": None, "toolset_name": None,
            },
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result", "tool_use_id": "toolu_7", "is_error": False, "cache_control": MARK,
                "toolset_name": None,
                "content": [
                    block("No fog."), {"type": "tool_reference", "tool_name": "listen", "cache_control": MARK},
                ],
            }
        ],
    },
    {"role": "assistant", "content": "None."},
    {"role": "user", "content": "And now?"},
    {
        "role": "system", "content": [block("Be brief.")], "clear_at": None,
        "output_config": {"format": None, "task_budget": None},
    },
]  # fmt: skip
TOOL = {
    "type": "custom", "name": "look", "description": "Looks at the sea.", "input_schema": SCHEMA, "strict": False,
    "cache_control": MARK, "eager_input_streaming": False, "allowed_callers": None, "defer_loading": False,
    "input_examples": None,
}  # fmt: skip
LATER = {**TOOL, "name": "listen", "defer_loading": True}
ASKED = {
    "messages": TURNS,
    "system": [block("Be kind.")],
    "tools": [TOOL, LATER],
    "output_config": {"task_budget": None},
}
PLAIN = [{"role": "user", "content": "And now?"}]
OPEN = {"type": "enabled", "budget_tokens": 4, "display": "summarized", "block_binding": None}
MESSAGES_EXAMPLES = [
    ASKED,
    {"messages": PLAIN, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"messages": PLAIN, "thinking": OPEN},
    {"messages": PLAIN, "thinking": {"type": "adaptive", "display": "summarized", "block_binding": None}},
    *(
        {"messages": PLAIN, "tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": False}}
        for choice in ({"type": "tool", "name": "look"}, {"type": "auto"}, {"type": "any"})
    ),
]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "description": "An a.", "schema": {"type": "object"}, "strict": True},
}
TEXT = {"type": "json_schema", "name": "a", "description": "An a.", "schema": {"type": "object"}, "strict": True}
EXAMPLES = {
    CHAT: [
        {**TEMPLATED, "max_tokens": 6},
        *({**TEMPLATED, "tool_choice": choice} for choice in (NAMED, NAMED_CUSTOM)),
        {"response_format": FORMAT},
    ],
    COMPLETIONS: [{"response_format": FORMAT}],
    TOKENIZE: [TEMPLATED],
    TEMPLATE: [TEMPLATED],
    RESPONSES: [
        {"input": ITEMS, "tools": [FLAT, CUSTOM], "max_output_tokens": 6},
        {"input": "And now?", "tools": [FLAT], "tool_choice": {"type": "function", "name": "look"}},
        {"input": "And now?", "text": {"format": TEXT, "verbosity": None}},
        {"input": "And now?", "reasoning": {"summary": None, "generate_summary": None}},
        {"input": "And now?", "tools": [SEA]},
        *({"input": [{**ADDED, "tools": tools}, *PLAIN]} for tools in ([FLAT, CUSTOM], [SEA])),
    ],
    MESSAGES: MESSAGES_EXAMPLES,
    COUNT_TOKENS: MESSAGES_EXAMPLES,
}


def at(body, spot):
    for key in spot:
        body = body[key]
    return body


def spots(body, path):
    """Where a body has what a path means: keys and indices."""
    found = [()]
    for segment in path.split("."):
        match = SEGMENT.match(segment)
        objects = [spot for spot in found if isinstance(at(body, spot), dict)]
        found = [(*spot, match["name"]) for spot in objects if match["name"] in at(body, spot)]
        if match["list"]:
            lists = [spot for spot in found if isinstance(at(body, spot), list)]
            found = [(*spot, i) for spot in lists for i in range(len(at(body, spot)))]
        if match["tag"]:
            kinds = match["kinds"].split("|")
            # A message of the Responses API may leave its type out.
            found = [spot for spot in found if at(body, spot).get(match["tag"], "message") in kinds]
    return found


def example(path, field):
    """A body that has the field, and where."""
    for body in EXAMPLES[path]:
        for spot in spots(body, field):
            return body, spot
    raise LookupError(f"no example of {path} has {field}")


def changed(path, field, value):
    """A body without a change, and with this value for the field; and the field's place, as errors name it."""
    plain, spot = example(path, field)
    body = copy.deepcopy(plain)
    at(body, spot[:-1])[spot[-1]] = value
    return plain, body, ".".join(map(str, spot))


def of_kind(path, field):
    """A body with an object of the kind that the path ends with, in place of one that is taken."""
    match = SEGMENT.match(field.split(".")[-1])
    outer = field[: field.rindex("[" if match["list"] else "{")] + ("[]" if match["list"] else "")
    plain, body, place = changed(path, outer, {match["tag"]: match["kinds"]})
    return plain, body, place, match["tag"]


def written(field, value, word=None):
    """The effect of what is part of the prompt: `word` (the value itself) is in it, and only then."""

    def check(e):
        plain, body, _ = changed(e.path, field, value)
        before, after = e.shown(**plain), e.shown(**body)
        assert before != after
        if isinstance(after, str):
            assert (word or value) in after and (word or value) not in before

    return check


def needed(field):
    """The effect of a field that says what an object is: there is nothing else that it may say, and it must."""

    def check(e):
        _, wrong, place = changed(e.path, field, "narwhal")
        assert e.post(**wrong).json()["error"]["param"] == place
        absent, spot = copy.deepcopy(wrong), example(e.path, field)[1]
        del at(absent, spot[:-1])[spot[-1]]
        assert e.post(**absent).json()["error"]["param"] == place

    return check


def held(schema, also):
    """The effect of `strict`: what no grammar can hold is a 400 that names the schema; without it the model is free."""

    def check(e):
        for strict, status in ((False, 200), (True, 400 if also(e) else 200)):
            _, body, _ = changed(e.path, schema, {"type": "object", "properties": {"a": {"not": {"type": "null"}}}})
            [*outer, _] = example(e.path, schema)[1]
            at(body, outer)["strict"] = strict
            answer = e.post(**body)
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == schema.replace("[]", "[0]")

    return check
