"""Tools and tool_choice in the form of the Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from ...generation.request import Tool
from ...http.fields import LABEL, OneError, Refused, RefusedKinds, Wire, refused
from .. import notes
from ..custom_tools import InputGrammar, as_function
from ..response_format import TextFormat
from ..sampling import Text
from ..tools import MAX_TOOLS, Function, FunctionName, as_tool

BUILT_IN_CHOICES = """
    apply_patch code_interpreter computer computer_use computer_use_preview file_search image_generation mcp
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


class FlatGrammarFormat(InputGrammar):
    """Text that follows a grammar. Every input that is not cut off follows it."""

    type: Literal["grammar"]


class FlatCustom(Wire):
    """A tool whose input is a text. The model calls it as a function with the text as `input`."""

    type: Literal["custom"]
    name: Annotated[FunctionName, notes.PROMPT_AND_CALL]
    description: Annotated[Text | None, notes.PROMPT] = None
    format: Annotated[TextFormat | FlatGrammarFormat, Field(discriminator="type")] | None = None
    """text, or a grammar that the input follows."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "async": refused(False),
        "allowed_callers": refused(["direct"]),
        "defer_loading": refused(False),
    }

    @property
    def grammar(self) -> InputGrammar | None:
        return self.format if isinstance(self.format, FlatGrammarFormat) else None


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
    """A group of functions and custom tools. The prompt has each under the names of both, as in `group__function`."""

    type: Literal["namespace"]
    name: FunctionName
    """Part of the prompt; a call of one of its functions has it as `namespace`."""
    description: Annotated[Text | None, LABEL] = None
    """Accepted: the functions have descriptions of their own."""
    tools: Annotated[
        list[Annotated[FlatFunction | FlatCustom | HostedTool, Field(discriminator="type")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]
    """The functions. Tools whose calls have a notation of their own are left out of the prompt."""


AnyTool = Annotated[FlatFunction | FlatCustom | NamespaceTool | HostedTool, Field(discriminator="type")]


class FlatNamed(Wire):
    """A function or a custom tool that must be called, by its name."""

    type: Literal["function", "custom"]
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


class Callable(NamedTuple):
    """A tool that the model may call."""

    tool: FlatFunction | FlatCustom
    namespace: str | None
    field: str  # of the request

    @property
    def name(self) -> str:
        """The name in the prompt."""
        return in_namespace(self.namespace, self.tool.name)

    @property
    def as_tool(self) -> Tool:
        """The tool in the form that generation reads."""
        if isinstance(self.tool, FlatCustom):
            field = self.field if self.grammar is None else self.grammar_field
            return as_function(self.name, self.tool.description, self.grammar, field)
        return as_tool(self.tool, self.name, self.field)

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of a custom tool's input, if it has one."""
        return self.tool.grammar if isinstance(self.tool, FlatCustom) else None

    @property
    def grammar_field(self) -> str:
        """Where the request has the grammar's definition."""
        return f"{self.field}.format.definition"


def callables(tools: Sequence[AnyTool] | None, field: str) -> list[Callable]:
    """Return the functions and custom tools among the tools of a field and in their groups."""
    found = []
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, NamespaceTool):
            found += [
                Callable(own, tool.name, f"{field}[{index}].tools[{number}]")
                for number, own in enumerate(tool.tools)
                if not isinstance(own, HostedTool)
            ]
        elif not isinstance(tool, HostedTool):
            found.append(Callable(tool, None, f"{field}[{index}]"))
    return found


def in_namespace(namespace: str | None, name: str) -> str:
    """Return the name under which the prompt has a function, which may belong to a group."""
    return name if namespace is None else f"{namespace}__{name}"
