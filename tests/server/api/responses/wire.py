"""What the tests of the Responses API share: tools, requests, and readers of answers."""

import msgspec

from server.api.responses.schema import ResponseObject
from tests.fakes import TEMPLATE, FakeEngine, model_folder, serving
from tests.server.wire import LIBRARY, RESPONSES, ask, saying

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CLOCK = {"type": "function", "name": "clock"}
TOOLS = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.place }}]{% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Nantucket"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def make_folder(folder):
    """A model folder whose template also shows tools, calls and reasoning."""
    return model_folder(folder, tokenizer_config={"eos_token": "<|end|>", "chat_template": TEMPLATE + TOOLS})


async def respond(folder, says="the whale", **body):
    response = await ask(folder, RESPONSES, {"input": "the sea", **body}, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    msgspec.convert(response.json(), ResponseObject)
    return response.json()


async def prompts(folder, *bodies):
    """What the model is told by the last of these requests; each goes on from the one before."""
    engine = FakeEngine(saying("the whale"))
    async with serving(folder, engine) as (client, _):
        last = None
        for body in bodies:
            more = {"previous_response_id": last} if last else {}
            last = (await client.post(RESPONSES, json={**more, **body})).json()["id"]
    return LIBRARY.decode(engine.requests[-1].prompt_ids)
