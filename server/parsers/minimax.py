"""Calls of MiniMax-M2: like Qwen3-Coder's, but several in one block, and values without line ends around them."""

from __future__ import annotations

from .formats import CALL_DELIMITERS
from .qwen_coder import Coder
from .scanner import Script

OPENS, CLOSES = CALL_DELIMITERS["minimax_m2"]
FUNCTION, END_FUNCTION = '<invoke name="', "</invoke>"
PARAMETER, END_TAG = '<parameter name="', '">'


class MiniMax(Coder):
    """Inside a block a call begins with its function alone, outside it is text. Calls inside reasoning are text."""

    opens: tuple[str, ...] = (OPENS,)
    closes = (END_FUNCTION, CLOSES)
    unclosed = ()
    on_lines = False
    function, end_function = FUNCTION, END_FUNCTION
    parameter_tag, end_tag = PARAMETER, END_TAG

    def call(self, delimiter: str, char: str) -> Script[str]:
        if delimiter == OPENS:
            char = yield from self.white(char)
            found, char = yield from self.literal(FUNCTION, char)
            if not found:
                return char
            self.opens = (OPENS, FUNCTION)
        return (yield from super().call(FUNCTION, char))

    def named(self, tag: str) -> str:
        return super().named(tag).partition('"')[0]  # models add a type after it

    def _close(self, delimiter: str) -> None:
        if delimiter == CLOSES:
            self.opens = (OPENS,)
        super()._close(delimiter)
