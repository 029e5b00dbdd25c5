"""Requests with tools as people wrote them, forced upon a model of random weights: every call parses and validates.

Here one of thirty lines; `python -m benchmarks.calls` asks them all.
"""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest

from benchmarks import calls

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a"]}}}
CASE = calls.Case("c", 0, {"id": "a", "tools": [TOOL]})


def test_every_required_call_is_valid(data):
    with calls.random_model(data) as server:
        found = calls.measure(server, data, every=30, concurrency=16)
    assert found["wrong"] == []
    counts = found["all"]
    assert counts["length"] < counts["answers"] / 2, "most answers come to an end"
    assert counts["valid"] >= counts["answers"] - counts["length"]


@pytest.mark.parametrize(
    ("made", "finish", "content", "counted"),
    [
        (['{"a": 1}', '{"a": 2}'], "tool_calls", None, {"valid": 2}),
        (['{"a": 1}', '{"a": '], "length", None, {"valid": 1, "length": 1}),
        (['{"b": 1}'], "tool_calls", None, {"invalid": 1}),
        (['{"a": '], "tool_calls", None, {"invalid": 1}),
        ([], "stop", "no", {"failed": 1}),
        (['{"a": 1}'], "tool_calls", "beside", {"failed": 1}),
    ],
)
def test_an_answer_is_judged(made, finish, content, counted):
    message = {"content": content, "tool_calls": [{"function": {"name": "f", "arguments": text}} for text in made]}
    counts = Counter()
    answer = httpx.Response(200, json={"choices": [{"finish_reason": finish, "message": message}]})
    problem = calls.judge(CASE, answer, counts)
    assert +counts == Counter(counted) + Counter(answers=1)
    assert (problem is not None) == bool(counted.keys() & {"invalid", "failed"})


@pytest.mark.parametrize(
    ("made", "right"),
    [
        ([{"a": 1}, {"a": 2}], True),
        ([{"a": 2}, {"a": 1, "b": "x"}], True),
        ([{"a": 1}], False),
        ([{"a": 1}, {"a": 1}], False),
        ([{"a": 1}, {"a": 2}, {"a": 2}], False),
        ([{"a": 1, "b": "y"}, {"a": 2}], False),
        ([{"a": 1, "c": 1}, {"a": 2}], False),
        ([{}, {"a": 2}], False),
        ([], False),
    ],
)
def test_an_answer_is_right_if_its_calls_are_those_of_the_ground_truth(made, right):
    truth = [{"f": {"a": [1], "b": ["x", ""]}}, {"f": {"a": [2, 3]}}]
    assert calls.is_right([{"function": {"name": "f", "arguments": json.dumps(each)}} for each in made], truth) == right
    assert not calls.is_right([{"function": {"name": "g", "arguments": '{"a": 2}'}}], truth[1:])


def test_an_error_is_a_failure():
    counts = Counter()
    assert calls.judge(CASE, httpx.Response(500, text="no"), counts) == "500: no"
    assert counts["failed"] == 1
