"""Reasoning: separated from the answer, counted, shown or not, and told to the template."""

import openai
import pytest
import tokenizers
from msgspec.structs import replace

from tests.fakes import INFO, TEMPLATE, FakeEngine, listening, model_folder, serving
from tests.server.wire import CHAT, QUESTION, RESPONSES, ask, chunks, ids, saying

THOUGHT = "<think>\nWhales are large.\n</think>\n\nYes."
# Of a mark that is several tokens only the last one is known to begin a block.
NUM_THOUGHT = len(ids("<think>\nWhales are large.\n</think>")) - len(ids("<think>")) + 1
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {"eos_token": "<|end|>", "chat_template": THINKING}
    return model_folder(tmp_path_factory.mktemp("model") / "fake", tokenizer_config=config)


async def choice(folder, says, **body):
    response = await ask(folder, CHAT, {"messages": QUESTION, **body}, FakeEngine(saying(says)))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def deltas(folder, says, **body):
    response = await ask(folder, CHAT, {"messages": QUESTION, "stream": True, **body}, FakeEngine(saying(says)))
    return [piece["delta"] for chunk in chunks(response.text) for piece in chunk["choices"]]


async def test_reasoning_stands_beside_the_answer(folder):
    message = (await choice(folder, THOUGHT))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Whales are large.", "Yes.")


async def test_a_stream_has_separate_deltas_for_reasoning_and_content(folder):
    seen = await deltas(folder, THOUGHT)
    assert "".join(delta.get("reasoning_content", "") for delta in seen) == "Whales are large."
    assert "".join(delta.get("content", "") for delta in seen) == "Yes."
    assert not any(delta.get("reasoning_content") and delta.get("content") for delta in seen)
    assert len([delta for delta in seen if "reasoning_content" in delta]) > 3, "it comes as it is thought"


async def test_reasoning_tokens_are_counted_with_their_marks(folder):
    response = await ask(folder, CHAT, {"messages": QUESTION}, FakeEngine(saying(THOUGHT)))
    usage = response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert usage["completion_tokens"] == len(ids(THOUGHT)) + 1


@pytest.mark.parametrize("per_delta", [1, 2, 3, 100])
async def test_the_count_does_not_depend_on_how_tokens_came(folder, per_delta):
    engine = FakeEngine(saying(THOUGHT), per_delta=per_delta)
    usage = (await ask(folder, CHAT, {"messages": QUESTION}, engine)).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == NUM_THOUGHT


async def test_reasoning_can_be_left_out(folder):
    message = (await choice(folder, THOUGHT, include_reasoning=False))["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "Yes."
    assert not any("reasoning_content" in delta for delta in await deltas(folder, THOUGHT, include_reasoning=False))


async def test_an_answer_cut_while_it_thinks_has_no_content(folder):
    cut = await choice(folder, THOUGHT, max_tokens=12)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] == ""
    assert "Whales".startswith(cut["message"]["reasoning_content"][:6])


async def test_a_model_without_reasoning_answers_as_it_stands(folder, tmp_path):
    plain = model_folder(tmp_path / "plain")
    message = (await ask(plain, CHAT, {"messages": QUESTION}, FakeEngine(saying(THOUGHT)))).json()["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": THOUGHT, "refusal": None}


async def test_the_flag_decides_where_the_template_does_not(folder, tmp_path):
    engine = FakeEngine(saying(THOUGHT))
    off = await ask(folder, CHAT, {"messages": QUESTION}, engine, reasoning_parser="none")
    assert off.json()["choices"][0]["message"]["content"] == THOUGHT
    plain = model_folder(tmp_path / "plain")
    on = await ask(plain, CHAT, {"messages": QUESTION}, FakeEngine(saying(THOUGHT)), reasoning_parser="think")
    assert on.json()["choices"][0]["message"]["content"] == "Yes."


async def prompt(folder, more):
    engine = FakeEngine(saying("Yes."))
    response = await ask(folder, CHAT, {"messages": QUESTION, **more}, engine)
    assert response.status_code == 200, response.text
    return engine.requests[0].prompt_ids


async def test_effort_none_reaches_the_template(folder):
    engine = FakeEngine(saying("Yes."))
    assert (await ask(folder, CHAT, {"messages": QUESTION, "reasoning_effort": "none"}, engine)).status_code == 200
    assert engine.requests[0].prompt_ids[-len(ids("<think>\n\n</think>\n\n")) :] == tuple(
        ids("<think>\n\n</think>\n\n")
    )


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
async def test_an_effort_only_turns_thinking_on_where_the_template_has_no_levels(folder, effort):
    plain = await prompt(folder, {})
    assert await prompt(folder, {"reasoning_effort": effort}) == plain
    assert await prompt(folder, {"enable_thinking": True}) == plain
    assert await prompt(folder, {"reasoning_effort": "none"}) != plain


@pytest.mark.parametrize(("template", "kind"), [(THINKING, "effect"), (TEMPLATE, "label")], ids=["switch", "none"])
async def test_capabilities_say_whether_an_effort_has_an_effect(tmp_path, template, kind):
    config = {"eos_token": "<|end|>", "chat_template": template}
    path = model_folder(tmp_path / "model", tokenizer_config=config)
    async with serving(path) as (client, _):
        rows = (await client.get("/v1/capabilities")).json()
        seen = {row["field"]: row["kind"] for row in rows if row["field"].endswith("effort")}
    fields = ("reasoning_effort", "reasoning.effort", "output_config.effort", "messages[].output_config.effort")
    assert seen == dict.fromkeys(fields, kind)


async def test_an_effort_that_there_is_not_is_refused(folder):
    error = (await ask(folder, CHAT, {"messages": QUESTION, "reasoning_effort": "loud"})).json()["error"]
    assert error["param"] == "reasoning_effort"


async def test_a_block_that_the_prompt_opens_is_reasoning_from_the_first_token(folder, tmp_path):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE + "<think>\n{# </think> #}"}
    opening = model_folder(tmp_path / "opening", tokenizer_config=config)
    engine = FakeEngine(saying("Large.\n</think>\n\nYes."))
    message = (await ask(opening, CHAT, {"messages": QUESTION}, engine)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Large.", "Yes.")


async def test_the_openai_sdk_reads_reasoning(folder):
    async with serving(folder, FakeEngine(saying(THOUGHT))) as (_, app), listening(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(model="fake", messages=QUESTION)
            assert answer.choices[0].message.reasoning_content == "Whales are large."
            assert answer.usage.completion_tokens_details.reasoning_tokens > 3


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
FORMED = [
    {"tools": [WEATHER], "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
]
OFF = [
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A model whose marks of reasoning are tokens, so that a grammar can end what it thinks."""
    template = "{# tools <tool_call> <think> </think> #}" + THINKING
    config = {"eos_token": "<|end|>", "chat_template": template}
    path = model_folder(tmp_path_factory.mktemp("model") / "marked", tokenizer_config=config)
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.add_tokens(["<think>", "</think>"])
    library.save(str(path / "tokenizer.json"))
    return path


async def grammar(folder, path=CHAT, **body):
    """What the engine is told that the output must follow."""
    engine = FakeEngine(saying("a"), info=replace(INFO, vocab_size=INFO.vocab_size + 2))
    response = await ask(folder, path, body, engine)
    assert engine.requests, response.text
    return engine.requests[0].params.grammar[1]


@pytest.mark.parametrize("formed", FORMED, ids=["call", "schema"])
@pytest.mark.parametrize("off", OFF, ids=str)
async def test_what_is_forced_does_not_think_where_thinking_is_off(marked, formed, off):
    assert "thought" not in await grammar(marked, messages=QUESTION, **formed, **off)
    assert "thought" in await grammar(marked, messages=QUESTION, **formed)


@pytest.mark.parametrize("formed", FORMED, ids=["call", "schema"])
@pytest.mark.parametrize(("limit", "most"), [({"max_tokens": 40}, 40), ({}, None), ({"max_tokens": -1}, None)], ids=str)
async def test_what_is_forced_leaves_half_of_the_tokens_for_itself(marked, formed, limit, most):
    free = {name: value for name, value in formed.items() if name == "tools"}  # the prompt is the same
    left = INFO.max_len - len(await prompt(marked, free))
    assert f"thought[max_tokens={(most or left) // 2}]" in await grammar(marked, messages=QUESTION, **formed, **limit)


async def test_the_other_apis_turn_thinking_off_too(marked):
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    responses = {"input": "the sea", "text": {"format": schema}}
    assert "thought" in await grammar(marked, RESPONSES, **responses)
    assert "thought" not in await grammar(marked, RESPONSES, **responses, reasoning={"effort": "none"})
    messages = {"messages": QUESTION, "max_tokens": 40, "output_config": {"format": {**schema}}}
    del messages["output_config"]["format"]["name"]
    assert "thought" in await grammar(marked, "/v1/messages", **messages, thinking={"type": "adaptive"})
    assert "thought" not in await grammar(marked, "/v1/messages", **messages, thinking={"type": "disabled"})
    assert "thought" not in await grammar(marked, "/v1/messages", **messages), (
        "as Anthropic's models, unless they are asked to"
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"choice": ["yes", "no"]}, "yes"),
        ({"regex": "[a-z]+"}, "abc"),
        ({"json": {}}, "5"),
        ({"json_object": True}, "{}"),
    ],
    ids=str,
)
@pytest.mark.parametrize("opens", ["<think>\n", ""], ids=["opened", "closed"])
async def test_structured_outputs_follow_the_reasoning(tmp_path, kind, said, opens):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE + opens + "{# <think> </think> #}"}
    path = model_folder(tmp_path / "model", tokenizer_config=config)
    engine = FakeEngine(saying(("" if opens else "<think>\n") + f"Large.\n</think>\n\n{said}"))
    message = (await choice_of(path, engine, structured_outputs=kind))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Large.", said)
    form, text = engine.requests[0].params.grammar
    assert form == "lark" and '"</think>"' in text


async def choice_of(folder, engine, **body):
    response = await ask(folder, CHAT, {"messages": QUESTION, **body}, engine)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize(
    ("grammar", "said", "thought"),
    [('start: "yes"', "yes", None), ('start: /[a-z]+/ "</think>" "yes"', "large</think>yes", "large")],
    ids=["content", "reasoning"],
)
async def test_a_grammar_of_the_client_constrains_the_whole_completion(tmp_path, grammar, said, thought):
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE + "<think>\n{# </think> #}"}
    path = model_folder(tmp_path / "model", tokenizer_config=config)
    engine = FakeEngine(saying(said))
    message = (await choice_of(path, engine, structured_outputs={"grammar": grammar}))["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, "yes")
    assert engine.requests[0].params.grammar == ("lark", grammar)
