"""Descriptions that several fields of requests share."""

from pydantic import Field

PROMPT = Field(description="Part of the prompt.")
PROMPT_AND_CALL = Field(description="Part of the prompt and of calls.")
FOR_TEMPLATE = Field(description="Passed to the chat template; few templates use it.")
CALL_ID = Field(description="The id of the call that it belongs to, passed to the chat template; few templates use it.")
THOUGHT = Field(description="The model's reasoning, passed to the chat template, which may leave it out of the prompt.")
CACHE = Field(description="Accepted: cached prefixes are found without it.")
KEPT = Field(description="Accepted, and kept with the item.")
ITEM_ID = Field(
    description="The id under which the item is stored; absent, or another item of the conversation has it: the server "
    "makes one."
)
ACCOUNTING = Field(description="Accepted for accounting elsewhere.")
MODEL = Field(description="One of the served names; absent: the first of them. Another name is a 404.")
STOP = Field(description="Texts that end the output and are not part of it.")
STRUCTURED = Field(description="The output follows a grammar: one of json, regex, choice, grammar and json_object.")
STRICT = Field(description="true: arguments follow the schema even if the model is free to call the function or not.")
PARAMETERS = Field(description="The JSON schema of the arguments, an object; absent: there are none.")
ONE_CALL = Field(description="false: at most one call.")
MODE = Field(description="auto: the model decides; required: at least one call.")
ALLOWED = Field(description="The tools that may be called.")
TOOL_NAME = Field(description="The name of one of the tools.")
ALL_REASONING = Field(description="Accepted: the response has all of the reasoning.")
VERBOSITY = Field(description="Accepted: the server has no way to make a model more or less verbose.")
PRIORITY = Field(description="Lower values are served first; only with --scheduling-policy priority.")
CACHE_SALT = Field(description="Only requests with the same salt share cached prefixes.")
TEMPLATE_VARIABLES = Field(description="Variables for the chat template.")
TOP_LOGPROBS = Field(description="The number of most likely tokens at each position that are reported too.")
STREAM_OPTIONS = Field(description="What a stream contains besides the output; only with stream true.")
ARGUMENTS = Field(description="A JSON object as text; part of the prompt.")
REASONING_LIMIT = Field(description="The largest number of tokens of the reasoning.")
TOOL_CHOICE = Field(
    description="auto: the model decides; none: no call, and the prompt does not contain the tools; required: at least "
    "one call; or a function that must be called, or allowed_tools: those that may or must be."
)
EFFORT = Field(
    description="How much the model is to reason, passed to the chat template. If that can only turn reasoning on or "
    "off, none turns it off and any other effort on; if it cannot do that either, the effort has no effect."
)
REASONING_BUDGET = Field(
    description="The largest number of tokens of the reasoning; -1: no limit. Absent: half of the tokens that the "
    "request allows if the output must follow a schema or be a call, and otherwise -1."
)
FORMAT = Field(
    description="text, json_object (any JSON object), or json_schema: the output follows the schema, strict or not."
)
