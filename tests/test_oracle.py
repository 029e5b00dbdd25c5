"""Part of `make oracle` in the test suite: one architecture of each kind, and the trained models."""

import os

import pytest

from engine import roofline
from tests import oracle
from tests.models import FLOAT32_ONLY, MODELS

EVERY = dict.fromkeys(oracle.SITUATIONS)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits, which change no token, took most of an engine's start, and there are 400."""
    monkeypatch.setattr(roofline, "measure", lambda *_, **__: None)


@pytest.mark.parametrize("name", ["stories260k", "babyllama-char-940k"])
@pytest.mark.slow
def test_trained_models_give_their_references(name, data):
    folder = data / "models" / name
    cases = oracle.referenced(folder)
    assert oracle.check(folder, "float32", cases) == dict.fromkeys(EVERY, len(cases))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_random_models_give_the_tokens_of_transformers(name, tmp_path):
    dtype = "float32" if name in FLOAT32_ONLY else "float64"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = oracle.generated(name, tmp_path / name, dtype, seed=list(MODELS).index(name) + 1)
    found = oracle.check(tmp_path / name, dtype, cases, oracle.MAX_LEN.get(name))
    assert found == dict.fromkeys(EVERY, len(cases))
