"""Trains the built-in model from scratch: `python -m engine.builtin.train`.

Generates the text, trains the tokenizer and the weights, writes the files of a hub model, and evaluates the result.
"""

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read when tokenizers is imported; keeps merges deterministic

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from engine.builtin import corpus, path

CONVERSATIONS = 110_000
VOCABULARY = 2048
BATCH_TOKENS = 2_500  # padded tokens per step
PEAK_LR = 3e-3  # so narrow a model needs a high rate
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)
ENDS = [IM_END, END_OF_TEXT]

# Qwen's split: words with their leading space, and each digit separately, so that sums are computed on digits.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nFunctions, called by <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\\n' }}
{%- for tool in tools %}
{{- (tool.function or tool) | tojson + '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'system' if message.role == 'developer' else message.role %}
{{- '<|im_start|>' + role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content if part.type == 'text' %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' }}
{{- (call.function or call) | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_OF_TEXT,
    "dtype": "float32",
    "eos_token_id": IM_END,
    "head_dim": 64,  # the smallest that GPU attention kernels commonly support
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pad_token_id": END_OF_TEXT,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}

GENERATION = {
    "bos_token_id": END_OF_TEXT,
    "do_sample": True,
    "eos_token_id": ENDS,
    "pad_token_id": END_OF_TEXT,
    "temperature": 0.3,  # stories vary a little, facts and sums stay right
}


def added_token(text: str) -> dict:
    return {
        "content": text,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "added_tokens_decoder": {str(i): added_token(text) for i, text in enumerate(SPECIALS)},
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 2048,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}

# --- text to tokens


def segments(conversation: corpus.Conversation) -> list[tuple[str, bool]]:
    """Split a conversation, as the chat template renders it, into (text, whether the loss counts it)."""
    if conversation[0]["role"] == "text":
        return [("<|endoftext|>", False), (conversation[0]["content"] + "<|endoftext|>", True)]
    parts: list[tuple[str, bool]] = []
    for message in conversation:
        if message["role"] == "assistant":
            parts += [("<|im_start|>assistant\n", False), (message["content"] + "<|im_end|>", True), ("\n", False)]
        else:
            parts.append((f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n", False))
    return parts


def prompt(messages: corpus.Conversation) -> str:
    """Return the prompt that the chat template renders for messages."""
    return "".join(text for text, _ in segments(messages)) + "<|im_start|>assistant\n"


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE of VOCABULARY tokens, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


Example = tuple[list[int], list[bool]]  # tokens, and whether the loss counts each


def encode(conversations: list[corpus.Conversation], tokenizer: Tokenizer) -> list[Example]:
    """Encode conversations; the loss counts the assistant's messages and their end of turn."""
    split = [segments(conversation) for conversation in conversations]
    encoded = iter(tokenizer.encode_batch([text for parts in split for text, _ in parts], add_special_tokens=False))
    examples = []
    for parts in split:
        tokens: list[int] = []
        counted: list[bool] = []
        for _, trained in parts:
            ids = next(encoded).ids
            tokens += ids
            counted += [trained] * len(ids)
        examples.append((tokens, counted))
    return examples


def batches(examples: list[Example], rng: random.Random) -> list[list[Example]]:
    """Return batches of examples of similar length, at most BATCH_TOKENS when padded, in random order."""
    order = sorted(examples, key=lambda example: (len(example[0]), rng.random()))
    groups: list[list[Example]] = [[]]
    for example in order:
        if (len(groups[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    return groups


def tensors(batch: list[Example], rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, attention mask, positions and counted, each [rows, length], padded on the right.

    Positions skip ahead at the start of some messages, which trains the distances of long chats on short ones.
    """
    length = max(len(tokens) for tokens, _ in batch)
    ids = torch.tensor([tokens + [END_OF_TEXT] * (length - len(tokens)) for tokens, _ in batch])
    counted = torch.tensor([marks + [False] * (length - len(marks)) for _, marks in batch])
    mask = torch.tensor([[1] * len(tokens) + [0] * (length - len(tokens)) for tokens, _ in batch])
    positions = []
    for tokens, _ in batch:
        starts = [i for i, token in enumerate(tokens) if token == IM_START]
        row, offset = [], 0
        jump_at = rng.choice(starts[:-1]) if len(starts) > 2 and rng.random() < 0.5 else None
        for i in range(length):
            offset += rng.randrange(1500) if i == jump_at else 0
            row.append(i + offset)
        positions.append(row)
    return ids, mask, torch.tensor(positions), counted


# --- training


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: a short warm-up, then a linear decay to zero."""
    return PEAK_LR * min((step + 1) / 50, (steps - step) / steps)


def train(model: Qwen3ForCausalLM, groups: list[list[Example]], rng: random.Random) -> None:
    """Train for one pass over the batches."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    start, recent = time.monotonic(), 0.0
    for step, group in enumerate(groups):
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate(step, len(groups))
        ids, mask, positions, counted = tensors(group, rng)
        hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
        wanted = counted[:, 1:]
        loss = cross_entropy(model.lm_head(hidden[:, :-1][wanted]), ids[:, 1:][wanted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent += loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{len(groups)} loss {recent / 50:.4f} {time.monotonic() - start:.0f} s", flush=True)
            recent = 0.0


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the five files of a hub model. Weights are stored as float16 and served in the config's float32."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GENERATION),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {name: p.detach().to(torch.float16).contiguous() for name, p in sorted(model.named_parameters())}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only


# --- evaluation


def load(folder: Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """Return the saved model in float32, and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def answers(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: list[str], limit: int) -> list[tuple[str, bool]]:
    """Return greedy answers to rendered prompts, each with whether the turn ended within `limit` tokens."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_padding(direction="left", pad_id=END_OF_TEXT, pad_token=SPECIALS[END_OF_TEXT])
    encoded = tokenizer.encode_batch(prompts, add_special_tokens=False)
    ids = torch.tensor([e.ids for e in encoded])
    mask = torch.tensor([e.attention_mask for e in encoded])
    untyped: Any = model  # releases of transformers type `generate` differently
    output = untyped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False)
    new = output[:, ids.shape[1] :]
    results = []
    for row in new.tolist():
        end = next((i for i, token in enumerate(row) if token in ENDS), None)
        results.append((tokenizer.decode(row[:end]), end is not None))
    return results


def is_right(answer: str, words: list) -> bool:
    """Return whether the answer contains all words, and one of each inner list."""
    answer = answer.lower()
    wanted = [word if isinstance(word, list) else [word] for word in words]
    return all(any(word.lower() in answer for word in choices) for choices in wanted)


def ask_questions(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[tuple[dict, str, bool, bool]]:
    """Return each question with its answer, whether it is right, and whether it ended."""
    questions = corpus.questions()
    prompts = [prompt([{"role": "user", "content": q["question"]}]) for q in questions]
    replies = answers(model, tokenizer, prompts, limit=160)
    return [(q, text, is_right(text, q["words"]), ended) for q, (text, ended) in zip(questions, replies, strict=True)]


def count_sums(model: Qwen3ForCausalLM, tokenizer: Tokenizer, form: str = "What is {a} + {b}?") -> tuple[int, int]:
    """Return how many of the sums 0 + 0 to 20 + 20 are right and ended, and their number."""
    pairs = [(a, b) for a in range(corpus.LARGEST + 1) for b in range(corpus.LARGEST + 1)]
    prompts = [prompt([{"role": "user", "content": form.format(a=a, b=b)}]) for a, b in pairs]
    replies = answers(model, tokenizer, prompts, limit=16)
    right = [text == f"{a} + {b} = {a + b}." and ended for (a, b), (text, ended) in zip(pairs, replies, strict=True)]
    return sum(right), len(right)


def report(folder: Path) -> None:
    """Print an evaluation of the saved model."""
    model, tokenizer = load(folder)
    results = ask_questions(model, tokenizer)
    for question, text, right, ended in results:
        if not (right and ended):
            print(f"wrong: {question['id']} {question['question']} -> {text} (ended: {ended})")
    held = [right for question, _, right, _ in results if question["held_out"]]
    print(f"questions right: {sum(r[2] for r in results)} of {len(results)}, held out: {sum(held)} of {len(held)}")
    print(f"ended: {sum(r[3] for r in results)} of {len(results)}")
    print("sums right: {} of {}".format(*count_sums(model, tokenizer)))
    print(f"parameters: {sum(p.numel() for p in model.parameters())}")
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        print(f"{hashlib.sha256(data).hexdigest()}  {file.name} ({len(data)} bytes)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.builtin.train", description=__doc__)
    parser.add_argument("--seed", type=int, default=corpus.SEED)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="fixes the number of steps")
    parser.add_argument("--out", type=Path, default=path())
    args = parser.parse_args()

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    conversations = list(corpus.conversations(args.conversations, args.seed))
    tokenizer = train_tokenizer("".join(text for text, _ in segments(c)) for c in conversations)
    examples = encode(conversations, tokenizer)
    groups = batches(examples, rng)
    print(f"{len(examples)} conversations, {sum(len(e[0]) for e in examples)} tokens, {len(groups)} steps", flush=True)

    model = Qwen3ForCausalLM(Qwen3Config.from_dict(CONFIG)).float()
    train(model, groups, rng)
    save(model, tokenizer, args.out)
    report(args.out)
    print(f"CPU time: {time.process_time():.0f} s on {args.threads} threads")


if __name__ == "__main__":
    main()
