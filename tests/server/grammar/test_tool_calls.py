"""Random texts that a call grammar allows are valid calls to the parser of its format."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher

from engine import GrammarTrial, builtin
from engine.grammar import limits, source
from engine.grammar.table import Table
from server.grammar.rules import Lark, TooLong
from server.grammar.schemas import MAX_WRITTEN, find_problem
from server.grammar.tool_calls import arguments, call_grammar
from server.parsers.formats import BLOCKS, IN_MESSAGES, REASONING_FORMATS, TOOL_FORMATS, Formats, delimiters
from server.parsers.parts import join
from server.parsers.select import message_parser
from tests.server.parsers.test_parsers import WRITTEN_CALLS, read

TOOLS = {
    "find_ship": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "as painted"},
            "masts": {"type": "integer", "minimum": 1, "maximum": 5},
            "rig": {"type": "string", "enum": ["brig", "full\n", '"a\\b"']},
            "logs": {"type": "array", "items": {"enum": ["</parameter>", "}", 3]}, "maxItems": 2},
            "at": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["name", "logs"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
    },
    "find": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
    "ring_bell": {},
}
EACH = pytest.mark.parametrize("tools", TOOL_FORMATS)
ENDINGS = [
    '"',
    '"}',
    "}",
    "]",
    '"]',
    ",",
    ":",
    "\n",
    " ",
    "1",
    "\n</parameter>",
    "</arg_value>",
    '<|"|>',
    "<tool_call|>",
    "</think>",
    "<|end|>",
    "</",
    "<",
    "[",
    "{",
]


class Sampler:
    """Samples completions from grammars, as a model with equal logits that prefers tokens which close something."""

    def __init__(self, path) -> None:
        self.library = tokenizers.Tokenizer.from_file(str(path))
        size = self.library.get_vocab_size()
        self.special = {token.content: i for i, token in self.library.get_added_tokens_decoder().items()}
        self.table = Table(path.read_bytes(), size)
        self.endings = [self.library.encode(text, add_special_tokens=False).ids for text in ENDINGS]

    def matcher(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self.table.library, source("lark", lark), limits=limits(), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allows(self, lark: str, text: str) -> bool:
        matcher = self.matcher(lark)
        ids = self.library.encode(text, add_special_tokens=False).ids
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def sample(self, lark: str, rng: random.Random, max_tokens: int = 500) -> str | None:
        """Return one completion; None if it is longer than `max_tokens`."""
        matcher = self.matcher(lark)
        bits = np.zeros(-(-self.table.library.vocab_size // 32), np.int32)
        ids: list[int] = []
        while len(ids) < max_tokens:
            if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.3):
                return self.library.decode(ids, skip_special_tokens=False)
            ending = rng.choice(self.endings)
            if rng.random() < 0.6 and matcher.validate_tokens(ending) == len(ending):
                matcher.consume_tokens(ending)
                ids += ending
                continue
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            assert not matcher.is_error(), matcher.get_error()
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed[allowed != self.table.end_id]))
            assert matcher.consume_token(token), self.library.id_to_token(token)
            ids.append(token)
        return None


@pytest.fixture(scope="module")
def small() -> Sampler:
    return Sampler(builtin.path() / "tokenizer.json")


@pytest.fixture(scope="module")
def marked(tmp_path_factory) -> Sampler:
    """The small vocabulary with all delimiters of reasoning as tokens."""
    path = tmp_path_factory.mktemp("marked") / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))
    library.add_special_tokens(sorted(text for name in REASONING_FORMATS for text in delimiters(Formats(None, name))))
    library.save(str(path))
    return Sampler(path)


@pytest.fixture(scope="module")
def large(data) -> Sampler:
    """Qwen3's vocabulary, in which the delimiters of calls and reasoning are tokens."""
    return Sampler(data / "tokenizers/qwen3/tokenizer.json")


def formats_of(tools: str, reasoning: bool = True) -> Formats:
    return Formats(tools, tools if tools in IN_MESSAGES else "think" if reasoning else None)


def check(text: str, formats: Formats, tools, opened: bool = False) -> int:
    """Parse a completion, assert that its calls are valid, and return their number."""
    ids = itertools.count()
    reader = message_parser(formats, tools=tools, opened=opened, new_id=lambda: str(next(ids)))
    message = join([*reader.feed(text), *reader.finish()])
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), tools[call.name] or {"type": "object"})
    return len(message.calls)


def sample_all(sampler: Sampler, formats: Formats, tools, times: int, **options) -> list[int]:
    """Return the number of calls in each completion that came to an end."""
    made = call_grammar(formats, tools, special=sampler.special, **options)
    assert find_problem(made.kind, made.text) is None
    counts = []
    for seed in range(times):
        text = sampler.sample(made.text, random.Random(seed))
        if text is not None:
            counts.append(check(text, made.formats, tools, options["opened"]))
    return counts


@EACH
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_sampled_calls_are_valid(small, tools, opened):
    formats = formats_of(tools)
    several = sample_all(small, formats, TOOLS, 12, required=True, parallel=True, opened=opened)
    single = sample_all(small, formats, TOOLS, 12, required=True, parallel=False, opened=opened)
    assert len(several) >= 4 and len(single) >= 4, "a third of the completions come to an end"
    assert min(several) >= 1 and set(single) == {1}
    assert max(several) > 1 or tools == "gpt_oss"


@EACH
def test_delimiters_that_are_tokens_are_sampled_as_tokens(large, tools):
    counts = sample_all(large, formats_of(tools), TOOLS, 6, required=True, parallel=True, opened=False)
    assert counts and min(counts) >= 1


@EACH
def test_named_function_is_called_once(small, tools):
    made = call_grammar(
        formats_of(tools, False), {"ring_bell": {}}, required=True, parallel=False, opened=False, special=small.special
    )
    texts = [small.sample(made.text, random.Random(seed)) for seed in range(5)]
    messages = [read(made.formats, text, tools=TOOLS) for text in texts if text is not None]
    assert messages
    assert all([call.name for call in message.calls] == ["ring_bell"] for message in messages)


@EACH
def test_without_required_the_completion_may_be_text_but_no_invalid_call(small, tools):
    formats = formats_of(tools)
    made = call_grammar(formats, TOOLS, required=False, parallel=True, opened=False, special=small.special)
    forced = call_grammar(formats, TOOLS, required=True, parallel=True, opened=False, special=small.special)
    call = next(text for seed in range(50) if (text := small.sample(forced.text, random.Random(seed))) is not None)
    prose = {"gpt_oss": "<|channel|>final<|message|>The sea.", "solar_open": "<|content|>The sea."}.get(
        tools, "The sea."
    )
    assert small.allows(made.text, prose) and not small.allows(forced.text, prose)
    assert small.allows(made.text, call)
    if tools not in ("json", "llama3_json", *IN_MESSAGES):
        assert small.allows(made.text, f"The sea. {call}") or "<think>" in call
        assert not small.allows(made.text, f"{FIRST[tools]} and then")


FIRST = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral_v11": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call>",
    "glm4": "<|assistant|>",
    "glm45": "<tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "seed_oss": "<seed:tool_call>",
    "minimax_m2": "<minimax:tool_call>",
    "nemotron_json": "<TOOLCALL>",
    "hunyuan": "<tool_calls>",
    "hunyuan_a13b": "<tool_calls>",
    "deepseek_v3": "<\uff5ctool▁calls▁begin\uff5c>",
    "deepseek_v31": "<\uff5ctool▁calls▁begin\uff5c>",
    "gemma4": "<|tool_call>",
}


def test_text_of_glm4_does_not_begin_like_a_call(small):
    tools = {"find": {"type": "object", "properties": {"deep": {"type": "boolean"}}}, "ring": {}}
    options = {"parallel": True, "opened": False, "special": small.special}
    free = call_grammar(Formats("glm4"), tools, required=False, **options).text
    for text in ("find", "\nfind is\n{}", "So:\nfind\n{}", 'find\n{"deep": true}', "So.<|assistant|>ring\n{}"):
        assert small.allows(free, text), text
    for text in ("find\n{", "find\nit", "\nfind \n{}", "find\n{} so", "So.<|assistant|>so"):
        assert not small.allows(free, text), text
    several = 'find\n{"deep": true}<|assistant|>ring\n{}'
    forced = call_grammar(Formats("glm4"), tools, required=True, **options).text
    single = call_grammar(Formats("glm4"), tools, required=True, **{**options, "parallel": False}).text
    assert small.allows(forced, several) and not small.allows(single, several)
    assert not small.allows(forced, "So.")


@pytest.mark.parametrize("reasoning", IN_MESSAGES)
def test_without_a_format_of_calls_the_completion_is_in_the_messages_that_are_parsed(small, reasoning):
    options = {"required": False, "parallel": True, "opened": False, "special": small.special}
    made = call_grammar(Formats(None, reasoning), {}, content=("regex", "[a-z]+"), **options)
    opens = {"gpt_oss": "<|channel|>final<|message|>", "solar_open": "<|content|>"}[reasoning]
    assert small.allows(made.text, f"{opens}sea") and not small.allows(made.text, "sea")
    assert read(made.formats, f"{opens}sea").content == "sea"


def call_of(tools: str, arguments: dict[str, str], name: str = "f", line: str = "\n") -> str:
    """Return a call between tags. `line`: what GLM writes between them."""
    if tools == "qwen3_coder":
        each = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>"
    if tools == "seed_oss":
        each = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
        return f"<seed:tool_call>\n<function={name}>\n{each}</function>\n</seed:tool_call>"
    if tools == "minimax_m2":
        each = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        return f'<minimax:tool_call>\n<invoke name="{name}">\n{each}</invoke>\n</minimax:tool_call>'
    each = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{line}{each}</tool_call>"


EACH_TAGGED = pytest.mark.parametrize("tools", ["qwen3_coder", "seed_oss", "glm45", "minimax_m2"])


@EACH_TAGGED
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": ["</parameter></arg_value>"]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"enum": ["x", 1]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"enum": ["None", "x"]}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["null", "x"]}}},
        {"type": "object", "properties": {"a": {"enum": ["None", None]}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"], "const": "null"}}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"type": "string", "format": "date"}},
        },
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
        {"type": "object", "properties": {"<a>b": {"type": "integer"}}},
        {"type": "object", "properties": {"a\nb": {"type": "integer"}}},
        {"type": "object", "properties": {" a": {"type": "integer"}}},
        {"type": "object", "properties": {"a" * 201: {"type": "integer"}}},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_arguments_that_tags_cannot_express_are_written_as_json(tools, schema):
    made = call_grammar(Formats(tools, "think"), {"f": schema}, required=True, parallel=True, opened=False, special={})
    assert made.formats == Formats("json", "think")


RIG = {"enum": ["bark", "brig"], "type": "string"}


@EACH_TAGGED
@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string"}, {"null": "null", "5": "5", "a\n\nb ": "a\n\nb "}, []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"null": None, "5": "5", "a\nb": "a\nb"}, []),
        ({"type": ["string", "null"]}, {"null": None, "a": "a"}, []),
        ({"$ref": "#/$defs/rig"}, {"bark": "bark"}, ["null", "ship", '"bark"']),
        ({"anyOf": [{"$ref": "#/$defs/rig"}, {"type": "null"}]}, {"brig": "brig", "null": None}, ["ship"]),
        ({"type": ["string", "null"], "enum": ["bark", None]}, {"bark": "bark", "null": None}, ["brig"]),
        ({"type": "string", "enum": ["bark", None]}, {"bark": "bark"}, ["null"]),
        ({"type": "string", "enum": ["None", "null"]}, {"None": "None", "null": "null"}, ["bark"]),
        ({"const": "bark", "type": "string"}, {"bark": "bark"}, ["null", "brig"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"5": 5, "null": None}, ["five"]),
        ({"type": "boolean"}, {"true": True}, ["True", "5"]),
        ({"type": "object", "required": ["b"], "properties": {"b": {}}}, {'{"b": "x"}': {"b": "x"}}, ["x", "{}"]),
        ({"type": "array", "items": {"$ref": "#/$defs/rig"}}, {'["bark"]': ["bark"]}, ['["ship"]']),
    ],
)
def test_values_between_tags_follow_their_schema(small, tools, schema, allowed, refused):
    functions = {"f": {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"rig": RIG}}}
    formats = Formats(tools, "think")
    made = call_grammar(formats, functions, required=True, parallel=False, opened=True, special=small.special)
    assert made.formats == formats
    for value in (*allowed, *refused):
        text = f"hm\n</think>\n\n{call_of(tools, {'a': value})}"
        assert small.allows(made.text, text) == (value in allowed), value
        if value in allowed:
            [parsed] = read(formats, text, opened=True, tools=functions).calls
            assert json.loads(parsed.arguments) == {"a": allowed[value]}


@pytest.mark.parametrize("tools", ["hunyuan", "hunyuan_a13b", "nemotron_json"])
def test_calls_in_one_block_are_written_as_the_template_shows_them(small, tools):
    def written(*made):
        return WRITTEN_CALLS[tools]("", [(name, {}) for name in made])

    options = {"required": True, "opened": False, "special": small.special}
    for parallel in (True, False):
        made = call_grammar(Formats(tools), TOOLS, parallel=parallel, **options)
        assert made.formats == Formats(tools)
        assert small.allows(made.text, written("find"))
        assert small.allows(made.text, written("find", "ring_bell")) == parallel
        assert not small.allows(made.text, written("sink")) and not small.allows(made.text, written("find_ship"))


@pytest.mark.parametrize("spelling", ["characters", "tokens"])
@pytest.mark.parametrize(("reasoning", "tag"), [("hunyuan_a13b", "answer"), ("ernie45", "response")])
def test_calls_and_content_may_be_an_answer_between_tags(request, small, spelling, reasoning, tag):
    sampler = small if spelling == "characters" else request.getfixturevalue("marked")
    formats = Formats("hermes", reasoning)
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    forced = shaped(sampler, formats, TOOLS, required=True)
    strict = shaped(sampler, formats, TOOLS)
    whale = shaped(sampler, formats, content=("json_schema", json.dumps(WHALE)))
    quiet = shaped(sampler, formats, content=("json_schema", json.dumps(WHALE)), budget=0)
    for before, after in (("", ""), (f"<{tag}>\n", f"\n</{tag}>"), (f"<{tag}>", "")):
        for thought in ("", "<think>\nhm\n</think>\n\n"):
            for lark, written in ((forced, call), (strict, call), (strict, "The sea."), (whale, '{"teeth": 50}')):
                text = f"{thought}{before}{written}{after}"
                assert sampler.allows(lark, text), text
                message = read(formats, text, tools=TOOLS)
                assert (message.content, len(message.calls)) == (("", 1) if written == call else (written, 0))
            assert sampler.allows(quiet, f'{thought}{before}{{"teeth": 50}}{after}') == (not thought)
    assert not sampler.allows(forced, f"<{tag}>\nThe sea.\n</{tag}>")


def test_minimax_calls_are_in_one_block(small):
    options = {"required": True, "opened": False, "special": small.special}
    one = call_of("minimax_m2", {}, "find")
    call = one.removeprefix("<minimax:tool_call>\n").removesuffix("</minimax:tool_call>")
    for parallel in (True, False):
        made = call_grammar(Formats("minimax_m2"), TOOLS, parallel=parallel, **options)
        assert made.formats == Formats("minimax_m2")
        assert small.allows(made.text, one)
        assert small.allows(made.text, one.replace(call, call * 2)) == parallel
        assert not small.allows(made.text, one + one) and not small.allows(made.text, one.replace(call, ""))


def test_line_ends_between_glm_tags_are_optional(small):
    formats = Formats("glm45")
    options = {"required": True, "opened": False, "special": small.special}
    several = call_grammar(formats, TOOLS, parallel=True, **options)
    single = call_grammar(formats, TOOLS, parallel=False, **options)
    assert several.formats == single.formats == formats
    for line in ("", "\n"):
        call = call_of("glm45", {"name": "a\n", "logs": '[3, "}"]'}, "find_ship", line)
        for name in ("find", "ring_bell"):
            text = f"{call}{line}{call_of('glm45', {}, name, line)}"
            assert small.allows(several.text, text) and not small.allows(single.text, text)
            assert [made.name for made in read(formats, text, tools=TOOLS).calls] == ["find_ship", name]
        assert small.allows(single.text, call)
        assert not small.allows(single.text, call_of("glm45", {"name": "a"}, "find_ship", line)), "logs are required"
        assert not small.allows(single.text, call.replace("logs", "log"))
        assert not small.allows(single.text, call.replace("find_ship", "sink"))


@pytest.mark.parametrize(
    "inner",
    [
        {"type": "string", "pattern": "^x"},
        {"enum": ['<|"|>']},
        {"enum": [{"a": 1}]},
        {"type": "array", "items": {"type": "null"}, "maxItems": 10**6},
        {"type": "object", "required": ["b"]},
        {"type": "object", "minProperties": 1},
        {"type": "integer", "anyOf": [{"$ref": "#/$defs/b"}]},
        {"type": "string", "enum": [1, None]},
        {"const": 1, "enum": [True, 2]},
        {"type": "object", "properties": {"a:b": {"type": "null"}}},
        {"$ref": "#"},
        {"$ref": "#b"},
        {"allOf": [{"type": "string"}]},
    ],
)
def test_arguments_that_gemma_cannot_express_are_written_as_json(inner):
    tools = {"f": {"type": "object", "properties": {"a": inner}, "$defs": {"b": {"maximum": 1}}}}
    made = call_grammar(Formats("gemma4"), tools, required=True, parallel=True, opened=False, special={})
    assert made.formats == Formats("json")


def test_arguments_of_gemma_follow_their_schemas(small):
    made = call_grammar(Formats("gemma4"), TOOLS, required=True, parallel=True, opened=False, special=small.special)
    assert made.formats == Formats("gemma4")
    for written, allowed in (
        ('{name:<|"|>a }<|"|>,logs:[]}', True),
        ('{name:<|"|>a<|"|>,masts:3,rig:<|"|>"a\\b"<|"|>,logs:[3,<|"|>}<|"|>],at:{x:true},note:null}', True),
        ('{name:<|"|>a<|"|>,logs:[3,3,3]}', False),
        ('{name:<|"|>a<|"|>,masts:9,logs:[]}', False),
        ('{name:<|"|>a<|"|>}', False),
        ("{logs:[]}", False),
        ('{name:"a",logs:[]}', False),
    ):
        text = f"<|tool_call>call:find_ship{written}<tool_call|>"
        assert small.allows(made.text, text) == allowed, written
        assert small.allows(made.text, text * 2) == allowed
    assert small.allows(made.text, "<|tool_call>call:find{}<tool_call|><|tool_call>call:ring_bell{}<tool_call|>")


ANY = {"type": "object"}


@EACH
@pytest.mark.parametrize("required", [False, True], ids=["free", "required"])
def test_functions_with_any_arguments_are_called_in_the_native_format(small, tools, required):
    formats = formats_of(tools, False)
    made = call_grammar(
        formats, {"f": ANY, **TOOLS}, required=required, parallel=True, opened=False, special=small.special
    )
    assert made.formats == formats
    assert find_problem(made.kind, made.text) is None


@pytest.mark.parametrize(
    ("tools", "value", "allowed"),
    [
        ("qwen3_coder", "x <parameter=b>", True),
        ("qwen3_coder", "</function>\n</tool_call>", True),
        ("qwen3_coder", "x\n</functions>", True),
        ("qwen3_coder", "x\n</function>\ny", True),
        ("qwen3_coder", "x\n</function>\n</tool_call>\ny", False),
        ("qwen3_coder", "x\n</function><function=f>", False),
        ("qwen3_coder", "x\n<parameter=b>\ny", False),
        ("seed_oss", "\nx\n</function>\n", True),
        ("seed_oss", "</function>\n</seed:tool_call>", True),
        ("seed_oss", "x\n</function> </seed:tool_call>", False),
        ("seed_oss", "x\n<parameter=b>\ny", False),
        ("minimax_m2", 'x <parameter name="b">', True),
        ("minimax_m2", "\nx\n</invokes>", True),
        ("minimax_m2", 'x\n</invoke>\n<parameter="b">', True),
        ("minimax_m2", "x\n</invoke>\n</minimax:tool_call>", False),
        ("minimax_m2", 'x\n</invoke>\n<invoke name="f">', False),
        ("minimax_m2", 'x\n<parameter name="b">\ny', False),
        ("glm45", "x <arg_key>", True),
        ("glm45", "x\n</tool_call>\nf <tool_call>\n", True),
        ("glm45", "x</tool_call>\n<tool_call>f\n<arg_key>", False),
        ("glm45", "x</tool_call><tool_call>f</tool_call>", False),
        ("glm45", "x\n<arg_value>", True),
        ("glm45", "x\n<arg_key>", False),
        ("glm45", "x</arg_value>y", False),
    ],
)
@pytest.mark.parametrize("parameters", [ANY, {"type": "object", "properties": {"b": {}, "a": {"type": "string"}}}])
def test_values_between_tags_hold_no_tag_that_ends_them(small, tools, value, allowed, parameters):
    lark = shaped(small, Formats(tools), {"f": parameters}, required=True)
    text = call_of(tools, {"a": value})
    assert small.allows(lark, text) == allowed
    made = [json.loads(call.arguments) for call in read(Formats(tools), text, tools={"f": parameters}).calls]
    assert (made == [{"a": value}]) == allowed


GEMMA_OBJECTS = [
    ("{}", {}),
    (
        '{name:<|"|>Pequod, {a}<|"|>,masts:-3.5e2,at:{x:[],y:{z:null}},logs:[true,<|"|><|"|>,[{a:1}]]}',
        {"name": "Pequod, {a}", "masts": -350.0, "at": {"x": [], "y": {"z": None}}, "logs": [True, "", [{"a": 1}]]},
    ),
    ("{first name:1,content-type:2,été:3,0:4}", {"first name": 1, "content-type": 2, "été": 3, "0": 4}),
]


@pytest.mark.parametrize("vocabulary", ["small", "tokens"])
def test_gemma_writes_any_arguments(small, tmp_path, vocabulary):
    sampler = small
    if vocabulary == "tokens":
        library = tokenizers.Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))
        library.add_special_tokens(sorted(delimiters(Formats("gemma4", "gemma4"))))
        library.save(str(tmp_path / "tokenizer.json"))
        sampler = Sampler(tmp_path / "tokenizer.json")
    formats = Formats("gemma4", "gemma4")
    options = {"required": False, "parallel": True, "opened": False, "special": sampler.special}
    for tools in ({"f": ANY}, {"f": {"type": "object", "additionalProperties": {}}}, {"f": ANY, "g": ANY}):
        made = call_grammar(formats, tools, **options)
        assert made.formats == formats
        for written, meant in GEMMA_OBJECTS:
            text = f"<|tool_call>call:f{written}<tool_call|>"
            assert sampler.allows(made.text, text), written
            assert [json.loads(call.arguments) for call in read(formats, text, tools=tools).calls] == [meant]
        for written in ("{a}", "{a:}", "{a:b}", '{"a":1}', "{a:1,}", "[1]", "{a:[1}", '{a:"b"}', "{a:01}"):
            assert not sampler.allows(made.text, f"<|tool_call>call:f{written}<tool_call|>"), written
    counts = sample_all(sampler, formats, {"f": ANY, **TOOLS}, 24, required=True, parallel=True, opened=False)
    assert len(counts) >= 8 and min(counts) >= 1


def test_gemma_writes_values_without_a_type(small):
    inner = {"a": {}, "b": {"type": "array"}, "c": {"type": "object", "additionalProperties": {"type": "integer"}}}
    tools = {"f": {"type": "object", "properties": inner}}
    made = call_grammar(Formats("gemma4"), tools, required=True, parallel=True, opened=False, special=small.special)
    assert made.formats == Formats("gemma4")
    for written, allowed in (
        ('{a:<|"|>x<|"|>,b:[1,{d:null}],c:{e:5}}', True),
        ("{a:{},c:{}}", True),
        ("{b:1}", False),
        ("{c:{e:null}}", False),
        ("{d:1}", False),
    ):
        assert small.allows(made.text, f"<|tool_call>call:f{written}<tool_call|>") == allowed, written


@EACH_TAGGED
def test_tags_carry_any_parameters(small, tools):
    formats = Formats(tools)
    lark = shaped(small, formats, {"f": ANY}, required=True)
    for value, meant in (
        ("The sea.", "The sea."),
        ("two\nlines", "two\nlines"),
        ("3", 3),
        ('{"a": ["</parameter></arg_value>", "\\""]}', {"a": ["</parameter></arg_value>", '"']}),
        ("", ""),
    ):
        text = call_of(tools, {"some name": value, "other name": value})
        assert small.allows(lark, text), value
        made = json.loads(read(formats, text, tools={"f": ANY}).calls[0].arguments)
        assert made == {"some name": meant, "other name": meant}
    assert small.allows(lark, call_of(tools, {}))
    for name, value in (("a", '["'), ("a", '["x\n"]'), ("", "1"), ("a<b", "1")):
        assert not small.allows(lark, call_of(tools, {name: value}))
    whole = call_of(tools, {"a": "1"})
    for tag in ("</parameter>", "</arg_value>"):
        assert tag not in whole or not small.allows(lark, whole.replace(tag, ""))
    counts = sample_all(small, formats, {"f": ANY}, 24, required=True, parallel=True, opened=False)
    assert len(counts) >= 8 and min(counts) >= 1


@pytest.mark.parametrize("required", [True, False])
def test_glm_may_write_a_line_end_before_its_reasoning_and_before_its_calls(tmp_path, required):
    formats = Formats("glm45", "think")
    library = tokenizers.Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))
    library.add_tokens(sorted(delimiters(formats)))
    library.save(str(tmp_path / "tokenizer.json"))
    sampler = Sampler(tmp_path / "tokenizer.json")
    options = {"required": required, "parallel": True, "opened": False, "special": sampler.special}
    made, call = call_grammar(formats, TOOLS, **options), call_of("glm45", {}, "find")
    for before in ("", "\n", "<think>hm</think>\n", "\n<think>hm</think>\n", "\n<think></think>\n"):
        assert sampler.allows(made.text, before + call), before
    assert sampler.allows(made.text, "\n<think>hm</think>\nThe sea.") != required


def test_closing_tag_that_is_a_token_is_not_spelled_inside_a_glm_value(tmp_path):
    library = tokenizers.Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))
    library.add_tokens(sorted(delimiters(Formats("glm45"))))
    library.save(str(tmp_path / "tokenizer.json"))
    sampler = Sampler(tmp_path / "tokenizer.json")
    inner = {"a": {"type": "string"}, "b": {"type": "array"}, "c": {"enum": ["x", ""]}}
    tools = {"f": {"type": "object", "properties": inner}, "g": ANY}
    made = call_grammar(Formats("glm45"), tools, required=True, parallel=True, opened=False, special=sampler.special)
    assert find_problem(made.kind, made.text) is None
    for name, values in (("f", {"a": "\n<", "b": '["</arg_"]', "c": ""}), ("f", {"c": "x"}), ("g", {"d": "</arg"})):
        for line in ("", "\n"):
            assert sampler.allows(made.text, call_of("glm45", values, name, line)), values
    for name, key in (("f", "a"), ("g", "d")):
        before, after = call_of("glm45", {key: "|"}, name).split("|")
        pieces = f"{before}x</arg_", "value>", after
        ids = [i for piece in pieces for i in sampler.library.encode(piece, add_special_tokens=False).ids]
        assert sampler.matcher(made.text).validate_tokens(ids) < len(ids)
    counts = sample_all(sampler, Formats("glm45"), tools, 24, required=True, parallel=True, opened=False)
    assert len(counts) >= 8 and min(counts) >= 1


def test_gemma_writes_what_references_share_once():
    def schema(properties, values):
        inner = {f"property{i}": {"$ref": "#/$defs/code"} for i in range(properties)}
        return {"type": "object", "properties": inner, "$defs": {"code": {"enum": [*range(values)]}}}

    options = {"required": True, "parallel": True, "opened": False, "special": {}}
    made = call_grammar(Formats("gemma4"), {"f": schema(50, 500)}, **options)
    assert made.formats == Formats("gemma4") and made.text.count('"499"') == 1
    tools = {"f": schema(700, 8700)}
    made = call_grammar(Formats("gemma4"), tools, **options)
    assert made.formats == Formats("json") and len(made.text) < 2 * len(json.dumps(tools))


@pytest.mark.parametrize("format_", ["qwen3_coder", "seed_oss", "glm45", "minimax_m2"])
def test_definitions_are_written_only_for_the_parameters_that_refer_to_them(format_):
    properties = {f"p{i}": {"type": "integer", "minimum": i} for i in range(600)} | {"last": {"$ref": "#/$defs/unit"}}
    schema = {"type": "object", "properties": properties, "$defs": {"unit": {"enum": [*range(10_000, 14_000)]}}}
    made = call_grammar(Formats(format_), {"f": schema}, required=True, parallel=True, opened=False, special={})
    assert made.formats == Formats(format_)
    assert made.text.count("13999") == 1


@pytest.mark.parametrize("format_", ["qwen3_coder", "seed_oss", "glm45", "minimax_m2", "gemma4", "hermes", "json"])
def test_rules_that_grow_beyond_the_limit_are_given_up_at_once(format_, monkeypatch):
    sizes = []
    add = Lark._add
    monkeypatch.setattr(Lark, "_add", lambda lark, *rule: (sizes.append(len(rule[1])), add(lark, *rule))[1])
    options = {"required": True, "parallel": True, "opened": False, "special": {}}
    tools = {f"f{i}": {"type": "object", "properties": {"a": {"enum": [*range(i, 1000 + i)]}}} for i in range(1000)}
    with pytest.raises(TooLong):
        call_grammar(Formats(format_), tools, **options)
    assert sum(sizes) < 3 * MAX_WRITTEN  # in the model's format and as JSON
    assert call_grammar(Formats(format_), {"f0": tools["f0"]}, **options).formats.tools == format_


@pytest.mark.parametrize("format_", ["qwen3_coder", "glm45", "minimax_m2"])
def test_arguments_between_tags_that_are_too_long_are_json(format_):
    properties = {f"p{i}": {"$ref": "#/$defs/unit", "maximum": 20_000 + i} for i in range(20)}
    schema = {"type": "object", "properties": properties, "$defs": {"unit": {"enum": [*range(10_000, 14_000)]}}}
    made = call_grammar(Formats(format_), {"f": schema}, required=True, parallel=True, opened=False, special={})
    assert made.formats == Formats("json")
    assert len(made.text) < MAX_WRITTEN // 4


def test_choices_of_gemma_follow_their_type(small):
    inner = {
        "a": {"type": "integer", "enum": ["x", 1, 2.0, 2.5, True, None, [3]]},
        "b": {"type": ["string", "null"], "enum": ["y", 1, None]},
        "c": {"const": 1, "enum": [True, 1, 2]},
        "d": {"type": "number", "enum": [1, 2.5, False]},
    }
    tools = {"f": {"type": "object", "properties": inner}}
    made = call_grammar(Formats("gemma4"), tools, required=True, parallel=True, opened=False, special=small.special)
    assert made.formats == Formats("gemma4")
    allowed = ("a:1", "a:2.0", 'b:<|"|>y<|"|>', "b:null", "c:1", "d:1", "d:2.5")
    excluded = ('a:<|"|>x<|"|>', "a:2.5", "a:true", "a:null", "b:1", "c:true", "c:2", "d:false")
    for written in (*allowed, *excluded):
        text = f"<|tool_call>call:f{{{written}}}<tool_call|>"
        assert small.allows(made.text, text) == (written in allowed), written


def test_model_without_a_format_writes_json():
    made = call_grammar(Formats(), TOOLS, required=True, parallel=False, opened=False, special={})
    assert made.formats == Formats("json", None)


def test_arguments_allow_no_other_properties_by_default():
    assert arguments({}) == {"type": "object", "properties": {}, "additionalProperties": False}
    described = {"properties": {"description": {"type": "string", "description": "any"}}}
    closed = {"type": "object", "properties": {"description": {"type": "string"}}, "additionalProperties": False}
    assert arguments(described) == closed
    assert described["properties"]["description"] == {"type": "string", "description": "any"}, "the client's own"
    for more in ({"additionalProperties": {"type": "integer"}}, {"anyOf": [{"required": ["a"]}]}):
        schema = {"type": "object", "properties": {"a": {}}, **more}
        assert arguments(schema) == schema
    unlisted = {"type": "object", "properties": {"a": {}}, "required": ["b"]}
    assert arguments(unlisted) == unlisted


def tool_sets(data):
    """Yield the id and the functions, {name: schema}, of each recorded request."""
    for file in sorted((data / "function_calling").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            case = json.loads(line)
            yield case["id"], {tool["function"]["name"]: tool["function"]["parameters"] for tool in case["tools"]}


def test_all_recorded_functions_can_be_forced(data):
    refused = {}
    count = 0
    for number, (case, tools) in enumerate(tool_sets(data)):
        formats = formats_of(TOOL_FORMATS[number % len(TOOL_FORMATS)])
        made = call_grammar(formats, tools, required=True, parallel=True, opened=False, special={})
        count += 1
        if (reason := find_problem(made.kind, made.text)) is not None:
            refused[case] = reason
    assert count > 900
    assert refused == {}


@EACH
def test_as_many_recorded_functions_as_a_request_may_have_can_be_forced_together(data, tools):
    every = {name: schema for _, functions in tool_sets(data) for name, schema in functions.items()}
    functions = dict(itertools.islice(every.items(), 256))
    options = {"required": True, "parallel": True, "opened": False, "special": {}, "budget": 100}
    made = call_grammar(formats_of(tools), functions, **options)
    assert len(functions) == 256 and 64 << 10 < len(made.text) < MAX_WRITTEN
    assert find_problem(made.kind, made.text) is None
    assert GrammarTrial(1000).problem(made.kind, made.text) is None


@EACH
def test_calls_sampled_for_recorded_functions_are_valid(data, small, tools):
    ended = 0
    for case, functions in itertools.islice(tool_sets(data), TOOL_FORMATS.index(tools), None, 120):
        counts = sample_all(small, formats_of(tools, False), functions, 2, required=True, parallel=True, opened=False)
        assert all(counts), case
        ended += len(counts)
    assert ended >= 4


# Completions that are not calls


WHALE = {
    "type": "object",
    "properties": {"teeth": {"type": "integer"}},
    "required": ["teeth"],
    "additionalProperties": False,
}


def shaped(sampler: Sampler, formats: Formats, tools=None, **more):
    options = {"required": False, "parallel": True, "opened": False, "special": sampler.special}
    return call_grammar(formats, tools or {}, **options | more).text


@EACH
@pytest.mark.parametrize("spelling", ["characters", "tokens"])
def test_completion_follows_its_schema_or_is_a_call(request, small, tools, spelling):
    sampler = small if spelling == "characters" else request.getfixturevalue("large")
    formats = formats_of(tools)
    lark = shaped(sampler, formats, TOOLS, content=("json_schema", json.dumps(WHALE)))
    assert find_problem("lark", lark) is None
    messages = []
    for seed in range(16):
        text = sampler.sample(lark, random.Random(seed))
        if text is not None:
            message = read(formats, text, tools=TOOLS)
            assert bool(message.content) != bool(message.calls)
            if message.content:
                jsonschema.validate(json.loads(message.content), WHALE)
            messages.append(message)
    assert any(message.content for message in messages)
    assert not sampler.allows(lark, "The sea.")


@pytest.mark.parametrize(
    ("content", "follows", "other"),
    [
        (("choice", json.dumps(["aye/", 'no "\\\n\x7f', ""])), ["aye/", 'no "\\\n\x7f', ""], "ay"),
        (("regex", "^a/\n\\/[/b]$"), ["a/\n/b", "a/\n//"], "^a/\n/b"),
        (("regex", ""), [""], "a"),
    ],
)
@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["alone", "tools"])
def test_reasoning_or_calls_precede_the_content_of_any_grammar(small, content, follows, other, tools):
    lark = shaped(small, Formats("hermes", "think"), tools, content=content)
    assert find_problem("lark", lark) is None
    for each in follows:
        assert small.allows(lark, each) and small.allows(lark, f"<think>\nSome.\n</think>\n\n{each}")
    assert not small.allows(lark, other) and not small.allows(lark, f"<think>\nSome.\n</think>\n\n{other}")


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_reasoning_precedes_the_content_of_a_schema(small, opened):
    lark = shaped(small, Formats(None, "think"), content=("json_schema", json.dumps(WHALE)), opened=opened)
    assert small.allows(lark, ("" if opened else "<think>\n") + 'Some.\n</think>\n\n{"teeth": 50}')
    assert small.allows(lark, '{"teeth": 50}') is not opened
    assert not small.allows(lark, ("" if opened else "<think>\n") + "Some.\n</think>\n\nFifty.")


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_reasoning_ends_within_its_budget(marked, reasoning):
    formats = Formats("gpt_oss" if reasoning == "gpt_oss" else None, reasoning)
    opens, closes = BLOCKS[reasoning]
    starts = {
        "gpt_oss": "<|start|>assistant<|channel|>final<|message|>",
        "solar_open": "<|begin|>assistant<|content|>",
    }
    after = starts.get(reasoning, "\n\n")
    for budget in (0, 1, 7):
        lark = shaped(marked, formats, budget=budget)
        assert find_problem("lark", lark) is None
        for words in (0, 1, 7, 8):
            thought = " whale" * words
            assert len(marked.library.encode(thought).ids) == words
            fits = words <= budget and (budget > 0 or reasoning in starts)
            assert marked.allows(lark, f"{opens}{thought}{closes}{after}Yes.") == fits, (budget, words)


def test_budget_of_0_ends_a_block_that_the_prompt_opened(marked):
    lark = shaped(marked, Formats(None, "think"), budget=0, opened=True)
    assert marked.allows(lark, "</think>\n\nYes.")
    assert not marked.allows(lark, "Hm.</think>\n\nYes.")
