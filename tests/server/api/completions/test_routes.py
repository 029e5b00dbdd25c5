"""Completions over a fake engine: every form of prompt, echo, and log-probabilities in columns."""

import msgspec
import pytest
import tokenizers
from msgspec.structs import replace

from server.api.completions.request import CompletionRequest
from server.api.completions.response import Completion
from tests.fakes import INFO, FakeEngine, model_folder
from tests.server.wire import COMPLETIONS, END, LIBRARY, Odds, ask, chunks, float32, ids, joined, odds, saying, whole
from tests.toys import byte_fallback


async def test_an_answer_has_what_openai_has(folder):
    answer = (
        await ask(folder, COMPLETIONS, {"model": "fake", "prompt": "the sea"}, FakeEngine(saying(" the whale")))
    ).json()
    msgspec.convert(answer, Completion)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    ending = {"finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "text": " the whale", "logprobs": None, **ending}]
    assert answer["usage"]["prompt_tokens"] == len(ids("the sea"))
    assert answer["usage"]["completion_tokens"] == len(ids(" the whale")) + 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the sea", [ids("the sea")]),
        (["the sea", "a whale"], [ids("the sea"), ids("a whale")]),
        ([11, 339], [[11, 339]]),
        ([[11], [12, 13]], [[11], [12, 13]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_every_form_of_prompt_is_answered_n_times_prompt_by_prompt(folder, prompt, expected, n):
    engine = FakeEngine(saying("a", "b", "c", "d", "e", "f"))
    answer = (
        await ask(folder, COMPLETIONS, {"prompt": prompt, "n": n, "return_token_ids": True, "seed": 1}, engine)
    ).json()
    prompts = [each for each in expected for _ in range(n)]
    assert [list(request.prompt_ids) for request in engine.requests] == prompts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    assert [choice["text"] for choice in answer["choices"]] == list("abcdef")[: len(prompts)]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*ids(c), END] for c in "abcdef"[: len(prompts)]]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected)), "a prompt costs once, however many answers"
    assert answer["usage"]["completion_tokens"] == 2 * len(prompts)


GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


def infilling(path, marks):
    """A model's folder whose vocabulary has these marks, and what the engine is told of it."""
    folder = model_folder(path / "fake")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in marks])
    library.save(str(folder / "tokenizer.json"))
    return folder, library, replace(INFO, vocab_size=library.get_vocab_size())


@pytest.mark.parametrize(
    ("marks", "written"),
    [
        (GAP, "<|fim_prefix|>the {<|fim_suffix|> sea<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>the {<fim_suffix> sea<fim_middle>"),
        (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX] sea[PREFIX]the {"),
    ],
    ids=["Qwen", "StarCoder", "Codestral"],
)
async def test_a_suffix_makes_the_prompt_that_the_model_was_trained_on(tmp_path, marks, written):
    folder, library, info = infilling(tmp_path, marks)
    engine = FakeEngine(saying(" calm"), info=info)
    answer = await ask(folder, COMPLETIONS, {"prompt": "the {", "suffix": " sea"}, engine)
    assert answer.json()["choices"][0]["text"] == " calm"
    [request] = engine.requests
    assert list(request.prompt_ids) == library.encode(written).ids
    assert {*request.params.stop_ids} == {END, *map(library.token_to_id, marks)} - {library.token_to_id("[MIDDLE]")}


async def test_what_fills_a_gap_ends_in_a_mark_which_is_not_part_of_it(tmp_path):
    folder, library, info = infilling(tmp_path, GAP)
    said = [*ids(" calm"), library.token_to_id("<|fim_pad|>"), *ids(" never")]
    filled, plain = [
        (await ask(folder, COMPLETIONS, {"prompt": "the", **more}, FakeEngine(lambda _: said, info=info))).json()
        for more in ({"suffix": " sea"}, {"max_tokens": len(said)})
    ]
    assert filled["choices"][0]["text"] == " calm"
    assert filled["choices"][0]["finish_reason"] == "stop"
    assert plain["choices"][0]["text"] == " calm<|fim_pad|> never", "without a suffix a mark is a token like others"


@pytest.mark.parametrize(
    "body",
    [{"prompt": "the"}, {"prompt": "the", "echo": True}, {"prompt": [11, 12]}, {"prompt": [[11]]}],
    ids=["no marks", "echo", "ids", "lists of ids"],
)
async def test_a_suffix_that_cannot_be_heeded_is_refused(folder, tmp_path, body):
    info = INFO
    if body != {"prompt": "the"}:
        folder, _, info = infilling(tmp_path, GAP)
    answer = await ask(folder, COMPLETIONS, {**body, "suffix": " sea"}, FakeEngine(info=info))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert (await ask(folder, COMPLETIONS, {**body, "suffix": ""}, FakeEngine(info=info))).status_code == 200


async def test_a_suffix_of_many_prompts_is_bounded_like_a_body(tmp_path):
    folder, _, info = infilling(tmp_path, GAP)
    body = {"prompt": ["the"] * 256, "suffix": " sea" * 10_000}
    answer = await ask(folder, COMPLETIONS, body, FakeEngine(info=info))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


async def test_an_output_has_sixteen_tokens_by_default(folder):
    assert (await ask(folder, COMPLETIONS, {"prompt": "the sea"})).json()["usage"]["completion_tokens"] == 16
    assert (await ask(folder, COMPLETIONS, {"prompt": "the sea", "max_tokens": 3})).json()["usage"][
        "completion_tokens"
    ] == 3
    nearly_full = await ask(folder, COMPLETIONS, {"prompt": [11] * 509})
    assert nearly_full.json()["usage"]["completion_tokens"] == 3
    assert nearly_full.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the sea", ids("the sea")], ids=["text", "ids"])
async def test_echo_begins_with_the_prompt(folder, prompt, stream):
    body = {"prompt": prompt, "echo": True, "n": 2, "stream": stream}
    response = await ask(folder, COMPLETIONS, body, FakeEngine(saying(" calls", "!")))
    choices = joined(chunks(response.text)) if stream else whole(response.json())
    assert [choice["text"] for choice in choices.values()] == ["the sea calls", "the sea!"]


@pytest.mark.parametrize("per_delta", [1, 4])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 0, "n": 2, "stop": ["ale; sh"], "return_token_ids": True},
        {"prompt": ["the", "a"], "n": 2, "echo": True, "return_token_ids": True},
        {"stop": [" never", "x"], "max_tokens": 5},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 0, "prompt": [[11, 12], [13]], "n": 2, "logprobs": 1, "return_token_ids": True},
        {"echo": True, "logprobs": 2, "prompt": ["the 🐳", "a sea"], "n": 2, "return_token_ids": True},
        {"echo": True, "logprobs": 1, "prompt_logprobs": 3},
        {"echo": True, "logprobs": 3, "max_tokens": 0, "n": 2},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
async def test_a_stream_joined_is_the_whole_answer_byte_for_byte(folder, more, per_delta):
    texts = (" the whale; ship 🐳", " sailing", " é", " whale; ships")
    body = {"prompt": "the sea", "max_tokens": 100, "seed": 1, **more}
    answer = (await ask(folder, COMPLETIONS, body, Odds(saying(*texts)))).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    seen = chunks((await ask(folder, COMPLETIONS, body, Odds(saying(*texts), per_delta=per_delta))).text)
    for chunk in seen:
        msgspec.convert(chunk, Completion)
    assert joined(seen) == whole(answer)
    assert seen[-1]["usage"] == answer["usage"]
    assert seen[-1]["choices"] == []


async def test_logprobs_are_columns_and_offsets_count_characters(folder):
    answer = (await ask(folder, COMPLETIONS, {"prompt": "the sea", "logprobs": 2}, Odds(saying("a 🐳.")))).json()
    said = [*ids("a 🐳."), END]
    columns = answer["choices"][0]["logprobs"]
    assert [float32(number) for number in columns["token_logprobs"]] == [odds(i, t) for i, t in enumerate(said)]
    assert columns["tokens"][0] == "a" and columns["tokens"][-1] == "<|end|>"
    assert [len(top) for top in columns["top_logprobs"]] == [2] * len(said)
    assert columns["text_offset"][0] == 0
    assert columns["text_offset"][-1] == len("a 🐳.")
    assert columns["text_offset"] == sorted(columns["text_offset"])


async def test_offsets_count_characters_that_remain_incomplete(folder):
    whale = ids("🐳")[0]  # its first byte or bytes
    for said in ([whale, *ids("a"), whale, END], [whale, *ids("a"), whale]):
        answer = (await ask(folder, COMPLETIONS, {"prompt": "b", "logprobs": 0}, Odds(lambda _, own=said: own))).json()
        choice = answer["choices"][0]
        assert choice["text"] == "\ufffda\ufffd"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3][: len(said)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the 🐳;<|user|> sea", ids("the 🐳;<|user|> sea")], ids=["text", "ids"])
async def test_echo_with_logprobs_joins_those_of_prompt_and_output(folder, prompt, stream):
    engine = Odds(saying(" whale"))
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "stream": stream, "skip_special_tokens": False}
    response = await ask(folder, COMPLETIONS, body, engine)
    choice = (joined(chunks(response.text)) if stream else whole(response.json()))[0]
    asked, said = ids("the 🐳;<|user|> sea"), [*ids(" whale"), END]
    assert choice["text"] == "the 🐳;<|user|> sea whale"
    columns = choice["logprobs"]
    assert {len(column) for column in columns.values()} == {len(asked) + len(said)}
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    expected = [odds(1000 + i, t) for i, t in enumerate(asked[1:])] + [odds(i, t) for i, t in enumerate(said)]
    assert [float32(number) for number in columns["token_logprobs"][1:]] == expected
    assert [len(top) for top in columns["top_logprobs"][1:]] == [2] * len(expected)
    for token, offset in zip(columns["tokens"][:-1], columns["text_offset"][:-1], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    assert columns["text_offset"][-1] == len(choice["text"])
    assert (engine.requests[0].params.logprobs, engine.requests[0].params.prompt_logprobs) == (2, 2)


async def test_offsets_are_those_of_the_prompt_as_it_was_sent(tmp_path):
    library = byte_fallback()  # puts a token before every text, and a space that it takes away again
    own = model_folder(tmp_path / "own", tokenizer_config={"eos_token": "</s>"})
    library.save(str(own / "tokenizer.json"))
    said = library.token_to_id("▁sea")
    body = {"prompt": "the </s> a", "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = (await ask(own, COMPLETIONS, body, FakeEngine(lambda _: [said]))).json()["choices"][0]
    columns = choice["logprobs"]
    assert choice["text"] == "the </s> a sea"
    spelt = dict(zip(columns["tokens"], columns["text_offset"], strict=True))
    assert columns["tokens"][0] == "<s>"
    assert (spelt["<s>"], spelt[" the"], spelt["</s>"], spelt[" sea"]) == (0, 0, 4, 10)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_without_an_answer(folder, stream):
    body = {"prompt": "the sea", "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    engine = Odds(saying(" whale"))
    response = await ask(folder, COMPLETIONS, body, engine)
    choice = (joined(chunks(response.text)) if stream else whole(response.json()))[0]
    assert (choice["text"], choice["finish_reason"]) == ("the sea", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids("the sea"))
    usage = (chunks(response.text)[-1] if stream else response.json())["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids("the sea")), 0)
    assert engine.requests[0].params.max_tokens == 1
    assert (await ask(folder, COMPLETIONS, {"prompt": [11] * 511, "echo": True, "max_tokens": 0})).status_code == 200


async def test_prompt_logprobs_have_the_form_of_vllm_for_each_choice_and_cost_one_scoring(folder):
    engine = Odds(saying("a", "b", "c", "d"))
    body = {"prompt": [[11, 12, 13], [14]], "n": 2, "prompt_logprobs": 2}
    answer = (await ask(folder, COMPLETIONS, body, engine)).json()
    msgspec.convert(answer, Completion)
    # The other choices start when the prompt has been scored, and find it in the prefix cache.
    assert [request.params.prompt_logprobs for request in engine.requests] == [2, 2, None, None]
    first, second, third, fourth = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert first == second
    assert third == fourth == [None]
    assert first[0] is None
    assert [list(entry) for entry in first[1:]] == [["12", "13"], ["13", "14"]]
    told = first[1]["12"]
    assert (float32(told["logprob"]), told["rank"], told["decoded_token"]) == (odds(1000, 12), 1, LIBRARY.decode([12]))


@pytest.mark.parametrize(
    ("prompt", "k", "ranks"), [([11, 1], 2, {"1": 2, "0": 1}), ([11, 12], 1, {"12": None, "0": 1})]
)
async def test_the_rank_of_a_prompt_token_is_returned_where_it_is_known(folder, prompt, k, ranks):
    engine = FakeEngine(saying("a"))  # says that 0, 1, ... are the most likely ones
    answer = (await ask(folder, COMPLETIONS, {"prompt": prompt, "prompt_logprobs": k}, engine)).json()
    [_, entry] = answer["choices"][0]["prompt_logprobs"]
    assert {token: told["rank"] for token, told in entry.items()} == ranks


async def test_words_are_forbidden_as_they_are_spelt_with_and_without_a_space(folder):
    engine = FakeEngine(saying("a"))
    body = {"prompt": "a", "bad_words": ["whale", "  sea", "qq"], "allowed_token_ids": [7, 8]}
    await ask(folder, COMPLETIONS, body, engine)
    params = engine.requests[0].params
    spelt = [ids("whale"), ids(" whale"), ids("sea"), ids(" sea"), ids("qq")]
    assert ids(" qq")[-2:] == ids("qq"), "forbidden with the first spelling"
    assert params.bad_words == tuple(map(tuple, spelt))
    assert params.allowed_ids == (7, 8)
    assert params.uses_history


async def test_the_sampled_token_is_reported_even_if_no_likely_ones_were_requested(folder):
    columns = (await ask(folder, COMPLETIONS, {"prompt": "the sea", "logprobs": 0}, Odds(saying("a")))).json()[
        "choices"
    ][0]["logprobs"]
    assert [list(top) for top in columns["top_logprobs"]] == [["a"], ["<|end|>"]]


async def test_special_tokens_around_a_text_can_be_left_out(tmp_path):
    own = model_folder(
        tmp_path / "own",
        tokenizer_config={"eos_token": "<|end|>", "bos_token": "<|user|>", "add_bos_token": True},
    )
    for more, expected in (({}, [1, *ids("the")]), ({"add_special_tokens": False}, ids("the"))):
        engine = FakeEngine(saying("a"))
        await ask(own, COMPLETIONS, {"prompt": "the", **more}, engine)
        assert list(engine.requests[0].prompt_ids) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_goes_on_where_its_prompt_ends(tmp_path, stream):
    library = byte_fallback()  # at the start of a text it drops the space of the first word
    own = model_folder(tmp_path / "own", tokenizer_config={"eos_token": "</s>"})
    library.save(str(own / "tokenizer.json"))
    sea, end = library.token_to_id("▁sea"), library.token_to_id("</s>")
    body = {"prompt": "the", "echo": True, "stream": stream, "logprobs": None}
    response = await ask(own, COMPLETIONS, body, FakeEngine(lambda _: [sea, end]))
    assert (joined(chunks(response.text)) if stream else whole(response.json()))[0]["text"] == "the sea"


async def test_too_long_is_refused_with_both_numbers_and_the_flag(folder):
    for body, param in (
        ({"prompt": [11] * 512}, "prompt"),
        ({"prompt": "sea " * 100_000}, "prompt"),
        ({"prompt": ["a", "sea " * 600]}, "prompt"),
    ):
        response = await ask(folder, COMPLETIONS, body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "maximum context length is" in error["message"]
        assert "--max-model-len" in error["message"]


@pytest.mark.parametrize("most", [12, 13, 100_000, -1])
async def test_a_limit_beyond_the_context_means_as_many_as_fit(folder, most):
    answer = (await ask(folder, COMPLETIONS, {"prompt": [11] * 500, "max_tokens": most})).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (12, "length")


async def test_the_examples_of_the_api_page_work(folder):
    for example in CompletionRequest.model_config["json_schema_extra"]["examples"]:
        response = await ask(folder, COMPLETIONS, {**example, "model": "fake"}, FakeEngine(saying("a")))
        assert response.status_code == 200, response.text
