"""Rules for arguments between tags, where strings have no quotes and other values are JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..parsers import glm, minimax, qwen_coder
from ..parsers.parts import Schema
from ..parsers.references import referred
from ..parsers.tagged import MAX_STEPS, NULLS, types
from .gemma import Inexpressible
from .rules import Lark, quoted
from .schemas import compact, walk

LINE = "\n"
SPACE = r"[ \t\r\n]*"
ANY_NAME = r"""/[^<>"\r\n]{1,64}/"""  # the name of a parameter that no schema lists
MAX_NAME = 200  # characters: the parsers read no endless tags
# The value of a parameter that no schema lists: what begins like JSON has no open quotes at its end and no line ends
# inside them, since the parser takes a tag inside quotes for text unless a line end is next to it.
ANY_VALUE = r"""/(?s:[^\[{"].*|([\[{]|"([^"\\\n]|\\[^\n])*")([^"]|"([^"\\\n]|\\[^\n])*")*)?/"""
# Keywords of an object whose properties can be written one by one.
ONE_BY_ONE = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
DEFINITIONS = "#/$defs/", "#/definitions/"
TEXTUAL = ["string", "null"]  # the types of values that are written as they are
LISTED = [{"type"}, {"enum"}, {"type", "enum"}, {"const"}, {"type", "const"}]  # keywords of which one lists the texts


class Tags(NamedTuple):
    """How a format writes one parameter."""

    opens: Callable[[str], str]  # returns the rule for all that precedes the value of the parameter with this name
    opens_any: str  # the same for any name, the terminal NAME
    line: str  # text between the value and its closing tag
    closes: str  # the closing tag
    after: str  # the rule for what follows it
    ends: tuple[str, ...]  # what no string may contain, because it ends a value
    text: str  # the terminal of strings, which contain none of these
    excluded: str  # characters that no name may contain


def coder(calls: tuple[str, ...], line: str) -> Tags:
    """Return how Qwen3-Coder, Qwen3.5 and Seed-OSS write a parameter.

    `calls`: the delimiters around a call. `line`: the line end before and after a value, if any.
    """
    opens, after, function = qwen_coder.PARAMETER, f">{line}", qwen_coder.END_FUNCTION
    follows = _either(*calls, qwen_coder.FUNCTION)
    return Tags(
        opens=lambda name: quoted(f"{opens}{name}{after}"),
        opens_any=f"{quoted(opens)} NAME {quoted(after)}",
        line=line,
        closes=qwen_coder.END_PARAMETER,
        after=quoted(LINE),
        ends=(qwen_coder.END_PARAMETER, f"{LINE}{opens}", f"{LINE}{function}"),
        text=_text_without(rf"\n({_either(opens)}|{_either(function)}{SPACE}({follows}))"),
        excluded=">\n",
    )


def glm45(lark: Lark) -> Tags:
    """Return how GLM-4.5 to 4.7 write a parameter. The versions differ in the line ends, so they are optional."""
    opens, between = lark.delimiter(glm.KEY), f"{lark.delimiter(glm.END_KEY)} LINE? {lark.delimiter(glm.VALUE)}"
    lark.rules["LINE"] = quoted(LINE)
    # A closing tag that is a token ends the value, and could still be spelled inside it.
    spelled = "" if lark.delimiter(glm.END_VALUE) == quoted(glm.END_VALUE) else r"<\/arg_value>|"
    return Tags(
        opens=lambda name: f"{opens} {quoted(name)} {between}",
        opens_any=f"{opens} NAME {between}",
        line="",
        closes=glm.END_VALUE,
        after="LINE?",
        ends=(glm.END_VALUE, f"{LINE}{glm.KEY}", glm.CLOSES),
        text=_text_without(rf"{spelled}\n<arg_key>|{_either(glm.CLOSES)}{SPACE}{glm.OPENS}"),
        excluded="<\n",
    )


def minimax_m2() -> Tags:
    """Return how MiniMax-M2 writes a parameter."""
    return Tags(
        opens=lambda name: quoted(f"{minimax.PARAMETER}{name}{minimax.END_TAG}"),
        opens_any=f"{quoted(minimax.PARAMETER)} NAME {quoted(minimax.END_TAG)}",
        line="",
        closes=qwen_coder.END_PARAMETER,
        after=quoted(LINE),
        ends=(qwen_coder.END_PARAMETER, f"{LINE}{minimax.PARAMETER}", f"{LINE}{minimax.END_FUNCTION}"),
        text=_text_without(
            rf"\n({minimax.PARAMETER}|{_either(minimax.END_FUNCTION)}{SPACE}"
            rf"({_either(minimax.OPENS, minimax.CLOSES, minimax.FUNCTION)}))"
        ),
        excluded='">\n',
    )


def _text_without(pattern: str) -> str:
    """Return a terminal for any text in which this regular expression matches nothing."""
    return f"/(?s:.*)/ & ~/(?s:.*({pattern}).*)/"


def _either(*texts: str) -> str:
    """Return a regular expression for these texts, which have no characters with a meaning but slashes."""
    return "|".join(texts).replace("/", r"\/")


def parameters(lark: Lark, tags: Tags, schema: Schema) -> str:
    """Return a rule for arguments that follow a schema without annotations. Raises Inexpressible."""
    if not _can_be_tagged(schema, tags.excluded):
        raise Inexpressible
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    written = [_any_parameters(lark, tags)] if _is_open(schema) else []
    for name, inner in schema.get("properties", {}).items():
        one = f"{tags.opens(name)} {_value(lark, tags, inner, shared)} {tags.after}"
        written.append(one if name in schema.get("required", ()) else f"({one})?")
    return " ".join(written)


def _value(lark: Lark, tags: Tags, schema: Any, shared: Schema) -> str:
    """Return a rule for one value and the tag that closes it."""
    texts = _texts(schema, shared, tags.ends)
    if texts is None:
        # Not all definitions for each parameter: they may be many times as long as it is.
        needed = shared if '"$ref"' in compact(schema) else {}
        return f"{lark.schema({**needed, **schema})} {_closing(lark, tags)}"
    if not texts:
        lark.rules["STRING"] = tags.text
        return lark.until(tags.closes, "STRING")
    return f"({' | '.join(_closing(lark, tags, text) for text in texts)})"


def _closing(lark: Lark, tags: Tags, text: str = "") -> str:
    """Return a rule for this text and the closing tag."""
    before, tag = f"{text}{tags.line}", lark.delimiter(tags.closes)
    if tag == quoted(tags.closes):
        return quoted(f"{before}{tags.closes}")  # one text: the line end could also belong to a longer one
    return f"{quoted(before)} {tag}" if before else tag


def _texts(schema: Any, shared: Schema, ends: tuple[str, ...]) -> list[str] | None:
    """Return the texts that a value without quotes may be; empty: any text. None: it is no string, but JSON.

    Raises Inexpressible for strings that must follow a schema which texts between tags cannot follow.
    """
    found = types({"properties": {"": schema}, **shared}, "")
    if "string" not in found:
        return None
    texts: list[str] = []
    is_any = False
    for node in _alternatives(schema, shared):
        kind = node.get("type", TEXTUAL)
        kinds = kind if isinstance(kind, list) else [kind]
        if any(each not in TEXTUAL for each in kinds) or node.keys() not in LISTED:
            raise Inexpressible
        is_any |= "string" in kinds and node.keys() == {"type"}
        for value in node.get("enum", [node.get("const")]):
            text = "null" if value is None else value
            if not isinstance(text, str) or any(end in text for end in ends):
                raise Inexpressible
            if value in NULLS and "null" in found:  # the parser would take this string for null
                raise Inexpressible
            if ("null" if value is None else "string") in kinds:
                texts.append(text)
    if not texts and not is_any:
        raise Inexpressible
    return [] if is_any else list(dict.fromkeys(texts))


def _alternatives(schema: Any, shared: Schema) -> list[Schema]:
    """Return the schemas of which a value must follow one. Raises Inexpressible if they cannot be listed."""
    found: list[Schema] = []
    todo = [schema]
    for _ in range(MAX_STEPS):
        if not todo:
            return found
        node = todo.pop()
        if not isinstance(node, dict):
            raise Inexpressible
        if node.keys() == {"anyOf"}:
            todo += reversed(node["anyOf"])
        elif node.keys() == {"$ref"}:
            todo.append(referred(shared, node["$ref"]))
        else:
            found.append(node)
    raise Inexpressible


def _is_open(schema: Schema) -> bool:
    """Return whether arguments may have any properties because their schema lists none."""
    return not schema.get("properties") and schema.get("additionalProperties", True) is not False


def _any_parameters(lark: Lark, tags: Tags) -> str:
    """Return a rule for parameters that no schema lists, whose values may have any type."""
    lark.rules["NAME"], lark.rules["VALUE"] = ANY_NAME, f"{ANY_VALUE} & {tags.text}"
    return f"({tags.opens_any} {lark.until(tags.closes, 'VALUE')} {tags.after})*"


def _can_be_tagged(schema: Schema, excluded: str) -> bool:
    """Return whether arguments can be written one by one. `excluded`: characters that no name may contain."""
    properties = schema.get("properties", {})
    if not (schema.keys() <= ONE_BY_ONE and {*schema.get("required", ())} <= {*properties}):
        return False
    if _is_open(schema) and schema.get("additionalProperties", True) not in (True, {}):
        return False
    references = [node["$ref"] for _, node, _ in walk(schema) if isinstance(node.get("$ref"), str)]
    if not all(each.startswith(DEFINITIONS) for each in references):  # each value has a schema of its own
        return False
    return all(_is_name(name, excluded) and isinstance(inner, dict) for name, inner in properties.items())


def _is_name(name: str, excluded: str) -> bool:
    """Return whether the parser reads this name of a parameter as it is."""
    return len(name) <= MAX_NAME and name == name.strip() and not any(char in name for char in excluded)
