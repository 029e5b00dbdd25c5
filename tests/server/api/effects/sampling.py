"""What the fields of `GenerationFields` and `CompletionFields` do; APIs that take only some of them name those."""

import json
import re

from tests.server.api.effects.endpoint import END, ask_out_of_turn
from tests.server.wire import CHAT, COMPLETIONS

GREEDY_LIKE = {"temperature": 2.0, "max_tokens": 6}


def differ(e, **more):
    return len({tuple(e.tokens(seed=seed, **more)) for seed in range(5)}) > 1


def model(e):
    assert [e.ask(model=name)["model"] for name in ("own", "other")] == ["own", "other"]
    assert e.post(model="third").status_code == 404


def temperature(e):
    assert not differ(e, temperature=0)
    assert differ(e, temperature=2.0)


def narrowing(field, value):
    def check(e):
        assert differ(e, **GREEDY_LIKE)
        greedy = e.tokens(max_tokens=6)
        assert all(e.tokens(**GREEDY_LIKE, **{field: value}, seed=seed) == greedy for seed in range(5))

    return check


def penalty(field, high, low):
    def check(e):
        few = {"allowed_token_ids": list(range(300, 330)), "max_tokens": 30, "temperature": 1.0}

        def various(value):
            return sum(len(set(e.tokens(**few, **{field: value}, seed=seed))) for seed in range(4))

        assert various(low) < various(None) < various(high)

    return check


def seed(e):
    assert e.tokens(temperature=2.0, seed=7) == e.tokens(temperature=2.0, seed=7)
    assert differ(e, temperature=2.0)


def n(e):
    choices = e.choices(n=3, temperature=2.0, seed=1)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1


def best_of(e):
    assert len(e.choices(n=2, best_of=2)) == 2
    assert e.post(n=2, best_of=3).json()["error"]["param"] == "best_of"


def logit_bias(e):
    assert set(e.tokens(logit_bias={"777": 100})) == {777}
    first = e.tokens()[0]
    assert first not in e.tokens(logit_bias={str(first): -100})


def allowed_token_ids(e):
    drawn = {token for seed in range(3) for token in e.tokens(temperature=2.0, seed=seed, allowed_token_ids=[50, 60])}
    assert drawn == {50, 60}


def bad_words(e):
    word = next(word for word in e.text(max_tokens=20).split() if len(word) > 3)
    said = e.text(max_tokens=20, bad_words=[word])
    assert word in e.text(max_tokens=20)
    assert word not in said.split()


def prompt_logprobs(e):
    answer = e.ask(prompt_logprobs=2, return_token_ids=True)
    place = answer if e.path == CHAT else answer["choices"][0]
    ids, told = place["prompt_token_ids"], place["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == len(ids)
    for token, entry in zip(ids[1:], told[1:], strict=True):
        assert entry[str(token)]["logprob"] <= 0
        assert 2 <= len(entry) <= 3
        assert {1, 2} <= {each["rank"] for each in entry.values()}
        assert all(each["decoded_token"] == e.decode([int(i)]) for i, each in entry.items() if i.isdigit())
    assert "prompt_logprobs" not in e.ask()
    short = {"messages": [{"role": "user", "content": "A"}]} if e.path == CHAT else {"prompt": "A whale"}
    answer = e.ask(**short, prompt_logprobs=-1)
    everything = (answer if e.path == CHAT else answer["choices"][0])["prompt_logprobs"][1]
    assert sorted(each["rank"] for each in everything.values()) == list(range(1, 2049))


def max_tokens(e):
    assert len(e.tokens(max_tokens=3, ignore_eos=True)) == 3
    assert e.choices(max_tokens=3)[0]["finish_reason"] == "length"


def min_tokens(e):
    ending = {"logit_bias": {str(END): 50}}
    assert e.tokens(**ending) == [END]
    assert END not in e.tokens(**ending, min_tokens=5)[:5]


def ignore_eos(e):
    ending = {"logit_bias": {str(END): 50}}
    assert len(e.tokens(**ending, ignore_eos=True)) == 12


def stop(e):
    text = e.text()
    assert e.text(stop=text[4:7]) == text[: text.index(text[4:7])]
    assert e.choices(stop=["never said", text[4:7]])[0]["finish_reason"] == "stop"


def include_stop_str_in_output(e):
    text = e.text()
    assert e.text(stop=text[4:7], include_stop_str_in_output=True).endswith(text[4:7])


def stop_token_ids(e):
    tokens = e.tokens()
    assert e.tokens(stop_token_ids=[tokens[3]]) == tokens[: tokens.index(tokens[3]) + 1]


def skip_special_tokens(e):
    special = {"logit_bias": {str(END): 100}, "ignore_eos": True, "max_tokens": 2}
    assert e.text(**special) == ""
    assert e.text(**special, skip_special_tokens=False) == "<|im_end|>" * 2


def return_token_ids(e):
    [choice] = e.ask(return_token_ids=True, ignore_eos=True)["choices"]
    assert e.decode(choice["token_ids"]).endswith(e.text(ignore_eos=True))
    assert "token_ids" not in e.ask()["choices"][0]


def stream(e):
    assert len(e.stream()) > 3


def stream_options(e):
    assert e.stream(stream_options={"include_usage": True}) != e.stream()
    assert e.post(stream_options={}).json()["error"]["param"] == "stream_options", "nothing to tell without a stream"


def include_usage(e):
    seen = e.stream(stream_options={"include_usage": True})
    assert seen[-1]["choices"] == [] and seen[-1]["usage"]["completion_tokens"] == len(e.tokens())
    assert "usage" not in e.stream()[-1]


def continuous_usage_stats(e):
    seen = e.stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert not any("usage" in part for part in e.stream(stream_options={"continuous_usage_stats": True}))
    counts = [part["usage"]["completion_tokens"] for part in seen if part.get("usage")]
    assert len(counts) > 2 and counts == sorted(counts)


def priority(e):
    ask_out_of_turn(e, max_tokens=4)


def cache_salt(e):
    long = "The whale and the sea and the captain. " * 10
    more = {"prompt": long} if e.path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}

    def cached(**salt):
        return e.ask(**more, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    own = f"salt of {e.path}"
    assert cached(cache_salt=own) == 0
    assert cached(cache_salt=own) > 0
    assert cached(cache_salt=own + " no more") == 0


OBJECT = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
ROOM = {"max_tokens": 60, "temperature": 1.0, "seed": 1}


def response_format(e):
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}}
    at_once = {"thinking_token_budget": 0} if e.path == CHAT else {}
    assert json.loads(e.text(**ROOM, **at_once, response_format=named)) == {"a": 1}
    assert e.text(**at_once, response_format={"type": "json_object"}).lstrip().startswith("{")
    assert e.text(response_format={"type": "text"}) == e.text()


def structured_outputs(e):
    assert e.text(**ROOM, structured_outputs={"choice": ["whale"]}) == "whale"
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["whale"]}}
    assert e.post(**both).json()["error"]["param"] == "structured_outputs"


def structured(name, value, matches):
    def check(e):
        assert matches(e.text(**ROOM, structured_outputs={name: value}))
        assert not matches(e.text(**ROOM))

    return check


def begins_an_object(text):
    return text.lstrip().startswith("{")


STRUCTURED = {
    **dict.fromkeys(
        (
            "response_format",
            "response_format.type",
            "response_format.json_schema",
            "response_format.json_schema.schema",
        ),
        response_format,
    ),
    "structured_outputs": structured_outputs,
    "structured_outputs.json": structured("json", OBJECT, begins_an_object),
    "structured_outputs.regex": structured("regex", "[ab]{3}", re.compile("[ab]{3}").fullmatch),
    "structured_outputs.choice": structured("choice", ["whale", "captain"], {"whale", "captain"}.__contains__),
    "structured_outputs.grammar": structured("grammar", 'start: "a" "b"', "ab".__eq__),
    "structured_outputs.json_object": structured("json_object", True, begins_an_object),
}

SHARED = {
    "model": model,
    "temperature": temperature,
    "top_p": narrowing("top_p", 0.01),
    "top_k": narrowing("top_k", 1),
    "min_p": narrowing("min_p", 1.0),
    "presence_penalty": penalty("presence_penalty", 2, -2),
    "frequency_penalty": penalty("frequency_penalty", 2, -2),
    "repetition_penalty": penalty("repetition_penalty", 2, 0.5),
    "repeat_penalty": penalty("repeat_penalty", 2, 0.5),
    "seed": seed,
    "n": n,
    "best_of": best_of,
    "logit_bias": logit_bias,
    "allowed_token_ids": allowed_token_ids,
    "bad_words": bad_words,
    "prompt_logprobs": prompt_logprobs,
    "max_tokens": max_tokens,
    "min_tokens": min_tokens,
    "ignore_eos": ignore_eos,
    "stop": stop,
    "include_stop_str_in_output": include_stop_str_in_output,
    "stop_token_ids": stop_token_ids,
    "skip_special_tokens": skip_special_tokens,
    "return_token_ids": return_token_ids,
    "stream": stream,
    "stream_options": stream_options,
    "stream_options.include_usage": include_usage,
    "stream_options.continuous_usage_stats": continuous_usage_stats,
    "priority": priority,
    "cache_salt": cache_salt,
    **STRUCTURED,
}
