"""LangChain's models of OpenAI, over both of its APIs, and of Anthropic."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from .place import ANSWER, ENDLESS, LONG, QUESTION, SAID, THINKS, THOUGHT, Place, Sighting, raised
from .place import lookout as look


@tool
def lookout(side: Literal["port", "starboard"], far: bool) -> str:
    """Looks out over one side of the ship."""
    return look(side, far)


def model_of(place: Place, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": place.model, "base_url": place.v1, "api_key": place.key, "temperature": 0, **more})


def responses_of(place: Place, **more: Any) -> ChatOpenAI:
    return model_of(place, use_responses_api=True, **more)


def anthropic_of(place: Place, **more: Any) -> ChatAnthropic:
    given = {"model": place.model, "base_url": place.url, "api_key": place.key, "max_tokens": 1000, "temperature": 0}
    return ChatAnthropic(**{**given, **more})


def check_stream(place: Place, model: Any) -> None:
    whole: Any = None
    for piece in model.stream(QUESTION):
        whole = piece if whole is None else whole + piece
    assert place.answers(whole.text)
    assert whole.usage_metadata["output_tokens"] > 0


async def check_stream_async(place: Place, model: Any) -> None:
    assert place.answers("".join([piece.text async for piece in model.astream(QUESTION)]))


def check_tools(place: Place, model: Any, *, streamed: bool = False) -> None:
    """A call that must be, its result sent back, and the answer."""
    said: list[BaseMessage] = [HumanMessage(QUESTION)]
    for choice in ("any", "lookout"):
        bound = model.bind_tools([lookout], tool_choice=choice, **place.one_call)
        answer = joined(bound, said) if streamed else bound.invoke(said)
        assert answer.tool_calls
        said.append(answer)
        said += [ToolMessage(lookout.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    free = model.bind_tools([lookout])
    last = joined(free, said) if streamed else free.invoke(said)
    assert place.goes_on(last.text, last.tool_calls)


def joined(model: Any, said: list[BaseMessage]) -> Any:
    pieces = list(model.stream(said))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole


def check_parse(model: Any, *methods: str) -> None:
    for method in methods:
        assert isinstance(model.with_structured_output(Sighting, method=method).invoke(QUESTION), Sighting), method


def chat(place: Place) -> None:
    answer = model_of(place).invoke([("system", "Be brief."), ("human", QUESTION)])
    assert place.answers(answer.text) and place.ends(answer.response_metadata["finish_reason"])
    assert place.answers(model_of(place).batch([QUESTION, QUESTION])[1].text)


async def chat_async(place: Place) -> None:
    assert place.answers((await model_of(place).ainvoke(QUESTION)).text)


def chat_stream(place: Place) -> None:
    assert place.answers("".join(piece.text for piece in model_of(place).stream(QUESTION)))


async def chat_stream_async(place: Place) -> None:
    await check_stream_async(place, model_of(place))


def chat_usage(place: Place) -> None:
    check_stream(place, model_of(place, stream_usage=True))


def chat_parse(place: Place) -> None:
    check_parse(model_of(place), "json_schema", "function_calling")


def chat_parse_stream(place: Place) -> None:
    assert isinstance([*model_of(place).with_structured_output(Sighting).stream(QUESTION)][-1], Sighting)


def chat_tools(place: Place) -> None:
    check_tools(place, model_of(place))


def chat_tools_stream(place: Place) -> None:
    check_tools(place, model_of(place), streamed=True)


def chat_logprobs(place: Place) -> None:
    answer = model_of(place, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer.response_metadata["logprobs"]["content"])


def responses(place: Place) -> None:
    model = responses_of(place, use_previous_response_id=True)
    first = model.invoke([HumanMessage(QUESTION)])
    assert place.answers(first.text)
    second = model.invoke([HumanMessage(QUESTION), first, HumanMessage("And 3 + 4?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


async def responses_async(place: Place) -> None:
    assert place.answers((await responses_of(place).ainvoke(QUESTION)).text)


def responses_stream(place: Place) -> None:
    check_stream(place, responses_of(place))


async def responses_stream_async(place: Place) -> None:
    await check_stream_async(place, responses_of(place))


def responses_parse(place: Place) -> None:
    check_parse(responses_of(place), "json_schema", "function_calling")


def responses_tools(place: Place) -> None:
    check_tools(place, responses_of(place))


def responses_tools_stream(place: Place) -> None:
    check_tools(place, responses_of(place), streamed=True)


def responses_stateless(place: Place) -> None:
    check_tools(place, responses_of(place, store=False, include=["reasoning.encrypted_content"]))


def responses_reasoning(place: Place) -> None:
    model = responses_of(place.thinker, extra_body=THINKS)
    answer = model.invoke(QUESTION)
    assert answer.text == SAID and THOUGHT in str(answer.content)
    assert model.invoke([HumanMessage(QUESTION), answer, HumanMessage("Why?")]).text == SAID


def messages(place: Place) -> None:
    answer = anthropic_of(place).invoke([("system", "Be brief."), ("human", QUESTION)])
    assert place.answers(answer.text) and answer.usage_metadata["output_tokens"] > 0


async def messages_async(place: Place) -> None:
    assert place.answers((await anthropic_of(place).ainvoke(QUESTION)).text)


def messages_stream(place: Place) -> None:
    check_stream(place, anthropic_of(place))


async def messages_stream_async(place: Place) -> None:
    await check_stream_async(place, anthropic_of(place))


def messages_parse(place: Place) -> None:
    check_parse(anthropic_of(place), "json_schema", "function_calling")


def messages_tools(place: Place) -> None:
    check_tools(place, anthropic_of(place))


def messages_tools_stream(place: Place) -> None:
    check_tools(place, anthropic_of(place), streamed=True)


def messages_thinking(place: Place) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    model = anthropic_of(place.thinker, thinking=thinking, max_tokens=1500, temperature=1, model_kwargs={})
    answer = model.invoke(QUESTION, extra_body=THINKS)
    assert answer.text == SAID and THOUGHT in str(answer.content)
    assert model.invoke([HumanMessage(QUESTION), answer, HumanMessage("Why?")], extra_body=THINKS).text == SAID


def count_tokens(place: Place) -> None:
    model = anthropic_of(place)
    assert model.get_num_tokens_from_messages([HumanMessage(QUESTION), AIMessage(ANSWER), HumanMessage("Why?")]) > 0


def completions(place: Place) -> None:
    model = OpenAI(model=place.model, base_url=place.v1, api_key=place.key, max_tokens=5, temperature=0)
    assert model.invoke("Hello") == "".join(model.stream("Hello"))


def embeddings(place: Place) -> None:
    # Without the flag it asks for the tokens of OpenAI's tokenizer, which it would have to download.
    model = OpenAIEmbeddings(
        model=place.model, base_url=place.v1, api_key=place.key, check_embedding_ctx_length=False, dimensions=64
    )
    assert [len(vector) for vector in model.embed_documents(["a whale", "a ship"])] == [64, 64]


def wrong_key(place: Place) -> None:
    raised(openai.AuthenticationError, lambda: model_of(place, api_key="sk-shark").invoke(QUESTION))
    raised(anthropic.AuthenticationError, lambda: anthropic_of(place, api_key="sk-shark").invoke(QUESTION))


def unknown_model(place: Place) -> None:
    raised(openai.NotFoundError, lambda: model_of(place, model="gpt-4").invoke(QUESTION))
    raised(anthropic.NotFoundError, lambda: anthropic_of(place, model="claude").invoke(QUESTION))


def bad_field(place: Place) -> None:
    error = raised(openai.BadRequestError, lambda: model_of(place, temperature=3).invoke(QUESTION))
    assert error.param == "temperature"


def hang_up(place: Place) -> None:
    with place.hung_up():
        stream = model_of(place, max_tokens=LONG["max_tokens"], extra_body=ENDLESS).stream(QUESTION)
        next(stream)
        stream.close()


async def hang_up_async(place: Place) -> None:
    model = model_of(place, max_tokens=LONG["max_tokens"], extra_body=ENDLESS)
    with place.hung_up():
        await place.give_up(model.ainvoke(QUESTION))


def retry(place: Place) -> None:
    with place.full() as url:
        assert place.answers(model_of(place, base_url=f"{url}/v1", max_retries=10).invoke(QUESTION).text)
