"""Formats: their detection from a chat template, their delimiters, and where reasoning begins and ends."""

from __future__ import annotations

import json

import pytest

from server.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    delimiters,
    detect,
    ends_reasoning,
    reasoning_closed,
    reasoning_opened,
)
from server.tokenization.chat_template import ChatTemplates

# Small templates, each with the delimiters of its family.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HERMES = (
    "{% if tools %}Functions: {{ tools | tojson }}\nCall one like this: "
    '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>{% endif %}'
) + CHATML
CODER = (
    "{% if tools %}{{ tools | tojson }} Call like this: <tool_call>\n<function=its_name>\n<parameter=its_parameter>\n"
    "value\n</parameter>\n</function>\n</tool_call>{% endif %}"
) + CHATML
GLM = (
    "{% if tools %}{{ tools | tojson }} Call like this: <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
    "<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>\n<think></think>"
)
GLM_NEW = GLM.replace("\n<arg", "<arg").replace("<|assistant|>\n<think></think>", "<|assistant|><think>")
MINIMAX = (
    '{% if tools %}{{ tools | tojson }} Call like this: <minimax:tool_call>\n<invoke name="tool-name-1">\n'
    '<parameter name="param-key-1">param-value-1</parameter>\n...\n</invoke>\n</minimax:tool_call>{% endif %}'
    "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content.split('</think>')[-1] }}[e~[\n{% endfor %}]~b]ai\n<think>\n"
)
NEMOTRON3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for t in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ t.name }}>\n{% for k, v in t.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>\n{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}<|im_start|>assistant\n<think></think>"
)
LLAMA3 = (
    '{% if tools %}{{ tools | tojson }} Answer with {"name": the function, "parameters": an object}{% endif %}'
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
)
LLAMA3_TEXT = LLAMA3[LLAMA3.index("{% for") :]
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}"
)
MISTRAL_NEW = MISTRAL.replace(
    "{{ m.tool_calls | tojson }}", "{{ m.tool_calls[0].name }}[ARGS]{{ m.tool_calls[0].args }}"
)
DEEPSEEK = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"  # noqa: RUF001
    "{{ t.type }}<｜tool▁sep｜>{{ t.name }}\n```json\n{{ t.args }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
    "{% endfor %}{{ m.content.split('</think>')[-1] }}{% endfor %}{% if tools %}{% endif %}"
)
DEEPSEEK_NEW = (
    DEEPSEEK.replace("{{ t.type }}", "{{ t.name }}").replace("{{ t.name }}\n```json\n", "").replace("\n```", "")
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if tools %}{{ tools }}{% endif %}<|start|>assistant"
)
SEED = (
    "{% for m in messages %}{{ m.role }}<seed:think>{{ m.reasoning_content }}</seed:think>{{ m.content }}{% endfor %}"
)
SEED_TOOLS = SEED + (
    "{% if tools %}<seed:tool_call>\n<function=its_name>\n<parameter=its_parameter>value</parameter>\n</function>\n"
    "</seed:tool_call>{% endif %}"
)
NEMOTRON2 = (
    '{% if tools %}<AVAILABLE_TOOLS>{{ tools }}</AVAILABLE_TOOLS> <TOOLCALL>[{"name": ...}]</TOOLCALL>{% endif %}'
    "{% for m in messages %}<SPECIAL_11>{{ m.content.split('</think>')[-1] }}{% endfor %}<SPECIAL_11>Assistant\n<think>"
)
HUNYUAN = (
    "{% if tools %}{{ tools }} First print <tool_calls>, then <tool_call>function_name\n```json\n...\n```</tool_call>"
    "{% endif %}{% for m in messages %}{{ m.content.split('<answer>')[-1] }}<|extra_0|>{% endfor %}"
    "<think>\n\n</think>\n"
)
HUNYUAN_LIST = (
    "{% if tools %}{{ tools }} <tool_calls>[{...}]</tool_calls>{% endif %}{% for m in messages %}{{ m.content }}"
    "<|extra_0|>{% endfor %}<think>\n\n</think>\n"
)
ERNIE = HERMES + "<think>\n{# <response>\n</response> </think> #}"
COMMAND = "{% for m in messages %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{{ m.content }}{% endfor %}"
MAGISTRAL = MISTRAL_NEW + "{# [THINK]draft[/THINK] #}"
GEMMA4 = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{% for t in m.tool_calls or [] %}<|tool_call>call:{{ t.name }}"
    '{key:<|"|>{{ t.value }}<|"|>}<tool_call|>{% endfor %}{{ m.content }}<turn|>{% endfor %}{% if tools %}{% endif %}'
    "<|turn>model\n<|channel>thought\n<channel|>"
)
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}{% for t in m.tool_calls or [] %}"
    "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ t.function.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|im_end|>{% endfor %}"
)
GLM4 = (
    "[gMASK]<sop>{% for t in tools or [] %}## {{ t.function.name }}\n\n{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.metadata %}<|assistant|>{{ m.metadata }}\n{{ m.content }}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)
SOLAR = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|begin|>{{ m.role }}<|content|>"
    "{{ m.content }}{% for t in m.tool_calls or [] %}<|tool_call:begin|>{{ t.id }}<|tool_call:name|>{% endfor %}<|end|>"
    "{% endfor %}<|begin|>assistant{# <|think|><|end|> #}"
)
KIMI = "{% for m in messages %}◁think▷{{ m.reasoning_content }}◁/think▷{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        (CHATML, Formats(None, None)),
        (HERMES, Formats("hermes", None)),
        (HERMES + "<think>\n\n</think>\n\n", Formats("hermes", "think")),
        (CODER, Formats("qwen3_coder", None)),
        (MINIMAX, Formats("minimax_m2", "think")),
        (NEMOTRON3, Formats("qwen3_coder", "think")),
        (GLM, Formats("glm45", "think")),
        (GLM_NEW.removesuffix("<think>") + "</think>", Formats("glm45", "think")),
        # Hunyuan 3 writes names and arguments in another way than GLM.
        (GLM.replace("\n<arg_key>", "<tool_sep>\n<arg_key>"), Formats("json", "think")),
        (f"<tool_calls>{GLM}".replace("\n<arg_key>", "<tool_sep>\n<arg_key>"), Formats("json", "think")),
        (LLAMA3, Formats("llama3_json", None)),
        (LLAMA3_TEXT, Formats(None, None)),
        (MISTRAL, Formats("mistral", None)),
        (MISTRAL_NEW, Formats("mistral_v11", None)),
        (MAGISTRAL, Formats("mistral_v11", "mistral")),
        (DEEPSEEK, Formats("deepseek_v3", "think")),
        (DEEPSEEK_NEW, Formats("deepseek_v31", "think")),
        (GPT_OSS, Formats("gpt_oss", "gpt_oss")),
        (SEED, Formats(None, "seed_oss")),
        (SEED_TOOLS, Formats("seed_oss", "seed_oss")),
        (NEMOTRON2, Formats("nemotron_json", "think")),
        (HUNYUAN, Formats("hunyuan", "hunyuan_a13b")),
        (HUNYUAN_LIST, Formats("hunyuan_a13b", "hunyuan_a13b")),
        (ERNIE, Formats("hermes", "ernie45")),
        (COMMAND, Formats(None, "command")),
        (KIMI, Formats(None, "kimi")),
        (KIMI_K2, Formats("kimi_k2", None)),
        (KIMI_K2 + "{# <think></think> #}", Formats("kimi_k2", "think")),
        (KIMI_K2.replace("<|tool_call_begin|>{{ t.id }}", ""), Formats("kimi_k2", None)),
        (GLM4, Formats("glm4", None)),
        (GLM4 + "\n<think>\n{# </think> #}", Formats("glm4", "think")),
        (SOLAR, Formats("solar_open", "solar_open")),
        (GEMMA4, Formats("gemma4", "gemma4")),
        ("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML, Formats("json", None)),
        ("", Formats(None, None)),
    ],
)
def test_formats_are_detected_from_the_template(template, formats):
    assert detect(template) == formats


def test_qwen3_template_is_detected(data):
    template = json.loads((data / "tokenizers/qwen3/tokenizer_config.json").read_text())["chat_template"]
    formats = detect(template)
    assert formats == Formats("hermes", "think")
    assert delimiters(formats) == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    templates = ChatTemplates({"default": template}, {})
    messages = [{"role": "user", "content": "Is it <think>"}]
    for thinking in (True, False):
        prompt = templates.render(messages, None, template_kwargs={"enable_thinking": thinking})
        assert not reasoning_opened(formats, prompt), "the model opens the block itself, or the prompt has closed it"


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_prompt_can_end_inside_reasoning(reasoning):
    formats = Formats("gpt_oss" if reasoning == "gpt_oss" else None, reasoning)
    closes = ends_reasoning(formats)
    assert closes is not None
    opens = {
        "gpt_oss": "<|channel|>analysis<|message|>",
        "command": "<|START_THINKING|>",
        "gemma4": "<|channel>thought",
        "solar_open": "<|think|>",
    }.get(reasoning, closes.replace("/", ""))
    assert reasoning_opened(formats, f"assistant\n{opens}\n")
    assert reasoning_opened(formats, opens)
    assert not reasoning_opened(formats, f"{opens}\n\n{closes}\n\n")
    assert reasoning_closed(formats, f"{opens}\n\n{closes}\n\n")
    assert not reasoning_closed(formats, f"{opens}\n\n{closes}\n\nso") and not reasoning_closed(formats, opens)
    assert not reasoning_opened(formats, f"{opens} is how it begins")
    assert not reasoning_opened(Formats(None, None), opens) and not reasoning_closed(Formats(None, None), closes)


def test_a_prompt_of_solar_open_can_have_an_empty_message_of_reasoning():
    formats = Formats("solar_open", "solar_open")
    assert reasoning_closed(formats, "<|end|><|begin|>assistant<|think|><|end|><|begin|>assistant")
    assert not reasoning_closed(formats, "<|begin|>user<|content|>Is it?<|end|><|begin|>assistant")


def test_models_that_do_not_reason_have_no_closing_delimiter():
    assert ends_reasoning(Formats("hermes", None)) is None


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_no_delimiter_contains_another(tools):
    """Scanner.until relies on it."""
    for reasoning in REASONING_FORMATS:
        found = delimiters(Formats(tools, reasoning))
        assert not [(a, b) for a in found for b in found if a != b and a in b]


def test_without_calls_only_the_delimiters_of_reasoning_are_visible():
    assert delimiters(Formats(None, "think")) == {"<think>", "</think>"}
    assert delimiters(Formats(None, None)) == delimiters(Formats("json", None)) == frozenset()
    assert "<|channel|>" in delimiters(Formats(None, "gpt_oss"))
    assert delimiters(Formats(None, "gemma4")) == {"<|channel>", "<channel|>"}, "the token alone"
