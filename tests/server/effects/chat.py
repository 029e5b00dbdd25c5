"""What the fields of a chat completion do."""

import typing

from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as params

from tests.server.wire import CHAT

from .drawing import SHARED
from .endpoint import QUESTION
from .extensions import EXTENSIONS


def max_completion_tokens(e):
    assert len(e.tokens(max_tokens=None, max_completion_tokens=3)) == 3


def messages(e):
    two = [*QUESTION, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    assert "Why?" in e.decode(e.prompt(messages=two))
    assert "batching" in e.decode(e.prompt())


def chat_logprobs(e):
    assert all(p <= 0 and k == 0 for p, k in e.logprobs(logprobs=True))
    assert e.choices()[0]["logprobs"] is None


def top_logprobs(e):
    assert {k for _, k in e.logprobs(logprobs=True, top_logprobs=3)} == {3}


def chat_template_kwargs(e):
    assert e.decode(e.prompt(chat_template_kwargs={"mood": "calm"})).startswith("calm")


def add_generation_prompt(e):
    ending = "<|im_start|>assistant\n"
    assert e.decode(e.prompt()).endswith(ending)
    assert not e.decode(e.prompt(add_generation_prompt=False)).endswith(ending)


def continue_final_message(e):
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert e.decode(e.prompt(messages=begun, continue_final_message=True)).endswith("It is")


TEMPLATES = {
    "messages": messages,
    "chat_template_kwargs": chat_template_kwargs,
    "add_generation_prompt": add_generation_prompt,
    "continue_final_message": continue_final_message,
}
EFFECTS = {
    CHAT: {
        **SHARED,
        **TEMPLATES,
        "max_completion_tokens": max_completion_tokens,
        "logprobs": chat_logprobs,
        "top_logprobs": top_logprobs,
    }
}
OWN = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
    media_io_kwargs mm_processor_kwargs return_prompt_text
"""
KNOWN = {
    CHAT: {
        *typing.get_type_hints(params.CompletionCreateParamsStreaming),
        *(f"stream_options.{name}" for name in typing.get_type_hints(ChatCompletionStreamOptionsParam)),
        *EXTENSIONS,
        *OWN.split(),
    }
}
