"""Trial: checks that a grammar compiles, without a model's vocabulary."""

from __future__ import annotations

import json

from ..tokenizer_files.byte_level import byte_characters
from . import GrammarError, limits, shown, source


class GrammarTrial:
    """Compiles grammars over a vocabulary of single bytes, padded to the width of a model's logits.

    The cost of compiling hardly depends on the vocabulary, and this one is quick to load. The model's token ids are
    valid in it.
    """

    def __init__(self, width: int) -> None:
        """`width`: of the model's logits."""
        from llguidance import LLTokenizer  # importing this module costs nothing

        self._tokenizer = LLTokenizer(_bytes_alone(), n_vocab=max(width, 257), eos_token=256)

    def problem(self, kind: str, text: str) -> str | None:
        """Return why a grammar cannot be used, in part of a sentence; None if it compiles and has a beginning."""
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, source(kind, text), limits=limits(), log_level=0)
        except GrammarError as error:
            return str(error)
        if not matcher.is_error():
            matcher.compute_bitmask()
        # The engine starts with the forced tokens, between two steps. If the grammar fails there, its requests would
        # each delay all others.
        if not matcher.is_error() and (forced := matcher.compute_ff_tokens()):
            matcher.consume_tokens(forced)
        return shown(matcher.get_error()) if matcher.is_error() else None


def _bytes_alone() -> str:
    """Return a tokenizer.json whose tokens 0 to 255 are the bytes, followed by an end token."""
    characters = byte_characters()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(256)}, "merges": []}
    end = {"id": 256, "content": "<|end|>", **flags}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": model,
        }
    )
