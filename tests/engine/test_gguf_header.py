"""What the header of a GGUF file decides: how to sample by default, which tokens end a response, and whether its parts
belong together."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from engine import ModelError
from engine.gguf import reader
from engine.gguf.folder import folder_of
from engine.gguf.tokenizer import Vocabulary
from tests.engine.test_gguf import write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_sampling_that_a_file_suggests_is_that_of_the_model(tmp_path):
    suggested = {"temp": 0.7, "top_k": 21, "top_p": 0.9, "min_p": 0.05, "penalty_repeat": 1.1}
    values = {f"general__sampling__{name}": value for name, value in suggested.items()}
    found = json.loads((folder_of(write(tmp_path / "model.gguf", **values)) / "generation_config.json").read_text())
    sampling = {name: found.get(name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    assert sampling == pytest.approx(
        {"temperature": 0.7, "top_k": 21, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    )


def test_a_file_that_suggests_no_sampling_leaves_the_defaults(tmp_path):
    found = json.loads((folder_of(write(tmp_path / "model.gguf")) / "generation_config.json").read_text())
    assert found.keys() <= {"eos_token_id", "bos_token_id", "pad_token_id"}


def test_parts_that_hold_the_same_tensor_are_not_those_of_one_model(tmp_path):
    first, second = (tmp_path / f"model-{part:05}-of-00002.gguf" for part in (1, 2))
    write(first)
    shutil.copy(first, second)  # as after a download that named the wrong part
    with pytest.raises(ModelError, match=r"00002-of-00002.gguf holds the tensor .* of another part; download"):
        reader.read(first)


def vocabulary(tokens: list[str], types: list[int], **values: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the files of a byte-level vocabulary, and the tokens that end a response."""
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, **values}
    files = Vocabulary({f"tokenizer.ggml.{key}": value for key, value in found.items()}).files()
    return files, [tokens[index] for index in files["generation_config.json"]["eos_token_id"]]


@pytest.mark.parametrize("kind", [1, 4], ids=["normal", "user-defined"])
def test_a_token_that_only_ends_responses_is_a_control_token_whatever_its_type(kind):
    files, ends = vocabulary(["a", "<|endoftext|>", "<|im_end|>", "</s>"], [1, 3, kind, kind], eos_token_id=1)
    assert ends == ["<|endoftext|>", "<|im_end|>"]  # in web pages </s> is text
    special = {each["content"]: each["special"] for each in files["tokenizer.json"]["added_tokens"]}
    assert special["<|im_end|>"] is True


def test_the_end_of_a_message_of_solar_open_does_not_end_its_response():
    _, ends = vocabulary(["a", "<|end|>", "<|flush|>", "<|calls|>"], [1, 3, 3, 3], eos_token_id=2)
    assert ends == ["<|flush|>", "<|calls|>"]


def test_models_with_several_end_tokens_stop_at_each():
    tokens = ["a", "<end_of_turn>", "<eos>", "[EOS]", "[EOT]", "<end_of_utterance>"]
    assert vocabulary(tokens, [1, 3, 3, 3, 3, 3], eos_token_id=1)[1] == tokens[1:]


def test_a_sentencepiece_vocabulary_that_names_no_tokens_has_those_of_llama(tmp_path):
    write(tmp_path / "model.gguf", vocabulary="llama")
    found = reader.read(tmp_path / "model.gguf").metadata
    files = Vocabulary({key: value for key, value in found.items() if not key.endswith("_token_id")}).files()
    assert files["tokenizer_config.json"] == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert files["generation_config.json"] == {"eos_token_id": [2]}
    assert files["tokenizer.json"]["post_processor"]["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}


def header(keys: dict[str, str | int], tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """Return a header with tensors in F32, all at the same place."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    for key, value in keys.items():
        own = struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
        parts.append(text(key) + own)
    for name, shape in tensors:
        parts.append(text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, 0))
    return b"".join(parts)


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data + bytes(4096))
    with pytest.raises(ModelError) as caught:
        folder_of(path)
    return str(caught.value)


def test_a_tensor_of_a_trillion_experts_gets_a_sentence_at_once(tmp_path):
    name = "qwen3moe"
    sizes = {"attention.head_count": 4, "embedding_length": 64, "context_length": 128, "block_count": 1}
    sizes |= {"feed_forward_length": 64, "expert_feed_forward_length": 64, "expert_count": 4, "expert_used_count": 2}
    sizes |= {"attention.layer_norm_rms_epsilon": 1, "vocab_size": 10}
    keys = {"general.architecture": name} | {f"{name}.{key}": value for key, value in sizes.items()}
    data = header(keys, [("blk.0.ffn_up_exps.weight", (0, 1, 10**12))])  # takes no bytes
    assert refused(tmp_path / "many.gguf", data) == (
        "the GGUF file has 1000000000000 tensors of experts, more than 524288"
    )


def test_two_tensors_of_one_name_get_a_sentence(tmp_path):
    data = header({"general.architecture": "llama"}, [("token_embd.weight", (4, 4)), ("token_embd.weight", (4, 4))])
    assert "has a broken header (two tensors of one name); download it again" in refused(tmp_path / "two.gguf", data)


def test_two_values_of_one_key_get_a_sentence(tmp_path):
    one, other = (header({key: "llama"}, []) for key in ("general.architecture", "general.architecture"))
    data = one[:16] + struct.pack("<Q", 2) + one[24:] + other[24:]
    assert "(two values of general.architecture)" in refused(tmp_path / "two.gguf", data)
