"""The session of `pequod bench`: what it prepares before the first request."""

from __future__ import annotations

import resource

from server.cli.bench import session
from tests.server.cli.bench.test_client import Other


def test_each_request_may_have_a_connection(pequod, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = []
    connect = session.connect

    async def connecting(*args, **more):
        limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return await connect(*args, **more)

    monkeypatch.setattr(session, "connect", connecting)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with Other().listening() as url:
            assert pequod("latency", "--url", url, "--rounds", "1", "--warmup", "0")[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits[0] > 512
