"""What the fields of a message do, in Anthropic's form."""

import json
import typing

from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params
from anthropic.types.output_config_param import OutputConfigParam

from . import drawing
from .endpoint import COUNT_TOKENS, END, MESSAGES, QUESTION, TOKENIZE, Endpoint


class MessagesEndpoint(Endpoint):
    """Answers in Anthropic's form: there are texts and counts, and no token ids."""

    def text(self, **more):
        return "".join(block.get("text", "") for block in self.ask(**more)["content"])

    def count(self, **more):
        """Tokens of the answer."""
        return self.ask(**more)["usage"]["output_tokens"]

    def tokens(self, **more):
        """The answer's text, as the tokenizer reads it."""
        text = self.text(**{"skip_special_tokens": False, **more})
        told = self.client.post(TOKENIZE, json={"prompt": text, "add_special_tokens": False})
        return told.json()["tokens"]

    def stream(self, **more):
        response = self.post(**more, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        frames = response.text.removesuffix("\n\n").split("\n\n")
        return [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]


class CountEndpoint(Endpoint):
    """Tells how many tokens a prompt has."""

    def count(self, **more):
        return self.ask(**more)["input_tokens"]

    def tokens(self, temperature=None, seed=None, **more):
        """What a label must not change; nothing is drawn here."""
        return self.count(**more)


ENDPOINTS = {MESSAGES: MessagesEndpoint, COUNT_TOKENS: CountEndpoint}

TOOL = {
    "name": "look",
    "description": "Looks at the sea.",
    "input_schema": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
}
FORMAT = {"type": "json_schema", "schema": drawing.OBJECT}


def size(e, **more):
    """Tokens of the prompt."""
    if e.path == COUNT_TOKENS:
        return e.count(**more)
    usage = e.ask(**{"max_tokens": 1, **more})["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def messages(e):
    two = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    assert size(e, messages=two) > size(e)


def system(e):
    assert size(e, system=[{"type": "text", "text": "Be brief."}]) == size(e, system="Be brief.") > size(e)


def tools(e):
    assert size(e, tools=[TOOL]) > size(e)


def tool_choice(e):
    assert size(e, tools=[TOOL], tool_choice={"type": "auto"}) > size(e)
    assert size(e, tools=[TOOL], tool_choice={"type": "none"}) == size(e)


def thinking(e):
    assert size(e, thinking={"type": "disabled"}) > size(e, thinking={"type": "adaptive"}) == size(e)
    assert size(e, thinking={"type": "enabled", "budget_tokens": 1024}) == size(e)
    if e.path == MESSAGES:
        begun = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>"}], "max_tokens": 40}

        def thought(**more):
            answer = e.ask(**begun, logit_bias={str(END): -100}, **more)
            return answer["usage"]["output_tokens_details"]["thinking_tokens"]

        assert thought() == 40
        assert thought(thinking={"type": "enabled", "budget_tokens": 5}) == 6, "and the mark that ends it"


def effort(e):
    assert size(e, output_config={"effort": "high"}) > size(e)


def output_config(e):
    effort(e)
    if e.path == MESSAGES:
        output_format(e)


def formatted(place):
    def check(e):
        more = {"output_config": {"format": FORMAT}} if place == "output_config" else {place: FORMAT}
        if e.path == MESSAGES:
            brief = {"type": "enabled", "budget_tokens": 4}  # so that the answer behind it has room
            assert json.loads(e.text(**drawing.ROOM, **more, thinking=brief)) == {"a": 1}
        else:
            assert e.count(**more) == e.count()
        for wrong in ({"type": "text"}, {"type": "json_schema"}):
            bad = {"output_config": {"format": wrong}} if place == "output_config" else {place: wrong}
            assert e.post(**bad).json()["error"]["param"].startswith(place)

    return check


output_format = formatted("output_format")


def max_tokens(e):
    assert e.count(max_tokens=3, ignore_eos=True) == 3
    assert e.ask(max_tokens=3)["stop_reason"] == "max_tokens"
    assert e.ask(max_tokens=0)["content"] == []


def min_tokens(e):
    ending = {"logit_bias": {str(END): 50}}
    assert e.count(**ending) == 1
    assert e.count(**ending, min_tokens=5) > 5


def ignore_eos(e):
    assert e.count(logit_bias={str(END): 50}, ignore_eos=True) == 12


def stop_sequences(e):
    text = e.text()
    answer = e.ask(stop_sequences=["never said", text[4:7]])
    assert answer["content"][0]["text"] == text[: text.index(text[4:7])]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4:7])


def include_stop_str_in_output(e):
    text = e.text()
    assert e.text(stop_sequences=[text[4:7]], include_stop_str_in_output=True).endswith(text[4:7])


def stop_token_ids(e):
    third = e.tokens()[2]
    assert e.count(stop_token_ids=[third]) <= 3 < e.count()


def logit_bias(e):
    assert e.text(logit_bias={"777": 100}) == e.decode([777] * 12)
    first = e.tokens()[0]
    assert e.tokens(logit_bias={str(first): -100})[0] != first


def allowed_token_ids(e):
    drawn = "".join(e.text(temperature=2.0, seed=seed, allowed_token_ids=[50, 60]) for seed in range(3))
    assert set(drawn) == {*e.decode([50, 60])}


def skip_special_tokens(e):
    special = {"logit_bias": {str(END): 100}, "ignore_eos": True, "max_tokens": 2}
    assert e.ask(**special)["content"] == []
    assert e.text(**special, skip_special_tokens=False) == "<|im_end|>" * 2


def stream(e):
    assert [event["type"] for event in e.stream()].count("content_block_delta") > 3


def cache_salt(e):
    long = [{"role": "user", "content": "The whale and the sea and the captain. " * 10}]

    def cached(salt):
        return e.ask(messages=long, cache_salt=salt)["usage"]["cache_read_input_tokens"]

    assert cached("messages") == 0
    assert cached("messages") > 0
    assert cached("messages no more") == 0


def structured_outputs(e):
    assert e.text(**drawing.ROOM, structured_outputs={"choice": ["whale"]}) == "whale"
    both = {"output_format": FORMAT, "structured_outputs": {"choice": ["whale"]}}
    assert e.post(**both).json()["error"]["param"] == "structured_outputs"


PROMPT = {
    "model": drawing.model,
    "messages": messages,
    "system": system,
    "tools": tools,
    "tool_choice": tool_choice,
    "thinking": thinking,
    "output_config": output_config,
    "output_config.effort": effort,
    "output_config.format": formatted("output_config"),
    "output_config.format.type": formatted("output_config"),
    "output_config.format.schema": formatted("output_config"),
}


def served(e):
    assert e.count(model="other") == e.count(model="own") == e.count()
    assert e.post(model="third").status_code == 404


EFFECTS = {
    MESSAGES: {
        **{name: drawing.SHARED[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "bad_words")},
        **{name: drawing.SHARED[name] for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
        **{name: check for name, check in drawing.STRUCTURED.items() if name.startswith("structured_outputs.")},
        **PROMPT,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "stop_sequences": stop_sequences,
        "include_stop_str_in_output": include_stop_str_in_output,
        "stop_token_ids": stop_token_ids,
        "logit_bias": logit_bias,
        "allowed_token_ids": allowed_token_ids,
        "skip_special_tokens": skip_special_tokens,
        "stream": stream,
        "priority": drawing.priority,
        "cache_salt": cache_salt,
        "output_format": output_format,
        "output_format.type": output_format,
        "output_format.schema": output_format,
        "structured_outputs": structured_outputs,
    },
    COUNT_TOKENS: {**PROMPT, "model": served},
}
LABELS = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "diagnostics": {"previous_message_id": "msg_1"},
}

# What the SDK's calls take and send as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


def sent(create):
    """The fields of a body."""
    source = typing.get_type_hints(create)
    return {*source} - HEADERS


KNOWN = {
    MESSAGES: {
        *sent(params.MessageCreateParamsStreaming),
        *sent(beta_params.MessageCreateParamsStreaming),
        *(f"output_config.{name}" for name in typing.get_type_hints(OutputConfigParam)),
        *("output_format", "temperature", "top_k", "top_p"),  # of older SDKs
    },
    COUNT_TOKENS: sent(count_params.MessageCountTokensParams) | sent(beta_count_params.MessageCountTokensParams),
}
