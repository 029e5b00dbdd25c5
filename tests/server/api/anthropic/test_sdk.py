"""The Anthropic Python SDK against a real server with the built-in model."""

import anthropic
import pytest

from tests.live import Server
from tests.server.api import coding_agent

QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]
ASKED = {"model": "builtin", "max_tokens": 4000, "messages": QUESTION, "extra_body": {"temperature": 0}}

DRAWN = {"temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def server():
    with Server("--served-model-name", "builtin", "fake") as running:
        yield running


@pytest.fixture
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def test_a_message_is_answered_and_ends_by_itself(client):
    answer = client.messages.create(**ASKED)
    assert "12" in answer.content[0].text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    count = client.messages.count_tokens(model="builtin", messages=QUESTION).input_tokens
    assert count == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_a_stream_gives_the_same_answer_in_pieces(client):
    whole = client.messages.create(**{**ASKED, "extra_body": DRAWN})
    with client.messages.stream(**{**ASKED, "extra_body": DRAWN}) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_second_request_finds_the_first_ones_prefix(client):
    long = {**ASKED, "messages": [{"role": "user", "content": "The whale and the captain. " * 20}], "max_tokens": 2}
    first, second = (client.messages.create(**long).usage for _ in range(2))
    assert (first.cache_read_input_tokens, second.cache_read_input_tokens > 0) == (0, True)
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_a_required_call_follows_the_tools_schema(client):
    schema = {"type": "object", "properties": {"far": {"enum": [1, 2]}}, "required": ["far"]}
    tool = {"name": "look", "description": "Looks.", "input_schema": {**schema, "additionalProperties": False}}
    asked = {**ASKED, "tools": [tool], "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 200}
    for seed in range(3):
        answer = client.messages.create(**{**asked, "extra_body": {"temperature": 1, "seed": seed}})
        assert answer.stop_reason == "tool_use"
        [call] = [block for block in answer.content if block.type == "tool_use"]
        assert call.name == "look"
        assert call.input in ({"far": 1}, {"far": 2})


def test_what_a_coding_agent_sends_is_answered(server):
    response = server.client.post(coding_agent.PATH, json=coding_agent.REQUEST, headers=coding_agent.HEADERS)
    assert response.status_code == 200, response.text
    assert response.text.rstrip().endswith('data: {"type":"message_stop"}')


def test_errors_become_the_exceptions_of_the_sdk(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "sea " * 5000}]})
    assert "prompt is too long" in long.value.api_message
