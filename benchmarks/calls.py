"""Checks that required tool calls match their tools' schemas, over collections of real requests.

    python -m benchmarks.calls ../shared/data --json > benchmarks/results/calls.json
    python -m benchmarks.calls ../shared/data --model smollm2 --json > benchmarks/results/calls_smollm2.json

Each line of each function_calling/*.jsonl file (`messages`, `tools`, `ground_truth`) is sent once, with tool_choice
required: to a small model with random weights and Qwen3's vocabulary and chat template, so that only the grammar makes
calls valid, or greedily to --model, with parallel_tool_calls where several calls are right. Reports for each
collection: `answers`, of which `length` reached the token limit; `valid` and `invalid` calls, checked with the
jsonschema package except the last of a truncated answer; `failed` answers: an error, no call, or text beside the calls;
and `right` answers, whose calls are those of the ground truth (which has none where no function fits). Every invalid or
failed one is listed with its id.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema

from tests import models
from tests.live import Server

NUM_BIASES = 1000
RANDOM = "one layer of random weights with Qwen3's vocabulary and chat template"
MAX_TOKENS = 300
COUNTED = ("answers", "length", "valid", "invalid", "failed", "right")


class Case(NamedTuple):
    """A line of a collection."""

    collection: str
    seed: int
    request: dict[str, Any]  # id, messages, tools, ground_truth


def cases(data: Path, every: int) -> list[Case]:
    """Return every `every`-th line of each collection."""
    lines = (
        (file.stem, json.loads(line))
        for file in sorted((data / "function_calling").glob("*.jsonl"))
        for line in file.read_text().splitlines()[::every]
    )
    return [Case(collection, seed, request) for seed, (collection, request) in enumerate(lines)]


@contextlib.contextmanager
def random_model(data: Path) -> Iterator[Server]:
    """Run a server with a small random Qwen3 that has the real vocabulary and chat template."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "qwen3"
        shape = {**models.BASE, "head_dim": 16, "vocab_size": 151936, "max_position_embeddings": 4096}
        models.MODELS["qwen3-random"] = ("qwen3", {**shape, "num_hidden_layers": 1, "eos_token_id": 151645})
        models.make("qwen3-random", folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(data / "tokenizers/qwen3" / name, folder / name)
        with Server(str(folder), "--dtype", "float32") as server:
            yield server


def closing(data: Path) -> dict[str, int]:
    """Return a logit_bias for closing quotes and brackets: a randomly sampled string would hardly ever end."""
    vocabulary = json.loads((data / "tokenizers/qwen3/tokenizer.json").read_text())["model"]["vocab"]
    closers = [i for token, i in vocabulary.items() if token[:1] in ('"', "}", "]") and len(token) < 5]
    return {str(i): 12 for i in sorted(closers)[:NUM_BIASES]}


def judge(case: Case, answer: httpx.Response, counts: Counter[str]) -> str | None:
    """Count an answer and its calls; returns what is wrong with it, or None."""
    counts["answers"] += 1
    if answer.status_code != 200:
        counts["failed"] += 1
        return f"{answer.status_code}: {answer.text[:400]}"
    choice = answer.json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    is_cut = choice["finish_reason"] == "length"
    counts["length"] += is_cut
    if not is_cut and (choice["finish_reason"] != "tool_calls" or not calls or choice["message"]["content"]):
        counts["failed"] += 1
        return json.dumps(choice)[:400]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in case.request["tools"]}
    for call in calls[:-1] if is_cut else calls:
        try:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
        except (KeyError, ValueError, jsonschema.ValidationError):
            counts["invalid"] += 1
            return json.dumps(call)[:400]
        counts["valid"] += 1
    counts["right"] += is_right(calls, case.request.get("ground_truth", []))
    return None


def is_right(calls: list[dict[str, Any]], truth: list[dict[str, dict[str, list[Any]]]]) -> bool:
    """Whether the calls are those of the ground truth, in any order, each argument with one of its values."""
    left = [(name, arguments) for call in truth for name, arguments in call.items()]
    for call in calls:
        try:
            made = json.loads(call["function"]["arguments"])
        except ValueError:  # truncated
            return False
        name = call["function"]["name"]
        found = next((each for each in left if each[0] == name and agrees(made, each[1])), None)
        if found is None:
            return False
        left.remove(found)
    return bool(calls) and not left


def agrees(made: dict[str, Any], wanted: dict[str, list[Any]]) -> bool:
    """Whether arguments are among the wanted ones; those that may be left out have "" as one of their values."""
    missing = [name for name in wanted if name not in made and "" not in wanted[name]]
    return not missing and all(value in wanted.get(name, ()) for name, value in made.items())


def measure(
    server: Server, data: Path, every: int, concurrency: int, sampling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send every `every`-th line; returns the counts by collection. `sampling`: for all; None: for the random model."""
    is_random = sampling is None
    sampling = sampling or {"temperature": 1.0, "logit_bias": closing(data)}
    start = time.perf_counter()

    def ask(case: Case) -> httpx.Response:
        fixed = {"seed": case.seed, "max_tokens": MAX_TOKENS, "tool_choice": "required", "thinking_token_budget": 0}
        body = {"messages": case.request["messages"], "tools": case.request["tools"]}
        if not is_random:
            body["parallel_tool_calls"] = len(case.request["ground_truth"]) > 1
        return client.post("/v1/chat/completions", json=body | fixed | sampling)

    collections: dict[str, Counter[str]] = {}
    wrong = []
    lines = cases(data, every)
    with (
        httpx.Client(base_url=server.url, timeout=None) as client,  # time is not measured here
        concurrent.futures.ThreadPoolExecutor(concurrency) as pool,
    ):
        for case, answer in zip(lines, pool.map(ask, lines), strict=True):
            counts = collections.setdefault(case.collection, Counter(dict.fromkeys(COUNTED, 0)))
            if (problem := judge(case, answer, counts)) is not None:
                wrong.append({"collection": case.collection, "id": case.request["id"], "problem": problem})
    return {
        "temperature": sampling["temperature"],
        "max_tokens": MAX_TOKENS,
        "every": every,
        "collections": {name: dict(counts) for name, counts in collections.items()},
        "all": {kind: sum(counts[kind] for counts in collections.values()) for kind in COUNTED},
        "wrong": wrong,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with function_calling/ and tokenizers/qwen3/")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="use only every n-th line of a collection")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--model", help="model to measure (default: the random one)")
    args = parser.parse_args()
    if args.model is None:
        with random_model(args.data) as server:
            result = measure(server, args.data, args.every, args.concurrency)
    else:
        with Server(args.model) as server:
            result = measure(server, args.data, args.every, args.concurrency, {"temperature": 0.0})
    result = {"model": args.model or RANDOM, **result}
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        for name, counts in [*result["collections"].items(), ("all", result["all"])]:
            print(f"{name:28}", *(f"{counts[kind]:5} {kind}" for kind in COUNTED))
        for each in result["wrong"]:
            print(each)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
