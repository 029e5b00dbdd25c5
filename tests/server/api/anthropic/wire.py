"""What the tests of messages in Anthropic's form share: requests, and readers of answers and events."""

import json

import msgspec
from msgspec.structs import replace

from server.api.anthropic.response import Message
from tests.fakes import INFO, FakeEngine, model_folder
from tests.server.wire import LIBRARY, ask, saying

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = [{"role": "user", "content": "the sea"}]
ASKED = {"model": "fake", "max_tokens": 300, "messages": QUESTION}
TEMPLATE = (
    "{{ 'pensive ' if enable_thinking is not false }}{{ reasoning_effort }}{# <think> </think> #}"
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}: "
    "{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}; "
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
}
# The client's search has found the tool `look`.
FOUND = [
    *QUESTION,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "One tool:"}, {"type": "tool_reference", "tool_name": "look"}],
            }
        ],
    },
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>'
THOUGHT = "<think>\nWhales are large.\n</think>\n\n"
LARGE = replace(INFO, max_len=8192)


def make_folder(folder):
    """A model folder whose template shows all that these requests can say."""
    return model_folder(folder, tokenizer_config={"eos_token": "<|end|>", "chat_template": TEMPLATE})


async def answer(folder, says, **body):
    response = await ask(folder, MESSAGES, {**ASKED, **body}, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    msgspec.convert(response.json(), Message)
    return response.json()


async def prompt(folder, **body):
    """The prompt that a request becomes."""
    engine = FakeEngine(saying("a"), info=LARGE)
    response = await ask(folder, MESSAGES, {**ASKED, **body}, engine)
    assert response.status_code == 200, response.text
    return LIBRARY.decode(list(engine.requests[0].prompt_ids), skip_special_tokens=False)


async def refusal(folder, path=MESSAGES, *, engine=None, settings=None, **body):
    response = await ask(folder, path, {**ASKED, **body}, engine, **(settings or {}))
    return response.status_code, response.json()["error"]


def events(text):
    """A stream's events; each says its type twice."""
    assert text.endswith("\n\n")
    seen = []
    for frame in text[:-2].split("\n\n"):
        head, data = frame.split("\n")
        seen.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {seen[-1]['type']}"
    return seen


def as_text(block, arguments):
    """A call whose arguments are no JSON object, as the whole answer has it."""
    return {"type": "text", "text": f'{{"name": "{block["name"]}", "arguments": {arguments}}}'}


def put_together(seen):
    """The message that events make, as a client does it."""
    assert [event["type"] for event in seen[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in seen[-2:]] == ["message_delta", "message_stop"]
    message, inputs, opened = seen[0]["message"], {}, None
    for event in seen[2:-2]:
        assert event["index"] == (len(message["content"]) if opened is None else opened)
        if event["type"] == "content_block_start":
            assert opened is None
            opened = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            block = message["content"][opened]
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(inputs.get(opened) or "{}")
                except ValueError:
                    if seen[-2]["delta"]["stop_reason"] != "max_tokens":
                        message["content"][opened] = as_text(block, inputs[opened])
            opened = None
        elif event["delta"]["type"] == "input_json_delta":
            inputs[opened] = inputs.get(opened, "") + event["delta"]["partial_json"]
        else:
            name = event["delta"]["type"].removesuffix("_delta")
            message["content"][opened][name] += event["delta"][name]
    assert opened is None
    return message | seen[-2]["delta"] | {"usage": seen[-2]["usage"]}
