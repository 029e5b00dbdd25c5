"""`pequod bench snapshot`: records the SHA-256 of greedy completions, and checks that they are unchanged."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

from ..commands import Failure, Parser, UsageError, settings_from, warn
from . import options
from .client import Ask
from .session import Session, opened
from .show import number, table

FORMAT = 1
MAX_TOKENS = 48
# Chats in which every token of the built-in model is far more likely than the second one, see `margin`. On other
# processors greedy completions differ only at near ties.
PROMPTS = (
    "What is Pequod?",
    "What is continuous batching?",
    "What is 7 + 5?",
    "What is 12 + 9?",
    "What is a KV cache?",
    "What is chunked prefill?",
    "What is a prefix cache?",
    "What is preemption?",
    "Who are you?",
)
# Log-probabilities in float32 differ by 1e-5 between processors and batches, in bfloat16 by 1e-2.
SAFE_MARGIN = 0.05


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod bench snapshot (--write | --check) [MODEL | --url URL] [flags]"
    parser.description = (
        "Record the SHA-256 of greedy completions of a list of prompts, or check that they are still the same, byte for"
        " byte. A change that preserves the mathematics leaves them as they are. Reports the smallest margin of each"
        " completion: by how much the log-probability of a token exceeded the second best. Where it is small, another"
        " processor may choose the other token."
    )
    box = parser.add_argument_group("snapshot")
    box.add_argument("--write", action="store_true", help="generate, and write the file")
    box.add_argument(
        "--check", action="store_true", help="generate, and compare with the file; exit code 1 if it differs"
    )
    box.add_argument("--file", metavar="FILE", type=Path, help="snapshot (default: benchmarks/snapshots/MODEL.json)")
    box.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="with --write: a text file with one prompt per line (default: questions for the built-in model)",
    )
    options.add_number(box, "--max-tokens", MAX_TOKENS, "with --write: maximum tokens of a completion")
    options.add_server(parser, api="chat")


def run(arguments: argparse.Namespace) -> int:
    """Write or check; returns 1 if a completion differs."""
    if arguments.write == arguments.check:
        raise UsageError("give either --write or --check")
    if arguments.check and arguments.prompts is not None:
        raise UsageError("--prompts needs --write: --check uses the prompts of the file")
    name = settings_from(arguments).settings.names[0].strip("/").replace("/", "--")
    path = arguments.file or Path("benchmarks/snapshots") / f"{name}.json"
    return asyncio.run(check(arguments, path) if arguments.check else write(arguments, path))


async def write(arguments: argparse.Namespace, path: Path) -> int:
    prompts = _prompts(arguments.prompts) if arguments.prompts is not None else PROMPTS
    async with opened(arguments) as session:
        entries = [await complete(session, arguments.api, prompt, arguments.max_tokens) for prompt in prompts]
        version = session.target.version
    snapshot = {
        "format": FORMAT,
        "model": session.target.model,
        "weights_hash": version.get("weights_hash"),
        "dtype": version.get("dtype"),
        "api": arguments.api,
        "max_tokens": arguments.max_tokens,
        "answers": entries,
    }
    _write(path, snapshot)
    print(shown(entries))
    for entry in entries:
        if entry["margin"] is not None and entry["margin"] < SAFE_MARGIN:
            warn(
                f"{entry['prompt'][:60]!r} is within {entry['margin']:.3g} of another completion: choose another prompt"
            )
    print(f"{len(entries)} completions written to {path}")
    return 0


async def check(arguments: argparse.Namespace, path: Path) -> int:
    """Generate the file's completions and compare them."""
    expected = _read(path)
    arguments.api = expected["api"]
    async with opened(arguments) as session:
        for name in ("weights_hash", "dtype"):
            now = session.target.version.get(name)
            if None not in (expected[name], now) and expected[name] != now:
                raise Failure(f"{path} was written for another {name}: {expected[name]}, and this server has {now}")
        wrong = 0
        for old in expected["answers"]:
            new = await complete(session, arguments.api, old["prompt"], expected["max_tokens"])
            if new["sha256"] != old["sha256"]:
                wrong += 1
                warn(difference(old, new))
    total = len(expected["answers"])
    print(f"{total - wrong} of {total} completions are the same, byte for byte")
    return 1 if wrong else 0


async def complete(session: Session, api: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Return one greedy completion; for `margin` see the description of the command."""
    own: dict[str, Any] = {"temperature": 0, "ignore_eos": None, "min_tokens": None, "return_token_ids": None}
    if api == "chat":
        own |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 2}
    else:
        own |= {"logprobs": 2}
    run = await session.send([Ask(prompt, 0, max_tokens, body=own)], label="completions")
    shot = run.complete().shots[0]
    return {
        "prompt": prompt,
        "sha256": hashlib.sha256(shot.text.encode()).hexdigest(),
        "tokens": shot.tokens,
        "margin": None if not shot.margins else float(f"{min(shot.margins):.4g}"),
        "text": shot.text,
    }


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return where a completion differs, in a sentence."""
    pairs = zip(old["text"], new["text"], strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old["text"]), len(new["text"])))
    before, after = (text[max(0, index - 20) : index + 20] for text in (old["text"], new["text"]))
    margin = f"; the smallest margin was {old['margin']:.3g}" if old["margin"] is not None else ""
    return f"{old['prompt'][:60]!r} differs at character {index}: it was {before!r}, it is {after!r}{margin}"


def shown(entries: list[dict[str, Any]]) -> str:
    head = ["prompt", "SHA-256", "tokens", "margin"]
    return table(head, [[e["prompt"][:40], e["sha256"][:12], str(e["tokens"]), number(e["margin"])] for e in entries])


def _prompts(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"--prompts {path} has no prompts")
    return lines


def _write(path: Path, snapshot: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(snapshot, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        snapshot = json.loads(path.read_bytes())
        if snapshot["format"] != FORMAT:
            raise Failure(f"{path} has format {snapshot['format']}, not {FORMAT}; write it again")
        for name in ("weights_hash", "dtype", "api", "max_tokens"):
            snapshot[name]
        for entry in snapshot["answers"]:
            entry["prompt"], entry["sha256"], entry["text"], entry["margin"]
    except OSError as error:
        raise UsageError(f"there is no snapshot {path}: {error.strerror}; create one with --write") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a snapshot; create one with --write") from None
    return dict(snapshot)
