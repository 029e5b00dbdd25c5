"""LiteLLM: its own completion, responses and messages, towards an OpenAI-compatible and an Anthropic address."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it downloads a list of prices when it is imported

import litellm

from .place import (
    ENDLESS,
    LONG,
    LOOKOUT_SCHEMA,
    MESSAGES,
    QUESTION,
    SAID,
    THINKS,
    THOUGHT,
    Place,
    Sighting,
    raised,
)
from .place import lookout as look

litellm.suppress_debug_info = True  # or it prints where to report what the calls of errors raise

LOOKOUT = {"name": "lookout", "description": "Looks out.", "parameters": LOOKOUT_SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": LOOKOUT}]
FLAT: list[Any] = [{"type": "function", **LOOKOUT}]


def asked(place: Place, **more: Any) -> dict[str, Any]:
    given = {"model": f"openai/{place.model}", "api_base": place.v1, "api_key": place.key}
    return {**given, "messages": MESSAGES, "temperature": 0, **more}


def input_of(place: Place, **more: Any) -> dict[str, Any]:
    given = asked(place, input=QUESTION, **more)
    del given["messages"]
    return given


def of_anthropic(place: Place, **more: Any) -> dict[str, Any]:
    return asked(place, model=f"anthropic/{place.model}", api_base=place.url, **more)


def chat(place: Place) -> None:
    answer = litellm.completion(**asked(place))
    assert place.answers(answer.choices[0].message.content) and place.ends(answer.choices[0].finish_reason)


async def chat_async(place: Place) -> None:
    assert place.answers((await litellm.acompletion(**asked(place))).choices[0].message.content)


def chat_stream(place: Place) -> None:
    pieces = litellm.completion(**asked(place), stream=True)
    assert place.answers("".join(choice.delta.content or "" for piece in pieces for choice in piece.choices))


async def chat_stream_async(place: Place) -> None:
    stream = await litellm.acompletion(**asked(place), stream=True)
    assert place.answers("".join([c.delta.content or "" async for piece in stream for c in piece.choices]))


def chat_usage(place: Place) -> None:
    whole = litellm.completion(**asked(place))
    pieces = list(litellm.completion(**asked(place), stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_helper(place: Place) -> None:
    pieces = list(litellm.completion(**asked(place), stream=True))
    assert place.answers(litellm.stream_chunk_builder(pieces, messages=MESSAGES).choices[0].message.content)


def chat_parse(place: Place) -> None:
    answer = litellm.completion(**asked(place), response_format=Sighting)
    Sighting.model_validate_json(answer.choices[0].message.content)


def check_tools(place: Place, given: dict[str, Any], *, streamed: bool = False) -> None:
    """A call that must be, its result sent back, and the answer."""

    def said(**more: Any) -> Any:
        answer = litellm.completion(**{**given, "tools": TOOLS, "stream": streamed, **more})
        return (litellm.stream_chunk_builder(list(answer)) if streamed else answer).choices[0].message

    first = said(tool_choice="required", **place.one_call)
    messages = [*given["messages"], first]
    for call in first.tool_calls:
        seen = look(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": "lookout", "content": seen})
    last = said(messages=messages)
    assert place.goes_on(last.content, last.tool_calls)


def chat_tools(place: Place) -> None:
    check_tools(place, asked(place))


def chat_tools_stream(place: Place) -> None:
    check_tools(place, asked(place), streamed=True)


def chat_reasoning(place: Place) -> None:
    message = litellm.completion(**asked(place.thinker), extra_body=THINKS).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, SAID)
    messages = [*MESSAGES, message, {"role": "user", "content": "Why?"}]
    assert litellm.completion(**asked(place.thinker, messages=messages), extra_body=THINKS).choices


def chat_logprobs(place: Place) -> None:
    answer = litellm.completion(**asked(place), logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def responses(place: Place) -> None:
    answer = litellm.responses(**input_of(place))
    assert place.answers(answer.output[0].content[0].text)


async def responses_async(place: Place) -> None:
    answer = await litellm.aresponses(**input_of(place))
    assert place.answers(answer.output[0].content[0].text)


def responses_stream(place: Place) -> None:
    events = list(litellm.responses(**input_of(place), stream=True))
    assert place.answers("".join(event.delta for event in events if event.type == "response.output_text.delta"))


def responses_tools(place: Place) -> None:
    first = litellm.responses(**input_of(place), tools=FLAT, tool_choice="required", **place.one_call)
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": look(**json.loads(call.arguments))}
        for call in first.output
        if call.type == "function_call"
    ]
    assert outputs
    more: Any = {"input": outputs, "previous_response_id": first.id}
    assert litellm.responses(**{**input_of(place), **more}, tools=FLAT).output


def messages(place: Place) -> None:
    answer = litellm.completion(**of_anthropic(place))
    assert place.answers(answer.choices[0].message.content)


async def messages_async(place: Place) -> None:
    answer: Any = await litellm.anthropic.messages.acreate(**of_anthropic(place, max_tokens=1000))
    assert place.answers(answer["content"][0]["text"])


def messages_stream(place: Place) -> None:
    pieces = litellm.completion(**of_anthropic(place), stream=True)
    assert place.answers("".join(choice.delta.content or "" for piece in pieces for choice in piece.choices))


def messages_tools(place: Place) -> None:
    check_tools(place, of_anthropic(place))


def messages_tools_stream(place: Place) -> None:
    check_tools(place, of_anthropic(place), streamed=True)


def completions(place: Place) -> None:
    given = {"model": f"text-completion-openai/{place.model}", "api_base": place.v1, "api_key": place.key}
    assert litellm.text_completion(**given, prompt="Hello", max_tokens=4).choices[0].text


def embeddings(place: Place) -> None:
    given = {"model": f"openai/{place.model}", "api_base": place.v1, "api_key": place.key}
    answer = litellm.embedding(**given, input=["a whale", "a ship"])
    whale, ship = (entry["embedding"] for entry in answer.data)
    assert len(whale) == len(ship) > 0 and whale != ship


def wrong_key(place: Place) -> None:
    raised(litellm.AuthenticationError, lambda: litellm.completion(**asked(place, api_key="sk-shark")))


def unknown_model(place: Place) -> None:
    raised(litellm.NotFoundError, lambda: litellm.completion(**asked(place, model="openai/gpt-none")))


def bad_field(place: Place) -> None:
    error = raised(litellm.BadRequestError, lambda: litellm.completion(**asked(place, temperature=3)))
    assert "temperature" in str(error)


def hang_up(place: Place) -> None:
    with place.hung_up():
        stream = litellm.completion(**asked(place, **LONG), stream=True, extra_body=ENDLESS)
        next(iter(stream))
        stream.completion_stream.close()


async def hang_up_async(place: Place) -> None:
    with place.hung_up():
        await place.give_up(litellm.acompletion(**asked(place, **LONG), extra_body=ENDLESS))


def retry(place: Place) -> None:
    with place.full() as url:
        answer = litellm.completion(**asked(place, api_base=f"{url}/v1", max_retries=10))
    assert place.answers(answer.choices[0].message.content)
