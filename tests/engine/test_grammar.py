"""Grammars: validation, masks, and forced tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llguidance import LLMatcher

from engine import ErrorCode, SamplingParams
from engine.batch import Batch, Row, RowError, Sampled, StepResult
from engine.grammar import limits, problem, source
from engine.grammar.grammars import REFUSED, Grammars, Matcher
from engine.grammar.table import Table
from tests.engine.grammars import CONFIG, TOKENS, request
from tests.toys import byte_level

# --- what both sides of the seam know


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        ("json_schema", '{"type": "object"}'), ("json_schema", "{}"), ("regex", "^[a-z]+$"), ("regex", ""),
        ("choice", '["a", "", "\\"\\u0001\\n🐋"]'), ("lark", 'start: "a" start | "b"'),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
    ],
)  # fmt: skip
def test_valid_grammars_have_no_problem(kind, good):
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
def test_invalid_grammars_report_a_problem(kind, bad):
    said = problem(kind, bad)
    assert said and len(said) <= 120
    assert "a" * 50 not in said


# --- one matcher


class Bench:
    """A matcher over the byte-level toy tokenizer, with masks as text."""

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


def test_forced_tokens_are_limited_to_the_remaining_tokens(tmp_path):
    bench = Bench(tmp_path, ("regex", "x?abcdefghij[kl]"))
    assert bench.matcher.jump(10) == []
    assert bench.take("x")
    assert bench.matcher.jump(0) == []
    first = bench.matcher.jump(3)
    rest = bench.matcher.jump(100)
    assert len(first) == 3
    assert bench.tokens.decode(first + rest) == "abcdefghij"
    assert bench.take("k") and bench.matcher.is_finished


def test_no_tokens_are_forced_with_log_probabilities(tmp_path):
    bench = Bench(tmp_path, ("regex", "abcdefghij[kl]"), logprobs=0)
    assert bench.matcher.jump(10) == []


async def test_a_token_that_the_grammar_does_not_allow_fails_its_row_alone():
    grammars = Grammars(CONFIG, 2048)
    for number in (1, 2):
        grammars.add(number, await grammars.compile(request(number, ("choice", '["yes"]'))))
    grammars.add(3, await grammars.compile(request(3, ("choice", '[""]'))))
    batch = Batch(1, [Row(number, 0, [5], [0], 1) for number in (1, 2, 3)] + [Row(4, 0, [5], [0], 1)])
    rows = grammars.rows(batch)
    assert rows == [0, 1, 2]
    y = next(i for i in TOKENS.encode("yes").ids)
    nothing_left = RowError("no token is left", ErrorCode.NO_TOKEN_LEFT)
    result = StepResult([Sampled([y]), Sampled([TOKENS.token_to_id("!")]), nothing_left, Sampled([7])])
    whole, *others = grammars.advance(batch, rows, result, lambda _: 50).outcomes
    assert TOKENS.decode(whole.token_ids) == "yes"
    assert whole.is_last
    assert others == [REFUSED, Sampled([], is_last=True), Sampled([7])], "an output that cannot go on may end here"
    grammars.close()
