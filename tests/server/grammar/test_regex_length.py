"""The length of the shortest match: equal to that of Python's own parser where both know the notation."""

from __future__ import annotations

from re import _parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.grammar.regex_length import ENOUGH, MAX_SHORTEST, is_too_long, shortest


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        ("", 0),
        ("abc", 3),
        ("^a|bcd$", 1),
        ("a*b?c+", 1),
        ("a{3}b{2,}c{0,9}", 5),
        ("a{3}?b", 4),
        ("(?:ab|c){4}", 4),
        ("(?P<name>ab){4}(?i)(?s:c){2}", 10),
        (r"\x41\u00e9\U0001f433\pL\x{41}", 5),
        ("(?:é){,5}b", 1),
        (r"[]a]{3}[^]b\]]{2}[(]", 6),
        (r"\d{3}\p{Greek}{2}\x{41}\(\)\{\b", 9),
        ("x{y}", 4),
        ("a{1000000000}", ENOUGH),
        ("((a{999999}){999999}){999999}", ENOUGH),
        ("a{" + "9" * 5000 + "}", ENOUGH),
        ("(((", 0),
        ("[abc", 1),
    ],
)
def test_shortest_match_of_each_kind_of_token(pattern, characters):
    if characters == ENOUGH:
        assert shortest(pattern) > MAX_SHORTEST
    else:
        assert shortest(pattern) == characters


def test_only_counts_make_a_pattern_too_long():
    assert is_too_long("a{20000}")
    assert is_too_long("(a{200}){200}")
    assert not is_too_long("a{0,20000}b{16000}")
    assert not is_too_long("a" * 20_000)


PIECES = st.sampled_from(["a", "b", ".", r"\d", r"\(", "[ab]", "[^]a]", "(?:a|bc)", "(?:(ab){2})", "(a|)"])
COUNTS = st.sampled_from(["", "*", "+", "?", "{3}", "{2,}", "{0,4}", "{2,5}?", "*?"])
SEQUENCES = st.lists(st.tuples(PIECES, COUNTS).map("".join), max_size=5).map("".join)
PATTERNS = st.lists(SEQUENCES, min_size=1, max_size=3).map("|".join)


@given(PATTERNS, PATTERNS, st.integers(0, 50))
def test_length_equals_that_of_pythons_parser(left, right, times):
    pattern = f"({left}){{{times}}}(?:{right})"
    assert shortest(pattern) == _parser.parse(pattern).getwidth()[0]


@given(st.text(alphabet="ab()[]{}|*+?\\^$,:<>Pp0123456789", max_size=40))
def test_any_text_has_a_length(text):
    assert shortest(text) >= 0


@pytest.mark.parametrize("piece", ["[", "(", "(?", "\\p{", "{1", "\\", "(?P<", "[^"])
def test_long_pattern_is_parsed_in_linear_time(piece):
    assert shortest(piece * (65_536 // len(piece))) >= 0  # quadratic time would be minutes
