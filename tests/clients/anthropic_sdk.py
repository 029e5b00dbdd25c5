"""The Anthropic SDK: messages, with its tool runner and its parsing, and the counting of tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic

from .place import ENDLESS, LONG, LOOKOUT_SCHEMA, MESSAGES, SAID, THINKS, THOUGHT, Place, Sighting, raised
from .place import lookout as look

LOOKOUT: Any = {"name": "lookout", "description": "Looks out.", "input_schema": LOOKOUT_SCHEMA}
COLD = {"temperature": 0}  # the SDK has no such argument any more


def client_of(place: Place, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": place.url, "api_key": place.key, **more})


def async_client_of(place: Place) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=place.url, api_key=place.key)


def asked(place: Place, **more: Any) -> dict[str, Any]:
    return {"model": place.model, "max_tokens": 1000, "messages": MESSAGES, "extra_body": COLD, **more}


def messages(place: Place) -> None:
    answer = client_of(place).messages.create(**asked(place), system="Be brief.")
    assert place.answers(answer.content[0].text) and place.ends(answer.stop_reason, "end_turn")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


async def messages_async(place: Place) -> None:
    async with async_client_of(place) as client:
        answers = await asyncio.gather(*(client.messages.create(**asked(place)) for _ in range(4)))
    assert all(place.answers(answer.content[0].text) for answer in answers)


def messages_stream(place: Place) -> None:
    with client_of(place).messages.stream(**asked(place)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert place.answers(text) and text == final.content[0].text
    events = list(client_of(place).messages.create(**asked(place), stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    [delta] = [event for event in events if event.type == "message_delta"]
    assert delta.usage.output_tokens == final.usage.output_tokens


async def messages_stream_async(place: Place) -> None:
    async with async_client_of(place) as client, client.messages.stream(**asked(place)) as stream:
        assert place.answers("".join([piece async for piece in stream.text_stream]))


def messages_parse(place: Place) -> None:
    client = client_of(place)
    assert isinstance(client.messages.parse(**asked(place), output_format=Sighting).parsed_output, Sighting)
    with client.messages.stream(**asked(place), output_format=Sighting) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Sighting)


def any_tool(*, once: bool) -> Any:
    """The choice that some tool must be called."""
    return {"type": "any", "disable_parallel_tool_use": True} if once else {"type": "any"}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def called(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def seen(message: Any) -> dict[str, Any]:
    """The turn with what the called tools gave back."""
    calls = called(message)
    assert calls and message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)} for call in calls]
    return {"role": "user", "content": results}


def messages_tools(place: Place) -> None:
    client, said = client_of(place), [*MESSAGES]
    for choice in (
        any_tool(once=bool(place.one_call)),
        {"type": "tool", "name": "lookout", "disable_parallel_tool_use": True},
    ):
        answer = client.messages.create(**asked(place, messages=said), tools=[LOOKOUT], tool_choice=choice)
        said += [{"role": "assistant", "content": answer.content}, seen(answer)]
    last = client.messages.create(**asked(place, messages=said), tools=[LOOKOUT])
    assert place.goes_on(text_of(last), called(last))
    assert last.stop_reason == "tool_use" if called(last) else place.ends(last.stop_reason, "end_turn")

    tool = anthropic.beta_tool(look)
    call = '<tool_call>\n{"name": "lookout", "arguments": {"side": "port", "far": true}}\n</tool_call>'
    runner = client.beta.messages.tool_runner(
        **asked(place, extra_body={**COLD, "structured_outputs": {"grammar": f"start: {json.dumps(call)}"}}),
        tools=[tool],
        max_iterations=2,
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert "Far to port" in str(runner.generate_tool_call_response())


def messages_tools_stream(place: Place) -> None:
    client = client_of(place)
    with client.messages.stream(
        **asked(place), tools=[LOOKOUT], tool_choice=any_tool(once=bool(place.one_call))
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        first = stream.get_final_message()
    assert len(pieces) > 1
    said = [*MESSAGES, {"role": "assistant", "content": first.content}, seen(first)]
    with client.messages.stream(**asked(place, messages=said), tools=[LOOKOUT]) as stream:
        last = stream.get_final_message()
    assert place.goes_on(text_of(last), called(last))


def messages_thinking(place: Place) -> None:
    client = client_of(place.thinker)
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": THINKS, "max_tokens": 1500}
    answer = client.messages.create(**asked(place, **more))
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.content[1].text) == (THOUGHT, SAID)
    with client.messages.stream(**asked(place, **more)) as stream:
        assert "".join(event.thinking for event in stream if event.type == "thinking") == THOUGHT
    said = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Why?"}]
    assert client.messages.create(**asked(place, **{**more, "messages": said})).content


def count_tokens(place: Place) -> None:
    client = client_of(place)
    plain = client.messages.count_tokens(model=place.model, messages=MESSAGES).input_tokens
    assert client.messages.count_tokens(model=place.model, messages=MESSAGES, tools=[LOOKOUT]).input_tokens > plain > 0


def models(place: Place) -> None:
    client = client_of(place)
    assert [model.id for model in client.models.list()] == [place.model]
    assert client.models.retrieve(place.model).id == place.model


def wrong_key(place: Place) -> None:
    client = client_of(place, api_key="sk-shark")
    raised(anthropic.AuthenticationError, lambda: client.messages.create(**asked(place)))
    bearer = anthropic.Anthropic(base_url=place.url, api_key=None, auth_token=place.key)
    assert bearer.messages.create(**asked(place)).content


def unknown_model(place: Place) -> None:
    client = client_of(place)
    for ask in (client.messages.create, client.messages.count_tokens):
        more = {"max_tokens": 5} if ask == client.messages.create else {}
        raised(anthropic.NotFoundError, lambda ask=ask, more=more: ask(model="claude", messages=MESSAGES, **more))


def bad_field(place: Place) -> None:
    client = client_of(place)
    error = raised(anthropic.BadRequestError, lambda: client.messages.create(**asked(place, max_tokens=-1)))
    assert "max_tokens" in error.message


def hang_up(place: Place) -> None:
    with place.hung_up(), client_of(place).messages.stream(**asked(place, **LONG, extra_body=ENDLESS)) as stream:
        next(iter(stream.text_stream))


async def hang_up_async(place: Place) -> None:
    async with async_client_of(place) as client:
        with place.hung_up():
            await place.give_up(client.messages.create(**asked(place, **LONG, extra_body=ENDLESS)))


def retry(place: Place) -> None:
    with place.full() as url:
        answer = client_of(place, base_url=url, max_retries=10).messages.create(**asked(place))
    assert place.answers(answer.content[0].text)
