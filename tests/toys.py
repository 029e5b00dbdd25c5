"""Small tokenizers of every kind, made on the spot, so that the text tests need no files from outside."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "Call me Ishmael. Some years ago - never mind how long precisely - I thought I would sail about a little.",
    "the ship, the sea; the whale! äöü ß €5 日本語のテキスト 🐳🐋 the whales, sailing, sails, sailor",
]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: every byte is a token, nothing is unknown."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    library.train_from_iterator(TEXT, trainer)
    return library


def byte_fallback(strip: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2, Mistral (stripping) and Gemma (not) have it: a mark for spaces, and tokens for lone bytes."""
    words = ["▁", "a", "b", "e", "h", "s", "t", "th", "the", "▁the", "▁a", "ea", "sea", "▁sea", "▁▁", "s▁", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("e", "a"), ("s", "ea"), ("▁", "sea"), ("▁", "▁")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    library.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return library


def word_pieces() -> tokenizers.Tokenizer:
    """As BERT has it: what a token adds depends on the one before."""
    words = ["[UNK]", "[SEP]", "the", "sea", "##s", "##ailor", "s", "a", ".", "whale"]
    library = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece(cleanup=False)
    library.add_special_tokens(["[UNK]", "[SEP]"])
    return library


def metaspace() -> tokenizers.Tokenizer:
    """As XGLM has it: marks for spaces, without tokens for bytes."""
    words = ["<unk>", "</s>", "▁the", "▁sea", "s", "▁", "whale", "é"]
    library = tokenizers.Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<unk>", "</s>"])
    return library


MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, no strip": lambda: byte_fallback(strip=False),
    "word pieces": word_pieces,
    "metaspace": metaspace,
}
