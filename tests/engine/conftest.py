"""Fixtures for the kernels' tests."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels import build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time to the tests of emulated instructions: the first ones wait until these are compiled."""
    for item in items:
        if any(isa in item.nodeid for isa in build.EMULATED):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture
def same_threads_after() -> Iterator[None]:
    """Random numbers from a fixed seed, and torch's number of threads as it was before the test."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype of the kernels' inputs in turn."""
    return request.param
