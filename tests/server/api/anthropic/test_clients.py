"""Messages in Anthropic's form as their clients see them: a coding agent, and the SDK."""

import asyncio

import anthropic
import pytest

from tests.fakes import FakeEngine, listening, serving, until
from tests.server.api import coding_agent
from tests.server.api.anthropic.wire import (
    ASKED,
    CALL,
    COUNT,
    LARGE,
    LOOK,
    QUESTION,
    THOUGHT,
    events,
    put_together,
)
from tests.server.wire import LIBRARY, saying


async def test_what_a_coding_agent_sends_is_answered(folder):
    engine = FakeEngine(
        saying(f'{THOUGHT}<tool_call>\n{{"name": "Bash", "arguments": {{"command": "ls"}}}}\n</tool_call>')
    )
    engine._info = LARGE
    engine.finish_loading()
    async with serving(folder, engine) as (client, _):
        first = await client.post(coding_agent.PATH, json=coding_agent.REQUEST, headers=coding_agent.HEADERS)
        assert first.status_code == 200, first.text
        message = put_together(events(first.text))
        call = message["content"][-1]
        assert (call["name"], call["input"], message["stop_reason"]) == ("Bash", {"command": "ls"}, "tool_use")
        result, late = coding_agent.NEXT
        result = {**result, "content": [{**result["content"][0], "tool_use_id": call["id"]}]}
        said = {"role": "assistant", "content": message["content"]}
        body = {**coding_agent.REQUEST, "messages": [*coding_agent.REQUEST["messages"], said, result, late]}
        second = await client.post(coding_agent.PATH, json=body, headers=coding_agent.HEADERS)
        assert second.status_code == 200, second.text
        counted = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
        count = await client.post(f"{COUNT}?beta=true", json=counted, headers=coding_agent.HEADERS)
        assert count.status_code == 200, count.text
    first, second = (LIBRARY.decode(list(request.prompt_ids)) for request in engine.requests)
    assert second.startswith(first.removesuffix("assistant: ")), "the prefix is found again"
    assert "x-anthropic" not in first
    assert "tool Bash: 41" in second


async def sdk(folder, use, engine, **settings):
    """Let `use(client)` talk to the server through the SDK."""
    async with serving(folder, engine, **settings) as (_, app), listening(app) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            return await use(client)


async def test_the_sdk_reads_whole_answers_streams_and_counts(folder):
    async def use(client):
        whole = await client.messages.create(**ASKED)
        assert whole.content[0].text == "the whale"
        assert whole.stop_reason == "end_turn"
        assert whole._request_id.startswith("req-")
        raw = [event.type async for event in await client.messages.create(**ASKED, stream=True)]
        assert raw[0] == "message_start" and raw[-1] == "message_stop"
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == final.content[0].text == "the whale"
        assert final.usage.output_tokens == whole.usage.output_tokens
        count = await client.messages.count_tokens(model="fake", messages=QUESTION)
        assert count.input_tokens == whole.usage.input_tokens
        beta = await client.beta.messages.create(**ASKED, betas=["interleaved-thinking-2025-05-14"])
        assert beta.content[0].text == "the whale"

    await sdk(folder, use, FakeEngine(saying("the whale")))


async def test_the_sdk_without_asyncio_does_too(folder):
    def work(url):
        with anthropic.Anthropic(base_url=url, auth_token="k", api_key=None, max_retries=0) as client:
            assert client.messages.create(**ASKED).content[0].text == "the whale"
            with client.messages.stream(**ASKED) as stream:
                assert stream.get_final_text() == "the whale"

    async with serving(folder, FakeEngine(saying("the whale")), api_key=["k"]) as (_, app), listening(app) as url:
        await asyncio.to_thread(work, url)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_sdk_runs_tools_until_the_final_answer(folder, is_streamed):
    engine = FakeEngine(saying(f"{THOUGHT}Let me look.\n{CALL}", "a whale"))

    async def use(client):
        messages, steps = [*QUESTION], 0
        while True:
            asked = {**ASKED, "messages": messages, "tools": [LOOK]}
            if is_streamed:
                async with client.messages.stream(**asked) as stream:
                    told = await stream.get_final_message()
            else:
                told = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": told.content})
            if told.stop_reason != "tool_use":
                return steps, told.content[-1].text
            calls = [block for block in told.content if block.type == "tool_use"]
            assert [call.input for call in calls] == [{"far": True}]
            steps += 1
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "a ship"} for call in calls]
            messages.append({"role": "user", "content": results})

    assert await sdk(folder, use, engine) == (1, "a whale")
    assert "tool look: a ship" in LIBRARY.decode(list(engine.requests[1].prompt_ids))


async def test_errors_become_the_exceptions_of_the_sdk(folder):
    engine = FakeEngine(saying("the whale"))

    async def use(client):
        with pytest.raises(anthropic.BadRequestError) as bad:
            await client.messages.create(**ASKED, extra_body={"colour": "blue"})
        assert bad.value.type == "invalid_request_error"
        assert bad.value.body["error"]["param"] == "colour"
        assert bad.value.request_id.startswith("req-")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**ASKED, "model": "gpt"})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="other").messages.create(**ASKED)
        with pytest.raises(anthropic.APIStatusError) as late:
            engine.hold()
            await client.messages.create(**ASKED, extra_headers={"x-deadline-ms": "50"})
        assert (late.value.status_code, late.value.type) == (504, "timeout_error")
        engine.let_go()
        engine.error_at = (2, "out of memory")
        with pytest.raises(anthropic.APIStatusError) as cut:
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
        assert cut.value.type == "api_error"

    await sdk(folder, use, engine, api_key=["k"])


async def test_a_stream_that_is_left_ends_its_work(folder):
    engine = FakeEngine(saying("the sea " * 50), delay=0.01)

    async def use(client):
        async with client.messages.stream(**ASKED) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: not engine.open)

    await sdk(folder, use, engine)
    assert engine.aborted
