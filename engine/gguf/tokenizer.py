"""Writes a GGUF file's vocabulary as a tokenizer.json, and its special tokens and chat template beside it.

Two kinds are supported: byte-level BPE ("gpt2"), whose pre-tokenizer is named by a key, and sentencepiece BPE, whose
merges follow from the tokens' scores ("llama") or are listed ("gemma4").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..types import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
# Patterns that split text before BPE, as the models' own tokenizers have them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = r"\p{N}"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS + r"\p{N}{1,3}" + ENDS
QWEN2 = WORDS + r"\p{N}" + ENDS
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")  # marks are parts of words
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
TEKKEN = CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = CASED.replace("|", SHORT + "|") + SHORT + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
# Letters with a case, but for those of some scripts
CASED_LETTERS = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e]]+"
)
HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK = [
    r"[\r\n]",
    rf"\s?{CASED_LETTERS}",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    HAN_AND_HANGUL,
    r"\p{N}+",
]
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, r"\p{N}"]
# Moonlight and Kimi: Han characters are words of their own, apart from those of other scripts.
KIMI_UPPER, KIMI_LOWER = (letters[:-1] + r"&&[^\p{Han}]]" for letters in (UPPER, LOWER))
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+{SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}+{KIMI_LOWER}*{SHORT}|\p{{N}}{{1,3}}{ENDS}"
)
YOUTU = [
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
]
PATTERNS = {
    name: [LLAMA3]
    for name in (
        "glm4", "chatglm-bpe", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "lfm2", "pixtral",
        "midm-2.0",
    )
}  # fmt: skip
PATTERNS |= {
    name: [DIGITS, GPT2] for name in ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
}
PATTERNS |= {
    name: [QWEN2] for name in ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "f2llmv2")
}
PATTERNS |= {
    name: [GPT2]
    for name in (
        "gpt-2", "mpt", "olmo", "jais", "phi-2", "exaone4", "a.x-4.0", "gigachat", "granite-docling", "mellum",
        "trillion",
    )
}  # fmt: skip
PATTERNS |= {
    "tekken": [TEKKEN],
    "gpt-4o": [O200K],
    "kanana2": [O200K],
    "minimax-m2": [O200K],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", O200K],
    "kimi-k2": [KIMI],
    "minicpm5": [r"\p{N}{1,3}", WORDS + r"\p{N}+" + ENDS],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "viking": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", DIGITS],
    "qwen35": [QWEN35],
    "deepseek-llm": DEEPSEEK,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense"), DEEPSEEK3),
    "youtu": YOUTU,
    "exaone-moe": [EXAONE_MOE],
    "seed-coder": [QWEN2.replace(r"]+[\r\n]*|", "]+|")],
    "solar-open": [QWEN2],
}
NORMALIZED = {"qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "command-r"}  # to Unicode's composed form
# A word that is a token is not merged.
BEGUN = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "lfm2", "pixtral", "midm-2.0"}
WHOLE_WORDS = BEGUN | {"youtu", "minicpm5", "kimi-k2"}
# Tokens that end a response though the file may name only one of them as its end, as in llama.cpp: those that are
# control tokens whatever type the file gives them, and those that may be text.
CONTROL_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
}  # fmt: skip
END_TOKENS = CONTROL_ENDS | {
    "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
# A response of gpt-oss or Solar Open has several messages, so MESSAGE_END does not end it. A key of LAST_ENDS is the
# token that ends a response, its value the one that ends it where tools are called.
LAST_ENDS, MESSAGE_END = {"<|return|>": "<|call|>", "<|flush|>": "<|calls|>"}, "<|end|>"
TOOL_RESPONSE = "<|tool_response>"  # ends Gemma 4's tool calls; in files its type is that of text
LONGEST_MERGED = 256  # characters of a token that merges are sought for; the longest real ones have 128
# Special tokens of Phi-3 after which whitespace is kept; it belongs to the others, as llama.cpp has it.
UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
PREFIX = "tokenizer.ggml."
SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # where a file names none
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in sentencepiece's tokens


class Vocabulary:
    """The tokenizer's part of the metadata. Raises ModelError for values that cannot be used."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int, len(self.tokens)) or [NORMAL] * len(self.tokens)
        if not self.tokens:
            raise ModelError("the GGUF file holds no vocabulary: it has no tokenizer.ggml.tokens")
        self.types = [
            CONTROL if token in CONTROL_ENDS else kind for token, kind in zip(self.tokens, self.types, strict=True)
        ]

    def get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def token(self, key: str) -> str | None:
        """Return the token that a key names by its id."""
        found = self._id(key)
        return None if found is None else self.tokens[found]

    def _id(self, key: str) -> int | None:
        """Return the id that a key names, or the one that its tokenizer has without the key."""
        found = self.get(key)
        if found is None and self.get("model") == "llama":
            found = SENTENCEPIECE_IDS.get(key)
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    def files(self) -> dict[str, dict[str, Any]]:
        """Return file name -> content: tokenizer.json, tokenizer_config.json and generation_config.json."""
        kind = self.get("model")
        if kind == "gpt2":
            parts = self._byte_level()
        elif kind in ("llama", "gemma4"):
            parts = self._sentencepiece()
        else:
            raise ModelError(
                f"the GGUF file's tokenizer {str(kind)[:64]!r} is not supported; gpt2, llama and gemma4 are"
            )
        strips = kind == "llama" and self.metadata.get("general.architecture") == "phi3"
        added = [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and token not in UNSTRIPPED,
                "normalized": False,
                "special": self.types[index] != USER_DEFINED,
            }
            for index, token in enumerate(self.tokens)
            if self.types[index] in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]
        tokenizer = {"version": "1.0", "added_tokens": added, "post_processor": self._post_processor(), **parts}
        return {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": self._config(),
            "generation_config.json": self._generation(),
        }

    def _list(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        found = self.get(key)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
            raise ModelError(f"the GGUF file's {PREFIX}{key} is not a list of the right type")
        if length is not None and len(found) != length:
            raise ModelError(f"the GGUF file's {PREFIX}{key} has {len(found)} values for {length} tokens")
        return found

    def _ids(self) -> dict[str, int]:
        """Return token -> id; the first of equal tokens counts."""
        ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            ids.setdefault(token, index)
        return ids

    def _byte_level(self) -> dict[str, Any]:
        name = self.get("pre") or "gpt-2"
        patterns = PATTERNS.get(name)
        if patterns is None:
            raise ModelError(
                f"the GGUF file's pre-tokenizer {str(name)[:64]!r} is not supported; use the model's safetensors files"
            )
        ids = self._ids()
        merges = self._merges(ids)
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in patterns
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if name in NORMALIZED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": name in WHOLE_WORDS},
        }

    def _merges(self, ids: Mapping[str, int]) -> list[list[str]]:
        """Return the merges that the file lists."""
        merges = [merge.split(" ") for merge in self._list("merges", str)]
        if not merges and self.get("model") == "gemma4":
            raise ModelError("the GGUF file's vocabulary lists no merges, which that of a Gemma 4 needs")
        if any(len(pair) != 2 or "".join(pair) not in ids or not ids.keys() >= {*pair} for pair in merges):
            raise ModelError("the GGUF file's tokenizer.ggml.merges names tokens that the vocabulary does not have")
        return merges

    def _merges_by_score(self, ids: Mapping[str, int]) -> list[list[str]]:
        """Return the merges that follow from the tokens' scores."""
        scores = self._list("scores", float, len(self.tokens))
        if not scores:
            raise ModelError("the GGUF file's vocabulary has no scores, which the merges follow from")
        ranked = []
        for token, index in ids.items():
            if self.types[index] != NORMAL or len(token) > LONGEST_MERGED:
                continue
            for cut in range(1, len(token)):
                left, right = ids.get(token[:cut]), ids.get(token[cut:])
                if left is not None and right is not None:
                    ranked.append((-scores[index], -cut, left, right))
        ranked.sort()
        return [[self.tokens[left], self.tokens[right]] for *_, left, right in ranked]

    def _sentencepiece(self) -> dict[str, Any]:
        ids = self._ids()
        lists_merges = self.get("model") == "gemma4"
        prefix = [{"type": "Prepend", "prepend": SPACE}] if self._adds("add_space_prefix", not lists_merges) else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        decoder: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoder},
            "model": {
                "type": "BPE",
                "vocab": ids,
                "merges": self._merges(ids) if lists_merges else self._merges_by_score(ids),
                "unk_token": self.token("unknown_token_id"),
                "fuse_unk": True,
                "byte_fallback": BYTE in self.types,
            },
        }

    def _adds(self, key: str, default: bool) -> bool:
        found = self.get(key)
        return found if isinstance(found, bool) else default

    def _post_processor(self) -> dict[str, Any] | None:
        """Return what adds bos and eos around a text."""
        name, kind = self.get("pre"), self.get("model")
        bos, eos = self.token("bos_token_id"), self.token("eos_token_id")
        sequence: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
        single, tokens = [sequence], {}
        # Gemma 4 needs bos, also where a file says otherwise.
        if bos and (kind == "gemma4" or self._adds("add_bos_token", kind == "llama" or name in BEGUN)):
            single, tokens[bos] = [{"SpecialToken": {"id": bos, "type_id": 0}}, *single], bos
        if eos and self._adds("add_eos_token", False):
            single, tokens[eos] = [*single, {"SpecialToken": {"id": eos, "type_id": 0}}], eos
        if not tokens:
            return None
        ids = self._ids()
        special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens}
        return {"type": "TemplateProcessing", "single": single, "pair": [sequence], "special_tokens": special}

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            name: token for name, key in NAMED_TOKENS.items() if (token := self.token(key)) is not None
        }
        main = self.metadata.get("tokenizer.chat_template")
        start = "tokenizer.chat_template."
        named = {key.removeprefix(start): value for key, value in self.metadata.items() if key.startswith(start)}
        if named and isinstance(main, str):
            named = {"default": main} | named
            config["chat_template"] = [{"name": name, "template": template} for name, template in named.items()]
        elif isinstance(main, str):
            config["chat_template"] = main
        return config

    def _generation(self) -> dict[str, Any]:
        ends = [index for name in ("eos", "eot", "eom") if (index := self._id(f"{name}_token_id")) is not None]
        last = {token for end, call in LAST_ENDS.items() if end in self.tokens for token in (end, call)}
        known = END_TOKENS | last
        ends += [index for index, token in enumerate(self.tokens) if token in known and self.types[index] == CONTROL]
        if self.get("model") == "gemma4":
            ends += [index for index, token in enumerate(self.tokens) if token == TOOL_RESPONSE]
        if last:
            ends = [index for index in ends if self.tokens[index] != MESSAGE_END]
        found = {name: self.metadata[key] for key, name in SAMPLING.items() if key in self.metadata}
        return {"eos_token_id": list(dict.fromkeys(ends)), **found}
