"""Tools in the form of chat completions: functions that the model may call, and which of them it must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..generation.request import Calling, Tool
from ..http.fields import OneError, RefusedKinds, Wire, clash
from . import notes
from .conversation import calling_of, check_choice
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


class FunctionTool(Wire):
    """A tool; functions are the only supported kind."""

    type: Literal["function"]
    function: Function
    """The function that the model may call."""


class NamedFunction(Wire):
    """The name of a function among the tools."""

    name: Annotated[FunctionName, notes.TOOL_NAME]


class NamedTool(Wire):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction
    """The function."""


class AllowedTools(Wire):
    """Some of the tools, and whether one of them must be called."""

    mode: Annotated[Literal["auto", "required"], notes.MODE]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), notes.ALLOWED]


class AllowedToolsChoice(Wire):
    """The model sees all tools and may call only some."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """The tools, and whether one of them must be called."""


NOT_CUSTOM = RefusedKinds("type", ("custom",))
Tools = Annotated[list[Annotated[FunctionTool, NOT_CUSTOM]], Field(max_length=MAX_TOOLS, fail_fast=True)]
Named = Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type"), NOT_CUSTOM]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Named,
    OneError("must be none, auto, required, the name of one of the tools, or allowed_tools"),
]


class ToolsField(Wire):
    """The tools of a conversation."""

    tools: Tools | None = None
    """Functions that the model may call."""

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, value: list[FunctionTool] | None) -> list[FunctionTool] | None:
        names = [tool.function.name for tool in value or ()]
        if len({*names}) < len(names):
            raise clash("must not hold two functions of the same name")
        return value

    @property
    def offered(self) -> tuple[Tool, ...]:
        functions = [tool.function for tool in self.tools or ()]
        return tuple(as_tool(each, each.name, f"tools[{index}].function") for index, each in enumerate(functions))


class ToolChoiceFields(ToolsField):
    """The tools of a conversation and how they may be called."""

    tool_choice: Annotated[ToolChoice | None, notes.TOOL_CHOICE] = None
    parallel_tool_calls: Annotated[bool | None, notes.ONE_CALL] = None

    @field_validator("tool_choice")
    @classmethod
    def _among_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        check_choice(value, chosen_names(value), [tool.function.name for tool in info.data.get("tools") or ()])
        return value

    @property
    def calling(self) -> Calling | None:
        """The tools that the response may call; None: none."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else None
        return calling_of(self.offered, choice, chosen_names(choice), mode=mode, parallel=self.parallel_tool_calls)


def chosen_names(choice: str | NamedTool | AllowedToolsChoice | None) -> list[str]:
    """Return the names of the functions that a choice contains."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    return [tool.function.name for tool in choice.allowed_tools.tools] if isinstance(choice, AllowedToolsChoice) else []


def as_tool(function: Function, name: str, field: str) -> Tool:
    """Return a function in the form that generation reads; `field` is where it is in the request."""
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return Tool(name, function.description, parameters, bool(function.strict), f"{field}.parameters")
