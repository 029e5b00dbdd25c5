"""schemathesis on our own API page: whatever may or must not be sent gets an answer that the page tells of.

PEQUOD_FUZZ_EXAMPLES says how many random requests each operation gets beside those of the coverage phase (20).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from server.app import build_app
from server.settings import Settings
from tests.fakes import FakeEngine
from tests.live import Server

# Texts of the length that the page allows are sent too: a small body keeps them short, a small context the answers.
SETTINGS = {"max_body_bytes": 1 << 15, "max_model_len": 64}
PAGE = build_app(Settings(model="builtin", **SETTINGS), FakeEngine()).openapi()
# What the page cannot say is a 400 as well: fields that clash, a prompt that is too long, an expression that is none.
# A body that is wrong and too large may be told either.
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["200", "400", "404", "413"]
negative_data_rejection.expected-statuses = ["400", "404", "405", "413"]
"""
# Those with the most fields; the others share a process, whose start takes longer than most of them.
LARGE = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.fixture(scope="module")
def server():
    flags = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]
    with Server(*flags) as running:
        yield running


def test_the_page_is_the_one_that_the_server_shows(server):
    assert server.client.get("/openapi.json").json() == PAGE


@pytest.mark.timeout(3600)  # thousands of requests
@pytest.mark.parametrize(
    "filters",
    [*(["--include-path", path] for path in LARGE), [part for path in LARGE for part in ("--exclude-path", path)]],
    ids=[*LARGE, "others"],
)
def test_every_response_is_one_that_the_page_describes(server, tmp_path, filters):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    examples = os.environ.get("PEQUOD_FUZZ_EXAMPLES", "20")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml"), "run"]
    flags = ["--mode", "all", "--max-examples", examples, "--checks", "all", "--seed", "1", "--continue-on-failure"]
    flags += ["--request-timeout", "300"]  # by default a request that takes 10 s is a failure
    run = subprocess.run(
        [*command, f"{server.url}/openapi.json", *flags, *filters, "--warnings", "off", "--generation-database=none"],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
    assert server.client.get("/ready").status_code == 200
