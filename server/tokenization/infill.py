"""Prompts with a suffix: the model fills in what is missing between two texts, as editors ask of models for code.

Such a model has tokens that mark the text before the gap, the text after it and the gap. A model is recognized by the
tokens of its vocabulary; many models have them that were hardly trained to use them.
"""

# ruff: noqa: RUF001 (DeepSeek's marks contain characters that look like others)

from __future__ import annotations

from typing import NamedTuple

from ..http.errors import invalid
from .tokenizer import Tokenizer


class Infill(NamedTuple):
    """How a family of models writes a prompt with a gap."""

    template: str  # of the prompt's text
    marks: tuple[str, ...]  # tokens that a model of the family has
    ends: tuple[str, ...] = ()  # tokens that end the filling besides the marks and the model's own end


FORMATS = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma and Granite 4. Fillings end in one of these tokens if the file goes on.
    Infill(
        "<|fim_prefix|>{prompt}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder2, Granite 3 and Stable Code.
    Infill(
        "<fim_prefix>{prompt}<fim_suffix>{suffix}<fim_middle>",
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    # DeepSeek-Coder, DeepSeek-V2 and V3.
    Infill(
        "<｜fim▁begin｜>{prompt}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ),
    Infill("[SUFFIX]{suffix}[PREFIX]{prompt}", ("[SUFFIX]", "[PREFIX]")),  # Codestral
)


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Return how this model fills in text; None: it cannot."""
    return next((each for each in FORMATS if len(tokenizer.ids_of(each.marks)) == len(each.marks)), None)


def with_gap(tokenizer: Tokenizer, prompt: str, suffix: str) -> str:
    """Return the text of a prompt whose completion goes before `suffix`. Raises 400 if the model cannot do that."""
    if (infill := infill_of(tokenizer)) is None:
        raise invalid("Invalid 'suffix': the model has no tokens for filling in text before a suffix.", "suffix")
    return infill.template.format(prompt=prompt, suffix=suffix)


def ends_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a filling: the model's own ends first."""
    infill = infill_of(tokenizer)
    marks = () if infill is None else infill.marks + infill.ends
    return tuple(dict.fromkeys((*tokenizer.eos_ids, *sorted(tokenizer.ids_of(marks)))))
