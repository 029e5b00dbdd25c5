"""Tools and tool_choice in the form of the Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from ...generation.request import Tool
from ...http.fields import LABEL, OneError, Refused, RefusedKinds, Wire, refused
from .. import notes
from ..sampling import Text
from ..tools import MAX_TOOLS, Function, FunctionName, as_tool
from .items import in_namespace

BUILT_IN_CHOICES = """
    apply_patch code_interpreter computer computer_use computer_use_preview custom file_search image_generation mcp
    programmatic_tool_calling shell web_search_preview web_search_preview_2025_03_11
"""


class FlatFunction(Function):
    """A function that the model may call: its name, its description, and the JSON schema of its arguments."""

    type: Literal["function"]

    unsupported: ClassVar[dict[str, Refused]] = {
        "async": refused(False),
        "allowed_callers": refused(["direct"]),
        "defer_loading": refused(False),
        "output_schema": refused(),
    }


class HostedTool(Wire):
    """A tool that OpenAI runs, or whose calls have a notation of their own: left out of the prompt.

    With tool_choice auto a model may always respond without any tool.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


class NamespaceTool(Wire):
    """A group of functions. The prompt has each under the names of both, as in `group__function`."""

    type: Literal["namespace"]
    name: FunctionName
    """Part of the prompt; a call of one of its functions has it as `namespace`."""
    description: Annotated[Text | None, LABEL] = None
    """Accepted: the functions have descriptions of their own."""
    tools: Annotated[
        list[Annotated[FlatFunction | HostedTool, Field(discriminator="type")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]
    """The functions. Tools whose calls have a notation of their own are left out of the prompt."""


AnyTool = Annotated[FlatFunction | NamespaceTool | HostedTool, Field(discriminator="type")]


class FlatNamed(Wire):
    """A function that must be called, by its name."""

    type: Literal["function"]
    name: Annotated[FunctionName, notes.TOOL_NAME]


class FlatAllowed(Wire):
    """The model sees all tools and may call only some."""

    type: Literal["allowed_tools"]
    mode: Annotated[Literal["auto", "required"], notes.MODE]
    tools: Annotated[list[FlatNamed], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), notes.ALLOWED]


FlatChoice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[
        FlatNamed | FlatAllowed, Field(discriminator="type"), RefusedKinds("type", tuple(BUILT_IN_CHOICES.split()))
    ],
    OneError("must be none, auto, required, the name of one of the tools, or allowed_tools"),
]


def chosen_names(choice: str | FlatNamed | FlatAllowed | None) -> list[str]:
    """Return the names of the functions that a choice contains."""
    if isinstance(choice, FlatNamed):
        return [choice.name]
    return [tool.name for tool in choice.tools] if isinstance(choice, FlatAllowed) else []


def functions(tools: Sequence[AnyTool] | None) -> list[Tool]:
    """Return the functions among the tools in the form that generation reads."""
    found = []
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, FlatFunction):
            found.append(as_tool(tool, tool.name, f"tools[{index}]"))
        elif isinstance(tool, NamespaceTool):
            found += [
                as_tool(own, in_namespace(tool.name, own.name), f"tools[{index}].tools[{number}]")
                for number, own in enumerate(tool.tools)
                if isinstance(own, FlatFunction)
            ]
    return found
