"""Fixtures for tests on bare sockets, on both event loops."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from server.http.connection import Connection
from tests.fakes import FakeEngine, listening, model_folder, serving, until


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def sockets(request, tmp_path):
    """Lets `use(connect, app, engine)` talk to a listening app over bare sockets."""

    def run(use, options=None, **settings):
        async def main():
            engine = FakeEngine()
            async with (
                serving(model_folder(tmp_path / "m"), engine, **settings) as (_, app),
                listening(app, **options or {}) as url,
            ):
                host, port = url.removeprefix("http://").split(":")
                await use(lambda: asyncio.open_connection(host, int(port)), app, engine)
                limits = app.state.pequod.limits
                await until(lambda: limits.bytes.open == limits.open_choices == 0)

        request.param(main())

    return run


@pytest.fixture
def connections(monkeypatch):
    """The server's connections, in the order of their arrival."""
    found = []
    made = Connection.connection_made

    def noted(self, transport):
        found.append(self)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    return found
