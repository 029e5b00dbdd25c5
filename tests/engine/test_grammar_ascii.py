"""ASCII classes in regular expressions, alone and in Lark."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.grammar import limits, problem, source
from engine.grammar.ascii import ascii_lark, ascii_regex

ARABIC_THREE, E_ACUTE = "\u0663", "\u00e9"


def is_match(kind, grammar, text):
    matcher = LLMatcher(LLTokenizer("byte"), source(kind, grammar), limits=limits(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting()


CASES = [
    (r"\d{3}", "123", f"12{ARABIC_THREE}"),
    (r"[\d.]+", "1.5", f"1.{ARABIC_THREE}"),
    (r"\w+", "Ahab_1", f"caf{E_ACUTE}"),
    (r"[\w-]+", "pale-ale", f"caf{E_ACUTE}"),
    (r"\D", ARABIC_THREE, "3"),
    (r"[\D]", ARABIC_THREE, "3"),
    (r"[^\d]", ARABIC_THREE, "3"),
    (r"\W", E_ACUTE, "e"),
    (r"[^\W\d]+", "abc", "a1"),
    (r"\\d", r"\d", "3"),
    (r"\\\d", r"\3", rf"\{ARABIC_THREE}"),
    (r"a\sb", "a\u2003b", "ab"),  # white space stays that of Unicode
    (r"\p{Nd}", ARABIC_THREE, "x"),  # where it is wanted
]


@pytest.mark.parametrize(("pattern", "matching", "other"), CASES)
@pytest.mark.parametrize("kind", ["regex", "lark", "schema"])
def test_digits_and_word_characters_are_ascii_in_every_kind_of_grammar(kind, pattern, matching, other):
    if kind == "regex":
        assert [is_match("regex", pattern, text) for text in (matching, other)] == [True, False]
    elif kind == "lark":
        assert [is_match("lark", f"start: /{pattern}/", text) for text in (matching, other)] == [True, False]
    else:
        schema = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
        written = [json.dumps(text, ensure_ascii=False) for text in (matching, other)]
        assert [is_match("json_schema", schema, text) for text in written] == [True, False]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"[+-\d]+", "-5", "A]"), (r"[-\d]+", "-5", "A"), (r"[+\-\d]+", "-5", "A"), (r"a-\d", "a-5", "a5"),
        (r"[\w--\d]+", "ab", "a5"), (r"[a-c-\d]+", "b-5", "d"),
    ],
)  # fmt: skip
def test_a_hyphen_before_an_escape_is_no_range(pattern, matching, other):
    for kind, grammar in (("regex", pattern), ("lark", f"start: /{pattern}/")):
        assert [is_match(kind, grammar, text) for text in (matching, other)] == [True, False]


@pytest.mark.parametrize(
    "grammar",
    [
        r'start: "\\d" | /a/', r'start: /a/ "\\d/\\w"', r"start: /a/ // \d/ \w", r"start: /a/ # \d/",
        r"start: <\d/> /a/", r'start: %json {"pattern": "^/\\d$"}', r'start: "unfinished \d',
    ],
)  # fmt: skip
def test_only_the_regular_expressions_of_a_lark_grammar_change(grammar):
    assert ascii_lark(grammar) == grammar


def test_expressions_between_texts_tags_and_comments_are_found():
    grammar = 'start: </call> /\\d\\/\\d/ "//" /\\w\n/ // "\nA: /\\d/i'
    assert ascii_lark(grammar) == (
        'start: </call> /[0-9]\\/[0-9]/ "//" /[0-9A-Za-z_]\n/ // "\nA: /[0-9]/i'
    )  # fmt: skip


@pytest.mark.parametrize("text", ['"' + '\\"' * 100_000, "/" + "\\/" * 100_000, "\\" * 200_001])
def test_long_unfinished_grammars_are_read_once(text):
    assert ascii_lark(text) == text
    assert ascii_regex(text) == text


@pytest.mark.parametrize(
    "text", ['root ::= "yes" | "no"', '# answers\nroot ::= a\n  a ::= "yes"', "<root> = x\nroot::=1"]
)
def test_a_gbnf_grammar_is_a_problem_that_names_the_syntax_of_lark(text):
    assert problem("lark", text) == 'it is in GBNF, and Lark\'s syntax is expected: start: "yes" | "no"'
    assert problem("lark", 'start: "root ::= " /a ::= b/') is None
