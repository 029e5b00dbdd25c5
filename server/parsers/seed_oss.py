"""Calls of Seed-OSS: like Qwen3-Coder's, with another delimiter, and values without line ends around them."""

from __future__ import annotations

from .formats import CALL_DELIMITERS
from .qwen_coder import END_FUNCTION, FUNCTION, Coder

OPENS, CLOSES = CALL_DELIMITERS["seed_oss"]


class SeedOss(Coder):
    """Calls inside reasoning are text."""

    opens = (OPENS, FUNCTION)
    closes = (END_FUNCTION, CLOSES)
    unclosed = ()
    on_lines = False
