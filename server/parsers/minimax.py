"""Calls of MiniMax-M2: like Qwen3-Coder's, but several in one block, and values without line ends around them."""

from __future__ import annotations

from .formats import CALL_DELIMITERS
from .qwen_coder import END_PARAMETER, Coder

OPENS, CLOSES = CALL_DELIMITERS["minimax_m2"]
FUNCTION, END_FUNCTION = '<invoke name="', "</invoke>"
PARAMETER, END_TAG = '<parameter name="', '">'
VALUE_ENDS = (END_PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}")


class MiniMax(Coder):
    """A call after the first one begins with its function alone. Calls inside reasoning are text."""

    opens = (OPENS, FUNCTION)
    closes = (END_FUNCTION, CLOSES)
    unclosed = ()
    on_lines = False
    function, end_function = FUNCTION, END_FUNCTION
    parameter_tag, end_tag = PARAMETER, END_TAG
    ends = VALUE_ENDS

    def named(self, tag: str) -> str:
        return super().named(tag).partition('"')[0]  # models add a type after it
