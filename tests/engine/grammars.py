"""Helpers for tests of grammars: requests to the built-in model with a grammar, and readers of their answers."""

from __future__ import annotations

import asyncio
import json

import tokenizers

from engine import EngineConfig, EngineRequest, LocalEngine, SamplingParams, TokenDelta, builtin

TOKENS = tokenizers.Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))
ENDS = tuple(json.loads((builtin.path() / "generation_config.json").read_text())["eos_token_id"])
PROMPT = tuple(TOKENS.encode("Tell me about the sea.").ids)
CONFIG = EngineConfig(model="builtin", num_blocks=256, debug=True)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["captain", "sailor"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMA = ("json_schema", json.dumps(PERSON))
WORDS = ("regex", "[a-z]{3,5}( [a-z]{3,5}){2}")


def request(number: int, grammar: tuple[str, str] | None, **params) -> EngineRequest:
    settings = {"max_tokens": 120, "temperature": 1.5, "seed": number, "stop_ids": ENDS, **params}
    return EngineRequest(id=number, prompt_ids=PROMPT, params=SamplingParams(grammar=grammar, **settings))


async def deltas(engine, asked: EngineRequest) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(asked)]


async def output(engine, asked: EngineRequest) -> tuple[list[int], str | None]:
    seen = await deltas(engine, asked)
    return [token for delta in seen for token in delta.token_ids], seen[-1].finish_reason


async def run(*asked: EngineRequest, config: EngineConfig = CONFIG) -> list[tuple[list[int], str | None]]:
    async with LocalEngine(config) as engine:
        return await asyncio.gather(*(output(engine, each) for each in asked))


def text(ids: list[int]) -> str:
    return TOKENS.decode([i for i in ids if i not in ENDS])
