"""Model folders by somebody who means harm: each is refused in one sentence, within bounds of time and memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import fetch

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parent.parent.parent
MAX_RSS = 700 << 20  # torch and the built-in model take 330 MB
DEEP = "[" * 100_000
HUGE = 300 << 20
INDEX = "model.safetensors.index.json"

Spoil = Callable[[Path], object]


def edit(name: str, **fields: Any) -> Spoil:
    """Change fields of a JSON file; None removes one."""

    def spoil(folder: Path) -> None:
        found = {**json.loads((folder / name).read_text()), **fields}
        (folder / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return spoil


def config(**fields: Any) -> Spoil:
    return edit("config.json", **fields)


def gpt2(**fields: Any) -> Spoil:
    """A config.json of a model that transformers' code computes."""
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 128}

    def spoil(folder: Path) -> None:
        kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
        (folder / "config.json").write_text(json.dumps({**kind, **sizes, **fields}))

    return spoil


def text(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


def large(name: str) -> Spoil:
    """A file of 300 MB that takes no place on a disk."""

    def spoil(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, HUGE)

    return spoil


def pipe(name: str) -> Spoil:
    """A named pipe: whoever opens it waits for somebody who writes into it."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def device(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return spoil


def directory(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def header(content: bytes, length: int | None = None, data: int = 1024) -> Spoil:
    """A safetensors file with this header, which says that it is `length` bytes long, and `data` bytes behind it."""

    def spoil(folder: Path) -> None:
        start = struct.pack("<Q", len(content) if length is None else length)
        (folder / "model.safetensors").write_bytes(start + content + bytes(data))

    return spoil


def tensors(**offsets: tuple[int, int]) -> bytes:
    described = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in offsets.items()}
    return json.dumps(described).encode()


def tensor(**fields: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}).encode()


def index(weight_map: Any) -> Spoil:
    return indexed(text(INDEX, json.dumps({"weight_map": weight_map})))


def indexed(spoil: Spoil) -> Spoil:
    """The index alone: it is not read where model.safetensors is."""

    def both(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        spoil(folder)

    return both


def tokenizer(**parts: Any) -> Spoil:
    return edit("tokenizer.json", **parts)


ONE_TENSOR = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
MANY_TENSORS = b"{" + b",".join(ONE_TENSOR % number for number in range(1_000_000)) + b"}"

# What is done to a good folder, and what its error says.
FOLDERS: dict[str, tuple[Spoil, str]] = {
    # Numbers in config.json
    "layers": (config(num_hidden_layers=10**9), "num_hidden_layers must be at most"),
    "more layers than the checkpoint": (config(num_hidden_layers=4000), "lacks the tensor"),
    "hidden size": (config(hidden_size=10**12), "hidden_size must be at most"),
    "larger hidden size than the checkpoint's": (config(hidden_size=1 << 20), "shape"),
    "feed-forward size": (config(intermediate_size=10**12), "intermediate_size must be at most"),
    "vocabulary": (config(vocab_size=10**9), "vocab_size must be at most"),
    "larger vocabulary than the checkpoint's": (config(vocab_size=1 << 24), "shape"),
    "heads": (config(num_attention_heads=1 << 40, num_key_value_heads=1), "num_attention_heads must be at most"),
    "key-value heads": (config(num_attention_heads=65536, num_key_value_heads=65536), "shape"),
    "head size": (config(head_dim=1 << 40), "head_dim must be at most"),
    "positions": (config(max_position_embeddings=10**18), "max_position_embeddings must be at most"),
    "window": (config(use_sliding_window=True, sliding_window=10**30), "sliding_window must be at most"),
    "layer types": (config(use_sliding_window=True, sliding_window=8, layer_types=["x"] * 500_000), "layer_types"),
    "no number": (config(hidden_size=[[]] * 1000), "hidden_size must be a positive whole number"),
    "rope of endless factor": (config(rope_scaling={"rope_type": "linear", "factor": 1e999}), "rotary"),
    "rope of large factor": (config(rope_scaling={"rope_type": "linear", "factor": 1e300}), "rotary"),
    "rope without base": (config(rope_theta=1e-320), "rotary"),
    "rope of no length": (
        config(rope_scaling={"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -1}),
        "rotary",
    ),
    "rope lists": (
        config(rope_scaling={"rope_type": "longrope", "short_factor": [1] * 300_000, "long_factor": [1] * 300_000}),
        "short_factor must hold",
    ),
    "a long name": (config(architectures=["x\n" * 10**6]), "x x x"),
    "names of another type": (config(architectures=[{}], model_type=[]), "names no architecture"),
    "an activation of another type": (config(hidden_act=["silu"]), "the activation must be a name"),
    "gpt2, layers": (gpt2(n_layer=10**9), "n_layer must be at most"),
    "gpt2, more layers than the checkpoint": (gpt2(n_layer=4000), "far more, or far larger, layers"),
    "gpt2, vocabulary": (gpt2(vocab_size=10**9), "far more, or far larger, layers"),
    "gpt2, positions": (gpt2(n_positions=10**6), "far more, or far larger, layers"),
    "gpt2, nested": (gpt2(text_config={"num_hidden_layers": 10**9}), "num_hidden_layers must be at most"),
    "gpt2, heads": (gpt2(n_head=10**9), "n_head must be at most"),
    # config.json as a file
    "config, deep": (text("config.json", DEEP), "nested too deeply"),
    "config, deep in an object": (text("config.json", '{"a":' * 100_000), "nested too deeply"),
    "config, large": (large("config.json"), "is larger than"),
    "config, many values": (text("config.json", '{"a":[' + "[]," * 1_300_000 + "0]}"), "holds more than"),
    "config, a long number": (text("config.json", '{"vocab_size":' + "9" * 100_000 + "}"), "is not valid JSON"),
    "config, a pipe": (pipe("config.json"), "is not a regular file"),
    "config, a device": (device("config.json"), "is not a regular file"),
    "config, a directory": (directory("config.json"), "is not a regular file"),
    # The checkpoint
    "header beyond the file": (header(b"{}", 1 << 40), "cut short"),
    "header of 100 MB": (header(b"{}" + b" " * 100_000_000), "header of"),
    "header, deep": (header(DEEP.encode()), "broken safetensors header"),
    "header, deep in a tensor": (header(b'{"a":' + DEEP.encode()), "broken safetensors header"),
    "header of a million tensors": (header(MANY_TENSORS), "header of"),
    "header of many values": (header(b'{"a":[' + b"[]," * 1_300_000 + b"0]}"), "holds more than"),
    "tensors that overlap": (header(tensors(a=(0, 16), b=(8, 24))), "broken safetensors header"),
    "a tensor before the data": (header(tensor(data_offsets=[-16, 0])), "broken safetensors header"),
    "a tensor behind the file": (header(tensor(shape=[1024], data_offsets=[0, 4096])), "cut short"),
    "a tensor of no end": (header(tensor(data_offsets=[0, 10**30])), "broken safetensors header"),
    "a tensor of another dtype": (header(tensor(dtype="F64")), "broken safetensors header"),
    "a tensor of no dtype": (header(tensor(dtype="x" * 10**6)), "not supported"),
    "a tensor of a million dimensions": (header(tensor(shape=[2] * 10**6)), "broken safetensors header"),
    "a tensor of negative size": (header(tensor(shape=[-2, -2])), "broken safetensors header"),
    "a tensor of half a row": (header(tensor(shape=[4.0])), "broken safetensors header"),
    "weights, a pipe": (pipe("model.safetensors"), "model.safetensors is missing"),
    "index, above the folder": (index({"a": "../model.safetensors"}), "outside the folder"),
    "index, the folder above": (index({"a": ".."}), "outside the folder"),
    "index, absolute": (index({"a": "/etc/passwd"}), "outside the folder"),
    "index, missing": (index({"a": "b.safetensors"}), "is missing"),
    "index, a zero byte": (index({"a": "b\0.safetensors"}), "is missing"),
    "index, no names": (index({"a": 1}), "is not a valid index"),
    "index, deep": (indexed(text(INDEX, '{"weight_map":' + DEEP)), "is not a valid index"),
    "index, large": (indexed(large(INDEX)), "is larger than"),
    "index, many": (index({str(number): "b" for number in range(2_000_001)}), "holds more than"),
    "index, a pipe": (indexed(pipe(INDEX)), "is not a regular file"),
    # The text's files
    "generation config, deep": (text("generation_config.json", DEEP), "nested too deeply"),
    "generation config, large": (large("generation_config.json"), "is larger than"),
    "generation config, a pipe": (pipe("generation_config.json"), "is not a regular file"),
    "many end tokens": (edit("generation_config.json", eos_token_id=list(range(10**5))), "eos_token_id"),
    "an end token of 30 digits": (edit("generation_config.json", eos_token_id=10**30), "eos_token_id"),
    "tokenizer config, deep": (text("tokenizer_config.json", '{"a":' + DEEP), "nested too deeply"),
    "tokenizer config, large": (large("tokenizer_config.json"), "is larger than"),
    "tokenizer config, a pipe": (pipe("tokenizer_config.json"), "is not a regular file"),
    "tokenizer config, a device": (device("tokenizer_config.json"), "is not a regular file"),
    "tokenizer config, flags": (
        edit("tokenizer_config.json", added_tokens_decoder={"0": {"content": "a", "special": True, "lstrip": "x"}}),
        "cannot be read",
    ),
    "tokenizer, deep": (text("tokenizer.json", DEEP), "cannot be read"),
    "tokenizer, deep in its model": (text("tokenizer.json", '{"version":"1.0","model":' + DEEP), "cannot be read"),
    "tokenizer, large": (large("tokenizer.json"), "is larger than"),
    "tokenizer, a pipe": (pipe("tokenizer.json"), "is not a regular file"),
    "tokenizer, a directory": (directory("tokenizer.json"), "is not a regular file"),
    "tokenizer, a panic": (
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "precompiled_charsmap",
    ),
    "chat template, large": (large("chat_template.jinja"), "is larger than"),
    "chat template, long": (text("chat_template.jinja", "x" * (2 << 20)), "chat templates"),
    "chat template, a pipe": (pipe("chat_template.jinja"), "is not a regular file"),
    "chat template, no text": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"),
        "is not text in UTF-8",
    ),
}

# Loads each of the folders that come on standard input in a process of its own, as the server and its engine do, and
# prints what came of it. The processes are forks, because importing torch takes longer than all else.
PROGRAM = """
import json, os, resource, signal, sys, traceback
from pathlib import Path

from engine import EngineConfig, EngineError
from engine.grammar.grammars import Grammars
from engine.models import hf
from engine.build import build
from server.tokenization.generation_defaults import read_defaults
from server.tokenization.encoder import Prompts
from server.tokenization.tokenizer import Tokenizer


def text(folder):
    read_defaults("auto", folder)
    Prompts.load(Tokenizer(folder), None).close()


def engine(folder):
    config = EngineConfig(model=str(folder), num_blocks=16)
    width = build(config)[1].vocab_size
    Grammars(config, width).close()


def load(folder):
    signal.setitimer(signal.ITIMER_PROF, 60)  # of computing, however busy the machine is
    signal.alarm(250)  # for what waits
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # the machine's, where a bound is gone
    errors = []
    for part in (text, engine):
        try:
            part(folder)
        except EngineError as error:
            errors.append(str(error))
        except BaseException:
            errors.append(traceback.format_exc())
    print(json.dumps([errors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]), flush=True)
    os._exit(0)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        load(Path(line.rstrip("\\n")))
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps([[f"the loading was ended by signal {status}"], 0]), flush=True)
"""


class Loader:
    """The program, which is asked for one folder after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def __call__(self, folder: Path) -> tuple[list[str], int]:
        """The errors of loading a folder, and the largest memory that it took, in bytes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        errors, memory = json.loads(self.process.stdout.readline())
        return errors, memory


@pytest.fixture(scope="module")
def load() -> Iterator[Loader]:
    loader = Loader()
    yield loader
    loader.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be spoiled."""
    return Path(shutil.copytree(fetch("builtin", weights=True).path, tmp_path / "model"))


def test_a_good_folder_is_loaded_also_through_symbolic_links(folder: Path, tmp_path: Path, load: Loader) -> None:
    (tmp_path / "links").mkdir()
    for file in folder.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    errors, memory = load(tmp_path / "links")
    assert errors == []
    assert memory < MAX_RSS


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_is_refused_within_bounds(name: str, folder: Path, load: Loader) -> None:
    spoil, says = FOLDERS[name]
    spoil(folder)
    errors, memory = load(folder)
    assert any(says in error for error in errors), errors
    assert not any("\n" in error or len(error) > 1000 for error in errors), errors
    assert memory < MAX_RSS
