"""OpenAI's agents SDK, over responses and over chat completions."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from .place import ENDLESS, LONG, QUESTION, Place, Sighting
from .place import lookout as look

set_tracing_disabled(True)  # traces go to OpenAI, whatever the model's address is
COLD = ModelSettings(temperature=0)


def calls(place: Place) -> ModelSettings:
    """A tool must be called until the first call; then the agent sets it back."""
    return ModelSettings(temperature=0, tool_choice="required", **place.one_call)


def client_of(place: Place, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": place.v1, "api_key": place.key, **more})


def chat_of(place: Place, **more: Any) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(place.model, client_of(place, **more))


def responses_of(place: Place) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(place.model, client_of(place))


def agent_of(model: Any, settings: ModelSettings = COLD, **more: Any) -> Agent[Any]:
    return Agent(name="Ishmael", instructions="Be brief.", model=model, model_settings=settings, **more)


async def check(place: Place, model: Any) -> None:
    agent = agent_of(model)
    first = await Runner.run(agent, QUESTION)
    assert place.answers(first.final_output)
    again: list[Any] = [*first.to_input_list(), {"role": "user", "content": QUESTION}]
    assert (await Runner.run(agent, again)).final_output


async def check_stream(place: Place, model: Any, settings: ModelSettings = COLD) -> None:
    result = Runner.run_streamed(agent_of(model, settings), QUESTION)
    kinds = {event.data.type async for event in result.stream_events() if event.type == "raw_response_event"}
    assert place.answers(result.final_output)
    assert "response.output_text.delta" in kinds
    assert any(place.ends(kind.removeprefix("response."), "completed") for kind in kinds)


async def check_parse(model: Any) -> None:
    assert isinstance((await Runner.run(agent_of(model, output_type=Sighting), QUESTION)).final_output, Sighting)


async def check_tools(place: Place, model: Any) -> None:
    result = await Runner.run(agent_of(model, calls(place), tools=[function_tool(look)]), QUESTION)
    assert result.final_output
    assert "tool_call_output_item" in [item.type for item in result.new_items]


async def check_tools_stream(place: Place, model: Any) -> None:
    result = Runner.run_streamed(agent_of(model, calls(place), tools=[function_tool(look)]), QUESTION)
    async for _ in result.stream_events():
        pass
    assert result.final_output
    assert "tool_call_output_item" in [item.type for item in result.new_items]


async def chat_async(place: Place) -> None:
    await check(place, chat_of(place))


async def chat_stream_async(place: Place) -> None:
    await check_stream(place, chat_of(place))


async def chat_usage(place: Place) -> None:
    result = Runner.run_streamed(agent_of(chat_of(place), ModelSettings(include_usage=True)), QUESTION)
    async for _ in result.stream_events():
        pass
    assert result.context_wrapper.usage.output_tokens > 0


async def chat_parse(place: Place) -> None:
    await check_parse(chat_of(place))


async def chat_tools_async(place: Place) -> None:
    await check_tools(place, chat_of(place))


async def chat_tools_stream(place: Place) -> None:
    await check_tools_stream(place, chat_of(place))


async def responses_async(place: Place) -> None:
    await check(place, responses_of(place))
    previous = await Runner.run(agent_of(responses_of(place)), QUESTION)
    later = await Runner.run(agent_of(responses_of(place)), QUESTION, previous_response_id=previous.last_response_id)
    assert later.final_output


async def responses_stream_async(place: Place) -> None:
    await check_stream(place, responses_of(place))


async def responses_parse(place: Place) -> None:
    await check_parse(responses_of(place))


async def responses_tools(place: Place) -> None:
    await check_tools(place, responses_of(place))


async def responses_tools_stream(place: Place) -> None:
    await check_tools_stream(place, responses_of(place))


async def responses_stateless(place: Place) -> None:
    settings = calls(place).resolve(ModelSettings(store=False, response_include=["reasoning.encrypted_content"]))
    result = await Runner.run(agent_of(responses_of(place), settings, tools=[function_tool(look)]), QUESTION)
    assert result.final_output


async def wrong_key(place: Place) -> None:
    await refused(openai.AuthenticationError, agent_of(chat_of(place, api_key="sk-shark")))


async def unknown_model(place: Place) -> None:
    await refused(openai.NotFoundError, agent_of(OpenAIResponsesModel("gpt-4", client_of(place))))


async def bad_field(place: Place) -> None:
    error = await refused(openai.BadRequestError, agent_of(responses_of(place), ModelSettings(top_p=3)))
    assert error.param == "top_p"


async def hang_up_async(place: Place) -> None:
    settings = ModelSettings(max_tokens=int(str(LONG["max_tokens"])), extra_body=ENDLESS)
    with place.hung_up():
        await place.give_up(Runner.run(agent_of(chat_of(place), settings), QUESTION))


async def retry(place: Place) -> None:
    with place.full() as url:
        model = chat_of(place, base_url=f"{url}/v1", max_retries=10)
        assert place.answers((await Runner.run(agent_of(model), QUESTION)).final_output)


async def refused(kind: type[openai.APIStatusError], agent: Agent[Any]) -> openai.APIStatusError:
    """The error that a run ends with."""
    try:
        await Runner.run(agent, QUESTION)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
