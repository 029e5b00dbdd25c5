"""What a request says that goes on with a conversation, whichever API's form it came in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from ..generation.output import Json
from ..generation.request import Calling, ConversationPrompt, Tool
from ..http.fields import clash
from ..tokenization.renderer import SWITCHES
from .sampling import Drawing

if TYPE_CHECKING:
    from ..tokenization.encoder import RenderOptions


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def check_choice(choice: Any, chosen: Collection[str], names: Collection[str]) -> None:
    """Raise unless a tool_choice, which names the functions `chosen`, goes with tools of these `names`."""
    if choice is None or choice in ("none", "auto"):
        return
    if not names:
        raise clash("must be absent, none or auto where there are no tools")
    if not {*chosen} <= {*names}:
        raise clash("must name functions that are among the tools")


def calling_of(
    tools: tuple[Tool, ...], choice: Any, chosen: Collection[str], *, mode: str | None, parallel: bool | None
) -> Calling | None:
    """What a tool_choice means: a word, or the functions `chosen`, of which one must be called (`mode` None) or those
    that may be (auto) or must be (required); `parallel` false: at most one call."""
    if not tools or choice == "none":
        return None
    is_parallel = parallel is not False
    if not chosen:
        return Calling(tools, choice == "required", is_parallel)
    some = tuple(tool for tool in tools if tool.name in chosen)
    return Calling(some, mode != "auto", is_parallel and mode is not None, told=tools)


class Conversation(Drawing):
    """A request whose prompt the chat template writes, and whose answer is a message."""

    @property
    def prompt_source(self) -> ConversationPrompt:
        return ConversationPrompt(self.turns, self.render_options, self.calling, self.thinks, self.thinking_budget)

    @property
    @abstractmethod
    def turns(self) -> list[Json]:
        """The messages as chat templates read them, in the form of chat completions."""

    @property
    def render_options(self) -> RenderOptions:
        """What else the template is told."""
        return {}

    @property
    def calling(self) -> Calling | None:
        """The tools that the answer may call; None: none."""
        return None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think before it answers; None: as its template has it."""
        return None

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The field that bounds the reasoning, and its most tokens, -1: as many as the model wants; None: no word."""
        return None


def thinking_variables(thinks: bool | None, effort: str | None, own: Json | None) -> Json | None:
    """What the template is told about thinking, under the names that templates have for it.

    `own`, the variables of the request itself, count before all others.
    """
    told: Json = {}
    if thinks is not None:
        told |= dict.fromkeys(SWITCHES, thinks)
    if effort is not None and effort != "none":
        told["reasoning_effort"] = effort
    return (told | (own or {})) or None


def is_thinking(own: Json | None, *others: bool | None) -> bool | None:
    """Whether the model is to think: as the request's own variables say, or the first of the others that says it."""
    for name in SWITCHES:
        if isinstance(value := (own or {}).get(name), bool):
            return value
    return next((value for value in others if value is not None), None)


def by_effort(effort: str | None) -> bool | None:
    """Whether a model that can only be told to think or not to think does so at this effort."""
    return None if effort is None else effort != "none"
