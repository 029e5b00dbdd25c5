"""Tools in the form of chat completions: functions and custom tools, and which of them the model must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..generation.request import Calling, Tool
from ..http.fields import OneError, Wire, clash
from . import notes
from .cache_marks import Marked
from .conversation import calling_of, check_choice
from .custom_tools import InputGrammar, as_function, check_grammars
from .response_format import TextFormat
from .sampling import Text

MAX_TOOLS = 256
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_./-]+$")]


class Function(Wire):
    """A function: its name, its description, and the JSON schema of its arguments."""

    name: Annotated[FunctionName, notes.PROMPT_AND_CALL]
    description: Annotated[Text | None, notes.PROMPT] = None
    parameters: Annotated[dict[str, Any] | None, notes.PARAMETERS] = None
    strict: Annotated[bool | None, notes.STRICT] = None


class FunctionTool(Marked):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function
    """The function that the model may call."""

    @property
    def name(self) -> str:
        return self.function.name

    def as_tool(self, field: str) -> Tool:
        """Return the tool in the form that generation reads; `field` is where it is in the request."""
        return as_tool(self.function, self.name, f"{field}.function")


class GrammarFormat(Wire):
    """Text that follows a grammar. Every input that is not cut off follows it."""

    type: Literal["grammar"]
    grammar: InputGrammar
    """The grammar, also part of the prompt."""


class Custom(Wire):
    """A custom tool: its name, its description, and the format of its input."""

    name: Annotated[FunctionName, notes.PROMPT_AND_CALL]
    description: Annotated[Text | None, notes.PROMPT] = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None
    """text, or a grammar that the input follows."""

    @property
    def grammar(self) -> InputGrammar | None:
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None


class CustomTool(Marked):
    """A tool whose input is a text. The model calls it as a function with the text as `input`."""

    type: Literal["custom"]
    custom: Custom
    """The custom tool that the model may call."""

    @property
    def name(self) -> str:
        return self.custom.name

    def as_tool(self, field: str) -> Tool:
        """Return the tool in the form that generation reads; `field` is where it is in the request."""
        grammar = self.custom.grammar
        where = f"{field}.custom" if grammar is None else grammar_field(field)
        return as_function(self.name, self.custom.description, grammar, where)


class NamedFunction(Wire):
    """The name of a function among the tools."""

    name: Annotated[FunctionName, notes.TOOL_NAME]


class NamedTool(Wire):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction
    """The function."""

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Wire):
    """The name of a custom tool among the tools."""

    name: Annotated[FunctionName, notes.TOOL_NAME]


class NamedCustomTool(Wire):
    """One of the custom tools."""

    type: Literal["custom"]
    custom: NamedCustom
    """The custom tool."""

    @property
    def name(self) -> str:
        return self.custom.name


NamedAny = Annotated[NamedTool | NamedCustomTool, Field(discriminator="type")]


class AllowedTools(Wire):
    """Some of the tools, and whether one of them must be called."""

    mode: Annotated[Literal["auto", "required"], notes.MODE]
    tools: Annotated[list[NamedAny], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), notes.ALLOWED]


class AllowedToolsChoice(Wire):
    """The model sees all tools and may call only some."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """The tools, and whether one of them must be called."""


AnyTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | NamedCustomTool | AllowedToolsChoice, Field(discriminator="type")],
    OneError("must be none, auto, required, the name of one of the tools, or allowed_tools"),
]


class ToolsField(Wire):
    """The tools of a conversation."""

    tools: Tools | None = None
    """Functions and custom tools that the model may call."""

    @field_validator("tools")
    @classmethod
    def _can_be_called(cls, value: list[AnyTool] | None) -> list[AnyTool] | None:
        tools = value or []
        if len({tool.name for tool in tools}) < len(tools):
            raise clash("must not hold two functions of the same name")
        customs = [(f"tools[{index}]", tool.custom) for index, tool in enumerate(tools) if isinstance(tool, CustomTool)]
        check_grammars([(grammar_field(field), tool.grammar) for field, tool in customs if tool.grammar is not None])
        return value

    @property
    def offered(self) -> tuple[Tool, ...]:
        return tuple(tool.as_tool(f"tools[{index}]") for index, tool in enumerate(self.tools or ()))


class ToolChoiceFields(ToolsField):
    """The tools of a conversation and how they may be called."""

    tool_choice: Annotated[ToolChoice | None, notes.TOOL_CHOICE] = None
    parallel_tool_calls: Annotated[bool | None, notes.ONE_CALL] = None

    @field_validator("tool_choice")
    @classmethod
    def _among_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        check_choice(value, chosen_names(value), [tool.name for tool in info.data.get("tools") or ()])
        return value

    @property
    def calling(self) -> Calling | None:
        """The tools that the response may call; None: none."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else None
        return calling_of(self.offered, choice, chosen_names(choice), mode=mode, parallel=self.parallel_tool_calls)


def chosen_names(choice: str | NamedTool | NamedCustomTool | AllowedToolsChoice | None) -> list[str]:
    """Return the names of the functions and custom tools that a choice contains."""
    if isinstance(choice, NamedTool | NamedCustomTool):
        return [choice.name]
    return [tool.name for tool in choice.allowed_tools.tools] if isinstance(choice, AllowedToolsChoice) else []


def grammar_field(field: str) -> str:
    """Return where a request has the definition of the grammar of the custom tool at `field`."""
    return f"{field}.custom.format.grammar.definition"


def as_tool(function: Function, name: str, field: str) -> Tool:
    """Return a function in the form that generation reads; `field` is where it is in the request."""
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return Tool(name, function.description, parameters, bool(function.strict), f"{field}.parameters")
