"""Requests for responses; the items of their input are in items.py."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field, PrivateAttr, TypeAdapter, field_validator
from pydantic_core.core_schema import ValidationInfo

from ...generation.output import Json
from ...generation.request import Calling, ConversationPrompt, GenerationRequest
from ...grammar.schemas import Grammar, of_schema
from ...http.fields import LABEL, Refused, Wire, clash, refused
from ...http.openapi import examples
from ...tokenization.encoder import RenderOptions
from .. import notes
from ..chat.request import Labels, TemplateKwargs
from ..conversation import Effort, by_effort, calling_of, check_choice, is_thinking, thinking_variables
from ..custom_tools import check_grammars
from ..extensions import Session, all_refused
from ..response_format import ANY_OBJECT, JsonObjectFormat, NamedSchema, StructuredOutputs, TextFormat, of_outputs
from ..sampling import MAX_INT, MAX_LOGPROBS, Count, GenerationFields, Limit, Stop, Text, User, listed, only_with
from ..tools import MAX_TOOLS
from .items import AdditionalToolsItem, ItemId, Items, as_turns, of_current_turn
from .tools import AnyTool, Callable, FlatAllowed, FlatChoice, callables, chosen_names

TOOLS: TypeAdapter[list[AnyTool]] = TypeAdapter(list[AnyTool])
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Summary = Literal["auto", "concise", "detailed", "none"]
# Codex puts a JSON object of any size into one of the values.
ClientMetadata = Annotated[dict[Annotated[str, Field(max_length=64)], Text], Field(max_length=64)]


class FlatSchemaFormat(NamedSchema):
    """JSON that follows a schema. Every output that is not cut off follows it, with `strict` and without."""

    type: Literal["json_schema"]


AnyFormat = Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


class TextOptions(Wire):
    """The format of the output text."""

    format: Annotated[AnyFormat | None, notes.FORMAT] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, LABEL, notes.VERBOSITY] = None


class ReasoningOptions(Wire):
    """How the model is to reason."""

    effort: Annotated[Effort | None, notes.EFFORT] = None
    context: Literal["auto", "all_turns", "current_turn"] | None = None
    """current_turn: reasoning before the user's last message is left out; otherwise the chat template decides which
    reasoning the model sees."""
    unsupported: ClassVar[dict[str, Refused]] = {"mode": refused("standard")}
    generate_summary: Annotated[Summary | None, LABEL, notes.ALL_REASONING] = None
    summary: Annotated[Summary | None, LABEL, notes.ALL_REASONING] = None


class ResponseStreamOptions(Wire):
    """What a stream contains besides the output."""

    include_obfuscation: Annotated[bool | None, LABEL] = None
    """Accepted: events are never padded."""


class ResponsesRequest(Labels, GenerationFields):
    """POST /v1/responses."""

    model_config = examples(
        {"model": "builtin", "input": "What is continuous batching?"},
        {
            "model": "builtin",
            "instructions": "Answer in one sentence.",
            "input": [{"role": "user", "content": "What is 7 + 5?"}],
            "temperature": 0.7,
            "max_output_tokens": 64,
            "stream": True,
        },
    )

    input: Text | Items | None = None
    """A text, or items: messages, function calls and their outputs, reasoning, additional tools, references. Absent or
    no items: only with previous_response_id, and the model goes on from there."""
    instructions: Text | None = None
    """A system message before the input; not carried over to later responses."""
    previous_response_id: ItemId | None = None
    """The stored response that this one continues: its whole conversation is put before the input."""
    store: bool | None = None
    """false: the response cannot be retrieved or continued later."""
    background: bool | None = None
    """true: the response is returned at once with status queued and is generated without the connection."""

    max_output_tokens: Limit | None = None
    """The largest number of tokens of the output with its reasoning; absent or -1: as many as the context holds."""
    include: Annotated[list[Included], Field(max_length=16)] | None = None
    """message.output_text.logprobs: the text has the log-probability of each of its tokens.
    reasoning.encrypted_content: accepted, as clients that store nothing send it; the reasoning is plain text,
    and continues when it is sent back. The others are accepted too: they concern items that are never returned."""
    top_logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, notes.TOP_LOGPROBS] = None
    text: TextOptions | None = None
    """The format of the output text."""
    reasoning: ReasoningOptions | None = None
    """How the model is to reason."""

    tools: Annotated[
        Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None, Field(validate_default=True)
    ] = None
    """Functions and custom tools that the model may call, single or in groups. Tools that OpenAI runs are left out of
    the prompt."""
    tool_choice: Annotated[FlatChoice | None, notes.TOOL_CHOICE] = None
    parallel_tool_calls: Annotated[bool | None, notes.ONE_CALL] = None

    stream_options: Annotated[ResponseStreamOptions | None, notes.STREAM_OPTIONS] = None

    stop: Annotated[Stop, notes.STOP] = None
    structured_outputs: Annotated[StructuredOutputs | None, notes.STRUCTURED] = None
    chat_template_kwargs: Annotated[TemplateKwargs | None, notes.TEMPLATE_VARIABLES] = None
    thinking_token_budget: Annotated[Annotated[int, Field(ge=-1, le=MAX_INT)] | None, notes.REASONING_BUDGET] = None
    return_token_ids: bool | None = None
    """true: the response has prompt_token_ids and token_ids."""

    max_tool_calls: Annotated[Count | None, LABEL] = None
    """Accepted: it limits calls of built-in tools, which this server does not have."""
    user: User = None
    client_metadata: Annotated[ClientMetadata | None, LABEL, notes.ACCOUNTING] = None
    session_id: Session = None
    """Accepted for routers in front of this server."""
    truncation: Annotated[Literal["auto", "disabled"] | None, LABEL] = None
    """Accepted: the input is never truncated; a prompt that is too long is a 400."""

    unsupported: ClassVar[dict[str, Refused]] = {
        "access_programs": refused(),
        **all_refused("background_options media_io_kwargs mm_processor_kwargs", refused({})),
        "context_management": refused([]),
        "conversation": refused(hint="send previous_response_id instead"),
        "enable_response_messages": refused(False),
        "image": refused({}),
        "include_reasoning": refused(True),
        "moderation": refused(),
        "previous_input_messages": refused([], hint="send input instead"),
        "prompt": refused(hint="send the text itself, as instructions and input"),
        "prompt_cache_retention": refused("in_memory", "in-memory", "24h"),
        "request_id": refused(hint="send the header X-Request-Id instead"),
        "spaces_between_special_tokens": refused(True),
        # of chat completions
        **all_refused("max_completion_tokens max_tokens", refused(hint="send max_output_tokens instead")),
        "messages": refused(hint="send input instead"),
        "response_format": refused(hint="send text.format instead"),
    }

    _before: list[Json] = PrivateAttr(default_factory=list)
    _own: list[Json] | None = PrivateAttr(default=None)
    _callables: list[Callable] | None = PrivateAttr(default=None)

    @field_validator("background")
    @classmethod
    def _can_be_found(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("store") is False:
            raise clash("must be absent where store is false: nobody could ask for the response")
        if value and info.data.get("stream"):
            raise clash("must be absent where stream is true: ask for the response with GET")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and LOGPROBS not in (info.data.get("include") or ()):
            raise clash(f"must be absent unless include holds {LOGPROBS}")
        return value

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, value: list[AnyTool] | None, info: ValidationInfo) -> list[AnyTool] | None:
        found = [*callables(value, "tools"), *in_items(info.data.get("input"))]
        if len({each.name for each in found}) < len(found):
            raise clash("must not hold two functions of the same name")
        if len(found) > MAX_TOOLS:
            raise clash("must not hold more than 256 functions, those of all groups together")
        check_grammars([(each.grammar_field, each.grammar) for each in found if each.grammar is not None])
        return value

    @field_validator("tool_choice")
    @classmethod
    def _among_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        found = [*callables(info.data.get("tools"), "tools"), *in_items(info.data.get("input"))]
        check_choice(value, chosen_names(value), [each.name for each in found])
        return value

    _options_of_a_stream = field_validator("stream_options")(only_with("stream"))

    @field_validator("structured_outputs")
    @classmethod
    def _one_grammar(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        text = info.data.get("text")
        if value is not None and text is not None and not isinstance(text.format, TextFormat | None):
            raise clash("must be absent where text.format names a format")
        return value

    # The conversation

    @property
    def given(self) -> list[Json]:
        """The input as items, in the form in which they are stored."""
        if self._own is not None:
            return self._own
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_none=True) for item in self.input]

    @property
    def before(self) -> list[Json]:
        """The conversation that the response continues."""
        return self._before

    @property
    def items(self) -> list[Json]:
        """The whole conversation before the output."""
        return [*self._before, *self.given]

    @property
    def is_empty(self) -> bool:
        """Whether there is neither input nor a response to continue."""
        return self.input in (None, []) and self.previous_response_id is None

    def expand(self, before: list[Json], own: list[Json]) -> None:
        """Set the conversation before the input, and the input with its references replaced."""
        self._before, self._own, self._callables = before, own, None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    # For generation

    @property
    def prompt_source(self) -> ConversationPrompt:
        budget = self.thinking_token_budget
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        is_current = self.reasoning is not None and self.reasoning.context == "current_turn"
        items = of_current_turn(self.items) if is_current else self.items
        return ConversationPrompt(
            turns=[*instructions, *as_turns(items)],
            render_options=self.render_options,
            calling=self.calling,
            thinks=self.thinks,
            thinking_budget=None if budget is None else ("thinking_token_budget", budget),
        )

    def resolve(self) -> GenerationRequest:
        return replace(
            super().resolve(),
            prompt_field="input",
            limit=("max_output_tokens", self.max_output_tokens),
            stops=listed(self.stop),
            num_logprobs=self.num_logprobs,
            grammar=self._grammar(),
        )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def thinks(self) -> bool | None:
        return is_thinking(self.chat_template_kwargs, by_effort(self._effort))

    @property
    def render_options(self) -> RenderOptions:
        return {"template_kwargs": thinking_variables(self.thinks, self._effort, self.chat_template_kwargs)}

    @property
    def _effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning else None

    def _grammar(self) -> Grammar | None:
        format = self.text.format if self.text else None
        if isinstance(format, JsonObjectFormat):
            return Grammar("json_schema", ANY_OBJECT, "text.format")
        if isinstance(format, FlatSchemaFormat):
            return of_schema(format.schema_, "text.format.schema")
        return of_outputs(self.structured_outputs)

    @property
    def callables(self) -> list[Callable]:
        """The functions and custom tools of the request and of its conversation; of those of one name the last."""
        if self._callables is None:  # each call of the output asks for them
            self._callables = self._find_callables()
        return self._callables

    def _find_callables(self) -> list[Callable]:
        found = callables(self.tools, "tools")
        for index, item in enumerate(self.items, start=-len(self._before)):
            if item["type"] == "additional_tools":
                field = "previous_response_id" if index < 0 else f"input[{index}].tools"
                found += callables(TOOLS.validate_python(item["tools"]), field)
        return [*{each.name: each for each in found}.values()]

    def called(self, name: str) -> Callable | None:
        """Return the tool that has this name in the prompt."""
        return next((each for each in self.callables if each.name == name), None)

    @property
    def calling(self) -> Calling | None:
        choice = self.tool_choice
        mode = choice.mode if isinstance(choice, FlatAllowed) else None
        tools = tuple(each.as_tool for each in self.callables)
        return calling_of(tools, choice, chosen_names(choice), mode=mode, parallel=self.parallel_tool_calls)


def in_items(items: Any) -> list[Callable]:
    """Return the functions and custom tools in the items of an input."""
    if not isinstance(items, list):
        return []
    return [
        each
        for index, item in enumerate(items)
        if isinstance(item, AdditionalToolsItem)
        for each in callables(item.tools, f"input[{index}].tools")
    ]
