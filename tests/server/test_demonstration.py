"""The built-in model over HTTP: its sixty questions, greedy, all ending by themselves."""

import concurrent.futures
import json

import pytest

from engine import fetch
from tests.live import Server

pytestmark = pytest.mark.slow


def right(answer: str, words: list) -> bool:
    text = answer.lower()
    return all(any(w.lower() in text for w in ([word] if isinstance(word, str) else word)) for word in words)


def test_sixty_questions_and_441_sums():
    folder = fetch("builtin", weights=False).path.parent
    questions = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert len(questions) == 60 and sum(q["held_out"] for q in questions) == 20
    sums = [(a, b) for a in range(21) for b in range(21)]
    with Server() as server, concurrent.futures.ThreadPoolExecutor(16) as pool:

        def ask(question: str) -> dict:
            body = {"model": "builtin", "temperature": 0, "messages": [{"role": "user", "content": question}]}
            answer = server.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        answers = list(pool.map(lambda q: ask(q["question"]), questions))
        assert {answer["finish_reason"] for answer in answers} == {"stop"}
        score = sum(right(a["message"]["content"], q["words"]) for a, q in zip(answers, questions, strict=True))
        assert score >= 54
        totals = list(pool.map(lambda ab: ask(f"What is {ab[0]} + {ab[1]}?")["message"]["content"], sums))
        correct = sum(f"= {a + b}." in text for (a, b), text in zip(sums, totals, strict=True))
        assert correct >= 0.95 * 441
