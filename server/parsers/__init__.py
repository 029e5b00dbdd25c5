"""Parsers that split a model's text into content, reasoning and tool calls.

A MessageParser turns the growing text of one choice into parts, from which every API writes its own events. Once `join`
has merged them, the parts do not depend on how the text was split into feeds. A model's format is detected from its
chat template. Grammars that force it to write calls are in grammar/tool_calls.py: they need more than the parsers do.
"""
