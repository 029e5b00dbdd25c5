"""Parsers: they recover what a model wrote however its text is split, keep other text, and take linear time."""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.parsers import select
from server.parsers.formats import ANSWERS, BLOCKS, CALL_DELIMITERS, IN_MESSAGES, TOOL_FORMATS, Formats, delimiters
from server.parsers.parts import Arguments, Call, Content, Message, Plain, Reasoning, join
from server.parsers.select import message_parser

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TOOLS: dict[str, dict[str, Any]] = {
    "find_ship": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "masts": {"type": "integer"},
            "at": {"$ref": "#/$defs/place"},
            "is_lost": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "anything": {},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "ring-bell.now": {"type": "object", "properties": {}},
}
FORMATS = [
    *(Formats(tools, "think") for tools in TOOL_FORMATS if tools not in IN_MESSAGES),
    *(Formats("hermes", reasoning) for reasoning in BLOCKS if reasoning not in IN_MESSAGES),
    *(Formats(shared, shared) for shared in IN_MESSAGES),
]
EACH = pytest.mark.parametrize("formats", FORMATS, ids="-".join)


def parser(formats: Formats, tools=TOOLS, opened=False):
    ids = itertools.count()
    return message_parser(formats, tools=tools, opened=opened, new_id=lambda: f"call_{next(ids)}")


def parts(formats: Formats, pieces, *, cut_before: str | None = None, **options):
    reader = parser(formats, **options)
    return [part for piece in pieces for part in reader.feed(piece)] + reader.finish(cut_before=cut_before)


def read(formats: Formats, *pieces: str, **options) -> Message:
    return join(parts(formats, pieces, **options))


def calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


# How a model writes a message, without any of the parsers' code.


def write(formats: Formats, reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]]) -> str:
    if formats.tools == "gpt_oss":
        return write_harmony(reasoning, content, made)
    if formats.tools == "solar_open":
        return write_solar(reasoning, content, made)
    opens, closes = BLOCKS[formats.reasoning]
    thought = f"{opens}\n{reasoning}\n{closes}\n\n" if reasoning else ""
    return thought + content + WRITTEN_CALLS[formats.tools](content, made)


def pair(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'


def write_hermes(content, made):
    return "".join(f"\n<tool_call>\n{pair(*call)}\n</tool_call>" for call in made)


def write_mistral(content, made):
    return f"[TOOL_CALLS] [{', '.join(pair(*call) for call in made)}]" if made else ""


def write_mistral_v11(content, made):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in made)


def tagged_value(x):
    return x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)


def write_coder(content, made):
    return "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{tagged_value(x)}\n</parameter>\n" for key, x in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in made
    )


def write_glm(content, made, line="\n"):
    return "".join(
        f"{line}<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{tagged_value(x)}</arg_value>{line}"
            for key, x in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in made
    )


def write_glm47(content, made):
    return write_glm(content, made, line="")


def write_seed(content, made):
    return "".join(
        f"\n<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{tagged_value(x)}</parameter>\n" for key, x in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in made
    )


def write_hunyuan(content, made):
    each = "\n".join(
        f"<tool_call>{name}\n```json\n{json.dumps(arguments)}\n```</tool_call>" for name, arguments in made
    )
    return f"<tool_calls>{each}</tool_calls>" if made else ""


def write_list(opens, closes):
    return lambda content, made: f"{opens}[{', '.join(pair(*call) for call in made)}]{closes}" if made else ""


def write_minimax(content, made):
    each = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{tagged_value(x)}</parameter>\n' for key, x in arguments.items())
        + "</invoke>\n"
        for name, arguments in made
    )
    return f"\n<minimax:tool_call>\n{each}</minimax:tool_call>" if made else ""


def write_deepseek(one):
    def written(content, made):
        each = "".join(f"<｜tool▁call▁begin｜>{one(*call)}<｜tool▁call▁end｜>" for call in made)  # noqa: RUF001
        return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>" if made else ""  # noqa: RUF001

    return written


def write_harmony(reasoning, content, made):
    messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
    if content:
        messages.append(f"<|channel|>{'commentary' if made else 'final'}<|message|>{content}<|end|>")
    for name, arguments in made:
        body = json.dumps(arguments, ensure_ascii=False)
        messages.append(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>")
    return "<|start|>assistant".join(messages)


def write_solar(reasoning, content, made):
    messages = [f"<|think|>{reasoning}"] if reasoning else []
    if content:
        messages.append(f"<|content|>{content}")
    each = [
        f"<|tool_call:begin|>a1b2c3d4e{index}<|tool_call:name|>{name}<|tool_call:args|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call:end|>"
        for index, (name, arguments) in enumerate(made)
    ]
    if made:
        messages.append(f"<|tool_calls|>{''.join(each)}")
    return "<|end|><|begin|>assistant".join(messages)


def write_kimi(content, made):
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(made)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>" if made else ""


def write_glm4(content, made):
    between = "<|assistant|>"
    each = between.join(f"{name}\n{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in made)
    return between + each if content and made else each


def write_gemma(content, made):
    def value(x):
        if isinstance(x, str):
            return f'<|"|>{x}<|"|>'
        if isinstance(x, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in x.items()) + "}"
        return "[" + ",".join(map(value, x)) + "]" if isinstance(x, list) else json.dumps(x)

    return "".join(f"<|tool_call>call:{name}{value(arguments)}<tool_call|>" for name, arguments in made)


WRITTEN_CALLS = {
    "hermes": write_hermes,
    "gemma4": write_gemma,
    "llama3_json": lambda content, made: "".join(
        ("; " if i else "<|python_tag|>") + pair(*call, "parameters") for i, call in enumerate(made)
    ),
    "mistral": write_mistral,
    "mistral_v11": write_mistral_v11,
    "qwen3_coder": write_coder,
    "glm4": write_glm4,
    "glm45": write_glm,
    "kimi_k2": write_kimi,
    "seed_oss": write_seed,
    "minimax_m2": write_minimax,
    "nemotron_json": write_list("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": write_hunyuan,
    "hunyuan_a13b": write_list("<tool_calls>", "</tool_calls>"),
    "deepseek_v3": write_deepseek(
        lambda name, arguments: f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"  # noqa: RUF001
    ),
    "deepseek_v31": write_deepseek(lambda name, arguments: f"{name}<｜tool▁sep｜>{json.dumps(arguments)}"),  # noqa: RUF001
    "json": lambda content, made: "" if content or not made else f"[{', '.join(pair(*call) for call in made)}]",
}

ALL_DELIMITERS = sorted({*itertools.chain(*CALL_DELIMITERS.values(), *BLOCKS.values())})
PIECES = [
    *ALL_DELIMITERS, *'{}[]"\\<>;,:|', "<function=", "</function>", "<parameter=x>", "</parameter>", "\n", " ", "\n\n",
    '{"name": "find_ship", "arguments": ', '"parameters": {}', "<thi", "<tool_", "```json", "```", "é", "🐋", "\u2028",
    "<tool_call>find_ship", "<arg_key>name</arg_key><arg_value>", "\n</function>\n", "\n</invoke>\n",
    "<parameter=name>", '<invoke name="', 'find_ship">', '<parameter name="', '">', "</invoke>",
    "find_ship", "ring-bell.now", "function", " to=", "functions.", "a", "null", "<|cha", "true", "name", "\\u00",
]  # fmt: skip
AWKWARD = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def without(delimiters):
    """Return a filter of unambiguous texts: those that contain none of the delimiters."""
    return lambda text: not any(delimiter in text for delimiter in delimiters)


# What ends a value between tags
TAGGED = {
    "qwen3_coder": ["</parameter>", "\n<parameter=", "\n</function>"],
    "seed_oss": ["</parameter>", "\n<parameter=", "\n</function>"],
    "glm45": ["</arg_value>", "\n<arg_key>"],
    "minimax_m2": ["</parameter>", '\n<parameter name="', "\n</invoke>"],
}
EACH_TAGGED = pytest.mark.parametrize("tools", TAGGED)


def plain(text: str) -> str:
    return text.strip(" \t\r\n")


def values(formats: Formats):
    """Arguments that the format can carry: tags have no escapes, so a string cannot contain the closing tag."""
    text = st.text(max_size=8) | AWKWARD
    deep = st.recursive(
        st.none() | st.booleans() | st.integers() | text, lambda x: st.lists(x, max_size=3), max_leaves=5
    )
    if formats.tools == "gpt_oss":
        text = text.filter(without(CALL_DELIMITERS["gpt_oss"]))
        deep = st.lists(st.integers() | text)
    keys = text
    if formats.tools == "gemma4":  # strings and keys have no escapes
        text, keys = text.filter(without(['<|"|>'])), st.text("ab_", min_size=1)
        deep = st.recursive(st.none() | st.booleans() | st.integers() | text, st.lists, max_leaves=5)
    if formats.tools not in TAGGED:
        return st.fixed_dictionaries(
            {}, optional={"name": text, "masts": deep, "at": st.dictionaries(keys, deep, max_size=2)}
        )
    text = text.filter(without(TAGGED[formats.tools]))
    deep = st.dictionaries(st.text("abc"), st.integers() | st.text('a"\\}{', max_size=3), max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "name": text,
            "masts": st.integers(),
            "at": deep,
            "is_lost": st.booleans(),
            "note": st.none() | text.filter(lambda text: text != "null"),
            "anything": st.booleans() | st.integers() | deep,
        },
    )


def looks_like_call(formats: Formats, text: str) -> bool:
    """Return whether content begins as a call does that has no delimiter."""
    if formats.tools == "glm4":
        return text.startswith("find_ship")
    return formats.tools in ("json", "llama3_json") and text[:1] in ("{", "[")


@EACH
def test_message_is_recovered_however_it_is_split(formats):
    prose = AWKWARD.filter(without({*delimiters(formats), "<function=", "</function>", "<invoke name=", "</invoke>"}))
    prose = prose.map(plain)

    @PROPERTY
    @given(
        prose,
        # A bare object at the beginning looks like a call.
        prose.filter(lambda text: not looks_like_call(formats, text)),
        st.lists(st.tuples(st.just("find_ship"), values(formats)) | st.just(("ring-bell.now", {})), max_size=3),
        CUTS,
    )
    def check(reasoning, content, made, cuts):
        content = "" if made and formats.tools == "json" else content
        text = write(formats, reasoning, content, made)
        got = read(formats, *split(text, cuts))
        assert got == read(formats, text) == read(formats, *text)
        assert (got.reasoning, got.content, calls(got)) == (reasoning, content, made)

    check()


@EACH
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_garbage_is_parsed_alike_however_it_is_split(formats, opened):
    @PROPERTY
    @given(st.lists(st.sampled_from(PIECES + ALL_DELIMITERS), max_size=25).map("".join), CUTS)
    def check(text, cuts):
        got = join(parts(formats, split(text, cuts), opened=opened))
        assert got == read(formats, text, opened=opened) == read(formats, *text, opened=opened)
        if not got.calls and formats.tools not in (*IN_MESSAGES, "glm4"):
            opens, closes = BLOCKS[formats.reasoning]
            kept = text
            if got.reasoning or opened:
                kept = kept.replace(opens, "", 0 if opened else 1).replace(closes, "", 1)
            # Nothing but the delimiters of the reasoning and white space next to them is missing.
            assert "".join((got.reasoning + got.content).split()) in ("".join(kept.split()), "".join(text.split())) or (
                not got.reasoning
            )

    check()


@EACH
def test_without_tools_the_delimiters_of_calls_are_text(formats):
    text = write(formats, "", "", [("find_ship", {"name": "Pequod"})])
    got = read(formats, text, tools={})
    assert not got.calls
    assert "Pequod" in got.content and (got.content == text or formats.tools in IN_MESSAGES)


@EACH
def test_calls_of_unknown_functions_are_text(formats):
    text = write(formats, "", "" if formats.tools == "json" else "so", [("sink", {"name": "Pequod"})])
    got = read(formats, text)
    assert not got.calls
    assert "sink" in got.content and '"Pequod"'.strip('"') in got.content


@pytest.mark.parametrize("length", range(1, len("</tool_call>")))
def test_incomplete_closing_delimiter_is_not_content(length):
    text = '<tool_call>\n{"name": "find_ship", "arguments": {}}\n' + "</tool_call>"[:length]
    got = read(Formats("hermes"), text)
    assert (calls(got), got.content) == ([("find_ship", {})], "")


@EACH
@pytest.mark.parametrize("content", ["", "Ahoy."], ids=["call", "content and call"])
def test_a_call_cut_off_anywhere_leaves_no_markup_in_the_content(formats, content):
    text = write(formats, "", content, [("find_ship", {"name": "Pequod"}), ("ring-bell.now", {})])
    whole = read(formats, text)
    for end, stop in itertools.product(range(len(text)), (0, 1, 4)):  # characters of a stop string, 0: at max_tokens
        reader = parser(formats)
        cut = join(reader.feed(text[:end]) + reader.finish(cut_before=text[end : end + stop]))
        assert whole.content.startswith(plain(cut.content)), text[:end]
        assert not cut.reasoning
        assert len(cut.calls) <= len(whole.calls)
        if "ring-bell.now" in text[:end]:  # the call before it is complete
            assert cut.calls[:1] == whole.calls[:1], text[:end]
        for call, wanted in zip(cut.calls, whole.calls, strict=False):
            assert call.name == wanted.name
            assert wanted.arguments.startswith(call.arguments)


@pytest.mark.parametrize(
    "start", ['{"name": "find_ship"', '[{"name": "find_ship"', '{"type": "function", "name": "find_ship"']
)
@pytest.mark.parametrize("tools", ["json", "llama3_json"])
def test_the_beginning_of_an_object_with_a_tools_name_is_no_content(tools, start):
    for end in range(1, len(start) + 1):
        reader = parser(Formats(tools))
        assert join(reader.feed(start[:end]) + reader.finish(cut_before="")) == Message("", "", ())


@pytest.mark.parametrize("text", ['{"weather": "fog', '{"name": "Ahab", "leg', "[1, 2, 3", '{"names": ["Ahab'])
def test_an_object_that_is_no_call_stays_content_when_it_is_cut_off(text):
    reader = parser(Formats("json"))
    assert join(reader.feed(text) + reader.finish(cut_before="")).content == text


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("1 <", "", "1 "),
        ("1 <", "t", "1 "),
        ("1 <", "tool_call> or not", "1 "),
        ("1 <", "2", "1 <"),
        ("1 <", "\n", "1 <"),
        ("1 <", "<tool", "1 <"),
        ("1 <<", "tool", "1 <"),
        ("1 <tool_", "_", "1 <tool_"),
    ],
)
def test_what_may_begin_a_delimiter_is_content_if_the_stop_string_after_it_shows_that_it_does_not(text, stop, content):
    reader = parser(Formats("hermes"))
    assert join(reader.feed(text) + reader.finish(cut_before=stop)).content == content


def test_known_call_after_an_unknown_one_is_a_call():
    got = read(Formats("hermes"), write_hermes("", [("sink", {}), ("find_ship", {})]))
    assert calls(got) == [("find_ship", {})]
    assert got.content == '\n<tool_call>\n{"name": "sink", "arguments": {}}\n</tool_call>'


@EACH
def test_arguments_are_streamed_as_they_are_written(formats):
    """The name is emitted before the arguments are complete, and each character of these at once."""
    text = write(formats, "", "", [("find_ship", {"name": "P" * 100})])
    reader = parser(formats)
    lengths, length = [], 0
    for char in text:
        for part in reader.feed(char):
            length += len(part.text) if isinstance(part, Arguments) else 0
        lengths.append(length)
    middle = text.index("P" * 100) + 50
    assert lengths[middle] - lengths[middle - 10] == 10
    assert length > 100


@EACH
def test_plain_text_is_emitted_at_once(formats):
    reader = parser(formats)
    assert [join(reader.feed(char)).content for char in "a whale"] == ["a", "", " w", "h", "a", "l", "e"] or (
        formats.tools == "gpt_oss"
    )
    assert reader.finish() == []


@pytest.mark.parametrize("reasoning", [name for name in BLOCKS if name not in IN_MESSAGES])
def test_reasoning_is_separated_from_content(reasoning):
    opens, closes = BLOCKS[reasoning]
    formats = Formats(None, reasoning)
    assert read(formats, f"\n{opens}\nhm\n\nhm\n{closes}\n\n so\n") == Message(" so\n", "hm\n\nhm", ())
    assert read(formats, f"\nhm\n{closes}so", opened=True) == Message("so", "hm", ())
    assert read(formats, f"{opens}hm\n") == Message("", "hm\n", ()), "opened and never closed"
    assert read(formats, f"so {opens}hm{closes}") == Message(f"so {opens}hm{closes}", "", ()), (
        "only at the beginning of the text"
    )
    assert read(formats, opens[:-1]) == Message(opens[:-1], "", ())


@pytest.mark.parametrize(("reasoning", "tag"), [("hunyuan_a13b", "answer"), ("ernie45", "response")])
@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n<answer>\nso\n\nit is\n</answer>", "hm", "so\n\nit is"),
        ("<think>\nhm\n</think>\n\n\n<answer>\nso\n</answer>\n", "hm", "so"),
        ("<think>\n\n</think>\n<answer>so", "", "so"),
        ("<answer>\nso\n</answer>", "", "so"),
        ("<think>like <answer> and </answer></think>so", "like <answer> and </answer>", "so"),
        ("so <answer>it</answers>", "", "so <answer>it</answers>"),
        ("so\n</answer>", "", "so"),
        ("so</answer>\n<think>hm</think>", "", "so</answer>\n<think>hm</think>"),
        ("<answer>so</answer>\n<answer>hm", "", "so</answer>\n<answer>hm"),
        ("Close it with </answer> , then go on", "", "Close it with </answer> , then go on"),
        ('<answer>{"html": "a </answer> b"}\n</answer>\n', "", '{"html": "a </answer> b"}'),
        ("<answer>\n<think>hm</think>\n</answer>", "", "<think>hm</think>"),
        ("<", "", "<"),
        ("</", "", "</"),
        ("<answer>", "", ""),
        ("so", "", "so"),
    ],
)
def test_tags_around_an_answer_are_no_content(reasoning, tag, text, thought, content):
    text, thought, content = (each.replace("answer", tag) for each in (text, thought, content))
    for formats in (Formats(None, reasoning), Formats("hermes", reasoning)):
        got = read(formats, text)
        assert got == read(formats, *text) == Message(content, thought, ())


SPEAKER = ANSWERS["hunyuan_a13b"].opens[-1]


@pytest.mark.parametrize("tools", ["hunyuan", "hunyuan_a13b"])
def test_calls_may_be_an_answer(tools):
    formats = Formats(tools, "hunyuan_a13b")
    for before, after in (("", ""), ("<think>\nhm\n</think>\n<answer>\n", "\n</answer>"), (SPEAKER, "")):
        text = f"{before}{WRITTEN_CALLS[tools]('', ONE * 2)}{after}"
        got = read(formats, text)
        assert got == read(formats, *text)
        assert (got.content, calls(got)) == ("", ONE * 2)


def test_hunyuan_content_does_not_begin_with_its_speaker():
    formats = Formats("hunyuan_a13b", "hunyuan_a13b")
    text = f"{SPEAKER}It writes {SPEAKER}so"
    for written in (text, f"<think>\nhm\n</think>\n<answer>\n{text}\n</answer>"):
        assert read(formats, written).content == read(formats, *written).content == f"It writes {SPEAKER}so"


@EACH
def test_is_reasoning_follows_the_delimiters_at_once(formats):
    reader = parser(formats)
    opens, closes = BLOCKS[formats.reasoning]
    assert not reader.is_reasoning
    reader.feed(opens)
    assert reader.is_reasoning
    reader.feed("hm")
    reader.feed(closes[:-1])
    assert reader.is_reasoning
    reader.feed(closes[-1])
    assert not reader.is_reasoning
    assert parser(formats, opened=True).is_reasoning


def test_model_without_delimiters_has_the_plain_parser():
    assert isinstance(parser(Formats()), Plain)
    assert isinstance(parser(Formats("hermes"), tools={}), Plain)
    assert read(Formats(), "a", "", "b\n") == Message("ab\n", "", ())


CALL = '{"name": "find_ship", "arguments": {"masts": 3}}'
ONE = [("find_ship", {"masts": 3})]
B = [("find_ship", {"name": "b"})]
NOTED = [("find_ship", {"masts": 3, "note": None})]
CODED = "<tool_call>\n<function=find_ship>\n<parameter=masts>\n3\n</parameter>\n</function>\n</tool_call>"
INVOKE = '<invoke name="find_ship">\n<parameter name="masts">3</parameter>\n</invoke>'
MINIMAX_CALL = f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>"
MINIMAX_BLOCK = f"<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>"
SEED_CALL = "<seed:tool_call>\n<function=find_ship>\n<parameter=masts>3</parameter>\n</function>\n</seed:tool_call>"
HUNYUAN_CALL = '<tool_call>find_ship\n```json\n{"masts": 3}\n```</tool_call>'
GLM_CALL = "<tool_call>find_ship\n<arg_key>masts</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("tools", "text", "content", "made"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>", "", ONE),
        ("hermes", f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", ONE * 2),
        ("hermes", f"<tool_call>{CALL}}}</tool_call> so", "so", ONE),  # a bracket too many
        ("hermes", f"<tool_call>\n{CALL}\n}} }}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "", ONE * 2),
        ("hermes", f"<tool_call>{CALL}}}{CALL}}}", "", ONE * 2),
        ("hermes", f"<tool_call>{CALL}}}</tool", "", ONE),
        ("hermes", f"<tool_call>{CALL}}} so", "} so", ONE),
        ("hermes", f"<tool_call>{CALL}", "", ONE),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n \n", "", ONE),
        ("hermes", '<tool_call>{"arguments": {"masts": 3}, "id": [1, "]"], "name": "find_ship"}</tool_call>', "", ONE),
        ("hermes", '<tool_call>{"name": "find_ship", "arguments": "{\\"masts\\": 3}"}</tool_call>', "", ONE),
        ("hermes", '<tool_call>{"name": "find_ship"}</tool_call>', "", [("find_ship", {})]),
        ("hermes", '<tool_call>{"name": "find_ship", "arguments": null}', "", [("find_ship", {})]),
        ("hermes", '<tool_call>{"name": "find_ship", "arguments": 5}', None, []),
        ("hermes", '<tool_call>{"name": "find_ship", "argu', None, []),
        ("hermes", '<tool_call>{"name": find_ship}</tool_call>', None, []),
        ("hermes", "<tool_call>find_ship</tool_call>", None, []),
        ("hermes", "</tool_call>", None, []),
        ("llama3_json", CALL, "", ONE),
        ("llama3_json", f"{CALL}; {CALL}", "", ONE * 2),
        ("llama3_json", f"{CALL}\n{CALL}", "", ONE * 2),
        ("llama3_json", f"<|python_tag|>{CALL};", ";", ONE),
        ("llama3_json", "<|python_tag|>import os", None, []),
        ("llama3_json", f"See {CALL}", None, []),
        ("json", f" [{CALL} , {CALL}]\n", "", ONE * 2),
        ("json", f"[{CALL}, {{bad]", ", {bad]", ONE),
        ("json", f"[{CALL}, and", ", and", ONE),
        ("json", "[1] says", None, []),
        ("json", "{}", None, []),
        ("json", f'{{"type": "function", "id": "1", {CALL[1:]}', "", ONE),
        ("json", f'{{"x": 1, {CALL[1:]}', None, []),
        ("hermes", f'<tool_call>{{"x": 1, {CALL[1:]}</tool_call>', "", ONE),
        ("json", '{"a": {"name": "find_ship"}}', None, []),
        ("mistral", f"so[TOOL_CALLS][{CALL},{CALL}]", "so", ONE * 2),
        ("mistral", f"[TOOL_CALLS]{CALL}", "", ONE),
        ("mistral", '[TOOL_CALLS]find_ship{"masts": 3}', "", ONE),
        ("mistral_v11", '[TOOL_CALLS]find_ship[CALL_ID]abc123def[ARGS]{"masts": 3}', "", ONE),
        ("mistral_v11", '[TOOL_CALLS]find_ship[ARG]{"masts": 3}', None, []),
        ("mistral_v11", "[TOOL_CALLS]find_ship[ARGS]3", None, []),
        ("qwen3_coder", "<function=find_ship><parameter=masts>3</parameter></function>", "", ONE),
        ("qwen3_coder", "<tool_call><function=find_ship></function></tool_call>", "", [("find_ship", {})]),
        ("qwen3_coder", "<function=find_ship><parameter=masts>3</parameter>so</function>", "so", ONE),
        ("qwen3_coder", "<function=find_ship><parameter=masts>some", "", None),
        # Without the tag that ends the function
        ("qwen3_coder", "<tool_call>\n<function=find_ship>\n<parameter=masts>\n3\n</parameter>\n</tool_call>", "", ONE),
        (
            "qwen3_coder",
            2 * "<tool_call>\n<function=find_ship>\n<parameter=masts>\n3\n</parameter>\n</tool_call>\n" + "so",
            "so",
            2 * ONE,
        ),
        (
            "qwen3_coder",
            "<function=find_ship><parameter=masts>3</parameter>\n"
            "<tool_call><function=find_ship><parameter=masts>3</parameter></function>",
            "",
            2 * ONE,
        ),
        ("qwen3_coder", "<function=find_ship><parameter=masts>3</parameter>\n</tool_c", "", ONE),
        ("qwen3_coder", "<function=find_ship><parameter=masts>3</parameter>\n</tools>", "</tools>", ONE),
        (
            "qwen3_coder",
            "<function=find_ship>\n<parameter=name>\na\n\n<parameter=masts>\n3\n</function>"
            "<function=find_ship>\n<parameter=masts>\n3\n</function>",
            "",
            [("find_ship", {"name": "a\n", "masts": 3}), *ONE],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=find_ship><parameter=name>\na </function> <parameter=x>\n</parameter></function>",
            "",
            [("find_ship", {"name": "a </function> <parameter=x>"})],
        ),
        ("qwen3_coder", "<function=find_ship><parameter=name>a\n<parameter=", "", None),
        # A string may have lines that begin like tags, unless the tag fits there.
        *(
            (
                "qwen3_coder",
                f"<tool_call>\n<function=find_ship>\n<parameter=name>\n{text}\n</parameter>\n</function>\n</tool_call>",
                "",
                [("find_ship", {"name": text})],
            )
            for text in ("a\n</function>\n</parameters>", "a\n<parameter=name>\nb", "\n</function>\n\n</tool_calls>")
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=find_ship>\n<parameter=name>\na\n</function>\n</tool_call>\nso",
            "so",
            [("find_ship", {"name": "a"})],
        ),
        ("qwen3_coder", "<function=find_ship>\n<parameter=name>\nb\n</function>\n", "", B),
        ("qwen3_coder", "<function=find_ship>\n<parameter=name>b\n</function></tool_c", "", B),
        (
            "qwen3_coder",
            "<function=find_ship>\n<parameter=name>a\n</function>\n<tool_call><function=find_ship>\n<parameter=masts>3"
            "</parameter></function>",
            "",
            [("find_ship", {"name": "a"}), *ONE],
        ),
        # A value without one of its quotes
        (
            "qwen3_coder",
            CODED.replace("<parameter=m", '<parameter=at>\n{"x": "y}\n</parameter>\n<parameter=m'),
            "",
            [("find_ship", {"at": '{"x": "y}', "masts": 3})],
        ),
        ("seed_oss", f"so\n{SEED_CALL}\n{SEED_CALL}so", "soso", ONE * 2),
        ("seed_oss", SEED_CALL.replace("\n", ""), "", ONE),
        ("seed_oss", SEED_CALL[len("<seed:tool_call>") :], "", ONE),
        ("seed_oss", SEED_CALL.removesuffix("</function>\n</seed:tool_call>"), "", None),
        ("seed_oss", f"{SEED_CALL.replace('</parameter>', '')}so", "so", ONE),
        ("seed_oss", SEED_CALL.replace("masts>3", "name>\na\n"), "", [("find_ship", {"name": "\na\n"})]),
        ("seed_oss", "<seed:tool_call>find_ship", None, []),
        ("nemotron_json", f"so <TOOLCALL>[{CALL}, {CALL}]</TOOLCALL>\nso", "soso", ONE * 2),
        ("nemotron_json", f"<TOOLCALL>\n[\n{CALL}\n]\n</TOOLCALL>", "", ONE),
        ("nemotron_json", f"<TOOLCALL>{CALL}</TOOLCALL>", "", ONE),
        ("nemotron_json", '<TOOLCALL>[{"name": "find_ship", "arguments": "{\\"masts\\": 3}"}]</TOOLCALL>', "", ONE),
        ("nemotron_json", f"<TOOLCALL>[{CALL}", "", ONE),
        ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", None, []),
        ("hunyuan", f"so <tool_calls>{HUNYUAN_CALL}\n{HUNYUAN_CALL}</tool_calls>", "so", ONE * 2),
        ("hunyuan", f"<tool_calls>\n{HUNYUAN_CALL}\n</tool_calls>\nso", "so", ONE),
        ("hunyuan", HUNYUAN_CALL, "", ONE),
        ("hunyuan", f"<tool_calls>[{CALL}]</tool_calls>", "", ONE),
        ("hunyuan", "<tool_calls><tool_call>find_ship\n```json", None, []),
        ("hunyuan", "<tool_calls><tool_call>find_ship\n3</tool_call></tool_calls>", None, []),
        ("hunyuan_a13b", f"so <tool_calls>[{CALL}, {CALL}]</tool_calls>\n", "so", ONE * 2),
        ("hunyuan_a13b", f"<tool_calls>{HUNYUAN_CALL}</tool_calls>", "", ONE),
        ("qwen3_coder", "<tool_call>\n<function=find_ship\n", None, []),
        ("glm45", "<tool_call>ring-bell.now</tool_call>", "", [("ring-bell.now", {})]),
        ("glm45", "so\n<tool_call>ring-bell.now\n</tool_call> so", "soso", [("ring-bell.now", {})]),
        ("glm45", f"{GLM_CALL}{GLM_CALL}\n{GLM_CALL}", "", ONE * 3),
        ("glm45", "<tool_call>find_ship <arg_key>masts</arg_key> <arg_value>3</arg_value> </tool_call>", "", ONE),
        (
            "glm45",
            "<tool_call>\nfind_ship<arg_key>name</arg_key><arg_value>\n</tool_call> \n<tool_call>\n</arg_value>"
            "<arg_key> masts\n</arg_key>\n<arg_value> 3\n</arg_value></tool_call>",
            "",
            [("find_ship", {"name": "\n</tool_call> \n<tool_call>\n", "masts": 3})],
        ),
        ("glm45", 'See <tool_call>find_ship is a call, <tool_call>{"name": "find_ship"}</tool_call> too.', None, []),
        ("glm45", f"{GLM_CALL}\nwithout </tool_call>", "without </tool_call>", ONE),
        (
            "glm45",
            f"<tool_call>find_ship<arg_key>{'x' * 300}</arg_key><arg_value>3",
            f"<arg_key>{'x' * 300}</arg_key><arg_value>3",
            [("find_ship", {})],
        ),
        ("glm45", "<tool_call>find_ship</tool>", None, []),
        ("glm45", "<tool_call>find_ships</tool_call>", None, []),
        ("glm45", "<tool_call>find_ship\n", None, []),
        ("glm45", "<arg_key>masts</arg_key>", None, []),
        # Without closing tags
        ("glm45", "<tool_call>find_ship<arg_key>masts<arg_value>3<arg_key>note<arg_value>null</tool_call>", "", NOTED),
        ("glm45", "<tool_call>find_ship\n<arg_key>masts\n<arg_value>3\n</tool_call>\nso", "so", ONE),
        ("glm45", f"{GLM_CALL.removesuffix('</tool_call>')}{GLM_CALL}", "", ONE * 2),
        ("glm45", f"{GLM_CALL.removesuffix('</tool_call>')}so", "so", ONE),
        (
            "glm45",
            "<tool_call>find_ship\n<arg_key>name</arg_key>\n<arg_value>a\n\n<arg_key>masts</arg_key>\n"
            "<arg_value>3</tool_call>",
            "",
            [("find_ship", {"name": "a\n", "masts": 3})],
        ),
        (
            "glm45",
            "<tool_call>find_ship<arg_key>name</arg_key><arg_value>The Pequod</tool_call>\n",
            "",
            [("find_ship", {"name": "The Pequod"})],
        ),
        *(
            (
                "glm45",
                f"<tool_call>find_ship<arg_key>name</arg_key><arg_value>a</tool_call>{space}{following}so",
                "so",
                [("find_ship", {"name": "a"}), *made],
            )
            for space in ("", "\n")
            for following, made in (
                (GLM_CALL, ONE),
                ("<tool_call>ring-bell.now\n</tool_call>", [("ring-bell.now", {})]),
                (f"<tool_call>find_ship<arg_key>name</arg_key><arg_value>b</tool_call>{GLM_CALL}", [*B, *ONE]),
            )
        ),
        ("glm45", "<tool_call>find_ship<arg_key>masts</arg_key>3", "<arg_key>masts</arg_key>3", [("find_ship", {})]),
        (
            "glm45",
            '<tool_call>find_ship\n<arg_key>at</arg_key>\n<arg_value>{"x": "y}</arg_value>\n<arg_key>masts</arg_key>\n'
            f"<arg_value>3</arg_value>\n</tool_call>\n{GLM_CALL}",
            "",
            [("find_ship", {"at": '{"x": "y}', "masts": 3}), *ONE],
        ),
        ("glm45", "<tool_call>find_ship<arg_key>name</arg_key><arg_value>Peq", "", None),
        ("minimax_m2", f"so\n{MINIMAX_BLOCK}\nso", "soso", ONE * 2),
        ("minimax_m2", f"{MINIMAX_BLOCK}{MINIMAX_BLOCK}", "", ONE * 4),
        ("minimax_m2", f"{MINIMAX_CALL}\n{MINIMAX_CALL}", "", ONE * 2),
        # Calls are in a block.
        ("minimax_m2", f"Like {INVOKE}, they say.", None, []),
        ("minimax_m2", f"In <minimax:tool_call> you write {INVOKE}.", None, []),
        ("minimax_m2", f"{MINIMAX_CALL}\nIt was {INVOKE}.", f"It was {INVOKE}.", ONE),
        ("minimax_m2", MINIMAX_BLOCK.replace("\n", ""), "", ONE * 2),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="ring-bell.now">\n</invoke>', "", [("ring-bell.now", {})]),
        ("minimax_m2", MINIMAX_BLOCK.replace("</invoke>\n", "", 1), "", ONE * 2),
        ("minimax_m2", MINIMAX_BLOCK.replace("</invoke>\n", ""), "", ONE * 2),
        ("minimax_m2", MINIMAX_BLOCK.replace("</parameter>", ""), "", ONE * 2),
        (
            "minimax_m2",
            MINIMAX_BLOCK.replace("find_ship", "sink", 1),
            f"<minimax:tool_call>\n{INVOKE.replace('find_ship', 'sink')}",
            ONE,
        ),
        (
            "minimax_m2",
            MINIMAX_CALL.replace('masts">3', 'name">\n </invoke> <parameter name="x">\n'),
            "",
            [("find_ship", {"name": '\n </invoke> <parameter name="x">\n'})],
        ),
        *(
            ("minimax_m2", MINIMAX_CALL.replace('masts">3', f'name">{text}'), "", [("find_ship", {"name": text})])
            for text in (
                'Like\n<invoke name="find_ship">\n<parameter name="x">\n</invoke>\nthey say',
                '\n<parameter name="name">\n</invoke>\n</minimax:tool_c',
                "a\n</invoke>",
            )
        ),
        (
            "minimax_m2",
            f"{MINIMAX_BLOCK.replace('</parameter>', '')}".replace('masts">3', 'name">b\n<parameter name="masts">3'),
            "",
            [("find_ship", {"name": "b", "masts": 3})] * 2,
        ),
        (
            "minimax_m2",
            MINIMAX_BLOCK.replace('masts">3', 'at">{"x": "y}', 1),
            "",
            [("find_ship", {"at": '{"x": "y}'}), *ONE],
        ),
        ("minimax_m2", MINIMAX_CALL.replace('masts"', 'masts" type="integer"'), "", ONE),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="find_ship"', None, []),
        ("minimax_m2", '<minimax:tool_call><invoke name="find_ship" id="1">', None, []),
        ("minimax_m2", "<minimax:tool_call>find_ship</minimax:tool_call>", None, []),
        ("gemma4", "<|tool_call>call:find_ship{masts:3}<tool_call|>", "", ONE),
        ("gemma4", 'so <|tool_call>call:find_ship{ "masts" : 3 , }<tool_call|>', "so", ONE),
        ("gemma4", '<|tool_call>call:find_ship{<|"|>masts<|"|>:3]<tool_call|>', "", ONE),
        (
            "gemma4",
            "<|tool_call>call:find_ship{note:None,is_lost:True}",
            "",
            [("find_ship", {"note": None, "is_lost": True})],
        ),
        ("gemma4", "<|tool_call>call:find_ship{name:The Pequod}", "", [("find_ship", {"name": "The Pequod"})]),
        (
            "gemma4",
            '<|tool_call>call:find_ship{name:"\\"", at:{x:}}',
            "",
            [("find_ship", {"name": '"', "at": {"x": None}})],
        ),
        ("gemma4", "<|tool_call>call:find_ship{masts}", "", [("find_ship", {"masts": None})]),
        (
            "gemma4",
            '<|tool_call>call:find_ship{at:{a:[1,[],<|"|>}<|"|>]}}',
            "",
            [("find_ship", {"at": {"a": [1, [], "}"]}})],
        ),
        (
            "gemma4",
            '<|tool_call>call:find_ship{masts,name:<|"|>Pequod<|"|>}',
            "",
            [("find_ship", {"masts": None, "name": "Pequod"})],
        ),
        (
            "gemma4",
            '<|tool_call>call:find_ship{masts: ,at:{x,y:1,z},"note",name:[]}',
            "",
            [("find_ship", {"masts": None, "at": {"x": None, "y": 1, "z": None}, "note": None, "name": []})],
        ),
        (
            "gemma4",
            '<|tool_call>call:find_ship{name:"a\nb\t\x01\\n\\x\\u00e9\\u0g\\\n",masts:3}',
            "",
            [("find_ship", {"name": "a\nb\t\x01\n\\xé\\u0g\\\n", "masts": 3})],
        ),
        (
            "gemma4",
            "<|tool_call>call:find_ship{masts:3,masts:[1,{a:2,a:3}],at:{masts:4,masts,x:{y:1},x:{y:2,z:3},y:[{x:5}]},"
            'masts,"masts":<|"|>6<|"|>,name:7}',
            "",
            [("find_ship", {"masts": 3, "at": {"masts": 4, "x": {"y": 1}, "y": [{"x": 5}]}, "name": 7})],
        ),
        ("gemma4", '<|tool_call>call:find_ship{name:<|"|>Pe', "", None),
        ("gemma4", '<|tool_call>call:find_ship{name:"Pe\\u00', "", None),
        ("gemma4", "<|tool_call>find_ship{}<tool_call|>", None, []),
        ("gemma4", "<|tool_call>call:find_ship(masts)<tool_call|>", None, []),
    ],
)
def test_malformed_calls_are_parsed_as_far_as_possible(tools, text, content, made):
    got = read(Formats(tools), text)
    assert got == read(Formats(tools), *text)
    assert got.content == (text if content is None else content)
    if made is not None:
        assert calls(got) == made


@pytest.mark.parametrize(
    ("name", "written", "meant"),
    [
        ("name", "null", "null"),
        ("name", "5", "5"),
        ("name", ' "quoted" \\ ', ' "quoted" \\ '),
        ("name", "\n\nlines\n\n", "\n\nlines\n\n"),
        ("masts", "3", 3),
        ("masts", " 3 ", 3),
        ("masts", "three", "three"),
        ("masts", "NaN", "NaN"),
        ("masts", "[" * 100_000, "[" * 100_000),
        ("is_lost", "True", True),
        ("is_lost", "false", False),
        ("at", '{"x": [1]}', {"x": [1]}),
        ("at", "{'x': [True, None, 'é', \"it's\"], 2: (1.5,)}", {"x": [True, None, "é", "it's"], "2": [1.5]}),
        ("at", "{'x'}", "{'x'}"),
        ("at", "{'x': b'y'}", "{'x': b'y'}"),
        ("at", "{'x': 1e999}", "{'x': 1e999}"),
        ("at", "{'x': '\\ud800'}", "{'x': '\\ud800'}"),
        ("at", "{'x': '\\d'}", {"x": "\\d"}),
        ("at", "{'x': open('y')}", "{'x': open('y')}"),
        ("at", "[" * 5000, "[" * 5000),
        ("at", "['x', " + "1, " * 30_000 + "]", "['x', " + "1, " * 30_000 + "]"),
        ("at", "(1, 2)", "(1, 2)"),
        ("masts", "['x']", "['x']"),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "5", "5"),
        ("anything", "5", 5),
        ("anything", "five", "five"),
        ("unheard_of", '{"a": 1}', {"a": 1}),
    ],
)
@EACH_TAGGED
def test_schema_determines_the_type_of_a_tagged_value(tools, name, written, meant):
    got = read(Formats(tools), WRITTEN_CALLS[tools]("", [("find_ship", {name: written})]))
    assert calls(got) == [("find_ship", {name: meant})]


@pytest.mark.parametrize(("name", "first", "second"), [("masts", 3, 4), ("name", "Rachel", "Rachel\n")])
@EACH_TAGGED
def test_first_value_of_a_repeated_tagged_parameter_counts(tools, name, first, second):
    keys = {f"{i}{name}": value for i, value in enumerate((first, second, first))}
    text = WRITTEN_CALLS[tools]("", [("find_ship", {**keys, "is_lost": True})])
    for key in keys:
        text = text.replace(key, name)
    [call] = read(Formats(tools), text).calls
    pairs = json.loads(call.arguments, object_pairs_hook=list)
    assert pairs == [(name, first), ("is_lost", True)]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("qwen3_coder", "<function=find_ship><parameter=masts>3</parameter><parameter=masts>4"),
        ("glm45", f"{GLM_CALL.removesuffix('</tool_call>')}<arg_key>masts</arg_key><arg_value>4"),
        ("seed_oss", "<function=find_ship><parameter=masts>3</parameter><parameter=masts>4"),
        ("minimax_m2", f'{MINIMAX_CALL.partition("</invoke>")[0]}<parameter name="masts">4'),
    ],
)
def test_text_that_ends_in_a_repeated_value_leaves_the_call_open(tools, text):
    [call] = read(Formats(tools), text).calls
    assert call.arguments == '{"masts": 3'


@pytest.mark.parametrize("content", ["", "Ahoy."])
def test_glm_calls_need_no_line_ends(content):
    made = [("find_ship", {"name": "\nPequod\n", "masts": 3, "at": {"x": "</arg_value>"}}), ("ring-bell.now", {}), *ONE]
    text = content + write_glm47(content, made)
    assert "\n" not in text.replace("\nPequod\n", "")
    got = read(Formats("glm45"), text)
    assert got == read(Formats("glm45"), *text)
    assert (got.content, calls(got)) == (content, made)


@pytest.mark.parametrize("end", ["", "\n"])
def test_end_of_a_glm_call_inside_a_string_leaves_a_call_that_is_cut_off_open(end):
    text = f"<tool_call>find_ship<arg_key>name</arg_key><arg_value>a</tool_call>{end}"
    for stop, arguments in ((None, '{"name": "a"}'), ("", '{"name": "a'), ("b", '{"name": "a')):
        [call] = read(Formats("glm45"), text, cut_before=stop).calls
        assert call.arguments == arguments


@pytest.mark.parametrize(
    ("tools", "call"),
    [("glm45", GLM_CALL), ("minimax_m2", MINIMAX_CALL), ("seed_oss", SEED_CALL), ("hunyuan", HUNYUAN_CALL)],
)
@pytest.mark.parametrize("mentioned", ["{}", "hm\n{}\nBut no.", "hm <tool_call>find_ship", "hm\n<tool_call>\n{}"])
@pytest.mark.parametrize("answer", ["", "so", "{}"])
def test_calls_in_reasoning_stay_reasoning(tools, call, mentioned, answer):
    mentioned = mentioned.format(call)
    got = read(Formats(tools, "think"), f"{mentioned}</think>{answer.format(call)}", opened=True)
    made = ONE if answer == "{}" else []
    assert (got.reasoning, got.content, calls(got)) == (mentioned, "" if made else answer, made)


UNENDED = CODED.removesuffix("</function>\n</tool_call>")


def check_reasoning(text, reasoning, content, made, opened):
    formats = Formats("qwen3_coder", "think")
    text = text if opened else f"<think>\n{text}"
    got = read(formats, text, opened=opened)
    assert got == read(formats, *text, opened=opened)
    assert (got.reasoning, got.content, calls(got)) == (reasoning, content, made)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "made"),
    [
        (f"hm\n{CODED}", "hm", "", ONE),
        (f"hm\n{CODED}\n{CODED}", "hm", "", ONE * 2),
        (f"hm\n{CODED}\n</think>\n\nso", "hm", "so", ONE),
        (f"hm\n{CODED}\n</think>\n\n{CODED}", "hm", "", ONE * 2),
        (f"{CODED}{CODED}", "", "", ONE * 2),
        (f"hm\n{CODED}\n{CODED[len('<tool_call>') :]}", "hm", "", ONE * 2),
        (f"hm\n{CODED.removesuffix('</tool_call>')}{CODED}", "hm", "", ONE * 2),
        (f"hm\n{UNENDED}</tool_call>\n</think>\n\nso", "hm", "so", ONE),
        (f"hm\n{UNENDED}</think>\n\nso", "hm", "so", ONE),
        ("<tool_call>\n<function=ring-bell.now>\n</function>\n</tool_call>\n", "", "", [("ring-bell.now", {})]),
        (f"hm <tool_call> hm\n</think>\n\n{CODED}", "hm <tool_call> hm", "", ONE),
        (f"hm <tool_call>\n{CODED}", "hm <tool_call>", "", ONE),
        ("<tool_call></think>so", "<tool_call>", "so", []),
        ("<tool_call>\n<</think>so", "<tool_call>\n<", "so", []),
        ("<tool_call>\n<function=sink></think>so", "<tool_call>\n<function=sink>", "so", []),
        ("<function=find_ship>\n</function></think>so", "<function=find_ship>\n</function>", "so", []),
        ("hm <tool_call>\n<", "hm <tool_call>\n<", "", []),
    ],
)
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_qwen_calls_in_unclosed_reasoning(text, reasoning, content, made, opened):
    check_reasoning(text, reasoning, content, made, opened)


NAMED = "<tool_call>\n<function=find_ship>"


@pytest.mark.parametrize(
    "reasoning",
    [
        f"I could write {NAMED} here.\nBut no.",
        f"Like `{CODED}`, they say.",
        f"hm {CODED}",
        f"  {CODED}",
        NAMED,
        f"hm\n{NAMED} here.\nBut no.",
        f"hm\n{NAMED}\nhm\n</function>",
        f"hm\n{NAMED}\n<parameter=\nhm>",
        f"hm\n{NAMED}\n<parameters>\nhm",
        f"hm\n{NAMED}\n{NAMED}\n</",
        f"hm\n{NAMED}\n<parameter=a",
    ],
)
@pytest.mark.parametrize("answer", ["", "so", CODED])
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_a_call_that_reasoning_mentions_stays_reasoning(reasoning, answer, opened):
    made = ONE if answer == CODED else []
    content = "" if made else answer
    check_reasoning(f"{reasoning}\n</think>\n\n{answer}", reasoning, content, made, opened)


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        (f"hm\n{CODED}\nBut no.", "hm\nBut no."),
        (f"hm\n{CODED} But\nno.", "hm But\nno."),
        (f"hm\n{CODED}\n{NAMED}\nBut no.", f"hm\n{NAMED}\nBut no."),
        (f"hm\n{CODED.removesuffix('</tool_call>')}or\n</tool_call>\nno.", "hm\nor\nno."),
        (f"hm\n{UNENDED}But no.", "hm\nBut no."),
        (f"```\n{CODED}\n```", "```\n```"),
        (f"hm\n{CODED}\nor </function> alone.", "hm\nor </function> alone."),
    ],
)
@pytest.mark.parametrize("answer", ["", "so"])
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_text_after_a_call_in_unclosed_reasoning_is_reasoning(text, reasoning, answer, opened):
    check_reasoning(text + (answer and f"\n</think>\n\n{answer}"), reasoning, answer, ONE, opened)


@PROPERTY
@given(
    st.lists(
        st.sampled_from((*CODED.splitlines(keepends=True), *"\n<xa ", "</t", "</", "<parameter=", "</tool_call>"))
    ),
    st.lists(st.integers(0, 500)),
    st.sampled_from((None, "", "</fu", "\n")),
)
def test_reasoning_that_is_not_closed_has_no_content(fragments, cuts, cut_before):
    formats, text = Formats("qwen3_coder", "think"), "".join(fragments)
    got = read(formats, text, opened=True, cut_before=cut_before)
    assert got == read(formats, *split(text, cuts), opened=True, cut_before=cut_before)
    assert got.content == ""


@pytest.mark.parametrize("end", range(len("hm\n<tool_call>\n<function=find_ship>\n<parameter=masts>")))
def test_a_call_that_is_cut_off_is_no_reasoning(end):
    reader = parser(Formats("qwen3_coder", "think"), opened=True)
    text = f"hm\n{CODED}"[:end]
    got = join([*reader.feed(text), *reader.finish(cut_before="")])
    assert (got.content, got.calls) == ("", ()) and got.reasoning.strip() == text[:2] and reader.is_reasoning


def test_where_a_grammar_closes_the_reasoning_it_has_no_calls():
    reader = message_parser(
        Formats("qwen3_coder", "think"), tools=TOOLS, opened=True, new_id=lambda: "call", closes_reasoning=True
    )
    got = join([*reader.feed(f"hm\n{CODED}\n</think>\n\n{CODED}"), *reader.finish()])
    assert (got.reasoning, got.content, calls(got)) == (f"hm\n{CODED}", "", ONE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("so", Message("so", "", ())),
        ("<|channel|>final<|message|>so<|return|>", Message("so", "", ())),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", ("", "a\nb")),
        ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", ("a\nb", "")),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assist", ("", "a")),
        ("<|channel|>" + "x" * 300, ("<|channel|>" + "x" * 300, "")),
    ],
)
def test_gpt_oss_messages_are_parsed(text, message):
    got = read(Formats("gpt_oss", "gpt_oss"), text)
    assert got[:2] == message[:2]


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.find_ship<|channel|>commentary json",
        "<|start|>assistant to=functions.find_ship<|channel|>analysis",
    ],
)
def test_gpt_oss_recipient_is_found_in_the_header(header):
    assert calls(read(Formats("gpt_oss", "gpt_oss"), f'{header}<|message|> {{"masts": 3}}\n<|call|>')) == ONE
    assert calls(read(Formats("gpt_oss", "gpt_oss"), f"{header}<|message|><|call|>")) == [("find_ship", {})]


def steps(formats: Formats, text: str) -> int:
    """Return the number of lines that the parsers execute for a text."""
    folder = str(pathlib.Path(select.__file__).parent)
    ours: dict[Any, Any] = {}  # code -> what traces it; a generator is asked about at every character
    count = 0

    def trace(frame, event, argument):
        code = frame.f_code
        if code not in ours:
            ours[code] = trace_lines if code.co_filename.startswith(folder) else None
        return ours[code]

    def trace_lines(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace_lines

    sys.settrace(trace)
    try:
        read(formats, text)
    finally:
        sys.settrace(None)
    return count


@EACH
@pytest.mark.parametrize(
    "unit",
    [
        *("<", "<tool_call", "<tool_call>", "<tool_call>{", '<tool_call>{"name": "', " ", "\n", "[", "{", '"', "\\"),
        *("<think>", "</", "<function=find_ship>", "<function=find_ship><parameter=name>\n", "[TOOL_CALLS]", "[{"),
        *("<arg_key>", "<arg_key>a</arg_key><arg_value>", "<tool_call>find_ship<arg_key>", "</tool_call> "),
        *('<invoke name="find_ship">', '<invoke name="find_ship"><parameter name="name">', "</invoke>"),
        *("[TOOL_CALLS]a[CALL_ID]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<|channel|>", "<|start|>"),  # noqa: RUF001
        "<|channel|>x<|message|>",
        *("<|tool_call>", "<|tool_call>call:find_ship{", '<|"|>', "<|", "a:", ","),
    ],
)
def test_time_is_linear_in_the_length_of_the_text(formats, unit):
    call = write(formats, "", "", [("find_ship", {"name": ""})])[:-20]
    # Formats that differ in the block of reasoning alone read the same outside of it.
    outside = ("", call) if formats.reasoning in ("think", formats.tools) else ()
    for before in (*outside, BLOCKS[formats.reasoning].opens):
        once, twice = (steps(formats, before + unit * (times * max(300 // len(unit), 20))) for times in (1, 2))
        assert twice <= 2.3 * once + 500  # the first characters cost more or less than those that follow


def test_adjacent_parts_of_one_kind_are_merged():
    got = parts(Formats("hermes", "think"), [f"<think>hm</think>so it is{write_hermes('', ONE)}"])
    assert got[:2] == [Reasoning("hm"), Content("so it is")]
    assert got[2:] == [Call(0, "call_0", "find_ship"), Arguments(0, '{"masts": 3}')]


KIMI_CALL = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.find_ship:0", "find_ship"),
        ("functions.find_ship:12", "find_ship"),
        ("find_ship:0", "find_ship"),
        ("functions.find_ship", "find_ship"),
        (" find_ship \n", "find_ship"),
        ("functions.ring-bell.now:3", "ring-bell.now"),
        ("functions.a:1", "functions.a:1"),
        ("functions.functions.a:1:0", "functions.a:1"),
    ],
)
def test_an_id_of_kimi_names_the_function(call_id, name):
    message = read(Formats("kimi_k2"), KIMI_CALL.format(call_id), tools={**TOOLS, "functions.a:1": {}})
    assert (calls(message), message.content) == ([(name, {})], "")


def test_kimi_may_call_before_it_has_closed_its_reasoning():
    formats = Formats("kimi_k2", "think")
    text = f"<think>I look for it.{KIMI_CALL.format('functions.find_ship:0')}<|tool_calls_section_end|>"
    for got in (read(formats, text), read(formats, *text)):
        assert (got.reasoning, got.content, calls(got)) == ("I look for it.", "", [("find_ship", {})])
    mentioned = "<think>It begins with <|tool_calls_section_begin|>, I think.</think>So."
    got = read(formats, mentioned)
    assert (got.reasoning, got.content) == ("It begins with <|tool_calls_section_begin|>, I think.", "So.")


@pytest.mark.parametrize(
    ("text", "content", "made"),
    [
        ('find_ship\n{"masts": 3}', "", [("find_ship", {"masts": 3})]),
        ("\nfind_ship \n{}", "", [("find_ship", {})]),
        ("find_ship\n{}\nring-bell.now\n{}", "", [("find_ship", {}), ("ring-bell.now", {})]),
        ("\nI ring.<|assistant|>ring-bell.now\n{}", "\nI ring.", [("ring-bell.now", {})]),
        ("\nSo.<|assistant|>\nI ring.", "\nSo.\nI ring.", []),
        ("find_ship looks for ships:\n{}", "find_ship looks for ships:\n{}", []),
        ("So:\nfind_ship\n{}", "So:\nfind_ship\n{}", []),
        ("find_ship", "find_ship", []),
    ],
)
def test_a_call_of_glm4_is_a_message_of_its_own(text, content, made):
    for got in (read(Formats("glm4"), text), read(Formats("glm4"), *text)):
        assert (got.content, calls(got)) == (content, made)


def test_what_cannot_become_a_call_of_glm4_is_content_when_it_is_cut_off():
    for text, content in (("find_sh", ""), ("find_ship\n", ""), ("finds", "finds"), ("find_ship\nhm", "find_ship\nhm")):
        reader = parser(Formats("glm4"))
        assert join(reader.feed(text) + reader.finish(cut_before="")).content == content


def test_messages_of_solar_open_follow_each_other():
    formats = Formats("solar_open", "solar_open")
    text = (
        "<|think|>hm<|end|><|begin|>assistant<|content|>I look.<|end|><|begin|>assistant<|tool_calls|>"
        '<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>find_ship<|tool_call:args|>{"name": "<|end|>"}<|tool_call:end|>'
        "<|tool_call:begin|>a1b2c3d4e6<|tool_call:name|>ring-bell.now<|tool_call:args|>{}<|tool_call:end|><|calls|>"
    )
    for got in (read(formats, text), read(formats, *text)):
        assert (got.reasoning, got.content) == ("hm", "I look.")
        assert calls(got) == [("find_ship", {"name": "<|end|>"}), ("ring-bell.now", {})]
    assert read(formats, "<|content|>So.<|flush|>") == Message("So.", "", ())
