"""Fixtures for the routes of the Responses API."""

import pytest

from tests.server.api.responses.wire import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder for apps over a fake engine, whose template shows all that a request can say."""
    return make_folder(tmp_path_factory.mktemp("model") / "fake")
