"""Fixtures for all tests."""

import gc
import os
import pathlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

import engine
from tests.live import Server

# The same examples at every run: what is found is found before it lands, and not by whoever runs the tests next.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

# What takes long begins first, so that at the end no worker is alone with it.
LONGEST = [
    "engine/test_paged_gpu.py",
    "engine/test_gpu_resources.py",
    "test_oracle.py",
    "engine/test_supervisor.py",
    "engine/test_graphs.py",
    "server/api/test_openapi_fuzz.py",
    "server/test_canaries.py",
    "server/cli/commands/test_bench.py",
    "server/http/test_hostile.py",
    "server/grammar/test_tool_calls.py",
    "server/parsers/test_parsers.py",
    "server/api/ops/test_capabilities.py",
    "test_gpu_benchmark.py",
    "test_benchmarks.py",
    "engine/test_exact.py",
    "engine/test_gguf_architectures.py",
    "engine/test_cpu_attention.py",
    "engine/test_families.py",
    "engine/test_builtin.py",
    "server/test_unicode.py",
    "server/tokenization/test_renderer.py",
    "server/test_kill.py",
    "engine/test_kernels_blocks.py",
    "engine/test_embeddings.py",
    "engine/test_hub.py",
    "engine/test_grammar_answers.py",
    "test_compare.py",
    "test_clients.py",
    "engine/test_models.py",
    "engine/test_kernels_build.py",
    "engine/test_compiling.py",
    "engine/test_gguf.py",
    "test_wheel.py",
    "engine/test_out_of_memory.py",
    "docker/test_docker.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    rank = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_configure() -> None:
    gc.disable()  # while the tests are imported


def pytest_collection_finish() -> None:
    """Let collections skip what was imported: going through it again and again took a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of async tests: asyncio alone, since the server does not run on trio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_packaged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MODEL a command uses the built-in model, also on a machine that has one from a package."""
    monkeypatch.setattr(engine, "packaged_models", dict)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits, which change no token, are most of an engine's start: for tests that build hundreds."""
    from engine import roofline  # it imports torch

    monkeypatch.setattr(roofline, "measure", lambda *_, **__: None)


@pytest.fixture(scope="session")
def data() -> pathlib.Path:
    """Models, tokenizers and prompts from outside of the repository."""
    place = os.environ.get("PEQUOD_TEST_DATA")
    if not place:
        pytest.skip("needs outside data: PEQUOD_TEST_DATA is not set")
    return pathlib.Path(place)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """`pequod serve` with the built-in model, in a process of its own."""
    with Server() as running:
        yield running
