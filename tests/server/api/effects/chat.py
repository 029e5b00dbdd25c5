"""What the fields of a chat completion do."""

import copy
import json

from openai.types.chat import completion_create_params as params

from tests.server.api.effects.endpoint import END, QUESTION
from tests.server.api.effects.extensions import EXTENSIONS
from tests.server.api.effects.places import CALL, FUNCTION, LOG, at, changed, example, held, needed, written
from tests.server.api.effects.sampling import OBJECT, SHARED
from tests.server.wire import CHAT


def max_completion_tokens(e):
    assert len(e.tokens(max_tokens=None, max_completion_tokens=3)) == 3


def messages(e):
    two = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    assert "Why?" in e.decode(e.prompt(messages=two))
    assert "batching" in e.decode(e.prompt())


def chat_logprobs(e):
    assert all(p <= 0 and k == 0 for p, k in e.logprobs(logprobs=True))
    assert e.choices()[0]["logprobs"] is None


def top_logprobs(e):
    assert {k for _, k in e.logprobs(logprobs=True, top_logprobs=3)} == {3}


def chat_template_kwargs(e):
    assert e.decode(e.prompt(chat_template_kwargs={"mood": "calm"})).startswith("calm")


def add_generation_prompt(e):
    ending = "<|im_start|>assistant\n"
    assert e.decode(e.prompt()).endswith(ending)
    assert not e.decode(e.prompt(add_generation_prompt=False)).endswith(ending)


def continue_final_message(e):
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert e.decode(e.prompt(messages=begun, continue_final_message=True)).endswith("It is")


# What a model says is forced, so that the marks in it are read.
THOUGHT = {"max_tokens": 60, "structured_outputs": {"grammar": r'start: "<think>\nA whale.\n</think>\n\nYes."'}}


def message(e, **more):
    return e.choices(**more)[0]["message"]


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FOG, ROW = tool("fog", thick={"type": "boolean"}), tool("row", oars={"enum": [2, 4]})
CALLED = {"tools": [FOG, ROW], "max_tokens": 120, "temperature": 1.0, "seed": 4, "thinking_token_budget": 0}


def called(e, **more):
    [choice] = e.choices(**CALLED, **more)
    assert choice["finish_reason"] == "tool_calls"
    return [call["function"] for call in choice["message"]["tool_calls"]]


def tools(e):
    assert '{"name": "fog"' in e.decode(e.prompt(tools=[FOG])).replace('"parameters"', '"name"')
    said = '<tool_call>\n{"name": "fog", "arguments": {"thick": true}}\n</tool_call>'
    [call] = message(e, max_tokens=60, tools=[FOG], structured_outputs={"grammar": f"start: {json.dumps(said)}"})[
        "tool_calls"
    ]
    assert call["function"] == {"name": "fog", "arguments": '{"thick": true}'}


def tool_choice(e):
    assert {call["name"] for call in called(e, tool_choice="required")} <= {"fog", "row"}
    [call] = called(e, tool_choice={"type": "function", "function": {"name": "row"}})
    assert call["name"] == "row" and json.loads(call["arguments"])["oars"] in (2, 4)
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "fog"}}]}
    assert {c["name"] for c in called(e, tool_choice={"type": "allowed_tools", "allowed_tools": some})} == {"fog"}
    assert "fog" not in e.decode(e.prompt(tools=[FOG], tool_choice="none"))


def parallel_tool_calls(e):
    again = {"tool_choice": "required", "logit_bias": {str(END): -100}}
    assert len(called(e, **again, parallel_tool_calls=False)) == 1
    said = '<tool_call>\n{"name": "fog", "arguments": {}}\n</tool_call>\n'
    twice = {"grammar": f"start: {json.dumps(said * 2)}"}
    for alone, num in ((None, 2), (False, 1)):
        said = message(e, max_tokens=90, tools=[FOG], structured_outputs=twice, parallel_tool_calls=alone)
        assert len(said["tool_calls"]) == num


def include_reasoning(e):
    assert message(e, **THOUGHT)["reasoning_content"] == "A whale."
    assert message(e, **THOUGHT, include_reasoning=False) == {"role": "assistant", "content": "Yes.", "refusal": None}


def reasoning_effort(e):
    assert e.decode(e.prompt(reasoning_effort="high")).startswith("high")
    assert e.decode(e.prompt(reasoning_effort="none")).startswith("brisk")


def thinking_token_budget(e):
    """The tokens that begin a block are forced; what it holds is the model's own."""

    begun = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>"}], "continue_final_message": True}
    begun |= {"max_tokens": 40, "logit_bias": {str(END): -100}}

    def thought(**more):
        return e.ask(**begun, **more)["usage"]["completion_tokens_details"]["reasoning_tokens"]

    assert thought() == 40
    assert thought(thinking_token_budget=5) == thought(thinking_budget=5) == 6, "and the mark that ends it"
    assert thought(thinking_token_budget=-1) == 40
    formed = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}}}
    assert thought(**formed) == 21, "half of the tokens, and the mark"
    assert json.loads(message(e, **begun, **formed)["content"]) == {"a": 1}
    assert thought(tools=[FOG], tool_choice="required") == 21
    assert thought(**formed, thinking_token_budget=5) == 6
    assert thought(**formed, thinking_token_budget=-1) == 40
    assert e.choices(**begun, **formed, thinking_token_budget=-1)[0]["finish_reason"] == "length"


def enable_thinking(e):
    assert e.decode(e.prompt(enable_thinking=False)).startswith("brisk")
    assert "brisk" not in e.decode(e.prompt(enable_thinking=True))
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    assert "brisk" not in e.decode(e.prompt(enable_thinking=False, **kwargs)), "the template's own variables count more"


def thinking(e):
    assert e.decode(e.prompt(thinking={"type": "disabled"})).startswith("brisk")
    assert "brisk" not in e.decode(e.prompt(thinking={"type": "enabled"}))
    assert reasoned(e, thinking={"type": "enabled", "budget_tokens": 5}) == 6, "and the mark that ends it"


def reasoning(e):
    assert e.decode(e.prompt(reasoning={"effort": "high"})).startswith("high")
    assert e.decode(e.prompt(reasoning={"effort": "none"})).startswith("brisk")
    assert e.decode(e.prompt(reasoning={"enabled": False})).startswith("brisk")
    assert reasoned(e, reasoning={"max_tokens": 5}) == 6
    assert "reasoning_content" not in message(e, **THOUGHT, reasoning={"exclude": True})


def reasoned(e, **more):
    """Tokens of reasoning in an answer that has no end of its own, and begins with one."""
    begun = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>"}], "continue_final_message": True}
    answer = e.ask(**begun, max_tokens=40, logit_bias={str(END): -100}, **more)
    return answer["usage"]["completion_tokens_details"]["reasoning_tokens"]


def custom_tool(e):
    """The input of a call follows the format, and the prompt has the grammar."""
    for syntax, definition in (("lark", 'start: "Fog" "."~2'), ("regex", "Fog[.]{2}")):
        log = {**LOG, "format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}}
        tools = [{"type": "custom", "custom": log}]
        assert f"this {syntax} grammar" in e.shown(messages=QUESTION, tools=tools)
        if e.path == CHAT:
            assert logged(e, tools=tools) == "Fog.."
    free = [{"type": "custom", "custom": {**LOG, "format": {"type": "text"}}}]
    assert "grammar" not in e.shown(messages=QUESTION, tools=free)
    for wrong, place in (
        ({"type": "narwhal"}, "type"),
        ({"type": "grammar", "grammar": {"syntax": "narwhal", "definition": "a"}}, "grammar.syntax"),
    ):
        error = e.post(messages=QUESTION, tools=[{"type": "custom", "custom": {**LOG, "format": wrong}}]).json()
        assert error["error"]["param"] == f"tools.0.custom.format.{place}"


def logged(e, **more):
    """The input of the one call of a custom tool."""
    sampled = {"max_tokens": 120, "temperature": 1.0, "seed": 4, "thinking_token_budget": 0}
    [call] = message(e, **{"tool_choice": "required", "parallel_tool_calls": False, **sampled, **more})["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "log")
    return call["custom"]["input"]


def named_custom_tool(e):
    tools = [FOG, {"type": "custom", "custom": LOG}]
    assert logged(e, tools=tools, tool_choice={"type": "custom", "custom": {"name": "log"}}) == "Fog."
    wrong = {"type": "custom", "custom": {"name": "sea"}}
    assert e.post(tools=tools, tool_choice=wrong).json()["error"]["param"] == "tool_choice"


def allowed_custom_tool(e):
    def choice(name):
        allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": name}}]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    tools = [FOG, {"type": "custom", "custom": LOG}]
    assert logged(e, tools=tools, tool_choice=choice("log")) == "Fog."
    assert e.post(tools=tools, tool_choice=choice("sea")).json()["error"]["param"] == "tool_choice"


def kind_of_call(e):
    field = "messages[].tool_calls[].type"
    plain, wrong, place = changed(e.path, field, "narwhal")
    assert e.post(**wrong).json()["error"]["param"] == place
    absent, spot = copy.deepcopy(wrong), example(e.path, field)[1]
    del at(absent, spot[:-1])["type"]
    assert e.shown(**absent) == e.shown(**plain), "a call without a type is one of a function"


def role(e):
    said = {role: e.shown(messages=[*QUESTION, {"role": role, "content": "No."}]) for role in ("user", "system")}
    assert "<|im_start|>user\nNo." in said["user"] and "<|im_start|>system\n" in said["system"]
    wrong = e.post(messages=[{"role": "narwhal", "content": "No."}])
    assert wrong.json()["error"]["param"] == "messages.0.role"


def named_tool(e):
    for name in ("fog", "row"):
        [call] = called(e, tool_choice={"type": "function", "function": {"name": name}})
        assert call["name"] == name
    for wrong in ({"type": "narwhal", "function": {"name": "fog"}}, {"type": "function", "function": {"name": "sea"}}):
        assert e.post(**CALLED, tool_choice=wrong).json()["error"]["param"] == "tool_choice"


def allowed_tools(e):
    def choice(mode, kind="function", name="fog"):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": [{"type": kind, "function": {"name": name}}]},
        }

    assert {call["name"] for call in called(e, tool_choice=choice("required"))} == {"fog"}
    assert {call["name"] for call in called(e, tool_choice=choice("required", name="row"))} == {"row"}
    free = e.choices(**CALLED, tool_choice=choice("auto"))[0]
    assert free["message"].get("tool_calls") is None
    for wrong in (choice("narwhal"), choice("auto", kind="narwhal"), choice("auto", name="sea")):
        assert e.post(**CALLED, tool_choice=wrong).json()["error"]["param"] == "tool_choice"


ROLES = ("role=system|developer", "role=user", "role=assistant", "role=tool")
# What chat and the endpoints that only write its prompt have.
TALKED = {
    "messages[].role": role,
    **{field: written(field, "Narwhal") for field in (f"messages[{role}].content" for role in ROLES)},
    **{field: written(field, "Narwhal") for field in (f"messages[{role}].content[].text" for role in ROLES)},
    **{field: written(field, "Narwhal") for field in (f"messages[{role}].name" for role in ROLES)},
    **{field: needed(field) for field in (f"messages[{role}].content[].type" for role in ROLES)},
    **{
        field: written(field, "narwhal")
        for field in (
            "messages[].reasoning_content",
            "messages[].reasoning",
            "messages[].tool_call_id",
            "messages[].tool_calls[type=function].id",
            "messages[].tool_calls[type=custom].id",
            "messages[].tool_calls[].function.name",
            "messages[].tool_calls[].custom.name",
            "messages[].tool_calls[].custom.input",
            "tools[].function.name",
            "tools[].function.description",
            "tools[].custom.name",
            "tools[].custom.description",
        )
    },
    **{
        field: written(field, value, "narwhal")
        for field, value in {
            "messages[].tool_calls": [{**CALL, "id": "narwhal"}],
            "messages[].tool_calls[].function": {"name": "narwhal", "arguments": "{}"},
            "messages[].tool_calls[].function.arguments": '{"far": "narwhal"}',
            "messages[].tool_calls[].custom": {"name": "log", "input": "A narwhal."},
            "tools[].function": {**FUNCTION, "name": "narwhal"},
            "tools[].custom": {**LOG, "name": "narwhal"},
            "tools[].custom.format.grammar.definition": 'start: "narwhal"',
            "tools[].function.parameters": {"type": "object", "properties": {"narwhal": {}}},
        }.items()
    },
    "messages[].tool_calls[].type": kind_of_call,
    "messages[].reasoning_details": written(
        "messages[].reasoning_details", [{"type": "reasoning.text", "text": "narwhal"}], "narwhal"
    ),
    "messages[].reasoning_details[].type": needed("messages[].reasoning_details[].type"),
    **{
        field: written(field, "narwhal")
        for field in ("messages[].reasoning_details[].text", "messages[].reasoning_details[].summary")
    },
    "tools[].type": needed("tools[].type"),
    **{f"tools[].custom.format{name}": custom_tool for name in ("", ".type", ".grammar", ".grammar.syntax")},
    "tools[].function.strict": held("tools[].function.parameters", lambda e: e.path == CHAT),
}
CHOSEN = {
    "tool_choice.type": tool_choice,
    "tool_choice.function": named_tool,
    "tool_choice.function.name": named_tool,
    **dict.fromkeys(("tool_choice.custom", "tool_choice.custom.name"), named_custom_tool),
    "tool_choice.allowed_tools": allowed_tools,
    "tool_choice.allowed_tools.mode": allowed_tools,
    "tool_choice.allowed_tools.tools": allowed_tools,
    "tool_choice.allowed_tools.tools[].type": allowed_tools,
    "tool_choice.allowed_tools.tools[].function": allowed_tools,
    "tool_choice.allowed_tools.tools[].function.name": allowed_tools,
    **{f"tool_choice.allowed_tools.tools[].custom{name}": allowed_custom_tool for name in ("", ".name")},
}
TEMPLATES = {
    "tools": tools,
    "messages": messages,
    "chat_template_kwargs": chat_template_kwargs,
    "add_generation_prompt": add_generation_prompt,
    "continue_final_message": continue_final_message,
}
EFFECTS = {
    CHAT: {
        **SHARED,
        **TEMPLATES,
        **TALKED,
        **CHOSEN,
        "max_completion_tokens": max_completion_tokens,
        "logprobs": chat_logprobs,
        "top_logprobs": top_logprobs,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
        "include_reasoning": include_reasoning,
        "reasoning_effort": reasoning_effort,
        "enable_thinking": enable_thinking,
        **dict.fromkeys(("thinking", "thinking.type", "thinking.budget_tokens"), thinking),
        **dict.fromkeys(("reasoning", "reasoning.effort", "reasoning.max_tokens"), reasoning),
        **dict.fromkeys(("reasoning.enabled", "reasoning.exclude"), reasoning),
        **dict.fromkeys(("thinking_token_budget", "thinking_budget"), thinking_token_budget),
    }
}
LABELS = {
    **{f"messages[{role}].content[].prompt_cache_breakpoint": {"mode": "explicit"} for role in ROLES},
    **{f"messages[{role}].content[].cache_control": {"type": "ephemeral", "ttl": "1h"} for role in ROLES},
    **{f"messages[{role}].cache_control": {"type": "ephemeral", "ttl": "1h"} for role in ROLES},
    **{f"tools[type={kind}].cache_control": {"type": "ephemeral"} for kind in ("function", "custom")},
    **{f"messages[].reasoning_details[].{name}": "narwhal" for name in ("data", "id", "format", "signature")},
    "messages[].reasoning_details[].index": 5,
    "prediction": {"type": "content", "content": "a = 1"},
    "verbosity": "low",
    "ttl": 300,
    "draft_model": "small",
    "messages[].tool_calls[].function.parsed_arguments": {"far": False},
    **{f"messages[].tool_calls[type={kind}].index": 3 for kind in ("function", "custom")},
    "messages[].parsed": {"a": 2},
    "messages[].provider_specific_fields": {"b": 3},
    "messages[].cot_id": "1f",
    "messages[].cot_summary": "A whale.",
    "response_format.json_schema.name": "narwhal",
    "response_format.json_schema.description": "A narwhal.",
    "response_format.json_schema.strict": False,
}
OWN = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
    media_io_kwargs mm_processor_kwargs return_prompt_text
"""
KNOWN = {CHAT: {*EXTENSIONS, *OWN.split()}}
SDK_TYPES = {CHAT: [params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming]}
