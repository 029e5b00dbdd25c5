"""Grammars: what can be drawn, what must be, and that a request with one is like any other in every batch."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from msgspec.structs import replace

from engine import (
    GRAMMARS_BUSY,
    EngineConfig,
    EngineRequest,
    LocalEngine,
    ProcessEngine,
    SamplingParams,
    TokenDelta,
    builtin,
)
from engine.batch import NOTHING_LEFT, Batch, Row, StepTokens
from engine.grammar import GrammarError, limits, problem, source
from engine.grammar import grammars as grammars_module
from engine.grammar.grammars import REFUSED, Grammars, Matcher
from engine.grammar.table import Table, _named_apart
from server.tokenizer import Tokenizer
from tests.live import WAIT_S
from tests.toys import MADE, byte_level

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


def run(*asked: EngineRequest, config: EngineConfig = CONFIG) -> list[tuple[list[int], str | None]]:
    async def main():
        async with LocalEngine(config) as engine:
            return await asyncio.gather(*(output(engine, each) for each in asked))

    return asyncio.run(main())


def text(ids: list[int]) -> str:
    return TOKENS.decode([i for i in ids if i not in ENDS])


# --- what both sides of the seam know


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        ("json_schema", '{"type": "object"}'), ("json_schema", "{}"), ("regex", "^[a-z]+$"), ("regex", ""),
        ("choice", '["a", "", "\\"\\u0001\\n🐋"]'), ("lark", 'start: "a" start | "b"'),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
    ],
)  # fmt: skip
def test_good_grammars(kind, good):
    assert problem(kind, good) is None


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("json_schema", "[1"), ("json_schema", "true"), ("json_schema", '{"type": "strin"}'),
        ("json_schema", '{"not": {}}'), ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'), ("regex", "("),
        ("regex", r"\ba"), ("regex", "a" * 70_000), ("choice", "[]"), ("choice", "[1]"), ("choice", '"a"'),
        ("choice", '["\\ud800"]'), ("lark", ""), ("lark", "start: a"), ("lark", "start: " + "(" * 3000),
        ("colour", "red"),
    ],
)  # fmt: skip
def test_bad_grammars(kind, bad):
    said = problem(kind, bad)
    assert said and len(said) <= 120
    assert "a" * 50 not in said


# --- the table


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "byte fallback, no strip"])
def test_the_table_has_the_bytes_that_the_server_writes(kind, tmp_path):
    MADE[kind]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.takes_grammars
    table = Table.of(tmp_path, tokenizer.vocab_size + 20)
    assert table.library.vocab_size == tokenizer.vocab_size + 20
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.decoder.piece(token, token)
        if token in tokenizer.special_ids:
            assert table.library.is_special_token(token)
        elif piece != b"\xff":  # llguidance's mark of special tokens, and in no text
            assert table.library.decode_bytes([token]) == piece, token


@pytest.mark.parametrize("kind", ["word pieces", "metaspace"])
def test_tokenizers_whose_tokens_are_not_bytes_take_no_grammars(kind, tmp_path):
    MADE[kind]().save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer(tmp_path).takes_grammars


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(GrammarError, match="has no tokenizer"):
        Table.of(tmp_path, 100)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "no such"}}')
    with pytest.raises(GrammarError, match="cannot be used"):
        Table.of(tmp_path, 100)


def test_tokens_that_only_other_files_call_special_have_no_text(tmp_path):
    library = byte_level()
    library.add_tokens(["[tool]"])
    library.save(str(tmp_path / "tokenizer.json"))
    number = library.token_to_id("[tool]")
    assert not Table.of(tmp_path, 400).library.is_special_token(number)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"additional_special_tokens": ["[tool]"]}))
    assert Table.of(tmp_path, 400).library.is_special_token(number)


# --- one matcher


class Bench:
    """A matcher over the byte-level toy: what may be drawn, as text."""

    def __init__(self, tmp_path, grammar, **params) -> None:
        self.tokens = byte_level()
        self.tokens.save(str(tmp_path / "tokenizer.json"))
        self.width = 400
        self.table = Table.of(tmp_path, self.width)
        library = LLMatcher(self.table.library, source(*grammar), limits=limits(), log_level=0)
        self.matcher = Matcher(library, self.table, SamplingParams(max_tokens=9, **params))

    def allowed(self) -> set[str]:
        bits = np.zeros(-(-self.width // 32), np.int32)
        self.matcher.library.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self.matcher.finish(bits)
        ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        return {self.tokens.id_to_token(int(i)) for i in ids}

    def take(self, letters: str) -> bool:
        return all(self.matcher.take(self.tokens.token_to_id(letter)) for letter in letters)


def test_stop_tokens_are_allowed_where_the_answer_may_end_and_only_there(tmp_path):
    end, comma = byte_level().token_to_id("<|end|>"), byte_level().token_to_id(",")
    bench = Bench(tmp_path, ("regex", "[0-9](,[0-9])*"), stop_ids=(end, comma))
    assert not bench.allowed() & {"<|end|>", ","}
    assert bench.take("5")
    assert bench.allowed() == {"<|end|>", ","}, "a stop token is no letter, also where the grammar wants one"
    assert bench.matcher.take(comma)


def test_without_stop_tokens_nothing_ends_an_answer_but_its_grammar(tmp_path):
    bench = Bench(tmp_path, ("choice", '["a", "ab"]'))
    assert bench.take("a")
    assert bench.matcher.is_accepting and not bench.matcher.is_finished
    assert bench.allowed() == {"b"}
    assert bench.take("b")
    assert bench.matcher.is_finished and bench.allowed() == set()


def test_what_the_grammar_forces_is_taken_up_to_the_room_there_is(tmp_path):
    bench = Bench(tmp_path, ("regex", "x?abcdefghij[kl]"))
    assert bench.matcher.jump(10) == []
    assert bench.take("x")
    assert bench.matcher.jump(0) == []
    first = bench.matcher.jump(3)
    rest = bench.matcher.jump(100)
    assert len(first) == 3
    assert bench.tokens.decode(first + rest) == "abcdefghij"
    assert bench.take("k") and bench.matcher.is_finished


def test_who_wants_log_probabilities_gets_no_token_without_one(tmp_path):
    bench = Bench(tmp_path, ("regex", "abcdefghij[kl]"), logprobs=0)
    assert bench.matcher.jump(10) == []


def test_a_token_that_the_grammar_does_not_allow_fails_its_row_alone():
    async def main():
        grammars = Grammars(CONFIG, 2048)
        for number in (1, 2):
            grammars.add(number, await grammars.compile(request(number, ("choice", '["yes"]'))))
        grammars.add(3, await grammars.compile(request(3, ("choice", '[""]'))))
        batch = Batch(1, [Row(number, 0, [5], [0], 1) for number in (1, 2, 3)] + [Row(4, 0, [5], [0], 1)])
        rows = grammars.rows(batch)
        assert rows == [0, 1, 2]
        y = next(i for i in TOKENS.encode("yes").ids)
        drawn = StepTokens([[y], [TOKENS.token_to_id("!")], [], [7]], errors={2: NOTHING_LEFT})
        tokens = grammars.advance(batch, rows, drawn, lambda _: 50)
        assert TOKENS.decode(tokens.token_ids[0]) == "yes"
        assert tokens.token_ids[1:] == [[], [], [7]]
        assert tokens.errors == {1: REFUSED}
        assert tokens.ended == {0, 2}, "an answer that cannot go on and may end here ends here"
        grammars.close()

    asyncio.run(main())


def test_compiled_grammars_are_kept_within_bytes(monkeypatch):
    monkeypatch.setattr("engine.grammar.grammars.CACHED_BYTES", 3 * (64 << 10) + 10_000)
    monkeypatch.setattr("engine.grammar.grammars.LARGE", 1 << 20)

    async def main():
        grammars = Grammars(CONFIG, 2048)
        for i in (0, 1, 2, 0, 3):
            await grammars.compile(request(1, ("regex", f"a{i}")))
        assert [text for _, text in grammars.small.known] == ["a2", "a0", "a3"]
        for i in range(3):
            await grammars.compile(request(1, ("choice", json.dumps([f"value {i} {k}" for k in range(3000)]))))
        assert len(grammars.small.known) == 1
        grammars.close()

    asyncio.run(main())


def test_what_cannot_be_used_is_found_out_once(monkeypatch):
    tried = []

    async def main():
        grammars = Grammars(CONFIG, 2048)
        compiled = grammars_module._compiled
        monkeypatch.setattr(grammars_module, "_compiled", lambda *args: (tried.append(args), compiled(*args))[1])
        for _ in range(3):
            with pytest.raises(GrammarError):
                await grammars.compile(request(1, ("lark", "start: nothing")))
        grammars.close()

    asyncio.run(main())
    assert len(tried) == 1


def test_a_small_grammar_does_not_wait_behind_large_ones(monkeypatch):
    held = Held(monkeypatch, large_only=True)
    large = ("choice", json.dumps(["whale" * 1000]))

    async def main():
        grammars = Grammars(CONFIG, 2048)
        waiting = asyncio.create_task(grammars.compile(request(1, large)))
        await asyncio.to_thread(held.begun.wait, WAIT_S)
        matcher = await asyncio.wait_for(grammars.compile(request(2, ("choice", '["a"]'))), WAIT_S)
        assert not matcher.is_accepting and not waiting.done()
        held.go.set()
        await waiting
        grammars.close()

    asyncio.run(main())


def test_a_grammar_that_waits_too_long_is_not_the_clients_fault(monkeypatch):
    monkeypatch.setattr("engine.grammar.grammars.WAIT_S", 0.05)
    held = Held(monkeypatch)

    async def main():
        async with LocalEngine(CONFIG) as engine:
            [delta] = await deltas(engine, request(1, SCHEMA))
            assert (delta.finish_reason, delta.error, delta.field) == ("error", GRAMMARS_BUSY, None)
            held.go.set()

    asyncio.run(main())


# --- in the engine


def test_every_answer_that_stops_follows_its_grammar():
    asked = [request(i, SCHEMA) for i in range(1, 9)]
    asked += [request(i, WORDS) for i in range(11, 19)]
    asked += [request(i, ("choice", '["yes", "no", "perhaps so"]')) for i in range(21, 29)]
    asked += [request(i, ("lark", 'start: "(" start ")" | "x"')) for i in range(31, 39)]
    seen = dict(zip((each.id for each in asked), run(*asked), strict=True))
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


def test_dozens_of_schemas_from_outside(data):
    closing = [i for i in range(TOKENS.get_vocab_size()) if set('"]}') & set(TOKENS.decode([i]))]
    params = {"logit_bias": {i: 5.0 for i in closing}, "max_tokens": 300}
    schemas = []
    for file in sorted((data / "schemas").rglob("*.jsonl")):
        lines = [json.loads(line)["schema"] for line in file.read_text().splitlines()[::9]]
        schemas += [each for each in lines if problem("json_schema", json.dumps(each)) is None]
    assert len(schemas) > 40
    asked = [request(i, ("json_schema", json.dumps(each)), **params) for i, each in enumerate(schemas, 1)]
    reasons = []
    for schema, (ids, reason) in zip(schemas, run(*asked), strict=True):
        reasons.append(reason)
        assert reason in ("stop", "length")
        if reason == "stop":
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            kind(schema).validate(json.loads(text(ids)))
    assert reasons.count("stop") > 25


def test_free_rows_draw_the_same_beside_grammar_rows_as_alone():
    free = [request(i, None, max_tokens=30) for i in (1, 2, 3)]
    mixed = run(free[0], request(11, SCHEMA), free[1], request(12, WORDS), free[2], request(13, SCHEMA))
    assert run(*free) == [mixed[0], mixed[2], mixed[4]]
    assert run(request(12, WORDS)) == [mixed[3]]


@pytest.mark.parametrize(
    "grammar",
    [
        SCHEMA, WORDS, ("json_schema", '{"const": {"a": 1}}'), ("choice", '["a whale in the sea"]'),
        ("choice", '["yes", "no"]'), ("choice", '["yes", "yes please"]'), ("regex", "x?abcdefghij[kl]"),
        ("regex", "yes( sir)?"), ("lark", 'start: "abc" TEXT?\nTEXT: /x{0,3}/'),
    ],
    ids=lambda grammar: grammar[1][:30],
)  # fmt: skip
def test_the_same_tokens_and_the_same_end_with_and_without_jumps(grammar):
    """With log-probabilities every token is drawn."""
    ways = [(number, most, told) for number in (1, 2, 3) for most in (120, 6, 5, 4, 1) for told in (None, 0)]
    asked = [request(number, grammar, max_tokens=most, logprobs=told) for number, most, told in ways]
    seen = run(*(replace(each, id=place) for place, each in enumerate(asked)))
    assert seen[::2] == seen[1::2]


def test_an_output_that_is_forced_from_its_beginning_has_no_end_token():
    [(ids, reason)] = run(request(1, ("choice", '["a whale in the sea"]')))
    assert (TOKENS.decode(ids, skip_special_tokens=False), reason) == ("a whale in the sea", "stop")


def test_forced_tokens_come_with_the_drawn_one_and_are_counted():
    async def main():
        async with LocalEngine(CONFIG) as engine:
            steps = []
            engine.on_step.append(steps.append)
            seen = await deltas(engine, request(1, SCHEMA))
            count = sum(len(delta.token_ids) for delta in seen)
            assert sum(step.forced_tokens for step in steps) == count - len(seen) > 5
            assert text(list(seen[0].token_ids)).startswith('{"name":')
            assert seen[-1].stats.output_tokens == count
            assert all(step.seconds["masks"] >= 0 for step in steps if step.rows and step.rows[0][1] == 1)

    asyncio.run(main())


@pytest.mark.parametrize("grammar", [SCHEMA, ("regex", "[a-z]{5}( [a-z]{5}){8}")])
def test_a_preempted_answer_is_the_same(grammar):
    asked = [request(i, grammar) for i in range(1, 7)]
    roomy = run(*asked, config=replace(CONFIG, prefix_caching=False))
    tight = replace(CONFIG, num_blocks=20, block_size=4, max_len=80, prefix_caching=False)

    async def main():
        async with LocalEngine(tight) as engine:
            preempted = []
            engine.on_step.append(lambda stats: preempted.append(stats.preempted))
            seen = await asyncio.gather(*(output(engine, each) for each in asked))
            return seen, sum(preempted)

    seen, preempted = asyncio.run(main())
    assert preempted > 0
    assert seen == roomy


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}])
def test_an_answer_handed_over_anywhere_goes_on_where_it_was(params):
    async def main():
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

    asyncio.run(main())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_answer_has_no_more_tokens_than_asked_for(number):
    [(whole, _)] = run(request(number, SCHEMA))
    text_tokens = [token for token in whole if token not in ENDS]
    for most in (1, 2, 5, 7, len(text_tokens) - 1):
        assert run(request(number, SCHEMA, max_tokens=most)) == [(whole[:most], "length")]
    assert run(request(number, SCHEMA, max_tokens=len(text_tokens))) == [(text_tokens, "stop")]


def test_an_answer_that_is_whole_ends_whatever_else_was_asked():
    choice = ("choice", '["yes"]')
    for params in ({"min_tokens": 50}, {"stop_ids": ()}, {"min_tokens": 50, "stop_ids": ()}):
        [(ids, reason)] = run(request(1, choice, **params))
        assert (text(ids), reason) == ("yes", "stop")
    [(ids, reason)] = run(request(1, ("choice", '[""]'), min_tokens=3))
    assert (text(ids), reason) == ("", "stop")


def test_a_prompt_can_be_scored_and_its_answer_follow_a_grammar():
    async def main():
        async with LocalEngine(CONFIG) as engine:
            seen = await deltas(engine, request(1, SCHEMA, prompt_logprobs=0, logprobs=1))
            assert len(seen[0].prompt_logprobs) == len(PROMPT) - 1
            assert all(len(delta.logprobs) == len(delta.token_ids) for delta in seen)

    asyncio.run(main())


def test_what_the_filters_leave_over_must_be_something():
    [(_, reason)] = run(request(1, SCHEMA, allowed_ids=(ENDS[0],)))
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


def test_hostile_grammars_hurt_nobody_else():
    async def main():
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

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


class Held:
    """Compiling waits until `go`; of large grammars alone, or of all."""

    def __init__(self, monkeypatch, *, large_only: bool = False) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        make = Grammars._make

        def wait(grammars, compiler, asked):
            if not large_only or compiler is grammars.large:
                self.begun.set()
                assert self.go.wait(WAIT_S)
            return make(grammars, compiler, asked)

        monkeypatch.setattr(Grammars, "_make", wait)


def test_an_abort_while_the_grammar_compiles(monkeypatch):
    held = Held(monkeypatch)

    async def main():
        async with LocalEngine(CONFIG) as engine:
            seen = []
            send = engine._receive
            engine._receive = lambda deltas, stats: (seen.extend(deltas), send(deltas, stats))
            task = asyncio.create_task(deltas(engine, request(1, SCHEMA)))
            await asyncio.to_thread(held.begun.wait, WAIT_S)
            free = await output(engine, request(2, None, max_tokens=5, stop_ids=()))
            assert free[1] == "length", "nobody else waits for it"
            engine.abort(1)
            assert [(delta.id, delta.finish_reason) for delta in seen if delta.id == 1] == [(1, "abort")]
            held.go.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await output(engine, request(1, SCHEMA)))[1] == "stop", "the id is free again"
            assert [delta.finish_reason for delta in seen if delta.id == 1 and delta.finish_reason] == ["abort", "stop"]
            assert not engine._loop.grammars._matchers and not engine._loop._compiling

    asyncio.run(main())


def test_an_engine_that_closes_does_not_wait_for_a_grammar(monkeypatch):
    held = Held(monkeypatch)

    async def main():
        async with LocalEngine(CONFIG) as engine:
            task = asyncio.create_task(deltas(engine, request(1, SCHEMA)))
            await asyncio.to_thread(held.begun.wait, WAIT_S)
        with pytest.raises(Exception, match="closed"):
            await task
        assert not [each for each in asyncio.all_tasks() if each.get_name() == "grammar"]

    try:
        asyncio.run(asyncio.wait_for(main(), WAIT_S / 2))
    finally:
        held.go.set()


def test_an_id_is_not_used_twice_while_its_grammar_compiles(monkeypatch):
    held = Held(monkeypatch)

    async def main():
        async with LocalEngine(CONFIG) as engine:
            told = []
            engine._loop.outbox.send = lambda deltas, stats: told.extend(deltas)
            engine._loop.add(request(1, SCHEMA))
            engine._loop.add(request(1, SCHEMA))
            assert [delta.finish_reason for delta in told] == ["error"]
            held.go.set()

    asyncio.run(main())


def test_a_killed_engine_goes_on_with_the_grammar_where_it_was():
    array = {"type": "array", "items": PERSON, "minItems": 8, "maxItems": 8}
    asked = replace(request(1, ("json_schema", json.dumps(array)), max_tokens=300))
    [(expected, _)] = run(asked)

    async def main():
        engine = ProcessEngine(CONFIG)
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
            return ids, reason, engine.status.restarts
        finally:
            await engine.close()

    ids, reason, restarts = asyncio.run(main())
    assert (restarts, reason) == (1, "stop")
    assert ids == expected
    jsonschema.validate(json.loads(text(ids)), array)


def test_forced_text_may_look_like_special_tokens(data):
    table = Table.of(data / "tokenizers/qwen3", 151_936)
    text = "<think>\nhm</think>\n<tool_call>\n{}\n</tool_call><|im_end|>."
    matcher = LLMatcher(table.library, source("choice", json.dumps([text])), limits=limits(), log_level=0)
    forced = matcher.compute_ff_tokens()
    assert max(forced) < 151_643, "it is spelt in letters"
    assert matcher.consume_tokens(forced) and matcher.is_accepting(), matcher.get_error()
    named = LLMatcher(table.library, source("lark", 'start: <[151657]> "x" <[151645]>'), limits=limits(), log_level=0)
    assert named.consume_tokens([151_657, 87, 151_645]) and named.is_accepting(), "a grammar can still name them"


def test_marks_get_other_names_however_a_vocabulary_spells_them():
    added = [{"id": 1, "content": "<a/b>", "special": True}]
    plain = {"added_tokens": added, "model": {"vocab": {"x": 0, "<a/b>": 1, "\\u": 2}, "unk_token": "<a/b>"}}
    text = json.dumps(plain)
    spellings = [text, text.replace("a/b", "a\\/b"), text.replace("<", "\\u003c")]
    found = [json.loads(_named_apart(spelling.encode())) for spelling in spellings]
    assert found[0] == found[1] == found[2]
    name = found[0]["added_tokens"][0]["content"]
    assert name != "<a/b>" and found[0]["model"] == {"vocab": {"x": 0, name: 1, "\\u": 2}, "unk_token": name}
