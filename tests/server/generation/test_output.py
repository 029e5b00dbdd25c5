"""What responses say of tokens: log-probabilities that JSON can hold, and whose tokens were cached."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from engine import TokenLogprob
from tests.fakes import FakeEngine, model_folder
from tests.server.wire import CHAT, COMPLETIONS, QUESTION, RESPONSES, ask, saying

LOGPROBS = {
    CHAT: {"messages": QUESTION, "logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {"prompt": "the sea", "logprobs": 2, "prompt_logprobs": 1},
    RESPONSES: {"input": "the sea", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model") / "fake")


class Sure(FakeEngine):
    """An engine of which every token has this log-probability."""

    def __init__(self, logprob: float) -> None:
        super().__init__(saying("the whale"))
        self.logprob = logprob

    def _delta(self, request, tokens, *rest):
        delta = super()._delta(request, tokens, *rest)
        entry = TokenLogprob(self.logprob, (tokens[0], 5), (self.logprob, self.logprob))
        scores = delta.prompt_logprobs
        scores = None if scores is None else (entry,) * len(scores)
        return replace(delta, logprobs=(entry,) * len(tokens), prompt_logprobs=scores)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", LOGPROBS)
async def test_a_token_without_any_chance_has_the_log_probability_that_openai_gives_it(folder, path, stream):
    """A grammar may force such a token, and JSON has no infinite numbers."""
    body = {**LOGPROBS[path], "stream": stream}
    never, seldom = [(await ask(folder, path, body, Sure(logprob))).text for logprob in (-math.inf, -7.0)]
    assert never.count("-9999.0") == seldom.count("-7.0") >= 6


class Cached(FakeEngine):
    """An engine that finds more of the prompt in its cache for every later request."""

    def _delta(self, request, *rest):
        delta = super()._delta(request, *rest)
        order = [other.id for other in self.requests].index(request.id)
        return delta if delta.stats is None else replace(delta, stats=replace(delta.stats, cached_tokens=1 + order))


@pytest.mark.parametrize(("prompts", "cached"), [(["the sea"], 1), (["the sea", "the ship"], 1 + 4)])
async def test_cached_tokens_of_a_prompt_are_those_of_its_first_choice(folder, prompts, cached):
    body = {"prompt": prompts, "n": 3, "max_tokens": 4}
    usage = (await ask(folder, COMPLETIONS, body, Cached(saying("the whale")))).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert usage["completion_tokens"] > len(prompts) * 3
