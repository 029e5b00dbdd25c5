"""The Responses API of a real server with the built-in model, as the OpenAI SDK sees it."""

import json
import signal

import openai
import pydantic
import pytest

from tests.live import PacedServer, Server, eventually

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Sum(pydantic.BaseModel):
    result: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server():
    with PacedServer() as running:
        yield running


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server):
    return client_of(server)


def test_a_response_and_its_stream_say_the_same(client):
    whole = client.responses.create(model="builtin", input="What is 7 + 5?", temperature=0)
    assert "12" in whole.output_text
    assert whole.status == "completed"
    with client.responses.stream(model="builtin", input="What is 7 + 5?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert client.responses.retrieve(final.id).output_text == text


def test_a_conversation_goes_on_and_finds_its_beginning_in_the_cache(client):
    long = "The whale and the sea and the captain. " * 10
    first = client.responses.create(model="builtin", input=f"{long} What is 7 + 5?", temperature=0)
    second = client.responses.create(
        model="builtin", input="And what is 3 + 4?", previous_response_id=first.id, temperature=0
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_an_answer_is_parsed_into_a_model(client):
    parsed = client.responses.parse(model="builtin", input="What is 7 + 5?", text_format=Sum, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Sum)


def test_a_tool_is_called_until_the_answer_is_there(client):
    asked = client.responses.create(
        model="builtin", input="What is 7 + 5?", tools=[ADD], tool_choice="required", max_output_tokens=200
    )
    calls = [item for item in asked.output if item.type == "function_call"]
    assert calls
    outputs = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": str(sum(json.loads(call.arguments).values())),
        }
        for call in calls
    ]
    last = client.responses.create(
        model="builtin", input=outputs, previous_response_id=asked.id, tools=[ADD], tool_choice="none"
    )
    assert last.status == "completed"
    assert last.output_text


def test_background_work_is_polled_and_cancelled(server, client):
    done = client.responses.create(model="builtin", input="What is 7 + 5?", temperature=0, background=True)
    assert done.status in ("queued", "in_progress")
    eventually(lambda: client.responses.retrieve(done.id).status == "completed")
    assert "12" in client.responses.retrieve(done.id).output_text
    with server.paced():
        long = client.responses.create(
            model="builtin", input="Go on.", background=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
        )
        eventually(lambda: client.responses.retrieve(long.id).status == "in_progress")
        assert client.responses.cancel(long.id).status == "cancelled"
    eventually(lambda: server.metric("vllm:num_requests_running") == 0)


def test_a_file_keeps_responses_over_a_killed_server(tmp_path):
    store = ["--response-store", str(tmp_path / "responses.db")]
    with PacedServer(*store) as first:
        client = client_of(first)
        kept = client.responses.create(model="builtin", input="What is 7 + 5?", temperature=0)
        first.pace(0.02)
        lost = client.responses.create(
            model="builtin", input="Go on.", background=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
        )
        eventually(lambda: client.responses.retrieve(lost.id).status == "in_progress")
        first.stop(signal.SIGKILL)
    with Server(*store) as second:
        client = client_of(second)
        assert client.responses.retrieve(kept.id).output_text == kept.output_text
        assert client.responses.retrieve(lost.id).status == "failed"
        follow = client.responses.create(model="builtin", input="Why?", previous_response_id=kept.id)
        assert follow.usage.input_tokens > kept.usage.input_tokens


@pytest.mark.parametrize("kind", ["text", "link"])
def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path, kind):
    path = tmp_path / "responses.db"
    if kind == "text":
        path.write_text("the whale " * 1000)
    else:
        path.symlink_to(tmp_path / "elsewhere.db")
    server = Server("--response-store", str(path), wait=False)
    assert server.process.wait(60) == 2
    reason = "file is not a database" if kind == "text" else "responses.db is a symbolic link, which is not followed"
    assert f"responses.db cannot be used: {reason}" in server.log
    assert "Traceback" not in server.log
    assert not (tmp_path / "elsewhere.db").exists()
