"""What the fields of a completion do."""

from openai.types import completion_create_params as params

from tests.server.api.effects.extensions import EXTENSIONS
from tests.server.api.effects.sampling import SHARED
from tests.server.wire import COMPLETIONS


def prompt(e):
    texts = e.choices(prompt=["The sea", "A block"])
    assert [e.decode(choice["prompt_token_ids"]) for choice in texts] == [
        "<|endoftext|>The sea",
        "<|endoftext|>A block",
    ]
    assert e.prompt(prompt=[50, 60]) == [50, 60]


def logprobs(e):
    assert all(p <= 0 and k in (2, 3) for p, k in e.logprobs(logprobs=2))
    assert e.choices()[0]["logprobs"] is None


def echo(e):
    assert e.text(echo=True) == "The captain" + e.text()
    assert e.text(echo=True, max_tokens=0) == "The captain"


def suffix(e):
    filled = e.choices(prompt="The captain", suffix=" of the ship")[0]
    prompt = e.decode(filled["prompt_token_ids"])
    assert prompt == "<|endoftext|><fim_prefix>The captain<fim_suffix> of the ship<fim_middle>"


def add_special_tokens(e):
    assert e.prompt()[0] == 0
    assert e.prompt(add_special_tokens=False) == e.prompt()[1:]


EFFECTS = {
    COMPLETIONS: {
        **SHARED,
        "prompt": prompt,
        "logprobs": logprobs,
        "echo": echo,
        "suffix": suffix,
        "add_special_tokens": add_special_tokens,
    }
}
KNOWN = {COMPLETIONS: {*EXTENSIONS, "prompt_embeds"}}
SDK_TYPES = {COMPLETIONS: [params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming]}
