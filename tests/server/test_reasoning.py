"""Reasoning: separated from the answer, counted, shown or not, and told to the template."""

import asyncio

import openai
import pytest

from tests.fakes import TEMPLATE, FakeEngine, listening, model_folder, serving
from tests.server.wire import CHAT, QUESTION, ask, chunks, ids, saying

THOUGHT = "<think>\nWhales are large.\n</think>\n\nYes."
# Of a mark that is several tokens only the last one is known to begin a block.
NUM_THOUGHT = len(ids("<think>\nWhales are large.\n</think>")) - len(ids("<think>")) + 1
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": THINKING}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


def choice(folder, says, **body):
    response = ask(folder, CHAT, {"messages": QUESTION, **body}, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def deltas(folder, says, **body):
    response = ask(folder, CHAT, {"messages": QUESTION, "stream": True, **body}, FakeEngine(saying(says)))
    return [piece["delta"] for chunk in chunks(response.text) for piece in chunk["choices"]]


def test_reasoning_stands_beside_the_answer(folder):
    message = choice(folder, THOUGHT)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Whales are large.", "Yes.")


def test_a_stream_tells_reasoning_and_answer_in_deltas_of_their_own(folder):
    seen = deltas(folder, THOUGHT)
    assert "".join(delta.get("reasoning_content", "") for delta in seen) == "Whales are large."
    assert "".join(delta.get("content", "") for delta in seen) == "Yes."
    assert not any(delta.get("reasoning_content") and delta.get("content") for delta in seen)
    assert len([delta for delta in seen if "reasoning_content" in delta]) > 3, "it comes as it is thought"


def test_reasoning_tokens_are_counted_with_their_marks(folder):
    response = ask(folder, CHAT, {"messages": QUESTION}, FakeEngine(saying(THOUGHT)))
    usage = response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert usage["completion_tokens"] == len(ids(THOUGHT)) + 1


@pytest.mark.parametrize("per_delta", [1, 2, 3, 100])
def test_the_count_does_not_depend_on_how_tokens_came(folder, per_delta):
    engine = FakeEngine(saying(THOUGHT), per_delta=per_delta)
    usage = ask(folder, CHAT, {"messages": QUESTION}, engine).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == NUM_THOUGHT


def test_reasoning_can_be_left_out(folder):
    message = choice(folder, THOUGHT, include_reasoning=False)["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "Yes."
    assert not any("reasoning_content" in delta for delta in deltas(folder, THOUGHT, include_reasoning=False))


def test_an_answer_cut_while_it_thinks_has_no_content(folder):
    cut = choice(folder, THOUGHT, max_tokens=12)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] == ""
    assert "Whales".startswith(cut["message"]["reasoning_content"][:6])


def test_a_model_without_reasoning_answers_as_it_stands(folder, tmp_path):
    plain = model_folder(tmp_path / "plain")
    message = ask(plain, CHAT, {"messages": QUESTION}, FakeEngine(saying(THOUGHT))).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": THOUGHT, "refusal": None}


def test_the_flag_decides_where_the_template_does_not(folder, tmp_path):
    engine = FakeEngine(saying(THOUGHT))
    off = ask(folder, CHAT, {"messages": QUESTION}, engine, reasoning_parser="none")
    assert off.json()["choices"][0]["message"]["content"] == THOUGHT
    plain = model_folder(tmp_path / "plain")
    on = ask(plain, CHAT, {"messages": QUESTION}, FakeEngine(saying(THOUGHT)), reasoning_parser="think")
    assert on.json()["choices"][0]["message"]["content"] == "Yes."


def test_effort_none_is_told_to_the_template(folder):
    engine = FakeEngine(saying("Yes."))
    assert ask(folder, CHAT, {"messages": QUESTION, "reasoning_effort": "none"}, engine).status_code == 200
    assert engine.requests[0].prompt_ids[-len(ids("<think>\n\n</think>\n\n")) :] == tuple(
        ids("<think>\n\n</think>\n\n")
    )


def test_an_effort_that_the_template_does_not_know_is_refused(folder):
    for effort in ("minimal", "low", "high", "xhigh"):
        error = ask(folder, CHAT, {"messages": QUESTION, "reasoning_effort": effort}).json()["error"]
        assert error["param"] == "reasoning_effort"
        assert "does not know reasoning_effort" in error["message"]
    assert ask(folder, CHAT, {"messages": QUESTION, "reasoning_effort": "medium"}).status_code == 200
    error = ask(folder, CHAT, {"messages": QUESTION, "reasoning_effort": "loud"}).json()["error"]
    assert error["param"] == "reasoning_effort"


def test_a_block_that_the_prompt_opens_is_reasoning_from_the_first_token(folder, tmp_path):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE + "<think>\n{# </think> #}"}
    opening = model_folder(tmp_path / "opening", tokenizer_config=config)
    engine = FakeEngine(saying("Large.\n</think>\n\nYes."))
    message = ask(opening, CHAT, {"messages": QUESTION}, engine).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Large.", "Yes.")


def test_the_openai_sdk_reads_reasoning(folder):
    async def main():
        async with serving(folder, FakeEngine(saying(THOUGHT))) as (_, app), listening(app) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                answer = await client.chat.completions.create(model="fake", messages=QUESTION)
                assert answer.choices[0].message.reasoning_content == "Whales are large."
                assert answer.usage.completion_tokens_details.reasoning_tokens > 3

    asyncio.run(main())
