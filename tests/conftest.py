"""Fixtures for all tests."""

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def data() -> pathlib.Path:
    """Models, tokenizers and prompts from outside of the repository."""
    place = os.environ.get("PEQUOD_TEST_DATA")
    if not place:
        pytest.skip("needs outside data: PEQUOD_TEST_DATA is not set")
    return pathlib.Path(place)
