"""Checks structured output over collections of JSON schemas: every completed answer must match its schema.

    python -m benchmarks.schemas ../shared/data/schemas --json > benchmarks/results/schemas.json
    python -m benchmarks.schemas ../shared/data/schemas --model smollm2 --temperature 0.7 --closing-bias 0

Generates one answer for each schema of each *.jsonl file under the folder (lines with `id` and `schema`), at a high
temperature, so that only the grammar makes answers valid. `valid` and `invalid` answers ended with "stop" and were
checked with the jsonschema package (`unchecked`: Python does not support a pattern); `length`: reached --max-tokens;
`refused`: by validation, by reason; `failed`: an error during generation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from engine import EngineConfig, EngineRequest, LocalEngine, SamplingParams, StepStats, fetch
from server.grammar.schemas import find_problem
from server.tokenization.detokenizer import Detokenizer
from server.tokenization.tokenizer import Tokenizer

PROMPT = "An example:"


def schemas(folder: Path, every: int) -> Iterator[tuple[str, str, Any]]:
    """Yield (collection, id, schema) for every `every`-th schema of a collection."""
    for file in sorted(folder.rglob("*.jsonl")):
        for index, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            if index % every == 0:
                item = json.loads(line)
                yield file.stem, item["id"], item["schema"]


def checked(text: str, schema: Any) -> str:
    """Return whether a text matches the schema: valid, invalid, or unchecked."""
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    except re.error:  # Python does not support \\p, which JSON Schema's regular expressions may contain
        json.loads(text)
        return "unchecked"
    return "valid"


class Run:
    """One engine, and the outcome of each schema."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = Tokenizer(fetch(args.model, weights=False).path)
        # A randomly sampled string hardly ever ends, so closing quotes and brackets get a bias.
        size = range(self.tokenizer.vocab_size)
        closing = [i for i in size if set('"]}') & set(self.tokenizer.token_text(i)[0])]
        self.bias = {i: args.closing_bias for i in closing} if args.closing_bias else {}
        self.outcomes: dict[str, Counter[str]] = {}
        self.reasons: dict[str, Counter[str]] = {}
        self.invalid: list[dict[str, str]] = []
        self.tokens = self.forced = 0
        self.mask_seconds: list[float] = []

    async def main(self) -> dict[str, Any]:
        config = EngineConfig(model=self.args.model, max_len=self.args.max_len)
        began = time.perf_counter()
        async with LocalEngine(config) as engine:
            engine.on_step.append(self._step)
            places = asyncio.Semaphore(self.args.concurrency)
            work = enumerate(schemas(Path(self.args.folder), self.args.every), 1)
            await asyncio.gather(*(self._one(engine, places, i, item) for i, item in work))
            assert engine.info is not None
            model = engine.info.architecture
        self.mask_seconds.sort()
        middle = self.mask_seconds[len(self.mask_seconds) // 2] if self.mask_seconds else 0.0
        return {
            "model": self.args.model,
            "architecture": model,
            "temperature": self.args.temperature,
            "closing_bias": self.args.closing_bias,
            "max_tokens": self.args.max_tokens,
            "every": self.args.every,
            "collections": {
                name: {**counts, "reasons": dict(self.reasons.get(name, Counter()).most_common())}
                for name, counts in sorted(self.outcomes.items())
            },
            "invalid": self.invalid,
            "tokens": self.tokens,
            "forced_tokens": self.forced,
            "mask_seconds_p50": round(middle, 6),
            "mask_seconds_max": round(max(self.mask_seconds, default=0.0), 6),
            "seconds": round(time.perf_counter() - began, 1),
        }

    def _step(self, stats: StepStats) -> None:
        self.forced += stats.forced_tokens
        if "masks" in stats.seconds:
            self.mask_seconds.append(stats.seconds["masks"])

    async def _one(
        self, engine: LocalEngine, places: asyncio.Semaphore, number: int, item: tuple[str, str, Any]
    ) -> None:
        name, label, schema = item
        counts = self.outcomes.setdefault(name, Counter())
        text = json.dumps(schema, ensure_ascii=False)
        reason = find_problem("json_schema", text)
        if reason is not None:
            counts["refused"] += 1
            self.reasons.setdefault(name, Counter())[kind_of(reason)] += 1
            return
        async with places:
            outcome, answer = await self._answer(engine, number, text)
        if outcome == "stop":
            outcome = checked(answer, schema)
        counts[outcome] += 1
        if outcome == "invalid":
            self.invalid.append({"collection": name, "id": label, "answer": answer[:400]})

    async def _answer(self, engine: LocalEngine, number: int, schema: str) -> tuple[str, str]:
        params = SamplingParams(
            max_tokens=self.args.max_tokens,
            temperature=self.args.temperature,
            seed=number,
            stop_ids=self.tokenizer.eos_ids,
            grammar=("json_schema", schema),
            logit_bias=self.bias,
        )
        prompt = tuple(self.tokenizer.encode(PROMPT))
        stream = Detokenizer(self.tokenizer, context=prompt, strip=False)
        text, reason = "", ""
        async for delta in engine.generate(EngineRequest(id=number, prompt_ids=prompt, params=params)):
            ids = delta.token_ids
            self.tokens += len(ids)
            ended = delta.finish_reason == "stop" and bool(ids) and ids[-1] in params.stop_ids
            text += "".join(map(stream.feed, ids[:-1] if ended else ids))
            reason = delta.finish_reason or ""
        return "failed" if reason == "error" else reason, text + stream.finish()


def kind_of(reason: str) -> str:
    """Return a reason without its path and values."""
    reason = re.sub(r"(?: at|^at) '[^']*'(?:: )?", "", reason)
    return re.sub(r"/.*/", "/.../", re.sub(r"(got|format:|digits:|Anchor) .*", r"\1 ...", reason)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="use only every n-th schema of a collection")
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--closing-bias", type=float, default=10.0, help='added to the logits of tokens with ", ] or }')
    parser.add_argument("--max-tokens", type=int, default=480)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    result = asyncio.run(Run(parser.parse_args()).main())
    if parser.parse_args().json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        for name, counts in result["collections"].items():
            print(name, {key: value for key, value in counts.items() if key != "reasons"})
            for reason, number in counts["reasons"].items():
                print(f"   {number:4} {reason}")
        print({key: value for key, value in result.items() if key not in ("collections", "invalid")})
        for each in result["invalid"]:
            print(each)
    return 1 if result["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
