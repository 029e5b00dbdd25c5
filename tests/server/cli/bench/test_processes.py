"""Servers that `pequod bench` starts."""

import json
import os
import sys
from pathlib import Path

import pytest

from server.cli.bench import processes
from server.cli.bench.client import connect
from server.cli.bench.processes import Child, environment, flags, variables
from server.cli.commands import Failure, Parser, bench, settings_from
from server.settings_sources import Loaded
from tests.server.cli.bench.test_client import Other

pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def child():
    started = Child([sys.executable, "-c", "import time; time.sleep(60)"], "http://127.0.0.1:1", "/ready", os.environ)
    yield started
    started.stop()


async def test_a_server_is_quiet_when_it_has_done_what_it_does_without_requests(child, monkeypatch):
    used = [0.0, 0.01, 0.015, 0.0155, 0.0155]  # in intervals of 10 ms: all of a core, half of it, a twentieth
    monkeypatch.setattr(processes, "QUIET_S", 0.01)
    monkeypatch.setattr(processes, "cpu_seconds", lambda pid: used.pop(0))
    await child.quiet()
    assert used == [0.0155]


async def test_a_server_that_is_never_quiet_is_measured_all_the_same(child, monkeypatch):
    monkeypatch.setattr(processes, "QUIET_S", 0.01)
    monkeypatch.setattr(processes, "QUIET_LIMIT_S", 0.05)
    monkeypatch.setattr(processes, "cpu_seconds", lambda pid: processes.time.perf_counter())
    await child.quiet()


def settings_of(*argv: str) -> Loaded:
    parser = Parser(prog="x")
    bench.part("latency").add_arguments(parser)
    return settings_from(parser.parse(argv))


def test_settings_reach_the_server_that_is_started():
    loaded = settings_of("builtin", "--dtype", "bfloat16", "--no-enable-prefix-caching", "--ignore-fields", "a,b")
    assert flags(loaded) == ["--dtype=bfloat16", "--no-enable-prefix-caching"]
    assert variables(loaded) == {"PEQUOD_IGNORE_FIELDS": '["a", "b"]'}


def test_keys_reach_it_in_the_environment_and_not_in_its_command(tmp_path):
    (tmp_path / "keys").write_text("canary-d\n")
    loaded = settings_of("builtin", "--api-key", "canary-a,canary-b", "--api_key", "canary-c", "--api-key-file",
                         str(tmp_path / "keys"))  # fmt: skip
    assert flags(loaded) == [f"--api-key-file={tmp_path / 'keys'}"]
    assert variables(loaded) == {"PEQUOD_API_KEY": json.dumps(["canary-a", "canary-b", "canary-c"])}


def test_keys_of_a_configuration_file_reach_it_the_same_way(tmp_path):
    (tmp_path / "my.toml").write_text('api_key = ["canary-a"]\nmetrics_key = "canary-b"\n')
    loaded = settings_of("--config", str(tmp_path / "my.toml"))
    assert flags(loaded) == []
    assert variables(loaded) == {"PEQUOD_API_KEY": '["canary-a"]', "PEQUOD_METRICS_KEY": "canary-b"}


def test_lists_reach_it_as_they_are(tmp_path):
    (tmp_path / "my.toml").write_text('allowed_hosts = []\nserved_model_name = ["a,b", "-c"]\n')
    loaded = settings_of("--config", str(tmp_path / "my.toml"))
    assert flags(loaded) == []
    assert variables(loaded) == {"PEQUOD_ALLOWED_HOSTS": "[]", "PEQUOD_SERVED_MODEL_NAME": '["a,b", "-c"]'}


def test_no_address_to_listen_on_reaches_it(monkeypatch, tmp_path):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    path = tmp_path / "my.toml"
    addresses = {"uds": "p.sock", "ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "step_log": "steps.jsonl"}
    lines = [f'{name} = "{tmp_path / file}"' for name, file in addresses.items()]
    path.write_text("\n".join([*lines, 'host = "0.0.0.0"', "port = 1", "block_size = 32"]))
    assert flags(settings_of("--config", str(path))) == ["--block-size=32"]
    monkeypatch.setenv("PEQUOD_CONFIG", str(path))
    for name, file in addresses.items():
        monkeypatch.setenv(f"PEQUOD_{name.upper()}", str(tmp_path / file))
    assert flags(settings_of()) == ["--block-size=32"]
    assert not [name for name in environment() if name.startswith("PEQUOD_")]


async def test_a_server_started_here_is_reached_without_a_proxy(child, monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")  # which needs another package
    with Other().listening() as url:
        child.url, child._ready = url, "/v1/models"
        await child.ready(60)
        target = await connect(url, None, None, is_own=True)
        await target.http.aclose()
    assert target.model == "other"


async def test_a_start_that_takes_long_says_what_it_waits_for(child, monkeypatch, capsys):
    monkeypatch.setattr(processes, "NOTICE_S", 0)
    Path(child.folder / "log").write_text("downloading the model\n")
    with pytest.raises(Failure, match="was not ready"):
        await child.ready(1)
    err = capsys.readouterr().err
    assert err.count("waiting for http://127.0.0.1:1/ready") == 1
    assert "downloading the model" in err
