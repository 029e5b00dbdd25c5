"""What a model's text means: the answer itself, its reasoning, and the calls of tools.

A MessageParser turns one choice's growing text into parts. The parts do not depend on how the text was cut into feeds
once `join` has put them together, and every API writes its own events from them. Which format a model writes is seen in
its chat template. Grammars that make it write calls are in grammar/tool_calls.py: they need more than the parsers do.
"""

from .formats import REASONING_FORMATS, TOOL_FORMATS, Formats, detect, ends_reasoning, markers, reasoning_opened
from .parts import Arguments, Call, CalledTool, Content, Message, MessageParser, Part, Plain, Reasoning, Schema, join
from .select import message_parser

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Arguments",
    "Call",
    "CalledTool",
    "Content",
    "Formats",
    "Message",
    "MessageParser",
    "Part",
    "Plain",
    "Reasoning",
    "Schema",
    "detect",
    "ends_reasoning",
    "join",
    "markers",
    "message_parser",
    "reasoning_opened",
]
