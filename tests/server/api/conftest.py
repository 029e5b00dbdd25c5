"""Fixtures for the routes."""

import pytest

from tests.fakes import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder for apps over a fake engine."""
    return model_folder(tmp_path_factory.mktemp("model") / "fake")
