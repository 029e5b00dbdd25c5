"""The wheel works by itself: what `make wheel-test` does, in the suite."""

import importlib.util

import pytest

from tests import wheel


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling to build without a network")
def test_the_wheel_is_complete():
    assert wheel.main() == 0
