"""Lark grammars without recursion as one regular expression, which a JSON schema can demand of a string."""

from __future__ import annotations

import json
import re

from ..http.excerpt import shown
from .schemas import MAX_SOURCE

MAX_DEPTH = 64  # rules within rules, and groups within groups

STATEMENT = re.compile(r"^(?:[?!]?(_*[A-Za-z]\w*)(?:\.-?\d+)?[ \t]*:|%(\w+))", re.ASCII | re.MULTILINE)
IMPORT = re.compile(r"\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*|\s+common\s*\(([\w\s,]+)\)\s*", re.ASCII)
TOKEN = re.compile(
    r"""(?P<space>\s+|(?://|\#)[^\n]*)|(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imsux]*)"""
    r"""|(?P<name>_*[A-Za-z]\w*)|(?P<count>~[ ]*\d+(?:\.\.\d+)?|\{\d+(?:,\d*)?\})|(?P<sign>->|\.\.|[|()\[\]*+?])""",
    re.ASCII,
)
# Terminals of `%import common`, as Lark defines them.
COMMON = {
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "CR": r"\r", "DIGIT": "[0-9]", "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)", "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+", "LCASE_LETTER": "[a-z]", "LETTER": "[a-zA-Z]", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?", "SIGNED_INT": "[+-]?[0-9]+",
    "UCASE_LETTER": "[A-Z]", "WORD": "[a-zA-Z]+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
}  # fmt: skip


def as_regex(grammar: str) -> str:
    """Return an expression that matches the texts of a Lark grammar; raises ValueError, half a sentence."""
    heads = list(STATEMENT.finditer(grammar))
    rules: dict[str, str] = {}
    terminals: dict[str, str] = {}
    begins = [head.start() for head in heads] + [len(grammar)]
    if _tokens(grammar[: begins[0]]):
        raise ValueError("it does not begin with a rule")
    for head, end in zip(heads, begins[1:], strict=True):
        name, directive = head.groups()
        body = grammar[head.end() : end]
        if directive is not None:
            terminals |= _imported(directive, body)
        elif name in rules:
            raise ValueError(f"it defines {shown(name)} twice")
        else:
            rules[name] = body
    if "start" not in rules:
        raise ValueError("it has no rule 'start'")
    return _Rules(rules, terminals).expression("start")


def _imported(directive: str, body: str) -> dict[str, str]:
    found = IMPORT.fullmatch(re.sub(r"(?://|#).*", "", body))
    if directive != "import" or found is None:
        raise ValueError(f"'%{shown(directive)}' is supported only as in '%import common.INT'")
    pairs = [(found[1], found[2] or found[1])] if found[1] else [(each.strip(),) * 2 for each in found[3].split(",")]
    for name, _ in pairs:
        if name not in COMMON:
            raise ValueError(f"it imports {shown(name)}, which is not among {', '.join(COMMON)}")
    return {own: f"(?:{COMMON[name]})" for name, own in pairs}


def _tokens(body: str) -> list[tuple[str, str]]:
    """Return the kinds and texts of a rule's tokens."""
    tokens, index = [], 0
    while index < len(body):
        found = TOKEN.match(body, index)
        if found is None:
            raise ValueError(f"it has no meaning at {shown(body[index:].split(maxsplit=1)[0])!r}")
        index = found.end()
        if found.lastgroup != "space":
            tokens.append((found.lastgroup or "", found[0]))
    return tokens


class _Rules:
    """The rules of a grammar, and the expressions of those that were read."""

    def __init__(self, rules: dict[str, str], expressions: dict[str, str]) -> None:
        self._rules = rules
        self._expressions = expressions
        self._open: list[str] = []  # the rules that are being read

    def expression(self, name: str) -> str:
        if name not in self._expressions:
            if name in self._open:
                raise ValueError(f"the rule {shown(name)} contains itself")
            if name not in self._rules:
                raise ValueError(f"it has no rule {shown(name)}")
            if len(self._open) >= MAX_DEPTH:
                raise ValueError(f"its rules are nested more than {MAX_DEPTH} deep")
            self._open.append(name)
            self._expressions[name] = self._body(_tokens(self._rules[name]))
            self._open.pop()
        return self._expressions[name]

    def _body(self, tokens: list[tuple[str, str]]) -> str:
        """Return the expression of a rule: alternatives of items, in groups."""
        groups: list[tuple[str, list[str]]] = [("", [])]  # the sign that opens each open group, and its items
        item = ""  # the last item, which may still be repeated
        tokens = [*tokens, ("end", "")]
        index = size = 0
        while index < len(tokens):
            kind, text = tokens[index]
            index += 1
            if kind == "count" or text in ("*", "+", "?"):
                if not item:
                    raise ValueError(f"nothing is repeated by {shown(text)!r}")
                item = f"(?:{item}{_count(text)})"
                continue
            groups[-1][1].append(item)
            size += len(item)
            item = ""
            if size > MAX_SOURCE:
                raise ValueError(f"its expression has more than {MAX_SOURCE} characters")
            if kind in ("text", "regex", "name"):
                item = self._item(kind, text)
                if tokens[index][1] == "..":
                    item = _range(text, tokens[index + 1][1])
                    index += 2
            elif text == "|":
                groups[-1][1].append("|")
            elif text in ("(", "["):
                if len(groups) >= MAX_DEPTH:
                    raise ValueError(f"its groups are nested more than {MAX_DEPTH} deep")
                groups.append((text, []))
            elif groups[-1][0] + text in ("()", "[]"):
                item = f"(?:{''.join(groups.pop()[1])}){'?' if text == ']' else ''}"
            elif text == "->" and tokens[index][0] == "name":  # an alias changes no text
                index += 1
            elif kind != "end" or len(groups) > 1:
                raise ValueError(f"{shown(text)!r} is not expected" if text else "a group is not closed")
        return f"(?:{''.join(groups[0][1])})"

    def _item(self, kind: str, text: str) -> str:
        if kind == "name":
            return self.expression(text)
        if kind == "text":
            literal = _literal(text.removesuffix("i"))
            escaped = re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", literal)
            return f"(?i:{escaped})" if text.endswith("i") else f"(?:{escaped})"
        body, _, flags = text[1:].rpartition("/")
        return f"(?{flags}:{body})"


def _literal(text: str) -> str:
    try:
        value: str = json.loads(text, strict=False)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a text with the escapes of JSON") from None
    return value


def _count(text: str) -> str:
    if text in ("*", "+", "?"):
        return text
    return "{" + text.strip("~{} ").replace("..", ",") + "}"


def _range(first: str, last: str) -> str:
    ends = [_literal(end) if end.startswith('"') else "" for end in (first, last)]
    if not all(len(end) == 1 for end in ends):
        raise ValueError("a range does not have a character at each end")
    low, high = (re.sub(r"[\\\[\]^-]", r"\\\g<0>", end) for end in ends)
    return f"[{low}-{high}]"
