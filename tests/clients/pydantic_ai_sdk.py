"""Pydantic AI: agents over OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart, ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from .place import ENDLESS, LONG, QUESTION, SAID, THINKS, THOUGHT, Place, Sighting, raised
from .place import lookout as look

COLD: Any = {"temperature": 0}


class CallsFirst(AbstractCapability[Any]):
    """A tool must be called in the first step, and may be in those that follow."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required"} if context.run_step == 1 else {}


def chat_of(place: Place, name: str | None = None, key: str | None = None) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=place.v1, api_key=key or place.key)
    return OpenAIChatModel(name or place.model, provider=provider)


def responses_of(place: Place) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(place.model, provider=OpenAIProvider(base_url=place.v1, api_key=place.key))


def messages_of(place: Place) -> AnthropicModel:
    return AnthropicModel(place.model, provider=AnthropicProvider(base_url=place.url, api_key=place.key))


def check(place: Place, model: Any) -> None:
    agent = Agent(model, system_prompt="Be brief.", model_settings=COLD)
    first = agent.run_sync(QUESTION)
    assert place.answers(first.output) and first.usage.output_tokens > 0
    assert agent.run_sync(QUESTION, message_history=first.all_messages()).output


async def check_async(place: Place, model: Any) -> None:
    assert place.answers((await Agent(model, model_settings=COLD).run(QUESTION)).output)


async def check_stream(place: Place, model: Any) -> None:
    async with Agent(model, model_settings=COLD).run_stream(QUESTION) as result:
        assert place.answers("".join([piece async for piece in result.stream_text(delta=True)]))
        assert result.usage.output_tokens > 0


def check_parse(model: Any, *outputs: Any) -> None:
    for output in outputs:
        made: Any = Agent(model, output_type=output, model_settings=COLD).run_sync(QUESTION).output
        assert isinstance(made, Sighting)


def agent_of(place: Place, model: Any) -> Agent[Any, Any]:
    return Agent(model, tools=[look], capabilities=[CallsFirst()], model_settings={**COLD, **place.one_call})


def check_tools(place: Place, model: Any) -> None:
    result = agent_of(place, model).run_sync(QUESTION)
    assert result.output and has_return(result)


async def check_tools_stream(place: Place, model: Any) -> None:
    async with agent_of(place, model).run_stream(QUESTION) as result:
        assert await result.get_output()
        assert has_return(result)


def has_return(result: Any) -> bool:
    """Whether a tool was called and gave something back."""
    return any(isinstance(part, ToolReturnPart) for message in result.all_messages() for part in message.parts)


def check_reasoning(model: Any, **more: Any) -> None:
    agent = Agent(model, model_settings={"extra_body": THINKS, **more})
    first = agent.run_sync(QUESTION)
    assert first.output == SAID
    [thinking] = [part for part in first.response.parts if isinstance(part, ThinkingPart)]
    assert THOUGHT in (thinking.content or str(thinking.provider_details))
    assert agent.run_sync("Why?", message_history=first.all_messages()).output == SAID


def chat(place: Place) -> None:
    check(place, chat_of(place))


async def chat_async(place: Place) -> None:
    await check_async(place, chat_of(place))


async def chat_stream_async(place: Place) -> None:
    await check_stream(place, chat_of(place))


def chat_parse(place: Place) -> None:
    check_parse(chat_of(place), ToolOutput(Sighting), NativeOutput(Sighting))


def chat_tools(place: Place) -> None:
    check_tools(place, chat_of(place))


async def chat_tools_stream(place: Place) -> None:
    await check_tools_stream(place, chat_of(place))


def chat_reasoning(place: Place) -> None:
    check_reasoning(chat_of(place.thinker))


def responses(place: Place) -> None:
    check(place, responses_of(place))


async def responses_async(place: Place) -> None:
    await check_async(place, responses_of(place))


async def responses_stream_async(place: Place) -> None:
    await check_stream(place, responses_of(place))


def responses_parse(place: Place) -> None:
    check_parse(responses_of(place), ToolOutput(Sighting), NativeOutput(Sighting))


def responses_tools(place: Place) -> None:
    check_tools(place, responses_of(place))


async def responses_tools_stream(place: Place) -> None:
    await check_tools_stream(place, responses_of(place))


def responses_reasoning(place: Place) -> None:
    check_reasoning(responses_of(place.thinker))


def messages(place: Place) -> None:
    check(place, messages_of(place))


async def messages_async(place: Place) -> None:
    await check_async(place, messages_of(place))


async def messages_stream_async(place: Place) -> None:
    await check_stream(place, messages_of(place))


def messages_parse(place: Place) -> None:
    # NativeOutput is offered for Anthropic's own models alone, by their names.
    check_parse(messages_of(place), ToolOutput(Sighting))


def messages_tools(place: Place) -> None:
    check_tools(place, messages_of(place))


async def messages_tools_stream(place: Place) -> None:
    await check_tools_stream(place, messages_of(place))


def messages_thinking(place: Place) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    check_reasoning(messages_of(place.thinker), anthropic_thinking=thinking, max_tokens=1500)


def wrong_key(place: Place) -> None:
    error = raised(ModelHTTPError, lambda: Agent(chat_of(place, key="sk-shark")).run_sync(QUESTION))
    assert error.status_code == 401


def unknown_model(place: Place) -> None:
    error = raised(ModelHTTPError, lambda: Agent(chat_of(place, name="gpt-4")).run_sync(QUESTION))
    assert (error.status_code, error.body["code"]) == (404, "model_not_found")


def bad_field(place: Place) -> None:
    agent = Agent(chat_of(place), model_settings={"top_p": 3})
    error = raised(ModelHTTPError, lambda: agent.run_sync(QUESTION))
    assert (error.status_code, error.body["param"]) == (400, "top_p")


async def hang_up_async(place: Place) -> None:
    agent = Agent(chat_of(place), model_settings={"max_tokens": LONG["max_tokens"], "extra_body": ENDLESS})
    with place.hung_up():
        await place.give_up(agent.run(QUESTION))
