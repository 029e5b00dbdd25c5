"""The OpenAI SDK: chat completions, responses and the rest."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageFunctionToolCall

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

LOOKOUT = {"name": "lookout", "description": "Looks out.", "parameters": LOOKOUT_SCHEMA, "strict": True}
TOOLS: list[Any] = [{"type": "function", "function": LOOKOUT}]
FLAT: list[Any] = [{"type": "function", **LOOKOUT}]


def client_of(place: Place, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": place.v1, "api_key": place.key, **more})


def async_client_of(place: Place) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=place.v1, api_key=place.key)


def asked(place: Place, **more: Any) -> dict[str, Any]:
    return {"model": place.model, "messages": MESSAGES, "temperature": 0, **more}


def chat(place: Place) -> None:
    answer = client_of(place).chat.completions.create(**asked(place))
    assert place.answers(answer.choices[0].message.content)
    assert place.ends(answer.choices[0].finish_reason)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def chat_async(place: Place) -> None:
    async with async_client_of(place) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**asked(place)) for _ in range(4)))
    assert all(place.answers(answer.choices[0].message.content) for answer in answers)


def chat_stream(place: Place) -> None:
    pieces = list(client_of(place).chat.completions.create(**asked(place), stream=True))
    assert place.answers("".join(choice.delta.content or "" for piece in pieces for choice in piece.choices))
    assert place.ends(pieces[-1].choices[0].finish_reason)


async def chat_stream_async(place: Place) -> None:
    async with async_client_of(place) as client:
        stream = await client.chat.completions.create(**asked(place), stream=True)
        assert place.answers("".join([c.delta.content or "" async for piece in stream for c in piece.choices]))


def chat_usage(place: Place) -> None:
    options = {"include_usage": True}
    pieces = list(client_of(place).chat.completions.create(**asked(place), stream=True, stream_options=options))
    assert pieces[-1].usage.completion_tokens > 0 and pieces[-1].choices == []
    assert all(piece.usage is None for piece in pieces[:-1])


def chat_helper(place: Place) -> None:
    with client_of(place).chat.completions.stream(**asked(place)) as stream:
        kinds = {event.type for event in stream}
        assert place.answers(stream.get_final_completion().choices[0].message.content)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def chat_parse(place: Place) -> None:
    answer = client_of(place).chat.completions.parse(**asked(place), response_format=Sighting)
    assert isinstance(answer.choices[0].message.parsed, Sighting)


def chat_parse_stream(place: Place) -> None:
    with client_of(place).chat.completions.stream(**asked(place), response_format=Sighting) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Sighting)
    assert partial


def seen(call: ChatCompletionMessageFunctionToolCall) -> dict[str, Any]:
    """The message with what a called tool gave back."""
    return {"role": "tool", "tool_call_id": call.id, "content": look(**json.loads(call.function.arguments))}


def chat_tools(place: Place) -> None:
    client, messages = client_of(place), [*MESSAGES]
    for choice in ("required", {"type": "function", "function": {"name": "lookout"}}):
        more = {"tools": TOOLS, "tool_choice": choice, **place.one_call}
        first = client.chat.completions.create(**asked(place, messages=messages, **more))
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        messages += [message, *map(seen, message.tool_calls)]
    last = client.chat.completions.create(**asked(place, messages=messages), tools=TOOLS, tool_choice="none")
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


def chat_tools_stream(place: Place) -> None:
    client = client_of(place)
    more = {"tools": TOOLS, "tool_choice": "required", **place.one_call}
    with client.chat.completions.stream(**asked(place, **more)) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert {*message.tool_calls[0].function.parsed_arguments} == {"side", "far"}
    messages = [*MESSAGES, message, *map(seen, message.tool_calls)]
    with client.chat.completions.stream(**asked(place, messages=messages), tools=TOOLS) as stream:
        last = stream.get_final_completion().choices[0].message
    assert place.goes_on(last.content, last.tool_calls)


async def chat_tools_async(place: Place) -> None:
    async with async_client_of(place) as client:
        more = {"tools": TOOLS, "tool_choice": "required", **place.one_call}
        first = await client.chat.completions.create(**asked(place, **more))
        message = first.choices[0].message
        messages = [*MESSAGES, message.model_dump(), *map(seen, message.tool_calls)]
        last = await client.chat.completions.create(**asked(place, messages=messages), tools=TOOLS)
    assert place.goes_on(last.choices[0].message.content, last.choices[0].message.tool_calls)


def chat_reasoning(place: Place) -> None:
    message = client_of(place.thinker).chat.completions.create(**asked(place), extra_body=THINKS).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, SAID)


def chat_logprobs(place: Place) -> None:
    answer = client_of(place).chat.completions.create(**asked(place), logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)


def responses(place: Place) -> None:
    client = client_of(place)
    answer = client.responses.create(model=place.model, input=QUESTION, temperature=0)
    assert place.answers(answer.output_text) and place.ends(answer.status, "completed")
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    items = client.responses.input_items.list(answer.id)
    assert QUESTION in items.data[0].content[0].text


async def responses_async(place: Place) -> None:
    async with async_client_of(place) as client:
        answer = await client.responses.create(model=place.model, input=QUESTION, temperature=0)
    assert place.answers(answer.output_text)


def responses_stream(place: Place) -> None:
    with client_of(place).responses.stream(model=place.model, input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert place.answers(text) and text == final.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]


async def responses_stream_async(place: Place) -> None:
    async with async_client_of(place) as client:
        stream = await client.responses.create(model=place.model, input=QUESTION, temperature=0, stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created" and place.ends(kinds[-1].removeprefix("response."), "completed")


def responses_parse(place: Place) -> None:
    client = client_of(place)
    answer = client.responses.parse(model=place.model, input=QUESTION, text_format=Sighting, temperature=0)
    assert isinstance(answer.output_parsed, Sighting)
    with client.responses.stream(model=place.model, input=QUESTION, text_format=Sighting, temperature=0) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Sighting)


def called(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def outputs(response: Any) -> list[Any]:
    """The items with what the called tools gave back."""
    assert called(response)
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": look(**json.loads(call.arguments))}
        for call in called(response)
    ]


def responses_tools(place: Place) -> None:
    client, shared = client_of(place), {"model": place.model, "tools": FLAT, "temperature": 0, **place.one_call}
    first = client.responses.create(**shared, input=QUESTION, tool_choice="required")
    named = {"type": "function", "name": "lookout"}
    second = client.responses.create(**shared, input=outputs(first), previous_response_id=first.id, tool_choice=named)
    last = client.responses.create(**shared, input=outputs(second), previous_response_id=second.id)
    assert place.goes_on(last.output_text, called(last))
    assert last.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens


def responses_tools_stream(place: Place) -> None:
    client, shared = client_of(place), {"model": place.model, "tools": FLAT, "temperature": 0, **place.one_call}
    with client.responses.stream(**shared, input=QUESTION, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    with client.responses.stream(**shared, input=outputs(first), previous_response_id=first.id) as stream:
        last = stream.get_final_response()
    assert place.goes_on(last.output_text, called(last))


def responses_stateless(place: Place) -> None:
    client = client_of(place)
    shared = {"model": place.model, "tools": FLAT, "temperature": 0, "store": False, **place.one_call}
    include = ["reasoning.encrypted_content"]
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(**shared, input=said, tool_choice="required", include=include)
    last = client.responses.create(**shared, input=[*said, *first.output, *outputs(first)], include=include)
    assert place.goes_on(last.output_text, called(last))


def responses_reasoning(place: Place) -> None:
    client = client_of(place.thinker)
    answer = client.responses.create(model=place.model, input=QUESTION, extra_body=THINKS)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert (answer.output[0].content[0].text, answer.output_text) == (THOUGHT, SAID)
    said: list[Any] = [{"role": "user", "content": QUESTION}, *answer.output, {"role": "user", "content": "Why?"}]
    assert client.responses.create(model=place.model, input=said, max_output_tokens=5).output


def completions(place: Place) -> None:
    shared = {"model": place.model, "max_tokens": 4, "temperature": 0}
    answer = client_of(place).completions.create(**shared, prompt=["Hello", "The sea"], n=2, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert sum(len(choice.logprobs.tokens) for choice in answer.choices) == answer.usage.completion_tokens


def completions_stream(place: Place) -> None:
    shared = {"model": place.model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    whole = client_of(place).completions.create(**shared).choices[0].text
    pieces = client_of(place).completions.create(**shared, stream=True)
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole


def embeddings(place: Place) -> None:
    answer = client_of(place).embeddings.create(model=place.model, input=["a whale", "a ship"], dimensions=64)
    assert [len(entry.embedding) for entry in answer.data] == [64, 64]
    plain = client_of(place).embeddings.create(model=place.model, input="a whale", encoding_format="float")
    assert abs(sum(number**2 for number in plain.data[0].embedding) - 1) < 1e-5


def models(place: Place) -> None:
    client = client_of(place)
    assert [model.id for model in client.models.list()] == [place.model]
    assert client.models.retrieve(place.model).id == place.model


def wrong_key(place: Place) -> None:
    client = client_of(place, api_key="sk-shark")
    for ask in (client.models.list, lambda: client.chat.completions.create(**asked(place))):
        error = raised(openai.AuthenticationError, ask)
        assert error.code == "invalid_api_key"


def unknown_model(place: Place) -> None:
    client = client_of(place)
    for ask in (
        lambda: client.chat.completions.create(**{**asked(place), "model": "gpt-4"}),
        lambda: client.responses.create(model="gpt-4", input=QUESTION),
        lambda: client.embeddings.create(model="gpt-4", input=QUESTION),
        lambda: client.models.retrieve("gpt-4"),
    ):
        assert raised(openai.NotFoundError, ask).code == "model_not_found"


def bad_field(place: Place) -> None:
    client = client_of(place)
    for param, ask in {
        "temperature": lambda: client.chat.completions.create(**{**asked(place), "temperature": 3}),
        "temprature": lambda: client.chat.completions.create(**asked(place), extra_body={"temprature": 1}),
        "max_output_tokens": lambda: client.responses.create(model=place.model, input="Hi", max_output_tokens=0),
        "dimensions": lambda: client.embeddings.create(model=place.model, input="Hi", dimensions=100_000),
    }.items():
        assert raised(openai.BadRequestError, ask).param == param


def hang_up(place: Place) -> None:
    with place.hung_up():
        stream = client_of(place).chat.completions.create(**asked(place, **LONG), stream=True, extra_body=ENDLESS)
        next(iter(stream))
        stream.close()


async def hang_up_async(place: Place) -> None:
    async with async_client_of(place) as client:
        with place.hung_up():
            await place.give_up(client.chat.completions.create(**asked(place, **LONG), extra_body=ENDLESS))


def retry(place: Place) -> None:
    with place.full() as url:
        answer = client_of(place, base_url=f"{url}/v1", max_retries=10).chat.completions.create(**asked(place))
    assert place.answers(answer.choices[0].message.content)
