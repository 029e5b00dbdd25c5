"""Pre-tokenizers of GGUF files: compared with the published patterns in another engine of regular expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
import tokenizers

from engine.gguf.architectures import ARCHITECTURES
from engine.gguf.tokenizer import PATTERNS, Vocabulary

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As llama.cpp has them for files that name them, in order: each splits what the one before has left.
PUBLISHED = {
    "kimi-k2": [KIMI],
    "midm-2.0": [LLAMA_3],
    "minicpm5": [r"\p{N}{1,3}", LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}+")],
    "kanana2": [GPT_4O],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O],
    "minerva-7b": [r"\p{N}", GPT_2],
    "viking": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    **{name: [LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")] for name in ("kormo", "f2llmv2")},
    **{name: [GPT_2] for name in ("a.x-4.0", "gigachat", "granite-docling", "mellum", "trillion")},
}
TEXT = (
    "I'm sure they'll say IT'S, don't DON'T; HTTPServer iPhone's 1 12 1234 1234567 3.14159 12345x x67890 "
    "\u4e2d\u6587English\u6df7\u5408 \u4f60\u597d\uff0c\u4e16\u754c\u3002"
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 \u5317\u4eac\u5e02 Pascal\n\n"
    "  def f(x):\r\n\t\treturn x**2/(y|z)  # caf\u00e9 cafe\u0301 "
    "\u0915\u093f \u0661\u0662\u0663\u0664 \U0001f600! ...\n \n /path/to//x/\n   "
)


def split(text: str, patterns: list[str]) -> list[str]:
    """Return the words: matches of the first pattern and what is between them, split by the next one, and so on."""

    def pieces(text: str, pattern: str) -> Iterator[str]:
        end = 0
        for found in regex.finditer(pattern, text, regex.VERSION1):
            yield text[end : found.start()]
            yield found.group()
            end = found.end()
        yield text[end:]

    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in pieces(word, pattern) if piece]
    return words


@pytest.mark.parametrize("name", PUBLISHED)
def test_texts_are_split_by_the_published_pattern(name):
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in PATTERNS[name]]
    words = tokenizers.pre_tokenizers.Sequence(splits).pre_tokenize_str(TEXT)
    assert [word for word, _ in words] == split(TEXT, PUBLISHED[name])


def vocabulary(pre: str) -> tokenizers.Tokenizer:
    tokens = ["a", "b", "ab", "[BOS]", "<|im_end|>"]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1, 1, 1, 3, 3], "bos_token_id": 3}
    files = Vocabulary({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}).files()
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def test_a_word_of_kimi_that_is_a_token_is_not_merged():
    assert vocabulary("kimi-k2").encode("ab<|im_end|>").tokens == ["ab", "<|im_end|>"]
    assert vocabulary("mellum").encode("ab<|im_end|>").tokens == ["a", "b", "<|im_end|>"]
    assert vocabulary("midm-2.0").encode("ab").tokens == ["[BOS]", "ab"]


def test_the_documentation_lists_every_pre_tokenizer_and_architecture():
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    section = text.partition("### GGUF files")[2].partition("\n## ")[0]

    def named(begin: str, end: str) -> set[str]:
        return set(re.findall(r"`([^`\s]+)`", section.partition(begin)[2].partition(end)[0]))

    assert named("is published:\n", "These files are refused") == set(PATTERNS)
    assert named("`general.architecture` |\n", "`tokenizer.ggml.model`") == set(ARCHITECTURES)
