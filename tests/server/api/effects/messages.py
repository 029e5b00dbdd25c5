"""What the fields of a message do, in Anthropic's form."""

import json

from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params

from tests.server.api.effects import sampling
from tests.server.api.effects.endpoint import COUNT_TOKENS, END, MESSAGES, QUESTION, TOKENIZE, Endpoint
from tests.server.api.effects.extensions import MESSAGES_EXTENSIONS
from tests.server.api.effects.places import held, needed, written


class MessagesEndpoint(Endpoint):
    """Answers in Anthropic's form: there are texts and counts, and no token ids."""

    def text(self, **more):
        return "".join(block.get("text", "") for block in self.ask(**more)["content"])

    def count(self, **more):
        """Tokens of the answer."""
        return self.ask(**more)["usage"]["output_tokens"]

    def tokens(self, **more):
        """The answer's text, as the tokenizer reads it."""
        text = self.text(**{"skip_special_tokens": False, **more})
        told = self.client.post(TOKENIZE, json={"prompt": text, "add_special_tokens": False})
        return told.json()["tokens"]

    def shown(self, **more):
        """Of the prompt only its size is told."""
        return size(self, **more)

    def stream(self, **more):
        response = self.post(**more, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        frames = response.text.removesuffix("\n\n").split("\n\n")
        return [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]


class CountEndpoint(Endpoint):
    """Tells how many tokens a prompt has."""

    def count(self, **more):
        return self.ask(**more)["input_tokens"]

    def shown(self, **more):
        return self.count(**more)

    def tokens(self, temperature=None, seed=None, **more):
        """What a label must not change; nothing is drawn here."""
        return self.count(**more)


ENDPOINTS = {MESSAGES: MessagesEndpoint, COUNT_TOKENS: CountEndpoint}

TOOL = {
    "name": "look",
    "description": "Looks at the sea.",
    "input_schema": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
}
FORMAT = {"type": "json_schema", "schema": sampling.OBJECT}


def size(e, **more):
    """Tokens of the prompt."""
    if e.path == COUNT_TOKENS:
        return e.count(**more)
    usage = e.ask(**{"max_tokens": 1, **more})["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def messages(e):
    two = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    assert size(e, messages=two) > size(e)


def system(e):
    assert size(e, system=[{"type": "text", "text": "Be brief."}]) == size(e, system="Be brief.") > size(e)


def tools(e):
    assert size(e, tools=[TOOL]) > size(e)


def tool_choice(e):
    assert size(e, tools=[TOOL], tool_choice={"type": "auto"}) > size(e)
    assert size(e, tools=[TOOL], tool_choice={"type": "none"}) == size(e)


def thinking(e):
    assert size(e, thinking={"type": "disabled"}) == size(e) > size(e, thinking={"type": "adaptive"})
    assert size(e, thinking={"type": "enabled", "budget_tokens": 1024}) == size(e, thinking={"type": "adaptive"})
    if e.path == MESSAGES:
        begun = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>"}], "max_tokens": 40}

        def thought(**more):
            answer = e.ask(**begun, logit_bias={str(END): -100}, **more)
            return answer["usage"]["output_tokens_details"]["thinking_tokens"]

        assert thought(thinking={"type": "adaptive"}) == 40
        assert thought(thinking={"type": "enabled", "budget_tokens": 5}) == 6, "and the mark that ends it"
        assert thought(output_format=FORMAT) == 1, "it is ended at once, as the request does not ask for it"
        roomy = {"type": "enabled", "budget_tokens": 1024}
        assert thought(output_format=FORMAT, thinking=roomy) == 40
        assert thought(output_format=FORMAT, thinking={"type": "adaptive"}) == 21, "half of the tokens, and the mark"


def effort(e):
    assert size(e, output_config={"effort": "high"}) > size(e)


def later_effort(e):
    """A message of the application changes the effort."""

    def asked(**config):
        return [*QUESTION, {"role": "system", "content": "Be brief.", "output_config": config}]

    assert size(e, messages=asked(effort="high")) > size(e, messages=asked())
    low = {"output_config": {"effort": "low"}}
    assert size(e, messages=asked(), **low) == size(e, messages=asked(effort="low"))
    wrong = e.post(messages=asked(effort="huge"))
    assert wrong.json()["error"]["param"] == "messages.1.output_config.effort"


def output_config(e):
    effort(e)
    if e.path == MESSAGES:
        output_format(e)


def formatted(place):
    def check(e):
        more = {"output_config": {"format": FORMAT}} if place == "output_config" else {place: FORMAT}
        if e.path == MESSAGES:
            brief = {"type": "enabled", "budget_tokens": 4}  # so that the answer behind it has room
            assert json.loads(e.text(**sampling.ROOM, **more, thinking=brief)) == {"a": 1}
        else:
            assert e.count(**more) == e.count()
        for wrong in ({"type": "text"}, {"type": "json_schema"}):
            bad = {"output_config": {"format": wrong}} if place == "output_config" else {place: wrong}
            assert e.post(**bad).json()["error"]["param"].startswith(place)

    return check


output_format = formatted("output_format")


def max_tokens(e):
    assert e.count(max_tokens=3, ignore_eos=True) == 3
    assert e.ask(max_tokens=3)["stop_reason"] == "max_tokens"
    assert e.ask(max_tokens=0)["content"] == []


def min_tokens(e):
    ending = {"logit_bias": {str(END): 50}}
    assert e.count(**ending) == 1
    assert e.count(**ending, min_tokens=5) > 5


def ignore_eos(e):
    assert e.count(logit_bias={str(END): 50}, ignore_eos=True) == 12


def stop_sequences(e):
    text = e.text()
    answer = e.ask(stop_sequences=["never said", text[4:7]])
    assert answer["content"][0]["text"] == text[: text.index(text[4:7])]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4:7])


def include_stop_str_in_output(e):
    text = e.text()
    assert e.text(stop_sequences=[text[4:7]], include_stop_str_in_output=True).endswith(text[4:7])


def stop_token_ids(e):
    third = e.tokens()[2]
    assert e.count(stop_token_ids=[third]) <= 3 < e.count()


def logit_bias(e):
    assert e.text(logit_bias={"777": 100}) == e.decode([777] * 12)
    first = e.tokens()[0]
    assert e.tokens(logit_bias={str(first): -100})[0] != first


def allowed_token_ids(e):
    drawn = "".join(e.text(temperature=2.0, seed=seed, allowed_token_ids=[50, 60]) for seed in range(3))
    assert set(drawn) == {*e.decode([50, 60])}


def skip_special_tokens(e):
    special = {"logit_bias": {str(END): 100}, "ignore_eos": True, "max_tokens": 2}
    assert e.ask(**special)["content"] == []
    assert e.text(**special, skip_special_tokens=False) == "<|im_end|>" * 2


def stream(e):
    assert [event["type"] for event in e.stream()].count("content_block_delta") > 3


def cache_salt(e):
    long = [{"role": "user", "content": "The whale and the sea and the captain. " * 10}]

    def cached(salt):
        return e.ask(messages=long, cache_salt=salt)["usage"]["cache_read_input_tokens"]

    assert cached("messages") == 0
    assert cached("messages") > 0
    assert cached("messages no more") == 0


def structured_outputs(e):
    assert e.text(**sampling.ROOM, structured_outputs={"choice": ["whale"]}) == "whale"
    both = {"output_format": FORMAT, "structured_outputs": {"choice": ["whale"]}}
    assert e.post(**both).json()["error"]["param"] == "structured_outputs"


def role(e):
    """A late system message is a reminder in the person's turn."""

    def said(role):
        return size(e, messages=[*QUESTION, {"role": role, "content": "No."}, *QUESTION])

    assert said("user") < said("system") < said("assistant") + size(e), "neighbouring messages of one role are one turn"
    assert said("assistant") != said("user")
    wrong = e.post(messages=[{"role": "narwhal", "content": "No."}])
    assert wrong.json()["error"]["param"] == "messages.0.role"


def part_type(role):
    def check(e):
        for kind in ("narwhal", "tool_use" if role == "user" else "tool_result"):
            wrong = e.post(messages=[*QUESTION, {"role": role, "content": [{"type": kind}]}])
            assert wrong.json()["error"]["param"] == "messages.1.content.0.type"

    return check


def is_error(e):
    def asked(**more):
        call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "No.", **more}
        return [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    assert size(e, messages=asked(is_error=True)) > size(e, messages=asked()) == size(e, messages=asked(is_error=False))


def only_custom(e):
    assert size(e, tools=[{**TOOL, "type": "custom"}]) == size(e, tools=[TOOL])
    assert e.post(tools=[{**TOOL, "type": "narwhal"}]).json()["error"]["param"] == "tools.0.type"


BEGUN = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>"}], "logit_bias": {str(END): -100}}


def display(kind):
    def check(e):
        thinking = {"type": kind} | ({"budget_tokens": 5} if kind == "enabled" else {})
        if e.path == COUNT_TOKENS:
            assert size(e, thinking={**thinking, "display": "omitted"}) == size(e, thinking=thinking)
            return
        shown, omitted = (
            e.ask(**BEGUN, thinking={**thinking, "display": display})["content"][0]
            for display in ("summarized", "omitted")
        )
        assert (shown["type"], omitted["type"]) == ("thinking", "thinking")
        assert shown["thinking"] and not omitted["thinking"]

    return check


OTHER = {**TOOL, "name": "row"}
CALLING = {"tools": [TOOL, OTHER], "max_tokens": 120, "temperature": 1.0, "seed": 4, "logit_bias": {str(END): -100}}


def called(e, **more):
    """Names of the tools that an answer uses."""
    brief = {"type": "enabled", "budget_tokens": 4}
    return [
        block["name"] for block in e.ask(**CALLING, thinking=brief, **more)["content"] if block["type"] == "tool_use"
    ]


def chosen_tool(e):
    for name in ("look", "row"):
        if e.path == MESSAGES:
            assert called(e, tool_choice={"type": "tool", "name": name}) == [name]
    wrong = e.post(tools=[TOOL], tool_choice={"type": "tool", "name": "sea"})
    assert wrong.json()["error"]["param"] == "tool_choice"


def one_call(kind):
    def check(e):
        alone = {"tool_choice": {"type": kind, "disable_parallel_tool_use": True}}
        if e.path == COUNT_TOKENS:
            assert size(e, tools=[TOOL], **alone) == size(e, tools=[TOOL], tool_choice={"type": kind})
        elif kind == "any":
            assert len(called(e, **alone)) == 1
        else:
            said = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
            twice = {"grammar": f"start: {json.dumps(said * 2)}"}
            for more, num in (({}, 2), (alone, 1)):
                said = e.ask(tools=[TOOL], max_tokens=90, structured_outputs=twice, **more)
                assert [block["type"] for block in said["content"]] == ["tool_use"] * num

    return check


def context_management(e):
    def asked(*edits):
        turns = []
        for thought in ("A whale thinks.", "A captain thinks, too."):
            said = [{"type": "thinking", "thinking": thought, "signature": "s"}, {"type": "text", "text": "Far."}]
            turns += [*QUESTION, {"role": "assistant", "content": said}]
        return size(e, messages=[*turns, *QUESTION], context_management={"edits": [*edits]})

    def cleared(**keep):
        return asked({"type": "clear_thinking_20251015", **keep})

    two = {"type": "thinking_turns", "value": 2}
    assert asked() == cleared(keep="all") == cleared(keep={"type": "all"}) == cleared(keep=two)
    assert asked() > cleared() == cleared(keep={"type": "thinking_turns"}) == cleared(keep={**two, "value": 1})
    for wrong in ({"type": "narwhal"}, {"type": "clear_thinking_20251015", "keep": "none"}):
        assert e.post(context_management={"edits": [wrong]}).status_code == 400


def deferred(e):
    """A tool is in the prompt where it was found."""
    search, later = {**TOOL, "name": "search"}, {**TOOL, "defer_loading": True}

    def asked(*parts, tools):
        call = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Yes."}, *parts]}
        turns = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        return {"messages": turns, "tools": tools}

    assert size(e, tools=[search, later]) == size(e, tools=[search]) < size(e, tools=[search, TOOL])
    found = {"type": "tool_reference", "tool_name": "look"}
    assert size(e, **asked(found, tools=[search, later])) > size(e, **asked(tools=[search, later]))
    unknown = {**found, "tool_name": "narwhal"}
    assert e.post(**asked(unknown, tools=[search, later])).json()["error"]["param"] == "tools"


USER, ASSISTANT = ("messages[role=user].content", "messages[role=assistant].content")
PLACES = {
    "messages[].role": role,
    f"{USER}[].type": part_type("user"),
    f"{ASSISTANT}[].type": part_type("assistant"),
    f"{USER}[].is_error": is_error,
    **dict.fromkeys(("messages[].output_config", "messages[].output_config.effort"), later_effort),
    "tools[].defer_loading": deferred,
    f"{USER}[].content[].tool_name": deferred,
    **{
        field: written(field, "A narwhal is a whale with a tooth.")
        for field in (
            "system[].text",
            USER,
            ASSISTANT,
            "messages[role=system].content",
            "messages[role=system].content[].text",
            f"{USER}[].text",
            f"{USER}[].content",
            f"{USER}[].content[].text",
            f"{ASSISTANT}[].text",
            f"{ASSISTANT}[].thinking",
            "tools[].description",
        )
    },
    **{
        field: written(field, "narwhal-with-a-tooth")
        for field in (f"{USER}[].tool_use_id", f"{ASSISTANT}[].id", f"{ASSISTANT}[].name", "tools[].name")
    },
    f"{ASSISTANT}[].input": written(f"{ASSISTANT}[].input", {"narwhal": "with a tooth"}),
    "tools[].input_schema": written("tools[].input_schema", {"type": "object", "properties": {"narwhal": {}}}),
    **{
        field: needed(field)
        for field in ("system[].type", f"{USER}[].content[].type", "messages[role=system].content[].type")
    },
    "tools[].type": only_custom,
    "tools[].strict": held("tools[].input_schema", lambda e: e.path == MESSAGES),
    **dict.fromkeys(("tool_choice.type", "tool_choice.name"), chosen_tool),
    "tool_choice{type=auto}.disable_parallel_tool_use": one_call("auto"),
    "tool_choice{type=any}.disable_parallel_tool_use": one_call("any"),
    **dict.fromkeys(("thinking.type", "thinking.budget_tokens"), thinking),
    "thinking{type=enabled}.display": display("enabled"),
    "thinking{type=adaptive}.display": display("adaptive"),
}
PROMPT = {
    **PLACES,
    "model": sampling.model,
    "messages": messages,
    "system": system,
    "tools": tools,
    "tool_choice": tool_choice,
    "thinking": thinking,
    "output_config": output_config,
    "output_config.effort": effort,
    "output_config.format": formatted("output_config"),
    "output_config.format.type": formatted("output_config"),
    "output_config.format.schema": formatted("output_config"),
    "context_management": context_management,
    **dict.fromkeys(("context_management.edits", "context_management.edits[].type"), context_management),
    "context_management.edits[].keep": context_management,
    "context_management.edits[].keep.type": context_management,
    "context_management.edits[].keep.value": context_management,
}


def served(e):
    assert e.count(model="other") == e.count(model="own") == e.count()
    assert e.post(model="third").status_code == 404


EFFECTS = {
    MESSAGES: {
        **{name: sampling.SHARED[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "bad_words")},
        **{
            name: sampling.SHARED[name]
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty")
        },
        **{name: check for name, check in sampling.STRUCTURED.items() if name.startswith("structured_outputs.")},
        **PROMPT,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "stop_sequences": stop_sequences,
        "include_stop_str_in_output": include_stop_str_in_output,
        "stop_token_ids": stop_token_ids,
        "logit_bias": logit_bias,
        "allowed_token_ids": allowed_token_ids,
        "skip_special_tokens": skip_special_tokens,
        "stream": stream,
        "priority": sampling.priority,
        "cache_salt": cache_salt,
        "output_format": output_format,
        "output_format.type": output_format,
        "output_format.schema": output_format,
        "structured_outputs": structured_outputs,
    },
    COUNT_TOKENS: {**PROMPT, "model": served},
}
LABELS = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "diagnostics": {"previous_message_id": "msg_1"},
    **{
        f"{place}.cache_control": {"type": "ephemeral", "ttl": "5m"}
        for place in (
            "system[]",
            "tools[]",
            "messages[role=system].content[]",
            *(f"{USER}[].content[type={kind}]" for kind in ("text", "tool_reference")),
            *(f"{USER}[type={kind}]" for kind in ("text", "tool_result")),
            *(f"{ASSISTANT}[type={kind}]" for kind in ("text", "thinking", "redacted_thinking", "tool_use")),
        )
    },
    f"{ASSISTANT}[].signature": "narwhal",
    f"{ASSISTANT}[].data": "narwhal",
    "tools[].eager_input_streaming": True,
    "tool_choice{type=tool}.disable_parallel_tool_use": True,
}

# What the SDK's calls take and send as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


OLDER = {"output_format", "temperature", "top_k", "top_p"}  # of older SDKs
KNOWN = {MESSAGES: {*OLDER, *MESSAGES_EXTENSIONS}}
SDK_TYPES = {
    MESSAGES: [
        kind
        for module in (params, beta_params)
        for kind in (module.MessageCreateParamsNonStreaming, module.MessageCreateParamsStreaming)
    ],
    COUNT_TOKENS: [count_params.MessageCountTokensParams, beta_count_params.MessageCountTokensParams],
}
