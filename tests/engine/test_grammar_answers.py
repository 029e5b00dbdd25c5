"""Answers that follow a grammar: the same in every batch, after a preemption, a resumption and a kill."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal

import jsonschema
import pytest
from msgspec.structs import replace

from engine import LocalEngine, ProcessEngine
from engine.grammar import grammars, problem
from tests.engine.faulty import stopping
from tests.engine.grammars import (
    CONFIG,
    ENDS,
    PERSON,
    PROMPT,
    SCHEMA,
    TOKENS,
    WORDS,
    deltas,
    output,
    request,
    run,
    text,
)


async def test_every_answer_that_stops_follows_its_grammar():
    asked = [request(i, SCHEMA) for i in range(1, 9)]
    asked += [request(i, WORDS) for i in range(11, 19)]
    asked += [request(i, ("choice", '["yes", "no", "perhaps so"]')) for i in range(21, 29)]
    asked += [request(i, ("lark", 'start: "(" start ")" | "x"')) for i in range(31, 39)]
    seen = dict(zip((each.id for each in asked), await run(*asked), strict=True))
    for number, (ids, reason) in seen.items():
        assert reason == "stop" or number > 30, (number, text(ids))
        if number < 10:
            jsonschema.validate(json.loads(text(ids)), PERSON)
        elif number < 20:
            assert re.fullmatch(WORDS[1], text(ids))
        elif number < 30:
            assert text(ids) in ("yes", "no", "perhaps so")
        elif reason == "stop":
            inner = text(ids)
            assert inner == "(" * (len(inner) // 2) + "x" + ")" * (len(inner) // 2)
    assert len({text(ids) for ids, _ in seen.values()}) > 15


async def test_public_schemas_are_followed(data):
    closing = [i for i in range(TOKENS.get_vocab_size()) if set('"]}') & set(TOKENS.decode([i]))]
    params = {"logit_bias": {i: 5.0 for i in closing}, "max_tokens": 300}
    schemas = []
    for file in sorted((data / "schemas").rglob("*.jsonl")):
        lines = [json.loads(line)["schema"] for line in file.read_text().splitlines()[::9]]
        schemas += [each for each in lines if problem("json_schema", json.dumps(each)) is None]
    assert len(schemas) > 40
    asked = [request(i, ("json_schema", json.dumps(each)), **params) for i, each in enumerate(schemas, 1)]
    reasons = []
    for schema, (ids, reason) in zip(schemas, await run(*asked), strict=True):
        reasons.append(reason)
        assert reason in ("stop", "length")
        if reason == "stop":
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            kind(schema).validate(json.loads(text(ids)))
    assert reasons.count("stop") > 25


async def test_rows_without_grammar_sample_the_same_beside_grammar_rows():
    free = [request(i, None, max_tokens=30) for i in (1, 2, 3)]
    mixed = await run(free[0], request(11, SCHEMA), free[1], request(12, WORDS), free[2], request(13, SCHEMA))
    assert await run(*free) == [mixed[0], mixed[2], mixed[4]]
    assert await run(request(12, WORDS)) == [mixed[3]]


@pytest.mark.parametrize(
    "grammar",
    [
        SCHEMA, WORDS, ("json_schema", '{"const": {"a": 1}}'), ("choice", '["a whale in the sea"]'),
        ("choice", '["yes", "no"]'), ("choice", '["yes", "yes please"]'), ("regex", "x?abcdefghij[kl]"),
        ("regex", "yes( sir)?"), ("lark", 'start: "abc" TEXT?\nTEXT: /x{0,3}/'),
    ],
    ids=lambda grammar: grammar[1][:30],
)  # fmt: skip
async def test_the_same_tokens_and_the_same_end_with_and_without_jumps(grammar):
    """With log-probabilities every token is sampled."""
    ways = [(number, most, told) for number in (1, 2, 3) for most in (120, 6, 5, 4, 1) for told in (None, 0)]
    asked = [request(number, grammar, max_tokens=most, logprobs=told) for number, most, told in ways]
    seen = await run(*(replace(each, id=place) for place, each in enumerate(asked)))
    assert seen[::2] == seen[1::2]


async def test_an_output_that_is_forced_from_its_beginning_has_no_end_token():
    [(ids, reason)] = await run(request(1, ("choice", '["a whale in the sea"]')))
    assert (TOKENS.decode(ids, skip_special_tokens=False), reason) == ("a whale in the sea", "stop")


async def test_forced_tokens_are_sent_with_the_sampled_one_and_counted():
    async with LocalEngine(CONFIG) as engine:
        steps = []
        engine.on_step.append(steps.append)
        seen = await deltas(engine, request(1, SCHEMA))
        count = sum(len(delta.token_ids) for delta in seen)
        assert sum(step.forced_tokens for step in steps) == count - len(seen) > 5
        assert text(list(seen[0].token_ids)).startswith('{"name":')
        assert seen[-1].stats.output_tokens == count
        assert all(step.seconds["masks"] >= 0 for step in steps if step.rows and step.rows[0][1] == 1)


@pytest.mark.parametrize("grammar", [SCHEMA, ("regex", "[a-z]{5}( [a-z]{5}){8}")])
async def test_preemption_does_not_change_an_answer(grammar):
    asked = [request(i, grammar) for i in range(1, 7)]
    roomy = await run(*asked, config=replace(CONFIG, prefix_caching=False))
    tight = replace(CONFIG, num_blocks=20, block_size=4, max_len=80, prefix_caching=False)
    async with LocalEngine(tight) as engine:
        preempted = []
        engine.on_step.append(lambda stats: preempted.append(stats.preempted))
        seen = await asyncio.gather(*(output(engine, each) for each in asked))
    assert sum(preempted) > 0
    assert seen == roomy


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}])
async def test_resumed_answer_continues_from_any_token(params):
    async with LocalEngine(CONFIG) as engine:
        asked = request(1, SCHEMA, **params)
        parts = [delta.token_ids for delta in await deltas(engine, asked)]
        whole = [token for part in parts for token in part]
        for cut in range(1, len(parts)):
            told = tuple(token for part in parts[:cut] for token in part)
            ids, reason = await output(engine, replace(asked, id=cut + 1, output_ids=told))
            assert [*told, *ids] == whole
            assert reason == "stop"
        seen = await deltas(engine, replace(asked, id=99, output_ids=(PROMPT[0],) * 3))
        assert (seen[-1].finish_reason, seen[-1].field) == ("error", "grammar")


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_an_output_has_no_more_tokens_than_requested(number):
    [(whole, _)] = await run(request(number, SCHEMA))
    text_tokens = [token for token in whole if token not in ENDS]
    for most in (1, 2, 5, 7, len(text_tokens) - 1):
        assert await run(request(number, SCHEMA, max_tokens=most)) == [(whole[:most], "length")]
    assert await run(request(number, SCHEMA, max_tokens=len(text_tokens))) == [(text_tokens, "stop")]


async def test_a_complete_output_ends_whatever_else_was_requested():
    choice = ("choice", '["yes"]')
    for params in ({"min_tokens": 50}, {"stop_ids": ()}, {"min_tokens": 50, "stop_ids": ()}):
        [(ids, reason)] = await run(request(1, choice, **params))
        assert (text(ids), reason) == ("yes", "stop")
    [(ids, reason)] = await run(request(1, ("choice", '[""]'), min_tokens=3))
    assert (text(ids), reason) == ("", "stop")


async def test_a_prompt_can_be_scored_and_its_answer_follow_a_grammar():
    async with LocalEngine(CONFIG) as engine:
        seen = await deltas(engine, request(1, SCHEMA, prompt_logprobs=0, logprobs=1))
        assert len(seen[0].prompt_logprobs) == len(PROMPT) - 1
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in seen)


async def test_row_without_an_allowed_token_fails():
    [(_, reason)] = await run(request(1, SCHEMA, allowed_ids=(ENDS[0],)))
    assert reason == "error"


HOSTILE = [
    ("regex", "("),
    ("regex", "((a|b|ab){1,100}){1,100}"),
    ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("regex", "(a|b)*a(a|b){300}"),
    ("regex", "(.*x){60}"),
    ("lark", 'start: e\ne: e e | "a" |\n'),
    ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    ("lark", "start: " + " ".join(f'("a" | "b"){{0,{i}}}' for i in range(1, 400))),
    ("lark", "start: " + " ".join(f'("a" | "b"){{0,{i}}}' for i in range(1, 40))),
    ("choice", json.dumps([f"value {i}" for i in range(4500)])),
    ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
    ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    ("json_schema", json.dumps({"type": "string", "minLength": 2_000_000, "maxLength": 4_000_000})),
    ("json_schema", json.dumps({"type": "string", "allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]})),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6})),
    ("json_schema", "\ud800"),
    ("no such kind", "x"),
]  # fmt: skip


async def test_hostile_grammars_do_not_affect_other_requests(monkeypatch):
    monkeypatch.setattr(grammars, "WAIT_S", 600.0)  # on a slow machine they wait long for each other
    async with asyncio.timeout(240):
        async with LocalEngine(CONFIG) as engine:
            alone = await output(engine, request(1000, None, max_tokens=100, stop_ids=()))
            bystander = asyncio.create_task(output(engine, request(1000, None, max_tokens=100, stop_ids=())))
            asked = [request(i, each, max_tokens=20) for i, each in enumerate(HOSTILE, 1)]
            seen = await asyncio.gather(*(deltas(engine, each) for each in asked))
            for each, answer in zip(HOSTILE, seen, strict=True):
                last = answer[-1]
                assert last.finish_reason in ("stop", "length", "error"), each[1][:60]
                if last.finish_reason == "error":
                    assert last.field == "grammar" and last.error and len(last.error) < 200
            assert [delta[-1].finish_reason for delta in seen].count("error") >= 4
            assert await bystander == alone


async def test_answer_continues_its_grammar_after_the_engine_is_killed():
    array = {"type": "array", "items": PERSON, "minItems": 8, "maxItems": 8}
    asked = replace(request(1, ("json_schema", json.dumps(array)), max_tokens=300))
    [(expected, _)] = await run(asked)
    engine = ProcessEngine(CONFIG, stopping(50))
    await engine.start()
    try:
        await engine.ready()
        ids, reason, pid = [], None, engine.pid
        async for delta in engine.generate(asked):
            ids += delta.token_ids
            reason = delta.finish_reason
            if pid is not None and len(ids) > 40:
                os.kill(pid, signal.SIGKILL)
                pid = None
    finally:
        await engine.close()
    assert (engine.status.restarts, reason) == (1, "stop")
    assert ids == expected
    jsonschema.validate(json.loads(text(ids)), array)
