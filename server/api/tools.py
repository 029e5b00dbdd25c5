"""Tools on the wire, in the form of chat completions: functions that the model may call, and which of them it must."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..generation.request import Calling, Tool
from ..http.fields import OneError, RefusedKinds, Wire, clash
from .conversation import calling_of, check_choice
from .sampling import Text

MAX_TOOLS = 256
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_./-]+$")]


class Function(Wire):
    """A function: its name, what it is for, and the JSON schema of its arguments."""

    name: FunctionName
    """Part of the prompt, and what a call has."""
    description: Text | None = None
    """Part of the prompt."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments, an object; absent: there are none."""
    strict: bool | None = None
    """true: arguments follow the schema also where the model is free to call the function or not."""


class FunctionTool(Wire):
    """A tool of the only kind that there is."""

    type: Literal["function"]
    function: Function
    """The function that the model may call."""


class NamedFunction(Wire):
    """The name of a function among the tools."""

    name: FunctionName
    """One of the tools' names."""


class NamedTool(Wire):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction
    """The function."""


class AllowedTools(Wire):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    """auto: the model decides; required: at least one call."""
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
    """Those that may be called."""


class AllowedToolsChoice(Wire):
    """The model sees all tools and may call only some."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """Which, and whether one of them must be."""


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
        """The tools as the rest of the server knows them."""
        return tuple(described(tool, index) for index, tool in enumerate(self.tools or ()))


class ToolChoiceFields(ToolsField):
    """What a chat request says about tools."""

    tool_choice: ToolChoice | None = None
    """auto: the model decides; none: no call, and the prompt does not tell of the tools; required: at least one call;
    or a function that must be called, or allowed_tools: those that may or must be."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""

    @field_validator("tool_choice")
    @classmethod
    def _among_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        check_choice(value, chosen_names(value), [tool.function.name for tool in info.data.get("tools") or ()])
        return value

    @property
    def calling(self) -> Calling | None:
        """The tools that the answer may call; None: none."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else None
        return calling_of(self.offered, choice, chosen_names(choice), mode=mode, parallel=self.parallel_tool_calls)


def chosen_names(choice: str | NamedTool | AllowedToolsChoice | None) -> list[str]:
    """The functions that a choice names."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    return [tool.function.name for tool in choice.allowed_tools.tools] if isinstance(choice, AllowedToolsChoice) else []


def described(tool: FunctionTool, index: int) -> Tool:
    """A tool as the rest of the server knows it."""
    function = tool.function
    return Tool(
        function.name,
        function.description,
        NO_PARAMETERS if function.parameters is None else function.parameters,
        bool(function.strict),
        f"tools[{index}].function.parameters",
    )
