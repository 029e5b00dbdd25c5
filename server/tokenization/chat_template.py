"""Chat templates: messages to the text of the prompt, as in transformers.

A template is a program that comes with the model. jinja's sandbox keeps it from the system; the process that this runs
in limits its time and memory, see renderer.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .demands import Demands, attribute_of
from .generic_tools import described, renders_tools
from .renderer import FAILED, MAX_CHARACTERS, NO_TEMPLATE, Message, PromptTooLong, TemplateError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PROBE = "INSTRUCTIONS"
KINDS = ("string", "iterable", "sequence", "mapping")  # tests that a template may apply to the content
CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class GenerationBlock(Extension):
    """`{% generation %}`, which selects the assistant's text for training; here an ordinary block."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(line)

    def render(self, caller: Macro) -> str:
        return caller()


class Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox with the functions that chat templates use."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        del self.globals["lipsum"]


class ChatTemplate:
    """A compiled template, and the form of messages that it needs."""

    def __init__(self, source: str, environment: Environment) -> None:
        try:
            tree = environment.parse(source)
            content = _Content(tree)
            self._template = environment.from_string(tree)
        except MemoryError:
            raise
        except Exception as error:  # also Python's, for generated code that is too deep or too large
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise TemplateError(f"The model's chat template has a syntax error{line}.") from error
        self.loops_over_content = any(content.has(loop.iter) for loop in tree.find_all(nodes.For))
        self.tests_content = any(test.name in KINDS and content.has(test.node) for test in tree.find_all(nodes.Test))
        self.demands = Demands(source, tree)
        self.knows_tools = renders_tools(source)
        self.knows_developer = any(const.value == "developer" for const in tree.find_all(nodes.Const))
        self.takes_system: bool | None = None  # None: not known yet

    def render(self, variables: dict[str, Any], limit: int) -> str:
        """Render at most `limit` characters; raises TemplateError."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise PromptTooLong
        except (TemplateError, MemoryError):
            raise
        except Exception as error:  # undefined names, types, refusals of the sandbox
            raise TemplateError(FAILED) from error
        return "".join(parts)


class ChatTemplates:
    """A model's chat templates: `default` and possibly `tool_use`; each is compiled at its first use."""

    def __init__(
        self, templates: dict[str, str], special_tokens: dict[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._sources = templates
        self._special_tokens = special_tokens
        self._environment = Environment(now)
        self._compiled: dict[str, ChatTemplate] = {}  # by name

    def get(self, name: str = "default") -> ChatTemplate:
        """Return a template by name, or the default; raises TemplateError if it is missing or invalid."""
        if not self._sources:
            raise TemplateError(NO_TEMPLATE)
        if name not in self._sources:
            name = "default" if "default" in self._sources else next(iter(self._sources))
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._sources[name], self._environment)
        return self._compiled[name]

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        limit: int = MAX_CHARACTERS,
    ) -> str:
        """Render the prompt of messages, given as in a request; raises TemplateError."""
        template = self.get("tool_use" if tools else "default")
        if not messages:
            raise TemplateError("There are no messages.")
        if not template.knows_tools:
            messages = described(messages, tools, takes_system=self._takes_system(template))
            tools = None
        if add_generation_prompt and continue_final_message:
            raise TemplateError("add_generation_prompt and continue_final_message cannot both be set.")
        chat = prepare(messages, template)
        variables = {
            **self._special_tokens,
            "messages": chat,
            "tools": template.demands.tools(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        own = template_kwargs or {}
        if clash := sorted(own.keys() & variables.keys()):
            raise TemplateError(f"chat_template_kwargs cannot set {clash[0]}.")
        variables |= own
        if not continue_final_message:
            return template.render(variables, limit)
        final = _tag_end(chat)
        return _cut_at_tag(template.render(variables, limit), final)

    def _takes_system(self, template: ChatTemplate) -> bool:
        """Whether the template writes system messages into the prompt; some refuse or ignore them."""
        if template.takes_system is None:
            chat = [{"role": "system", "content": PROBE}, {"role": "user", "content": "-"}]
            variables = {**self._special_tokens, "messages": prepare(chat, template), "add_generation_prompt": True}
            try:
                template.takes_system = PROBE in template.render(variables, MAX_CHARACTERS)
            except TemplateError:
                template.takes_system = False
        return template.takes_system


def prepare(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """Copy the messages in the form that the template needs; raises TemplateError."""
    prepared = [_prepare(i, message, template) for i, message in enumerate(messages)]
    return template.demands.messages(_merge_instructions(prepared, template))


def _prepare(index: int, message: Message, template: ChatTemplate) -> Message:
    # Many templates write "None" for a key without a value.
    message = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    content = message.get("content", "")
    if isinstance(content, list):
        if not all(_is_text(part) for part in content):
            raise TemplateError(f"messages[{index}].content has a part that is not text.")
        if not template.loops_over_content:
            content = "\n".join(part["text"] for part in content)
        else:
            content = [dict(part) for part in content]
    elif template.loops_over_content and not template.tests_content:
        content = [{"type": "text", "text": content}] if content else []
    message["content"] = content
    if "tool_calls" in message:
        message["tool_calls"] = [_parse_arguments(call) for call in message["tool_calls"]]
    # Most templates read reasoning_content, that of gpt-oss reads thinking, and that of Solar Open reasoning.
    reasoning = next((message[field] for field in REASONING_FIELDS if field in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, "reasoning": reasoning, **message, "reasoning_content": reasoning}
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a tool call, which templates expect as an object.

    Invalid ones, as of a truncated call, stay text, so that the conversation can continue.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _merge_instructions(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """Merge all system and developer messages into the first message: few templates support later ones."""
    own = [message for message in messages if message.get("role") in ("system", "developer")]
    if not own:
        return messages
    first = dict(own[0])
    if first["role"] == "developer" and not template.knows_developer:
        first["role"] = "system"
    contents = [message["content"] for message in own]
    if any(isinstance(content, list) for content in contents):
        first["content"] = [
            part
            for content in contents
            for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
        ]
    else:
        first["content"] = "\n\n".join(content for content in contents if content)
    return [first, *(message for message in messages if message.get("role") not in ("system", "developer"))]


def _tag_end(chat: list[Message]) -> str:
    """Append a tag to the last message, at which the rendered prompt is cut; returns its text without the tag."""
    content = chat[-1]["content"]
    if isinstance(content, list):
        if not content:
            content.append({"type": "text", "text": ""})
        text = content[-1]["text"]
        content[-1]["text"] = text + CONTINUE_HERE
    else:
        text = content
        chat[-1]["content"] = text + CONTINUE_HERE
    return text


def _cut_at_tag(prompt: str, final: str) -> str:
    tag = CONTINUE_HERE.strip()
    if final.strip() not in prompt or tag not in prompt:
        raise TemplateError("The model's chat template does not keep the final message, so it cannot be continued.")
    at = prompt.rindex(tag)
    # If the template has trimmed the space of the tag, it would have trimmed the end of the message too.
    return prompt[:at] if prompt.startswith(CONTINUE_HERE, at) else prompt[:at].rstrip()


class _Content:
    """The expressions of a template that are the content of a message."""

    _TRANSPARENT = frozenset(("list", "reverse", "sort", "selectattr", "rejectattr"))

    def __init__(self, tree: nodes.Template) -> None:
        self._names = {"content"}  # and names that it is assigned to
        assigned = [
            (each.target.name, each.node) for each in tree.find_all(nodes.Assign) if isinstance(each.target, nodes.Name)
        ]
        # Mistral's `tool_calls` is a message's content only where that is a list of calls, which no request has.
        others = {name for name, node in assigned if attribute_of(node) is not None and not self.has(node)}
        for name, node in assigned:
            if name not in others and self.has(node):
                self._names.add(name)

    def has(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Filter():
                return node.name in self._TRANSPARENT and self.has(node.node)
            case nodes.CondExpr():
                return self.has(node.expr1) or self.has(node.expr2)
            case nodes.Name():
                return node.name in self._names
        return attribute_of(node) == "content"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which would reach the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message)[:1000])
