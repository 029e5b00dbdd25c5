"""Part of `make oracle` in the test suite: the trained models, and each architecture in some of the situations."""

import os

import pytest

from tests import oracle
from tests.models import FLOAT32_ONLY, MODELS

# One of each kind that the cache and the scheduler treat differently: these are run in every situation.
KINDS = {
    "llama",
    "llama-longrope",  # frequencies depend on the length
    "mistral",  # windows in every layer
    "gemma3_text",  # windows in some
    "gpt_oss",  # sinks
    "gemma4_text-small",  # layers that share keys and values
    "deepseek_v3",  # latents
    "qwen3_next",  # states of linear attention
    "lfm2",  # of short convolutions
    "lfm3",  # of these, beside windows
    "nemotron_h",  # of Mamba2
    "gpt2",  # computed by transformers
}
# For the others: whole prompts beside decode rows, and chunks, prefixes from the cache and preemptions at once.
ESSENTIAL = ("mixed", "preempted")

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize("name", ["stories260k", "babyllama-char-940k"])
@pytest.mark.slow
def test_trained_models_give_their_references(name, data):
    folder = data / "models" / name
    cases = oracle.referenced(folder)
    assert oracle.check(folder, "float32", cases) == dict.fromkeys(oracle.SITUATIONS, len(cases))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_random_models_give_the_tokens_of_transformers(name, tmp_path):
    dtype = "float32" if name in FLOAT32_ONLY else "float64"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = oracle.generated(name, tmp_path / name, dtype, seed=list(MODELS).index(name) + 1)
    situations = oracle.SITUATIONS if name in KINDS else ESSENTIAL
    found = oracle.check(tmp_path / name, dtype, cases, oracle.MAX_LEN.get(name), situations)
    assert found == dict.fromkeys(situations, len(cases))


def test_each_kind_is_among_the_models():
    assert MODELS.keys() >= KINDS
