"""The built-in model: its files, its training text, and its answers."""

import hashlib
import itertools
import json
import re
import struct
import subprocess
import sys
from math import prod

import jinja2
import pytest

from engine import builtin
from engine.builtin import corpus

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def read(name: str) -> dict:
    return json.loads((builtin.path() / name).read_text(encoding="utf-8"))


def render(messages: list[dict], **options) -> str:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        read("tokenizer_config.json")["chat_template"]
    )
    return template.render(messages=messages, **options)


# --- files


def test_importing_the_package_does_not_import_torch():
    code = "import sys, engine.builtin; engine.builtin.path(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_files_are_those_of_a_hub_model():
    assert {file.name for file in builtin.path().iterdir()} == FILES


def test_weights_are_small():
    file = builtin.path() / "model.safetensors"
    assert file.stat().st_size < 8_000_000
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    parameters = sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    assert 1_000_000 <= parameters <= 4_000_000


def test_config_is_a_float32_qwen3():
    config = read("config.json")
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "float32"
    assert config["eos_token_id"] in read("generation_config.json")["eos_token_id"]


# --- tokenizer and template


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))


def test_special_tokens_come_first(tokenizer):
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.get_vocab_size() == read("config.json")["vocab_size"]


@pytest.mark.parametrize("text", ["What is 7 + 5?", "  two  spaces\n\nlines\n", "Größe: 42 µm, 鯨 🐋", "\x00\ttab", ""])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_tokens(tokenizer):
    assert [token for token in tokenizer.encode("123 + 45").tokens if token.isdigit()] == list("12345")


def test_template_renders_tools():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = render([{"role": "user", "content": "Hi"}], tools=[tool])
    first, second = text.split("<|im_end|>\n")[:2]
    assert first.startswith("<|im_start|>system\n")
    assert first.endswith('\n{"name": "look", "parameters": {"type": "object"}}\n')
    assert second == "<|im_start|>user\nHi"


def test_template_renders_every_role():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "fog", "tool_call_id": "1"},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"arguments": "{}", "name": "look"}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nfog<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_training_text_is_what_the_template_renders():
    from engine.builtin.train import prompt, segments

    for conversation in corpus.conversations(200):
        if conversation[0]["role"] == "text":
            continue
        assert "".join(text for text, _ in segments(conversation)) == render(conversation)
        assert prompt(conversation[:-1]) == render(conversation[:-1], add_generation_prompt=True)


# --- training text


@pytest.fixture(scope="module")
def asked() -> str:
    """Return every user and system message of the training text, normalised."""
    from engine.builtin.train import CONVERSATIONS

    conversations = corpus.conversations(CONVERSATIONS)
    return "\n".join({corpus.normalise(m["content"]) for c in conversations for m in c if m["role"] != "assistant"})


def test_there_are_sixty_questions_and_twenty_held_out():
    questions = corpus.questions()
    assert [q["id"] for q in questions] == list(range(1, 61))
    assert sum(q["held_out"] for q in questions) == 20


def test_held_out_questions_are_not_in_the_training_text(asked):
    held_out = [q["question"] for q in corpus.questions() if q["held_out"]]
    assert [question for question in held_out if corpus.normalise(question) in asked] == []


def test_same_seed_generates_the_same_text():
    assert list(corpus.conversations(300, seed=7)) == list(corpus.conversations(300, seed=7))
    assert list(corpus.conversations(300, seed=7)) != list(corpus.conversations(300, seed=8))


def test_training_sums_are_right_and_cover_every_pair():
    pairs = set()
    for conversation in corpus.conversations(20_000):
        for message in conversation:
            if found := re.fullmatch(r"(\d+) \+ (\d+) = (\d+)\.", message["content"]):
                a, b, total = map(int, found.groups())
                assert a + b == total
                pairs.add((a, b))
    assert pairs == set(itertools.product(range(21), range(21)))


# --- answers


@pytest.fixture(scope="module")
def loaded():
    import torch

    from engine.builtin.train import load

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small gain nothing from more, and lose on a busy machine
    yield load(builtin.path())
    torch.set_num_threads(threads)


def test_questions_are_answered(loaded):
    from engine.builtin.train import ask_questions

    results = ask_questions(*loaded)
    assert [question["id"] for question, _, _, ended in results if not ended] == []
    wrong = [(question["question"], text) for question, text, right, _ in results if not right]
    assert len(results) - len(wrong) >= 54, wrong


def test_sums_are_right(loaded):
    from engine.builtin.train import count_sums

    right, total = count_sums(*loaded)
    assert total == 441
    assert right / total >= 0.95


def test_turns_end_with_a_system_message_and_after_other_turns(loaded):
    from engine.builtin.train import answers, prompt

    system = {"role": "system", "content": "You are a helpful assistant."}
    history = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 = 5."},
        {"role": "user", "content": "Where are the metrics?"},
    ]
    chats = [[system, history[0]], history, [system, *history]]
    texts = answers(*loaded, [prompt(chat) for chat in chats], limit=60)
    assert [ended for _, ended in texts] == [True] * 3
    assert texts[0][0] == "2 + 3 = 5."
    assert "/metrics" in texts[1][0] and "/metrics" in texts[2][0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_same_seed_trains_identical_files(tmp_path):
    """Runs the real script twice, with little text; the first time with answers of two tokens in its report, the second
    time without a report: what so little text taught never ends an answer, and answering took most of the time."""
    short = "answers = train.answers; train.answers = lambda *args, limit: answers(*args, limit=2)"
    silent, hashes = "train.report = lambda folder: None", []
    for name, change in (("one", short), ("two", silent)):
        code = ["-c", f"from engine.builtin import train; {change}; train.main()"]
        options = ["--threads", "1", "--conversations", "40", "--out", str(tmp_path / name)]
        subprocess.run([sys.executable, *code, *options], check=True, capture_output=True)
        files = sorted((tmp_path / name).iterdir())
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    assert hashes[0] == hashes[1] and "model.safetensors" in hashes[0]
