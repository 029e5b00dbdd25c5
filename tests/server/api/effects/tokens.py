"""What the fields of the endpoints about tokens do."""

from tests.server.api.effects.chat import FOG, TALKED, TEMPLATES
from tests.server.api.effects.endpoint import DETOKENIZE, END, QUESTION, TEMPLATE, TOKENIZE


def served(**base):
    def check(e):
        assert e.ask(**base, model="other")
        assert e.post(**base, model="third").status_code == 404

    return check


def written(name):
    """A chat template's field, where it is only written."""

    def check(e):
        begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
        assert "batching" in e.shown(messages=QUESTION)
        if name == "chat_template_kwargs":
            assert e.shown(messages=QUESTION, chat_template_kwargs={"mood": "calm"}).startswith("calm")
        if name == "add_generation_prompt":
            bare = e.shown(messages=QUESTION, add_generation_prompt=False)
            assert e.shown(messages=QUESTION) == bare + "<|im_start|>assistant\n"
        if name == "tools":
            assert "fog" in e.shown(messages=QUESTION, tools=[FOG]) and "fog" not in e.shown(messages=QUESTION)
        if name == "continue_final_message":
            assert e.shown(messages=begun, continue_final_message=True).endswith("It is")

    return check


WRITTEN = {name: written(name) for name in TEMPLATES}


def tokenized(e):
    assert e.shown(prompt="The sea") == "<|endoftext|>The sea"


def bare(e):
    assert e.shown(prompt="The sea", add_special_tokens=False) == "The sea"


def spelt(e):
    assert e.ask(prompt="The sea", return_token_strs=True)["token_strs"][0] == "<|endoftext|>"
    assert e.ask(prompt="The sea")["token_strs"] is None


def detokenized(e):
    assert e.ask(tokens=[END])["prompt"] == "<|im_end|>"


EFFECTS = {
    TOKENIZE: {
        **TALKED,
        **WRITTEN,
        "model": served(prompt="a"),
        "prompt": tokenized,
        "add_special_tokens": bare,
        "return_token_strs": spelt,
    },
    DETOKENIZE: {"model": served(tokens=[5]), "tokens": detokenized},
    TEMPLATE: {**TALKED, **WRITTEN, "model": served()},
}
