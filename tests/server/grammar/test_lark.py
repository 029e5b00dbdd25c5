"""Lark grammars as regular expressions: what they match, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from engine import grammar_problem
from server.grammar.lark import as_regex

# The grammar of a patch, as a coding agent sends it.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


def test_a_patch_follows_the_grammar_of_patches():
    pattern = as_regex(PATCH)
    patch = "*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-a\n+b\n*** Delete File: b.py\n*** End Patch\n"
    assert re.fullmatch(pattern, patch)
    for wrong in ("*** Begin Patch\n*** End Patch\n", patch.replace("@@", "@"), patch.replace("*** End", "End")):
        assert not re.fullmatch(pattern, wrong)
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    assert grammar_problem("json_schema", json.dumps(schema)) is None


@pytest.mark.parametrize(
    ("grammar", "matches", "others"),
    [
        ('start: "a" "b" | "c"', ["ab", "c"], ["a", "abc", ""]),
        ('start: "a.b"\n     | "(c"', ["a.b", "(c"], ["axb"]),
        ('start: "a"i [ "-" ] X~2..3\nX: "0".."9"', ["a00", "A-123"], ["a0", "a1234", "b00"]),
        (
            '?start: (a | B)*\n_b.2: "x" // a comment "\na: "y"~2 -> twice\n!B: _b+ # another',
            ["", "yyxx", "xyy"],
            ["y"],
        ),
        (r'start: /[a-z\/]+/ "\n" /x/i', ["a/b\nX", "z\nx"], ["A\nx", "a x"]),
        ("%import common (INT, WS_INLINE)\n%import common.CNAME -> N\nstart: N WS_INLINE INT", ["a_1 7"], ["7 a"]),
        ('start: "é\\"\\\\"', ['é"\\'], ["e"]),
    ],
)
def test_texts_that_a_grammar_matches(grammar, matches, others):
    pattern = as_regex(grammar)
    assert [text for text in matches + others if re.fullmatch(pattern, text)] == matches


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("", "no rule 'start'"),
        ('x: "a"', "no rule 'start'"),
        ('"a"', "does not begin with a rule"),
        ("start: a", "no rule a"),
        ('start: "(" start? ")"', "the rule start contains itself"),
        ("start: a\na: b\nb: a", "the rule a contains itself"),
        ('start: ("a"', "a group is not closed"),
        ('start: ("a"]', "']' is not expected"),
        ('start: "a")', "')' is not expected"),
        ('start: "a" ->', "'->' is not expected"),
        ("start: * ", "nothing is repeated by '*'"),
        ('start: "\\q"', "escapes of JSON"),
        ('start: "a".."bc"', "a range does not have a character at each end"),
        ('start: "a"..', "a range does not have a character at each end"),
        ("start: /a", "no meaning at '/a'"),
        ("start: §" + "x" * 99, "no meaning at '§xxx"),
        ('start[lazy]: "a"', "no meaning at ':'"),
        ('start: "a"\nstart: "b"', "defines start twice"),
        ('%ignore " "\nstart: "a"', "'%ignore' is supported only as in"),
        ('%import other.INT\nstart: "a"', "'%import' is supported only as in"),
        ('%import common.NOPE\nstart: "a"', "imports NOPE, which is not among CNAME"),
        ("start: " + "(" * 99, "groups are nested more than 64 deep"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(99)), "rules are nested more than 64 deep"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"', "more than 65536"),
    ],
)
def test_a_grammar_that_is_no_regular_expression_is_refused(grammar, problem):
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        as_regex(grammar)
    assert len(str(caught.value)) < 300
