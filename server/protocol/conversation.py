"""What a request says that goes on with a conversation, whichever API's form it came in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from .common import Json
from .sampling import Drawing

if TYPE_CHECKING:
    from ..prompts import RenderOptions


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Json  # the JSON schema of its arguments, an object
    strict: bool  # arguments must follow the schema also where the model is free to call
    field: str  # of the request: where the schema stands

    @property
    def as_json(self) -> Json:
        """As chat templates read it."""
        told = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **told, "parameters": self.parameters}}


class Calling(NamedTuple):
    """How the answer may use tools."""

    tools: tuple[Tool, ...]
    is_required: bool = False  # the answer is at least one call
    is_parallel: bool = True  # there may be several calls
    told: tuple[Tool, ...] = ()  # what the prompt tells of, where that is more than may be called

    @property
    def in_prompt(self) -> tuple[Tool, ...]:
        return self.told or self.tools


class Rendered(Protocol):
    """What the prompt of a conversation is made from."""

    @property
    def turns(self) -> list[Json]: ...

    @property
    def render_options(self) -> RenderOptions: ...

    @property
    def calling(self) -> Calling | None: ...


class Conversation(Drawing):
    """A request whose prompt the chat template writes, and whose answer is a message."""

    @property
    def turns(self) -> list[Json]:
        """The messages as chat templates read them, in the form of chat completions."""
        raise NotImplementedError

    @property
    def render_options(self) -> RenderOptions:
        """What else the template is told."""
        return {}

    @property
    def calling(self) -> Calling | None:
        """The tools that the answer may call; None: none."""
        return None

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning; None: as many as the model wants."""
        return None
