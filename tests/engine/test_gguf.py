"""GGUF files: written by the gguf package, then read, loaded and compared with transformers on the same numbers."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as ValueType
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from engine import ConfigError, EngineConfig, ModelError
from engine.gguf import folder, reader
from engine.gguf.folder import folder_of
from engine.gguf.tokenizer import PATTERNS, Vocabulary
from engine.hub import fetch
from engine.kernels.blocks import FORMATS, Q4_Z
from engine.models import describe, examine, product
from tests.engine.test_exact import serve
from tests.engine.test_kernels import CPU, needs_library
from tests.engine.test_kernels_quantized import rounded
from tests.engine.test_models import Bench, whole
from tests.models import load_model, prompt

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM = 256, 512, 2, 4, 2, 64
WORDS = ["a", "b", "c", "ab", "\u0120a", "\u0120", "<s>", "</s>", "<|im_end|>", "<tool>"]
CONTROL, USER_DEFINED, BYTE = 3, 4, 6


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")


def quantized(numbers: np.ndarray, kind: Type) -> np.ndarray:
    """Return blocks of a type; of types that the gguf package only reads, any blocks."""
    try:
        return gguf.quantize(numbers, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(numbers.size)
        blocks = random.integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // block, size), dtype=np.uint8)
        halves = {Type.Q6_K: [208], Type.Q2_K: [80, 82], Type.Q3_K: [108]}.get(kind, [0, 2])
        for start in halves:
            scales = (random.normal(size=blocks.shape[:-1]) / 2**15).astype(np.float16)
            blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
        return blocks.reshape(*numbers.shape[:-1], -1)


def write(
    path: Path,
    kinds: dict[str, Type] | Type = Type.Q8_0,
    architecture: str = "llama",
    *,
    tied: bool = True,
    vocabulary: str = "gpt2",
    scaling: np.ndarray | None = None,
    **values: object,
) -> Path:
    """Write a small model. `kinds`: the type of all matrices, or of those whose name has a key."""
    writer = gguf.GGUFWriter(path, architecture)
    if f"{architecture}__context_length" not in values:
        writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in values.items():
        writer.add_key_value(key.replace("__", "."), value, ValueType.get_type(value))
    if vocabulary == "gpt2":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(WORDS)
        writer.add_token_types([1, 1, 1, 1, 1, 1, CONTROL, CONTROL, CONTROL, USER_DEFINED])
        writer.add_token_merges(["a b", "\u0120 a"])
    else:
        tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "\u2581",
            "a",
            "b",
            "\u2581a",
            "ab",
        ]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0])
        writer.add_token_types([2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * 5)
    writer.add_bos_token_id(WORDS.index("<s>") if vocabulary == "gpt2" else 1)
    writer.add_eos_token_id(WORDS.index("</s>") if vocabulary == "gpt2" else 2)
    random = np.random.default_rng(1)
    rows = 300

    def add(name: str, *shape: int) -> None:
        scale = 1.0 if name.startswith("token") else shape[-1] ** -0.5
        numbers = random.normal(size=shape).astype(np.float32) * scale
        kind = kinds if isinstance(kinds, Type) else next((t for part, t in kinds.items() if part in name), Type.Q8_0)
        if len(shape) == 1:
            writer.add_tensor(name, 1 + numbers / 8)
        elif kind == Type.F32:
            writer.add_tensor(name, numbers)
        elif kind == Type.F16:
            writer.add_tensor(name, numbers.astype(np.float16))
        else:
            writer.add_tensor(name, quantized(numbers, kind), raw_dtype=kind)

    add("token_embd.weight", rows, HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", rows, HIDDEN)
    if scaling is not None:
        writer.add_tensor("rope_freqs.weight", scaling)
    for index in range(LAYERS):
        start = f"blk.{index}."
        for name in ("attn_norm", "ffn_norm"):
            add(f"{start}{name}.weight", HIDDEN)
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                add(f"{start}{name}.weight", DIM)
        for name, size in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            add(f"{start}attn_{name}.weight", size, HIDDEN)
            if architecture == "qwen2":
                add(f"{start}attn_{name}.bias", size)
        add(f"{start}attn_output.weight", HIDDEN, HEADS * DIM)
        for name in ("gate", "up"):
            add(f"{start}ffn_{name}.weight", INNER, HIDDEN)
        add(f"{start}ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
}  # fmt: skip


def by_transformers(path: Path, *, rounds: bool = True):
    """Return transformers' model of a file, in float64, with weights that the gguf package has read. With `rounds` the
    inputs of matmuls with blocks are rounded to 8 bits, as ours are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = json.loads((folder_of(path) / "config.json").read_text())
    source.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source)).double().eval()
    state, groups = {}, {}
    for tensor in gguf.GGUFReader(path).tensors:
        *layer, own, kind = tensor.name.split(".")
        if own == "rope_freqs":
            continue
        numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).double()
        if own in ("attn_q", "attn_k") and source["model_type"] == "llama":
            numbers = numbers.unflatten(0, (-1, DIM // 2, 2)).transpose(1, 2).flatten(0, 2)
        name = f"model.layers.{layer[1]}.{NAMES[own]}" if layer else NAMES[own]
        state[f"{name}.{kind}"] = numbers
        if form := FORMATS.get(int(tensor.tensor_type)):
            groups["lm_head" if name == "model.embed_tokens" and source["tie_word_embeddings"] else name] = form.group
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    for name, size in groups.items() if rounds else ():
        if name != "model.embed_tokens":

            def round_input(_module, given, size=size):
                return (rounded(given[0].flatten(0, -2), size).view(given[0].shape),)

            model.get_submodule(name).register_forward_pre_hook(round_input)
    return model


def difference(path: Path, *, rounds: bool = True, **settings: str) -> float:
    """Return the largest difference between our logits and those of `by_transformers`, relative to the largest."""
    ids = prompt(40, seed=1)
    want = whole(by_transformers(path, rounds=rounds), ids)
    config = EngineConfig(model=str(path), **{"dtype": "float32", "gguf_activations": "int8", **settings})
    got = Bench(load_model(config, fetch(str(path), weights=True).path)).step({0: ids})[0]
    return ((got.double() - want).abs().max() / want.abs().max()).item()


# -- numbers ----------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("kind", [Type(number) for number in FORMATS if number != Q4_Z], ids=lambda kind: kind.name)
def test_logits_of_every_format_are_those_of_the_numbers_in_the_file(tmp_path, kind):
    path = write(tmp_path / "model.gguf", kind)
    assert difference(path) < 0.02
    assert difference(path, rounds=False) < 0.1
    assert difference(path, rounds=False, gguf_activations="int16") < 0.002
    assert difference(path, dtype="bfloat16") < 0.2


@needs_library
@pytest.mark.parametrize(
    "kind", [Type.Q2_K, Type.Q3_K, Type.IQ4_NL, Type.IQ4_XS, Type.TQ2_0], ids=lambda kind: kind.name
)
def test_types_without_a_kernel_are_converted(tmp_path, kind):
    path = write(tmp_path / "model.gguf", kind)
    assert difference(path, rounds=False) < 0.1
    spec, _ = examine(fetch(str(path), weights=True).path, EngineConfig(model=str(path)))
    assert spec.notes == (f"weights in {kind.name} are converted to Q8_0, which needs more memory than the file",)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_plain_types_need_no_kernel_for_blocks(tmp_path, kind):
    path = write(tmp_path / "model.gguf", kind)
    assert difference(path) < 1e-4
    assert difference(path, cpu_isa="torch") < 1e-4


@needs_library
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_formats_may_differ_from_weight_to_weight(tmp_path, architecture, tied):
    kinds = {
        "attn_v": Type.Q6_K, "attn_": Type.Q4_K, "blk.0.ffn_gate": Type.Q4_0, "ffn": Type.Q5_K, "token": Type.Q4_K,
        "output.": Type.Q6_K,
    }  # fmt: skip
    path = write(tmp_path / "model.gguf", kinds, architecture, tied=tied)
    assert difference(path) < 0.05


@needs_library
@pytest.mark.parametrize("activations", ["int8", "int16"])
async def test_requests_have_the_same_bits_alone_and_together(tmp_path, activations):
    kinds = {"attn_v": Type.Q6_K, "attn_": Type.Q4_K, "ffn": Type.Q4_1, "token": Type.Q8_0}
    path = write(tmp_path / "model.gguf", kinds, "qwen3", qwen3__context_length=256)
    base = {"model": str(path), "device": "cpu", "gguf_activations": activations, "num_blocks": 64, "max_seqs": 8}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and len(alone) == 8
    for settings in ({"max_batched_tokens": 9, "threads": 2}, {"num_blocks": 14, "threads": 1}):
        found, _, preempted = await serve(EngineConfig(**base | settings), together=True)
        assert found == alone
        assert preempted or "num_blocks" not in settings


@needs_library
def test_rotary_frequencies_may_be_divided_by_factors(tmp_path):
    factors = np.linspace(1, 8, DIM // 2, dtype=np.float32)
    path = write(tmp_path / "model.gguf", Type.F32, scaling=factors)
    config = json.loads((folder_of(path) / "config.json").read_text())
    assert config["rope_scaling"]["long_factor"] == factors.tolist()
    assert difference(path) < 1e-4


@needs_library
@pytest.mark.parametrize("key", ["llama__rope__scaling__factor", "llama__rope__scale_linear"])
def test_a_factor_of_positions_without_a_type_is_linear(tmp_path, key):
    path = write(tmp_path / "model.gguf", Type.F32, **{key: 4.0})
    config = json.loads((folder_of(path) / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert examine(fetch(str(path), weights=True).path, EngineConfig(model=str(path)))[0].max_len == 128
    assert difference(path) < 1e-4


@needs_library
def test_a_model_in_several_files_is_that_of_one_file(tmp_path):
    whole_file = write(tmp_path / "model.gguf", Type.Q4_0)
    parts = split(whole_file, tmp_path / "parts", 3)
    ids = prompt(20, seed=2)
    logits = []
    for path in (whole_file, *parts):
        config = EngineConfig(model=str(path), dtype="float32")
        logits.append(Bench(load_model(config, fetch(str(path), weights=True).path)).step({0: ids})[0])
    assert all(torch.equal(logits[0], others) for others in logits[1:])
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"one of 3 parts, and .*00002-of-00003.gguf is missing"):
        fetch(str(parts[0]), weights=True)


def test_parts_in_a_hubs_cache_are_links_to_files_called_by_their_hashes(tmp_path):
    parts = split(write(tmp_path / "model.gguf", Type.Q4_0), tmp_path / "parts", 2)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/a1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, part in enumerate(parts):
        (snapshot / part.name).symlink_to(shutil.move(part, blobs / f"{number:064x}"))
    found = fetch(str(snapshot), weights=True).path
    assert found.name == "model"
    logits = [
        Bench(load_model(EngineConfig(model="", dtype="float32"), each)).step({0: [1, 2, 3]})[0]
        for each in (found, folder_of(tmp_path / "model.gguf"))
    ]
    assert torch.equal(*logits)


def test_a_link_to_a_part_may_have_another_name(tmp_path):
    parts = split(write(tmp_path / "model.gguf", Type.Q4_0), tmp_path / "parts", 2)
    (tmp_path / "best.gguf").symlink_to(parts[0])
    assert folder_of(tmp_path / "best.gguf") == folder_of(parts[0])


def split(path: Path, target: Path, count: int) -> list[Path]:
    """Write the tensors of a file to several files; the first has the metadata."""
    target.mkdir()
    model = reader.read(path)
    names = list(model.tensors)
    files = []
    for part in range(count):
        own = names[part::count]
        file = target / f"model-{part + 1:05}-of-{count:05}.gguf"
        keys = path.read_bytes() if part == 0 else b""
        file.write_bytes(header_of(keys, own, model) if part == 0 else header_of(b"", own, model))
        files.append(file)
    return files


def header_of(source: bytes, names: list[str], model: reader.Model) -> bytes:
    """Return a file with some of a model's tensors, and with the keys of `source` if it is not empty."""
    if source:
        keys, count = keys_of(source)
    else:
        keys, count = b"", 0
    infos, data = b"", b""
    for name in names:
        tensor = model.tensors[name]
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(tensor.shape))
        infos += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1]) + struct.pack("<IQ", tensor.type, len(data))
        stored = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
        data += stored + bytes(-len(stored) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), count) + keys + infos
    return head + bytes(-len(head) % 32) + data


def keys_of(source: bytes) -> tuple[bytes, int]:
    """Return the bytes of a file's keys, and their number."""
    fields = [
        field for name, field in gguf.GGUFReader(temporary(source)).fields.items() if not name.startswith("GGUF.")
    ]
    start = min(field.offset for field in fields)
    end = max(field.offset + sum(int(part.nbytes) for part in field.parts) for field in fields)
    return source[start:end], len(fields)


def temporary(source: bytes) -> Path:
    path = Path(tempfile.mkstemp(suffix=".gguf")[1])
    path.write_bytes(source)
    return path


# -- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_byte_level_vocabulary_becomes_a_tokenizer(tmp_path):
    found = folder_of(write(tmp_path / "model.gguf", tokenizer__ggml__add_bos_token=True))
    tokenizer = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
    encoding = tokenizer.encode("ab a<tool>c</s>")
    assert encoding.tokens == ["<s>", "ab", "\u0120a", "<tool>", "c", "</s>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "ab a<tool>c"
    config = json.loads((found / "tokenizer_config.json").read_text())
    assert config == {"bos_token": "<s>", "eos_token": "</s>"}
    # The end according to the file, and the end of a message, which files often do not name.
    assert json.loads((found / "generation_config.json").read_text()) == {"eos_token_id": [7, 8]}


def test_messages_of_gpt_oss_do_not_end_an_answer():
    """Its analysis is a message of its own before the answer. Phi-3's answers end with the same token."""
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1,
    }
    found = Vocabulary(metadata).files()["generation_config.json"]
    assert [tokens[index] for index in found["eos_token_id"]] == ["<|return|>", "<|call|>", "<|endoftext|>"]
    metadata["tokenizer.ggml.tokens"] = ["a", "<|end|>", "b", "c", "<|endoftext|>"]
    assert Vocabulary(metadata).files()["generation_config.json"] == {"eos_token_id": [2, 1, 4]}


def test_texts_are_split_as_by_gpt_4o():
    text = "DON'T stop: HTTPServer's 12345 caf\N{LATIN SMALL LETTER E WITH ACUTE}s\n\n  x/\n"
    (pattern,) = PATTERNS["gpt-4o"]
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    pieces = split.pre_tokenize_str(text)
    assert [piece for piece, _ in pieces] == [
        "DON'T", " stop", ":", " HTTPServer's", " ", "123", "45", " caf\N{LATIN SMALL LETTER E WITH ACUTE}s",
        "\n\n", " ", " x", "/\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-llm", ["Call", " me", " ", "12345", ",", "中文", "\n", "w", "ö", "rld", " կ"]),
        ("deepseek-coder", ["Call", " me", " ", "1", "2", "3", "4", "5", ",", "中文", "\n", "wörld", " կ"]),
        ("deepseek-v3", ["Call", " me", " ", "123", "45", ",", "中文", "\n", "wörld", " կ"]),
        ("youtu", ["Call", " me", " ", "1", "2", "3", "4", "5", ",", "中文", "\n", "wörld", " կ"]),
    ],
)
def test_text_is_split_as_in_llama_cpp_for_models_of_deepseek(name, words):
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in PATTERNS[name]]
    split = tokenizers.pre_tokenizers.Sequence(splits)
    assert [word for word, _ in split.pre_tokenize_str("Call me 12345,中文\nwörld կ")] == words


def test_texts_are_split_as_by_hunyuan():
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in PATTERNS["hunyuan-dense"]]
    pieces = tokenizers.pre_tokenizers.Sequence(splits).pre_tokenize_str("It's 12345\u4f60\u597dab.cd!\n x")
    assert [piece for piece, _ in pieces] == [
        "It", "'s", " ", "123", "45", "\u4f60\u597d", "ab", ".cd", "!\n", " x",
    ]  # fmt: skip


def test_texts_are_split_as_by_qwen_3_5():
    assert PATTERNS["qwen35"] == [PRETOKENIZE_REGEX]
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
    word = "\N{DEVANAGARI LETTER KA}\N{DEVANAGARI VOWEL SIGN I}"  # a letter and a mark
    assert [piece for piece, _ in split.pre_tokenize_str(f"{word} 12!")] == [word, " ", "1", "2", "!"]


def test_a_sentencepiece_vocabulary_becomes_a_tokenizer(tmp_path):
    found = folder_of(write(tmp_path / "model.gguf", vocabulary="llama"))
    tokenizer = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
    encoding = tokenizer.encode("ab a\u00e9")
    assert encoding.tokens == ["<s>", "\u2581a", "b", "\u2581a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "ab a\u00e9"


def test_a_vocabulary_of_gemma_4_lists_its_merges():
    tokens = ["<unk>", "<bos>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "b", "\n", "\n\n", "ab", "\u2581ab", "<|tool_response>", "<eos>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * 7 + [USER_DEFINED, CONTROL],
        "tokenizer.ggml.merges": ["a b", "\n \n", "\u2581 ab"],
        "tokenizer.ggml.add_bos_token": False,  # llama.cpp does not believe it either
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    files = Vocabulary(metadata).files()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    encoding = tokenizer.encode("ab ab  a\n\n\u00e9<turn|>")
    assert encoding.tokens == [
        "<bos>", "ab", "\u2581ab", "\u2581", "\u2581", "a", "\n\n", "<0xC3>", "<0xA9>", "<turn|>",
    ]  # fmt: skip
    assert tokenizer.decode(encoding.ids) == "ab ab  a\n\n\u00e9"
    ends = [tokens[index] for index in files["generation_config.json"]["eos_token_id"]]
    assert ends == ["<eos>", "<turn|>", "<|tool_response>"]
    with pytest.raises(ModelError, match="names tokens that the vocabulary does not have"):
        Vocabulary(metadata | {"tokenizer.ggml.merges": ["a q"]}).files()
    for missing in ([], None):
        with pytest.raises(ModelError, match="lists no merges, which that of a Gemma 4 needs"):
            Vocabulary(metadata | {"tokenizer.ggml.merges": missing}).files()


def test_whitespace_after_special_tokens_of_phi_3_belongs_to_them():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    tokens += ["<|endoftext|>", "<|user|>", "<|end|>"]
    metadata = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * 3 + [CONTROL] * 3,
        "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -6.0, -1.0] + [0.0] * 3,
        "tokenizer.ggml.bos_token_id": 1,
    }

    def texts(architecture: str) -> list[str]:
        files = Vocabulary(metadata | {"general.architecture": architecture}).files()
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
        text = "<|user|>\na<|end|>\n<|endoftext|> </s>\n"
        return tokenizer.encode(text, add_special_tokens=False).tokens

    assert texts("phi3") == ["<|user|>\n", "\u2581a", "<|end|>\n", "<|endoftext|>", "\u2581", "\u2581", "</s>\n"]
    assert "<0x0A>" in texts("llama")


def test_the_text_of_cohere_2_is_normalized():
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "\u00c3", "\u00a9"]}
    files = Vocabulary(metadata | {"tokenizer.ggml.pre": "command-r"}).files()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert tokenizer.encode("e\u0301a").tokens == ["\u00c3", "\u00a9", "a"]


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_real_vocabularies_give_the_ids_of_their_own_tokenizers(data, tmp_path, name):
    source = json.loads((data / "tokenizers" / name / "tokenizer.json").read_text())
    added = {token["id"]: token for token in source["added_tokens"]}
    vocabulary = {index: token for token, index in source["model"]["vocab"].items()}
    vocabulary |= {index: token["content"] for index, token in added.items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in source["model"]["merges"]]
    types = [
        1 if index not in added else CONTROL if added[index]["special"] else USER_DEFINED
        for index in range(len(vocabulary))
    ]
    files = Vocabulary(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": {"qwen3": "qwen2", "gpt2": "gpt-2"}[name],
            "tokenizer.ggml.tokens": [vocabulary[index] for index in range(len(vocabulary))],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": merges,
        }
    ).files()
    ours = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    theirs = tokenizers.Tokenizer.from_file(str(data / "tokenizers" / name / "tokenizer.json"))
    for text in (*TEXTS, *(data / "prompts/naughty_strings.jsonl").read_text().splitlines()[:300]):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


TEXTS = [
    "It's 12345 o'clock, isn't IT'S?\n\n\n  def f(x):\n\treturn x**2  # caf\u00e9 cafe\u0301",
    "<|im_start|>user\nHello<|im_end|>\n<tool_call>\n{}\n</tool_call>",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \U0001f600\U0001f468\u200d\U0001f469 \u0645\u0631\u062d\u0628\u0627   ",
]


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_model_is_called_like_a_link_to_its_file(tmp_path):
    path = write(tmp_path / "0123456789abcdef.gguf").rename(tmp_path / "0123456789abcdef")
    (tmp_path / "tiny-Q8_0.gguf").symlink_to(path)
    assert folder_of(tmp_path / "tiny-Q8_0.gguf").name == "tiny-Q8_0"


def test_a_folder_may_hold_a_file_in_place_of_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "model/tiny-Q8_0.gguf")
    (tmp_path / "model/mmproj-tiny.gguf").write_bytes(b"an image encoder")
    found = fetch(str(tmp_path / "model"), weights=True).path
    assert found == folder_of(path) and found.name == "tiny-Q8_0"
    shutil.copy(path, tmp_path / "model/tiny-Q4_0.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files: tiny-Q4_0.gguf, tiny-Q8_0.gguf; name one of them"):
        fetch(str(tmp_path / "model"), weights=True)


def test_another_file_at_the_same_path_is_another_model(tmp_path):
    path = tmp_path / "model.gguf"
    first = folder_of(write(path))
    assert folder_of(path) == first
    second = folder_of(write(path, Type.Q4_0))
    assert second != first
    assert "Q4_0" in json.loads((second / "config.json").read_text())["quantization_config"]["types"]


# -- hostile files ----------------------------------------------------------------------------------------------------


def test_the_table_of_types_is_that_of_the_gguf_package():
    for number, kind in reader.TYPES.items():
        assert (kind.name, kind.block, kind.block_bytes) == (Type(number).name, *gguf.GGML_QUANT_SIZES[Type(number)])


def test_a_file_that_ends_anywhere_gets_a_sentence(tmp_path):
    data = write(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    for size in (*range(0, 400, 7), 2000, 4000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"short\.gguf .*(is not a GGUF file|broken header|is cut short)"):
            folder_of(path)


KEY = struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
HOSTILE = {
    "another format": (b"GGML" + bytes(40), "is not a GGUF file"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(8), "version 1 GGUF file; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8), "big-endian GGUF file"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "broken header .*tensors"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "broken header .*keys"),
    "a long key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "a text of"),
    "a long text": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IQ", 8, 1 << 62), "a text of"),
    "a long array": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 1 << 62),
        "arrays of",
    ),
    "arrays of arrays": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1),
        "an array of the type 9",
    ),
    "an unknown type of value": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77),
        "a value of the type 77",
    ),
    "bytes that are no text": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 4) + b"\xff" * 12, "broken header"),
    "no dimensions": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IIQ", 0, 0, 0),
        "a tensor of 0 dimensions",
    ),
    "an unknown type of tensor": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 32, 99, 0),
        "in the type 99",
    ),
    "part of a block": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 33, 2, 0),
        "33 columns in blocks",
    ),
    "a tensor beyond the end": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 32, 2, 1 << 63),
        "is cut short",
    ),
    "huge dimensions": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0),
        "is cut short",
    ),
    "no architecture": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8), "names no architecture"),
    "no hyperparameters": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY, "has no llama.attention.head_count"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_get_a_sentence(tmp_path, name):
    data, sentence = HOSTILE[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=sentence):
        fetch(str(tmp_path / "bad.gguf"), weights=True)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"llama__expert_count": 8}, "has no llama.expert_used_count"),
        ({"llama__rope__dimension_count": 32}, "rope.dimension_count differs from the size of a head"),
        ({"llama__rope__scaling__type": "su"}, "rotary scaling 'su' is not supported"),
        ({"llama__rope__scaling__factor": 1e-30}, "factor of rotary scaling is not from 1 to"),
        ({"tokenizer__ggml__merges": ["a q"]}, "names tokens that the vocabulary does not have"),
        ({"tokenizer__ggml__token_type": [1]}, "has 1 values for 10 tokens"),
        ({"tokenizer__ggml__pre": "other"}, "pre-tokenizer 'other' is not supported"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer 'rwkv' is not supported"),
        ({"general__architecture": "mamba"}, "of the architecture mamba are not supported; those of llama"),
        ({"general__alignment": 33}, "an alignment of 33"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path, monkeypatch, values, sentence):
    add = gguf.GGUFWriter.add_key_value
    changed = {key.replace("__", "."): value for key, value in values.items()}

    def added(writer, key, value, vtype, sub_type=None):
        add(writer, key, changed.get(key, value), vtype, sub_type)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", added)
    path = write(
        tmp_path / "model.gguf",
        **{key: value for key, value in values.items() if "tokenizer" not in key and "general__arch" not in key},
    )
    with pytest.raises(ModelError, match=sentence):
        folder_of(path)


def test_a_folder_from_elsewhere_cannot_name_other_files_as_its_weights(tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(folder_of(write(tmp_path / "model.gguf")), copied)
    with pytest.raises(ModelError, match="asks for gguf quantization, which is not supported"):
        examine(copied, EngineConfig(model=str(copied)))


@needs_library
def test_weights_of_another_shape_get_a_sentence(tmp_path):
    path = write(tmp_path / "model.gguf", llama__attention__key_length=32)
    config = EngineConfig(model=str(path))
    with pytest.raises(ModelError, match=r"q_proj.weight in .* has the shape \[256, 256\]"):
        examine(fetch(str(path), weights=True).path, config)


def test_blocks_need_our_kernels_and_no_other_quantization(tmp_path):
    path = write(tmp_path / "model.gguf", Type.Q4_0)
    found = fetch(str(path), weights=True).path
    config = EngineConfig(model=str(path), cpu_isa="torch")
    spec, _ = examine(found, config)
    assert spec.quantization == "gguf"
    with pytest.raises(ConfigError, match="quantized weights need our CPU kernels"):
        product(config, spec, CPU)
    with pytest.raises(ConfigError, match="leave out `quantization=int8`"):
        examine(found, EngineConfig(model=str(path), quantization="int8"))


@needs_library
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q5_1, Type.Q6_K], ids=lambda kind: kind.name)
def test_the_memory_plan_counts_the_packed_blocks(tmp_path, kind):
    path = write(tmp_path / "model.gguf", kind, tied=False)
    config = EngineConfig(model=str(path), dtype="bfloat16")
    model = load_model(config, fetch(str(path), weights=True).path)
    linears = [model.embedding, model.head, *(linear for layer in model.layers for linear in layer.linears)]
    padding = -(-300 // 32) * 32 / 300  # rows of the vocabulary in whole panels
    packed = sum(linear._packed.num_bytes for linear in linears)
    assert packed / padding <= model.weights_bytes <= packed * 1.02


@needs_library
@pytest.mark.parametrize("plain", ["attn_v", "ffn_up"])
def test_the_memory_plan_counts_weights_that_are_dequantized_beside_plain_ones(tmp_path, plain):
    path = write(tmp_path / "model.gguf", {plain: Type.BF16, "": Type.Q4_0}, tied=False)
    config = EngineConfig(model=str(path), dtype="bfloat16")
    folder = fetch(str(path), weights=True).path
    model = load_model(config, folder)
    linears = [model.embedding, model.head, *(linear for layer in model.layers for linear in layer.linears)]
    padding = -(-300 // 32) * 32 / 300
    packed = sum(linear._packed.num_bytes for linear in linears)
    assert packed / padding <= model.weights_bytes <= packed * 1.02
    assert describe(folder, config).weights_bytes == model.weights_bytes
