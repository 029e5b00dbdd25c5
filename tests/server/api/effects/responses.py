"""What the fields of a response do."""

import json

from openai.types.responses import response_create_params as params

from tests.live import eventually
from tests.server.api.effects import sampling
from tests.server.api.effects.endpoint import END, QUESTION, TOKENIZE, Endpoint
from tests.server.api.effects.extensions import RESPONSES_EXTENSIONS
from tests.server.api.effects.places import changed, held, needed, written
from tests.server.wire import RESPONSES, typed


class ResponsesEndpoint(Endpoint):
    """Answers in the form of the Responses API, read as those of chat are."""

    def post(self, **more):
        names = {"max_tokens": "max_output_tokens", "messages": "input"}
        return super().post(**{names.get(name, name): value for name, value in more.items()})

    def ask(self, **more):
        answer = super().ask(**more)
        if answer["usage"]:
            answer["usage"]["prompt_tokens_details"] = answer["usage"]["input_tokens_details"]
        return answer

    def choices(self, **more):
        answer = self.ask(**more, return_token_ids=True)
        cut = answer["incomplete_details"]
        return [{"token_ids": answer["token_ids"], "finish_reason": "length" if cut else "stop", "answer": answer}]

    def output(self, **more):
        return self.ask(**more)["output"]

    def text(self, **more):
        items = [item for item in self.output(**more) if item["type"] == "message"]
        return "".join(part["text"] for item in items for part in item["content"])

    def prompt(self, **more):
        return self.ask(**more, return_token_ids=True)["prompt_token_ids"]

    def logprobs(self, **more):
        parts = [part for item in self.output(**more) for part in item["content"]]
        return [(entry["logprob"], len(entry["top_logprobs"])) for part in parts for entry in part["logprobs"]]

    def events(self, **more):
        response = self.post(**more, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return typed(response.text)

    def stream(self, **more):
        """The deltas of text as chat has them."""
        return [
            {"choices": [{"index": 0, "text": event["delta"], "finish_reason": None, "logprobs": None}]}
            for event in self.events(**more)
            if event["type"] == "response.output_text.delta"
        ]


ENDPOINTS = {RESPONSES: ResponsesEndpoint}

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks at the sea.",
    "parameters": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
}
ROW = {
    "type": "function",
    "name": "row",
    "parameters": {
        "type": "object",
        "properties": {"oars": {"enum": [2, 4]}},
        "required": ["oars"],
        "additionalProperties": False,
    },
}
THOUGHT = {"max_tokens": 60, "structured_outputs": {"grammar": r'start: "<think>\nA whale.\n</think>\n\nYes."'}}
SAID = '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>'
SAYING = {"structured_outputs": {"grammar": f"start: {json.dumps(SAID)}"}}
TOOLED = {"tools": [TOOL], "max_tokens": 100}


def input(e):
    two = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    assert "Why?" in e.decode(e.prompt(input=two))
    assert e.prompt(input=QUESTION[0]["content"]) == e.prompt()


def instructions(e):
    assert e.decode(e.prompt(instructions="Be brief.")).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "system" not in e.decode(e.prompt())


def previous_response_id(e):
    first = e.ask()
    prompt = e.decode(e.prompt(input="Why?", previous_response_id=first["id"]))
    assert prompt.startswith(e.decode(e.prompt()) + first["output"][0]["content"][0]["text"])
    assert "Why?" in prompt
    assert e.post(previous_response_id="resp_none").json()["error"]["param"] == "previous_response_id"


def store(e):
    assert [e.client.get(f"{RESPONSES}/{e.ask(store=kept)['id']}").status_code for kept in (True, False)] == [200, 404]


def background(e):
    answer = e.ask(background=True)
    assert (answer["status"], answer["output"]) == ("queued", [])
    path = f"{RESPONSES}/{answer['id']}"
    eventually(lambda: e.client.get(path).json()["status"] not in ("queued", "in_progress"))
    assert e.client.get(path).json()["output"][0]["content"] == e.output()[0]["content"]


def include(e):
    assert all(p <= 0 and k == 0 for p, k in e.logprobs(include=["message.output_text.logprobs"]))
    assert len(e.logprobs(include=["message.output_text.logprobs"], ignore_eos=True)) == 12
    assert e.logprobs() == e.logprobs(include=["reasoning.encrypted_content"]) == []


def top_logprobs(e):
    assert {k for _, k in e.logprobs(include=["message.output_text.logprobs"], top_logprobs=3)} == {3}
    assert e.post(top_logprobs=3).json()["error"]["param"] == "top_logprobs"


def text_format(e):
    named = {"type": "json_schema", "name": "a", "schema": sampling.OBJECT}
    at_once = {**sampling.ROOM, "thinking_token_budget": 0}
    assert json.loads(e.text(**at_once, text={"format": named})) == {"a": 1}
    assert e.text(**at_once, text={"format": {"type": "json_object"}}).lstrip().startswith("{")
    assert e.text(text={"format": {"type": "text"}}) == e.text()


def effort(e):
    assert e.decode(e.prompt(reasoning={"effort": "high"})).startswith("high")
    assert e.decode(e.prompt(reasoning={"effort": "none"})).startswith("brisk")


def thinking_token_budget(e):
    [mark] = e.client.post(TOKENIZE, json={"prompt": "<think>", "add_special_tokens": False}).json()["tokens"]

    def thought(**more):
        answer = e.ask(max_tokens=40, logit_bias={str(mark): 50, str(END): -50}, **more)
        return answer["usage"]["output_tokens_details"]["reasoning_tokens"]

    assert e.output(**THOUGHT)[0]["content"][0]["text"] == "A whale."
    assert thought() == thought(thinking_token_budget=-1) == 40
    assert thought(thinking_token_budget=5) == 7, "the marks are counted too"
    assert thought(text={"format": {"type": "json_object"}}) == 22, "half of the tokens, where they leave none of use"


def tools(e):
    assert "Looks at the sea." in e.decode(e.prompt(tools=[TOOL]))
    [call] = e.output(**TOOLED, **SAYING)
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {"far": True})


def called(e, **more):
    """Names and arguments of the calls that an answer makes."""
    items = e.output(tools=[TOOL, ROW], max_tokens=120, temperature=1.0, seed=4, thinking_token_budget=0, **more)
    return [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]


def tool_choice(e):
    assert "Looks" not in e.decode(e.prompt(tools=[TOOL], tool_choice="none"))
    assert [item["type"] for item in e.output(**TOOLED, **SAYING, tool_choice="none")] == ["message"]
    assert {name for name, _ in called(e, tool_choice="required")} <= {"look", "row"}
    [(name, arguments)] = called(e, tool_choice={"type": "function", "name": "row"})
    assert name == "row" and arguments["oars"] in (2, 4)
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    assert {name for name, _ in called(e, tool_choice=some)} == {"look"}
    assert e.post(tool_choice="required").json()["error"]["param"] == "tool_choice", "there are no tools"


def parallel_tool_calls(e):
    again = {"tool_choice": "required", "logit_bias": {str(END): -100}}
    assert len(called(e, **again, parallel_tool_calls=False)) == 1


def chat_template_kwargs(e):
    assert e.decode(e.prompt(chat_template_kwargs={"mood": "calm"})).startswith("calm")


def structured_outputs(e):
    assert e.text(**sampling.ROOM, structured_outputs={"choice": ["whale"]}) == "whale"
    both = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["whale"]}}
    assert e.post(**both).json()["error"]["param"] == "structured_outputs"


def max_output_tokens(e):
    assert len(e.tokens(max_output_tokens=3, ignore_eos=True)) == 3
    assert e.ask(max_output_tokens=3, ignore_eos=True)["incomplete_details"] == {"reason": "max_output_tokens"}


def return_token_ids(e):
    answer = e.ask(return_token_ids=True, ignore_eos=True)
    assert e.decode(answer["token_ids"]).endswith(e.text(ignore_eos=True))
    assert "token_ids" not in e.ask()


def stream_options(e):
    assert e.post(stream_options={}).json()["error"]["param"] == "stream_options", "nothing to tell without a stream"


def item_type(e):
    assert e.shown(input=[{"type": "message", **QUESTION[0]}]) == e.shown(input=QUESTION)
    wrong = e.post(input=[{"type": "narwhal", **QUESTION[0]}])
    assert wrong.json()["error"]["param"] == "input.0.type"


def item_role(e):
    said = e.shown(input=[{"role": "system", "content": "Narwhal."}, *QUESTION])
    assert "<|im_start|>system\nNarwhal." in said
    wrong = e.post(input=[{"role": "narwhal", "content": "Narwhal."}])
    assert wrong.json()["error"]["param"] == "input.0.role"


def part_type(e):
    for kind, name in (("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")):
        assert "Narwhal" in e.shown(
            input=[{"role": "assistant", "content": [{"type": kind, name: "Narwhal"}]}, *QUESTION]
        )
    wrong = e.post(input=[{"role": "user", "content": [{"type": "narwhal", "text": "a"}]}])
    assert wrong.json()["error"]["param"] == "input.0.content.0.type"


def kept(field):
    """The effect of an item's id: the stored item has it, and can be referred to."""

    def check(e):
        _, body, _ = changed(e.path, field, "narwhal")
        answer = e.ask(**body)
        items = e.client.get(f"{RESPONSES}/{answer['id']}/input_items", params={"limit": 100}).json()["data"]
        assert "narwhal" in [item["id"] for item in items]
        again = [{"type": "item_reference", "id": "narwhal"}, *QUESTION]
        assert e.post(input=again, previous_response_id=answer["id"]).status_code == 200

    return check


def reference(e):
    first = e.ask(input="A narwhal.")
    said = e.shown(input=[{"type": "item_reference", "id": first["output"][0]["id"]}, *QUESTION])
    assert first["output"][0]["content"][0]["text"] in said
    wrong = e.post(input=[{"type": "item_reference", "id": "msg_none"}, *QUESTION])
    assert wrong.json()["error"]["param"] == "input.0.id"


def context(e):
    """Reasoning of earlier turns is left out."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Narwhal."}]}
    said = {"role": "assistant", "content": "No."}
    for items, kept in (([*QUESTION, thought, said, *QUESTION], False), ([*QUESTION, thought, said], True)):
        prompts = {each: e.shown(input=items, reasoning={"context": each}) for each in ("auto", "all_turns")}
        assert prompts["auto"] == prompts["all_turns"] == e.shown(input=items)
        assert "Narwhal." in prompts["auto"]
        assert ("Narwhal." in e.shown(input=items, reasoning={"context": "current_turn"})) is kept
    assert e.post(reasoning={"context": "narwhal"}).json()["error"]["param"] == "reasoning.context"


def summary(e):
    """Read where there is no content."""
    thought = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Narwhal."}]}]
    assert "Narwhal." in e.shown(input=[*thought, *QUESTION])
    thought[0]["content"] = [{"type": "reasoning_text", "text": "A whale."}]
    assert "Narwhal." not in e.shown(input=[*thought, *QUESTION])


def chosen(e):
    def choice(mode="required", kind="function", name="row"):
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": kind, "name": name}]}

    for name in ("look", "row"):
        assert {told for told, _ in called(e, tool_choice={"type": "function", "name": name})} == {name}
        assert {told for told, _ in called(e, tool_choice=choice(name=name))} == {name}
    assert called(e, tool_choice=choice("auto")) == []
    for wrong in (choice("narwhal"), choice(kind="narwhal"), choice(name="sea"), {"type": "narwhal", "name": "row"}):
        assert e.post(tools=[TOOL, ROW], tool_choice=wrong).json()["error"]["param"] == "tool_choice"


def custom_format(e):
    """The input of a call follows the grammar."""
    for syntax, definition in (("lark", 'start: "Fog" "."~2'), ("regex", "Fog[.]{2}")):
        tool = {
            "type": "custom", "name": "log", "format": {"type": "grammar", "syntax": syntax, "definition": definition}
        }  # fmt: skip
        for tools in ([tool], [{"type": "namespace", "name": "sea", "tools": [tool]}]):
            sampled = {"max_tokens": 120, "temperature": 1.0, "seed": 4, "thinking_token_budget": 0}
            items = e.output(tools=tools, tool_choice="required", parallel_tool_calls=False, **sampled)
            assert [item["input"] for item in items if item["type"] == "custom_tool_call"] == ["Fog.."]
    for wrong in ({"type": "narwhal"}, {"type": "grammar", "syntax": "narwhal", "definition": "a"}):
        error = e.post(tools=[{**tool, "format": wrong}]).json()["error"]
        assert error["param"] == f"tools.0.format.{[*wrong][len(wrong) // 2]}"


CONTENT = "input[type=message].content"
CALLED, GIVEN, THOUGHT_OF = (f"input[type={kind}]" for kind in ("function_call", "function_call_output", "reasoning"))
CUSTOM_CALLED, CUSTOM_GIVEN = (f"input[type={kind}]" for kind in ("custom_tool_call", "custom_tool_call_output"))
ADDED = "input[].tools"
TOOLS = ("tools", ADDED)  # where tools may be
KINDS = ("function", "custom")
NARWHAL = {"type": "object", "properties": {"narwhal": {}}}
IDS = ("input[type=message]", CALLED, GIVEN, CUSTOM_CALLED, CUSTOM_GIVEN, THOUGHT_OF)
ITEM_FIELDS = {
    "input[].type": item_type,
    "input[type=message].role": item_role,
    f"{CONTENT}[].type": part_type,
    "input[type=item_reference].id": reference,
    **{field: kept(field) for field in (f"{kind}.id" for kind in (*IDS, "input[type=additional_tools]"))},
    **{
        field: written(field, "narwhal")
        for field in (
            CONTENT,
            f"{CONTENT}[type=input_text].text",
            f"{CONTENT}[type=output_text].text",
            f"{CONTENT}[].refusal",
            *(f"{kind}.{name}" for kind in (CALLED, CUSTOM_CALLED) for name in ("call_id", "name", "namespace")),
            *(f"{kind}.{name}" for kind in (GIVEN, CUSTOM_GIVEN) for name in ("call_id", "output", "output[].text")),
            "input[].input",
            "input[].summary[].text",
            f"{THOUGHT_OF}.content[].text",
            *(f"{tools}[type={kind}].{n}" for tools in TOOLS for kind in KINDS for n in ("name", "description")),
            *(f"{tools}[type=namespace].name" for tools in TOOLS),
            *(
                f"{tools}[].tools[type={kind}].{n}"
                for tools in TOOLS
                for kind in KINDS
                for n in ("name", "description")
            ),
        )
    },
    **{
        field: written(field, value, "narwhal")
        for field, value in {
            "input[].arguments": '{"far": "narwhal"}',
            f"{THOUGHT_OF}.content": [{"type": "reasoning_text", "text": "narwhal"}],
            **{f"{tools}[].parameters": NARWHAL for tools in TOOLS},
            **{f"{tools}[].tools": [{**TOOL, "name": "narwhal"}] for tools in TOOLS},
            **{f"{tools}[].tools[].parameters": NARWHAL for tools in TOOLS},
            ADDED: [{**TOOL, "name": "narwhal"}],
        }.items()
    },
    "input[].summary": summary,
    **{
        field: needed(field)
        for field in (
            "input[type=additional_tools].role",
            f"{GIVEN}.output[].type",
            f"{CUSTOM_GIVEN}.output[].type",
            "input[].summary[].type",
            f"{THOUGHT_OF}.content[].type",
            *(f"{tools}[].type" for tools in TOOLS),
            *(f"{tools}[].tools[].type" for tools in TOOLS),
        )
    },
    **{f"{tools}[].strict": held(f"{tools}[].parameters", lambda e: True) for tools in TOOLS},
    **{f"{tools}[].tools[].strict": held(f"{tools}[].tools[].parameters", lambda e: True) for tools in TOOLS},
    **dict.fromkeys(("tool_choice.type", "tool_choice.name", "tool_choice.mode", "tool_choice.tools"), chosen),
    **dict.fromkeys(("tool_choice.tools[].type", "tool_choice.tools[].name"), chosen),
    **dict.fromkeys(("text.format.type", "text.format.schema"), text_format),
    **{
        f"{tools}[].format{name}": custom_format
        for tools in (*TOOLS, *(f"{place}[].tools" for place in TOOLS))
        for name in ("", ".type", ".syntax", ".definition")
    },
}
NOT_HERE = {
    "n", "best_of", "prompt_logprobs", "max_tokens",
    "response_format", "response_format.type", "response_format.json_schema",
    "response_format.json_schema.schema", "stream_options.include_usage", "stream_options.continuous_usage_stats",
}  # fmt: skip
EFFECTS = {
    RESPONSES: {
        **{field: check for field, check in sampling.SHARED.items() if field not in NOT_HERE},
        "input": input,
        "instructions": instructions,
        "previous_response_id": previous_response_id,
        "store": store,
        "background": background,
        "max_output_tokens": max_output_tokens,
        "include": include,
        "top_logprobs": top_logprobs,
        "text": text_format,
        "text.format": text_format,
        "reasoning": effort,
        "reasoning.effort": effort,
        "reasoning.context": context,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
        "thinking_token_budget": thinking_token_budget,
        "chat_template_kwargs": chat_template_kwargs,
        "structured_outputs": structured_outputs,
        "return_token_ids": return_token_ids,
        "stream_options": stream_options,
        **ITEM_FIELDS,
    }
}
LABELS = {
    "max_tool_calls": 3,
    "client_metadata": {"session_id": "1"},
    "truncation": "auto",
    "text.verbosity": "low",
    "reasoning.summary": "detailed",
    "reasoning.generate_summary": "concise",
    **{f"{tools}[type=namespace].description": "A narwhal." for tools in TOOLS},
    **{f"{GIVEN}.{name}": "narwhal" for name in ("name", "namespace")},
    **{f"{kind}.status": "incomplete" for kind in IDS},
    f"{CUSTOM_GIVEN}.name": "narwhal",
    "input[].phase": "final_answer",
    f"{CONTENT}[].annotations": [{"type": "file_path"}],
    f"{CONTENT}[].logprobs": [{"token": "a"}],
    "input[].encrypted_content": "gAAAAB",
    f"{CONTENT}[].prompt_cache_breakpoint": {"mode": "explicit"},
    **{f"{kind}.output[].prompt_cache_breakpoint": {"mode": "explicit"} for kind in (GIVEN, CUSTOM_GIVEN)},
    "text.format.name": "narwhal",
    "text.format.description": "A narwhal.",
    "text.format.strict": False,
}
CHAT_NAMES = {"max_completion_tokens", "max_tokens", "messages", "response_format"}
KNOWN = {RESPONSES: {*RESPONSES_EXTENSIONS, *CHAT_NAMES}}
SDK_TYPES = {RESPONSES: [params.ResponseCreateParamsNonStreaming, params.ResponseCreateParamsStreaming]}
