"""ASCII classes in regular expressions: `\\d` is 0 to 9, as in JSON Schema, and not every digit of Unicode.

llguidance does the same with the patterns of JSON schemas. In both `\\s` is any white space of Unicode, as in
ECMAScript.
"""

from __future__ import annotations

import re

# Classes may contain classes: [\d.] becomes [[0-9].].
REPLACED = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]", "-": r"\-"}
# Where a range would end with an escape, the hyphen is one, as in ECMAScript: [+-\d]. Two of them subtract a class.
ESCAPE = re.compile(r"\\.|--|-(?=\\[dDwW])", re.DOTALL)
# Parts of a grammar in Lark: what may contain a slash, and a regular expression. An unfinished part ends with the text,
# so that nothing is read twice.
LARK = re.compile(r'"(?:\\.|[^"\\])*"?|(?:#|//)[^\n]*|<[^<>\s]+>|(?P<regex>/(?:\\.|[^/\\])+/?)', re.DOTALL)


def ascii_regex(pattern: str) -> str:
    """Return a regular expression whose escapes for digits and word characters match ASCII alone."""
    return ESCAPE.sub(lambda escape: REPLACED.get(escape[0], escape[0]), pattern)


def ascii_lark(grammar: str) -> str:
    """Return a grammar in Lark whose regular expressions are as `ascii_regex` returns them."""
    return LARK.sub(lambda part: ascii_regex(part[0]) if part["regex"] else part[0], grammar)
