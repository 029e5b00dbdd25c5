"""The formats in which models write calls and reasoning, and their detection from a chat template."""

# ruff: noqa: RUF001 (DeepSeek's delimiters contain characters that look like others)

from __future__ import annotations

import re
from typing import NamedTuple


class Formats(NamedTuple):
    """The formats that a model writes; None: it writes no calls, or no reasoning."""

    tools: str | None = None
    reasoning: str | None = None


class Block(NamedTuple):
    """The delimiters around reasoning."""

    opens: str
    closes: str


class Answer(NamedTuple):
    """The delimiters around the content after reasoning, which the model may omit."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]


# The delimiters around the reasoning at the beginning of a completion.
BLOCKS = {
    "think": Block("<think>", "</think>"),
    "mistral": Block("[THINK]", "[/THINK]"),
    "seed_oss": Block("<seed:think>", "</seed:think>"),
    "command": Block("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": Block("◁think▷", "◁/think▷"),
    "gpt_oss": Block("<|channel|>analysis<|message|>", "<|end|>"),
    "gemma4": Block("<|channel>thought", "<channel|>"),
    "hunyuan_a13b": Block("<think>", "</think>"),
    "ernie45": Block("<think>", "</think>"),
    "solar_open": Block("<|think|>", "<|end|>"),
}
# Formats of messages in which calls, reasoning and content have the same delimiters: one parser reads all of them.
IN_MESSAGES = ("gpt_oss", "solar_open")
# What ends a prompt without reasoning, where that is not just the delimiter that closes the reasoning.
WITHOUT_REASONING = {"solar_open": "<|think|><|end|><|begin|>assistant"}
# The delimiters around the content, by format of reasoning. With tools Hunyuan's content may begin with "Assistant:".
ANSWERS = {
    "hunyuan_a13b": Answer(("<answer>", "助手："), ("</answer>",)),
    "ernie45": Answer(("<response>",), ("</response>",)),
}
NO_ANSWER = Answer((), ())
HUNYUAN_TOKENS = ("hy_Assistant", "<|extra_0|>")  # between the turns of a conversation
# Opening delimiters that are a token and text after it.
FIRST_TOKENS = {"<|channel>thought": "<|channel>"}
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
SOLAR_CALL = ("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>")
SOLAR_STARTS = ("<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>")
SOLAR_ENDS = ("<|end|>", "<|flush|>", "<|calls|>")
HUNYUAN = ("<tool_calls>", "<tool_call>", "</tool_call>", "</tool_calls>")
# The delimiters in the text of a call.
CALL_DELIMITERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_v11": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm4": ("<|assistant|>",),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": HUNYUAN,
    "hunyuan_a13b": HUNYUAN,  # the calls are a list
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,  # the same delimiters; the position of the name differs
    "kimi_k2": KIMI,
    "solar_open": (*SOLAR_STARTS, *SOLAR_CALL, *SOLAR_ENDS),
    "gpt_oss": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "json": (),
}

TOOL_FORMATS = tuple(CALL_DELIMITERS)
REASONING_FORMATS = tuple(BLOCKS)

# vLLM's names of the same formats, which are on model cards.
TOOL_ALIASES = {
    "ernie45": "hermes",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "openai": "gpt_oss",
    "qwen3_xml": "qwen3_coder",
}
REASONING_ALIASES = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "qwen3"), "think"),
    "openai_gptoss": "gpt_oss",
}


def detect(template: str) -> Formats:
    """Return the formats of the model that a chat template was written for, judged by its delimiters."""
    return Formats(_tools(template), _reasoning(template))


def delimiters(formats: Formats) -> frozenset[str]:
    """Return the tokens that a parser of these formats must see even if they are special."""
    if (shared := in_messages(formats)) is not None:
        return frozenset(CALL_DELIMITERS[shared])
    of_calls = CALL_DELIMITERS[formats.tools] if formats.tools else ()
    of_reasoning = BLOCKS[formats.reasoning] if formats.reasoning else ()
    opens, closes = answer(formats)
    return frozenset(FIRST_TOKENS.get(text, text) for text in (*of_calls, *of_reasoning, *opens, *closes))


def in_messages(formats: Formats) -> str | None:
    """Return the format in which calls, reasoning and content are messages; None: the model writes another one."""
    return next((name for name in IN_MESSAGES if name in formats), None)


def answer(formats: Formats) -> Answer:
    """Return the delimiters around the content."""
    return ANSWERS.get(formats.reasoning or "", NO_ANSWER)


def reasoning_opened(formats: Formats, prompt_tail: str) -> bool:
    """Return whether a prompt ends by opening a block of reasoning, so that the model writes only the rest of it."""
    return formats.reasoning is not None and prompt_tail.rstrip().endswith(BLOCKS[formats.reasoning].opens)


def reasoning_closed(formats: Formats, prompt_tail: str) -> bool:
    """Return whether a prompt ends with a closed block of reasoning, so that the model does not reason."""
    if formats.reasoning is None:
        return False
    closes = BLOCKS[formats.reasoning].closes
    return prompt_tail.rstrip().endswith((closes, WITHOUT_REASONING.get(formats.reasoning, closes)))


def ends_reasoning(formats: Formats) -> str | None:
    """Return the delimiter that closes a block of reasoning."""
    return BLOCKS[formats.reasoning].closes if formats.reasoning else None


def _tools(template: str) -> str | None:
    if (shared := _in_messages(template)) is not None:
        return shared
    if "<|tool_call_begin|>" in template or "<|im_system|>tool_declare" in template:
        return "kimi_k2"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if all(delimiter in template for delimiter in CALL_DELIMITERS["gemma4"]):
        return "gemma4"
    if "[TOOL_CALLS]" in template:
        return "mistral_v11" if "[ARGS]" in template else "mistral"
    if "<function=" in template and "<parameter=" in template:
        return "seed_oss" if "<seed:tool_call>" in template else "qwen3_coder"
    is_unknown = "<tool_sep>" in template  # Hunyuan 3 writes names and arguments as GLM does, with this between them
    if "<arg_key>" in template and "<arg_value>" in template and not is_unknown:
        return "glm45"
    if "<minimax:tool_call>" in template and "<invoke name=" in template:
        return "minimax_m2"
    if "<TOOLCALL>" in template:
        return "nemotron_json"
    if "<tool_calls>" in template and not is_unknown:
        return "hunyuan" if "<tool_call>" in template else "hunyuan_a13b"
    if "<tool_call>" in template and not is_unknown:
        return "hermes"
    if not re.search(r"\btools\b", template):
        return None
    if "<|observation|>" in template and "metadata" in template:
        return "glm4"
    return "llama3_json" if "<|start_header_id|>" in template and '"parameters"' in template else "json"


def _reasoning(template: str) -> str | None:
    if (shared := _in_messages(template)) is not None:
        return shared
    if "</think>" in template and any(token in template for token in HUNYUAN_TOKENS):
        return "hunyuan_a13b"
    if "</think>" in template and "<response>" in template:
        return "ernie45"
    for name, block in BLOCKS.items():
        # To turn reasoning off, some templates write only the closing delimiter.
        if block.closes in template and name not in IN_MESSAGES:
            return name
    return None


def _in_messages(template: str) -> str | None:
    if "<|channel|>" in template and "<|message|>" in template:
        return "gpt_oss"
    return "solar_open" if "<|tool_call:begin|>" in template else None
