"""The image, the compose file and what watches the server, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from engine import EngineInfo, EngineStatus
from engine.kernels import build as kernels
from server.__main__ import COMMANDS
from server.api.responses import store
from server.http import server as graceful
from server.http.admission import Limits
from server.http.auth import Keys
from server.http.middleware import RequestMiddleware, bare_host
from server.observability.metrics import Metrics
from server.settings import FIELDS, PREFIX, Settings
from tests.docker import image
from tests.docker.test_health import run as health
from tests.live import Server, eventually, free_port

ROOT = pathlib.Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROMETHEUS = DOCKER / "prometheus"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/pequod.json").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = re.compile(
    "ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|LABEL|RUN|STOPSIGNAL|USER|VOLUME|WORKDIR"
)


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        package = "docker-compose" if name == "docker-compose" else "prometheus"
        pytest.skip(f"{name} is not here (Debian package {package})")
    return found


def run(*command: str | pathlib.Path, **kwargs: Any) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60, **kwargs
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# The image


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined.splitlines() if line.strip()]


def last_stage() -> list[tuple[str, str]]:
    parts = instructions()
    return parts[max(i for i, (name, _) in enumerate(parts) if name == "FROM") :]


def argument(name: str) -> str:
    (value,) = [value for instruction, value in last_stage() if instruction == name]
    return value


def test_the_dockerfile_is_made_of_known_instructions_and_each_command_of_it_parses():
    parts = instructions()
    for name, value in parts:
        assert INSTRUCTIONS.fullmatch(name)
        if name == "RUN":
            run("sh", "-n", "-c", value)


def test_the_stages_are_there_for_both_devices():
    stages = {value.split(" AS ")[1] for name, value in instructions() if name == "FROM" and " AS " in value}
    assert stages == {"dependencies", "builder", "runtime-cpu", "runtime-cuda"}
    assert ("ARG", "DEVICE=cpu") in instructions()
    assert last_stage()[0] == ("FROM", "runtime-${DEVICE:-cpu}")  # not ${DEVICE}: Debian 12's buildah finds no stage


def test_every_stage_has_instructions_because_buildah_leaks_a_container_for_one_without():
    for (name, value), (following, _) in itertools.pairwise(instructions()):
        assert not (name == "FROM" and following == "FROM"), f"FROM {value} is all there is of its stage"


def test_every_stage_that_installs_takes_the_index_it_was_given():
    """A stage does not inherit the arguments of the one it is based on."""
    stages = "\n".join(f"{name} {value}" for name, value in instructions()).split("\nFROM ")[1:]
    installing = [stage for stage in stages if "pip install" in stage]
    assert len(installing) == 2
    assert all("\nARG PIP_INDEX_URL\n" in stage for stage in installing)


def test_a_new_version_of_the_code_or_another_revision_leaves_the_layer_of_the_dependencies_alone():
    copied = [value for name, value in last_stage() if name == "COPY"]
    assert copied[:2] == ["--from=dependencies /opt/pequod /opt/pequod", "--from=builder /opt/install /opt/pequod"]
    parts = instructions()
    dependencies = parts[: parts.index(("FROM", "dependencies AS builder"))]
    assert [value for name, value in dependencies if name == "COPY"] == ["pyproject.toml ./"]
    names = [name for name, _ in last_stage()]
    assert min(names.index("ARG"), names.index("LABEL")) > max(i for i, name in enumerate(names) if name == "COPY")


def test_an_image_without_its_kernels_is_not_built(tmp_path):
    """The line that looks for them, run as the build runs it, with and without a compiled library."""
    (command,) = [value for name, value in instructions() if name == "RUN" and "build.library" in value]
    packages = tmp_path / "install/lib/python3/site-packages"
    ignored = shutil.ignore_patterns("*.so", ".lock", "__pycache__", "model")
    shutil.copytree(ROOT / "engine", packages / "engine", ignore=ignored)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    call: dict[str, Any] = {"env": {**os.environ, "PATH": path, "CXX": "no-such-compiler"}, "cwd": tmp_path}
    command = command.replace("/opt/install", str(tmp_path / "install"))
    if reason := kernels.supported():
        assert reason in run("sh", "-c", command, **call)
        return
    failed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, **call)
    assert failed.returncode == 1 and "no C++ compiler was found" in failed.stderr
    library = packages / "engine/kernels" / kernels.file_name()
    library.touch()
    assert run("sh", "-c", command, **call) == f"{library}\n"


def test_what_the_image_copies_is_in_the_repository_and_in_the_build_context():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"  # a context of what is named, so that no secret and no gigabyte slips in
    allowed = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    dropped = [pattern for pattern in patterns[1:] if not pattern.startswith("!")]
    sources = [
        source for name, value in instructions() if name == "COPY" and "--from" not in value
        for source in value.split()[:-1]
    ]  # fmt: skip
    assert len(sources) > 4
    for source in sources:
        files = [path for path in listed if path == source or path.startswith(source + "/")]
        assert files, f"COPY {source}: no such file"
        assert any(source == name or source.startswith(name + "/") for name in allowed), f".dockerignore hides {source}"
        hidden = [
            path for path in files for pattern in dropped if fnmatch.fnmatch("/" + path, pattern.replace("**", "*"))
        ]
        assert not hidden
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(built["packages"]) | {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]} <= set(sources)


def test_the_dependencies_of_the_image_are_those_of_the_project(tmp_path):
    """The line that reads them from pyproject.toml, run as the build runs it, up to pip."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (command,) = [value for name, value in instructions() if name == "RUN" and "requirements.txt" in value]
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$*" >> calls\n')
    pip.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run("sh", "-c", command, cwd=tmp_path, env={**os.environ, "PATH": path, "TORCH_INDEX": ""})
    assert (tmp_path / "calls").read_text() == "install -r requirements.txt\n"
    assert (tmp_path / "requirements.txt").read_text().splitlines() == PROJECT["dependencies"]
    torch = (tmp_path / "torch.txt").read_text().splitlines()
    assert torch == [line for line in PROJECT["dependencies"] if line.startswith("torch>")]
    assert len(torch) == 1
    run("sh", "-c", command, cwd=tmp_path, env={**os.environ, "PATH": path, "TORCH_INDEX": "file:///other"})
    assert "install --index-url file:///other -r torch.txt\n" in (tmp_path / "calls").read_text()


def test_the_image_runs_our_command_as_a_user_without_rights():
    (entry,) = json.loads(argument("ENTRYPOINT"))
    assert entry in PROJECT["scripts"]
    assert json.loads(argument("CMD"))[0] in COMMANDS
    user, group = argument("USER").split(":")
    assert int(user) >= 10000 and int(group) >= 10000
    created = [value for name, value in instructions() if name == "RUN" and "useradd" in value]
    assert f"--uid {user} " in created[0] and f"--gid {group} " in created[0]
    assert argument("STOPSIGNAL") == "SIGTERM"
    assert argument("EXPOSE") == str(FIELDS["port"].default)
    assert ("ARG", f"VERSION={PROJECT['version']}") in last_stage()
    environment = dict(word.split("=", 1) for name, value in last_stage() if name == "ENV" for word in value.split())
    for name, value in environment.items():
        if name.startswith(PREFIX):
            Settings.model_validate({name.removeprefix(PREFIX).lower(): value})
    assert environment["PEQUOD_HOST"] == "0.0.0.0"
    (volume,) = json.loads(argument("VOLUME"))
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        assert environment[name].startswith(volume)


def test_no_package_index_and_no_image_registry_is_named():
    texts = [(ROOT / "Dockerfile").read_text(), *(path.read_text() for path in DOCKER.glob("compose*.yaml"))]
    for text in texts:
        hosts = set(re.findall(r"https?://([^/:\"\s]+)", text))
        assert hosts <= {"127.0.0.1"}
        images = re.findall(r"^\s*image: (\S+)", text, re.MULTILINE) + re.findall(r"PYTHON_IMAGE=(\S+)", text)
        assert not [image for image in images if "." in image.split("/")[0] and "/" in image]


# `make image-test`, as far as it goes without a container tool


def test_the_image_is_tried_with_the_options_of_the_compose_file():
    pequod = services()["pequod"]
    expected = ["--init"] if pequod["init"] else []
    expected += ["--read-only"] if pequod["read_only"] else []
    expected += [word for folder in pequod["tmpfs"] for word in ("--tmpfs", folder)]
    expected += [word for capability in pequod["cap_drop"] for word in ("--cap-drop", capability)]
    expected += [word for o in pequod["security_opt"] for word in ("--security-opt", o.removesuffix(":true"))]
    assert expected == image.OPTIONS
    assert [volume.split(":")[1] for volume in pequod["volumes"]] == [image.VOLUME]
    assert pequod["healthcheck"]["test"] == ["CMD", *image.READY]
    assert pequod["stop_grace_period"] == f"{image.STOP_S}s"


@pytest.fixture
def only_docker(tmp_path, monkeypatch):
    """A function that makes a shell script the only container tool of this machine."""

    def install(*cases: str) -> None:
        script = tmp_path / "docker"
        script.write_text('#!/bin/sh\ncase "$*" in\n' + "".join(f"{case};;\n" for case in cases) + "esac\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_a_machine_without_a_container_tool_skips_the_image(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert image.main([]) == 0
    expected = "skipped  docker is not installed; podman is not installed; buildah is not installed\n"
    assert capsys.readouterr().out == expected


def test_a_container_tool_that_does_not_work_is_named_with_its_error(only_docker, capsys):
    only_docker("info) echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    assert image.main([]) == 0
    assert "skipped  docker does not work here (Cannot connect to the Docker daemon); " in capsys.readouterr().out


def test_a_base_image_that_cannot_be_fetched_skips_the_image(only_docker, capsys):
    only_docker("info|--version)", "'image inspect base'|'pull base') echo 'no such host' >&2; exit 1")
    assert image.main(["--base", "base"]) == 0
    assert "skipped  the base image base cannot be fetched: no such host\n" in capsys.readouterr().out


def test_an_image_that_does_not_build_is_a_failure(only_docker, capsys):
    only_docker("build*) exit 1")
    assert image.main(["--base", "base"]) == 1
    assert "failed   docker could not build the image" in capsys.readouterr().out


def test_a_container_that_cannot_be_started_skips_the_image(only_docker, capsys):
    shown = json.dumps([{"Config": {"User": "10001:10001"}}])
    only_docker(
        f"'image inspect'*) echo '{shown}'", "run*' --entrypoint true '*) echo 'crun: not permitted' >&2; exit 126"
    )
    assert image.main(["--no-build"]) == 0
    assert "skipped  a container cannot be started: crun: not permitted\n" in capsys.readouterr().out


def test_an_image_that_runs_as_root_is_a_failure(only_docker, capsys):
    shown = json.dumps([{"Config": {"User": ""}}])
    seen = json.dumps({"uid": 0, "machine": "x86_64", "compilers": [], "written": {}})
    only_docker(f"'image inspect'*) echo '{shown}'", f"run*' --entrypoint python '*) echo '{seen}'")
    assert image.main(["--no-build"]) == 1
    assert "failed   it runs as the image's user, who is not root: uid 0\n" in capsys.readouterr().out


# The health check, whose own tests are in test_health.py


def test_the_image_and_the_compose_file_use_the_health_check_that_is_there():
    words = json.loads(argument("HEALTHCHECK").split("CMD", 1)[1])
    copied = [value.split()[1] for name, value in last_stage() if name == "COPY" and "health.py" in value]
    assert words == ["python", *copied, "/live"]
    assert ("RUN", f"chmod 0644 {copied[0]}") in last_stage()  # a checkout's file may be its owner's alone
    assert services()["pequod"]["healthcheck"]["test"] == ["CMD", "python", *copied, "/ready"]


# Compose


def services() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("more", [[], ["compose.cuda.yaml"], ["compose.keys.yaml"]], ids=["cpu", "cuda", "keys"])
def test_compose_takes_the_files(more):
    files = ["compose.yaml", *more]
    options = [option for name in files for option in ("-f", str(DOCKER / name))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    text = run(tool("docker-compose"), *options, "config", env={**kept, "PEQUOD_MODEL": "/models/one"})
    parsed = yaml.safe_load(text[text.index("services:") :])
    pequod = parsed["services"]["pequod"]
    assert set(parsed["services"]) == {"pequod", "prometheus", "grafana"}
    assert pequod["environment"]["PEQUOD_MODEL"] == "/models/one"
    assert pequod["environment"]["PEQUOD_API_KEY"] is None  # absent, not empty: an empty key is an error
    assert pequod["build"]["context"] == str(ROOT)
    devices = pequod.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    assert pequod.get("secrets") == ([{"source": "api-keys"}] if "compose.keys.yaml" in more else None)
    if "compose.cuda.yaml" not in more:
        assert devices is None
    else:
        assert pequod["build"]["args"]["DEVICE"] == "cuda"
        assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_every_setting_that_the_compose_file_hands_on_exists():
    environment = services()["pequod"]["environment"]
    assert {name.removeprefix(PREFIX).lower() for name in environment if name.startswith(PREFIX)} <= set(FIELDS)
    args = {value.partition("=")[0] for name, value in instructions() if name == "ARG"}
    for name in ("compose.yaml", "compose.cuda.yaml"):
        assert set(yaml.safe_load((DOCKER / name).read_text())["services"]["pequod"]["build"]["args"]) <= args


def test_a_drain_has_the_time_it_needs_before_the_container_is_killed():
    pequod = services()["pequod"]
    drain = Settings.model_validate({"drain_seconds": pequod["environment"]["PEQUOD_DRAIN_SECONDS"]}).drain_seconds
    afterwards = graceful.MARGIN_S + graceful.CLOSE_S + store.CLOSE_S + store.INTERRUPT_S
    assert int(pequod["stop_grace_period"].removesuffix("s")) >= drain + afterwards


@pytest.mark.parametrize("keys", [{}, {"api_key": ["one"]}], ids=["open", "with keys"])
def test_prometheus_and_the_health_check_reach_the_server_of_the_compose_file(keys):
    environment = dict(word.split("=", 1) for name, value in last_stage() if name == "ENV" for word in value.split())
    environment |= {name: value for name, value in services()["pequod"]["environment"].items() if value is not None}
    values = {
        name.removeprefix(PREFIX).lower(): re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value)
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    settings = Settings.model_validate(values | keys)
    middleware = RequestMiddleware(None, settings, None, None)
    targets = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    for host in (targets[0]["targets"][0], "127.0.0.1:8000"):
        assert middleware.allows(bare_host(host.encode()))
    Keys(settings).check_metrics_reader([])  # raises 401 for a scrape that needs a key


def test_the_key_file_of_the_compose_file_is_where_the_secret_is_mounted():
    added = yaml.safe_load((DOCKER / "compose.keys.yaml").read_text())
    pequod = added["services"]["pequod"]
    (secret,) = pequod["secrets"]
    assert pequod["environment"] == {"PEQUOD_API_KEY_FILE": f"/run/secrets/{secret}"}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert added["secrets"][secret]["file"] == "${API_KEY_FILE:-./api-keys}" and "docker/api-keys" in ignored


def test_services_are_pinned_checked_without_rights_and_reachable_from_this_machine_alone():
    for name, service in services().items():
        tag = service["image"].partition(":")[2]
        assert tag and tag != "latest"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["cap_drop"] == ["ALL"]
        bind = "BIND" if name == "pequod" else "MONITORING_BIND"
        assert all(port.startswith(f"${{{bind}:-127.0.0.1}}:") for port in service["ports"]), name


def test_what_is_mounted_is_where_the_programs_look():
    mounts = dict(volume.split(":")[:2] for name in ("prometheus", "grafana") for volume in services()[name]["volumes"])
    for source, target in mounts.items():
        if source.startswith("."):
            assert (DOCKER / source).is_dir()
        else:
            assert source in yaml.safe_load((DOCKER / "compose.yaml").read_text())["volumes"]
        mounts[source] = target
    assert f"--config.file={mounts['./prometheus']}/prometheus.yml" in services()["prometheus"]["command"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/pequod.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == mounts["./grafana/dashboards"] + "/pequod.json"
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["pequod:8000"]}]
    assert source["jsonData"]["timeInterval"] == "5s"


# Prometheus


def test_promtool_takes_the_scrape_configuration_and_the_alerts():
    assert "SUCCESS" in run(tool("promtool"), "check", "config", PROMETHEUS / "prometheus.yml")
    assert "FAILED" not in run(tool("promtool"), "check", "rules", PROMETHEUS / "alerts.yml")


def test_each_alert_rings_when_it_should_and_only_then():
    run(tool("promtool"), "test", "rules", PROMETHEUS / "alerts_test.yml")
    rung = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    tried = {case["alertname"] for test in rung for case in test.get("alert_rule_test", []) if case["exp_alerts"]}
    assert tried == set(alerts())


def alerts() -> dict[str, str]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


# The dashboard


def test_no_range_is_so_short_that_a_change_falls_between_two_of_them():
    """The last scrape of one range and the first of the next must be the same, or both miss what happened between."""
    assert "[$__interval]" not in json.dumps(DASHBOARD)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every expression of the dashboard, with its variables filled in, by the panel's title and a letter."""
    found = {f"{panel['title']}/{t['refId']}": t["expr"] for panel in panels() for t in panel["targets"]}
    found |= {note["name"]: note["expr"] for note in DASHBOARD["annotations"]["list"]}
    filled = {
        name: text.replace("$__rate_interval", "1m").replace("$__interval", "1m").replace("$instance", ".*")
        for name, text in found.items()
    }
    assert not [name for name, text in filled.items() if "$" in text]
    return filled


def named(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    words = re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])", bare)
    operators = {"and", "or", "unless", "bool", "offset", "sum", "max", "min", "count", "avg"}
    return {word for word in words if word not in operators and not re.fullmatch(r"\d+[smhd]", word)}


@pytest.fixture(scope="module")
def registered() -> set[str]:
    """The name of every series that a loaded server can expose."""
    info = EngineInfo(
        model="m", architecture="a", max_len=2048, vocab_size=10, block_size=16, num_blocks=8, max_seqs=4,
        max_batched_tokens=64, dtype="float32", device="cpu", attention="reference", implementation="native",
        exact=False, num_params=1, weights_bytes=1, kv_bytes_per_token=1, weights_hash="", load_seconds=0.0, torch="",
        kv_dtype="float32",
    )  # fmt: skip
    settings = Settings()
    status = EngineStatus(phase="ready", last_step=time.monotonic())
    engine = SimpleNamespace(status=status, info=info, pid=os.getpid(), on_step=[])
    metrics = Metrics(settings, engine, Limits(settings))
    metrics.bind(info)
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    families = [family for registry in (metrics.own, metrics.vllm) for family in registry.collect()]
    return {family.name + end for family in families for end in ends[family.type]}


def test_metrics_are_found_in_an_expression():
    text = (
        'histogram_quantile(0.95, sum by (le, x) (rate(vllm:a_bucket{b=~"c"}[5m]))) / on (job) pequod:d offset 5m > 0'
    )
    assert named(text) == {"vllm:a_bucket", "pequod:d"}


def test_the_dashboard_and_the_alerts_read_metrics_that_the_server_has(registered):
    known = registered | {"up", "ALERTS"}
    for name, expression in {**expressions(), **alerts()}.items():
        found = named(expression)
        assert found, name
        assert found <= known, f"{name} reads {found - known}"
    (variable,) = [entry for entry in DASHBOARD["templating"]["list"] if entry["name"] == "instance"]
    assert re.findall(r"label_values\(([\w:]+),", variable["definition"])[0] in registered


def test_every_expression_of_the_dashboard_is_promql(tmp_path):
    rules = [{"record": f"x:{number}", "expr": text} for number, text in enumerate(expressions().values())]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", file)


def test_panels_lie_side_by_side_and_say_what_they_show():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
    for panel in panels():
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# All of it, with a server and Debian's Prometheus


class Scraper:
    """Debian's Prometheus over one server, with our configuration."""

    def __init__(self, place: pathlib.Path, target: str) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}  # for haste
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        shutil.copy(PROMETHEUS / "alerts.yml", place)
        (place / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        self.log = open(place / "log", "w")
        self.process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={place / 'prometheus.yml'}",
                f"--storage.tsdb.path={place / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    def get(self, path: str, **params: str) -> Any:
        try:
            answer = self.client.get(path, params=params)
        except httpx.TransportError:
            return None
        if answer.status_code in (502, 503):  # it is still starting
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def value(self, expression: str) -> list[float]:
        data = self.get("/api/v1/query", query=expression)
        return [float(sample["value"][1]) for sample in data["result"]] if data else []

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.client.close()
        self.log.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tool("prometheus")
    with Server("--dtype", "float32", "--num-gpu-blocks-override", "200") as running:
        yield running


@pytest.fixture(scope="module")
def scraper(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraper]:
    running = Scraper(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{server.port}")
    try:
        eventually(lambda: running.value('up{job="pequod"}') == [1.0], every=0.2)
        yield running
    finally:
        running.stop()


def ask(server: Server, tokens: int) -> None:
    body = {"prompt": "The captain looked at the grey sea. " * 8, "max_tokens": tokens, "ignore_eos": True}
    for stream in (False, True):
        answer = server.client.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_prometheus_reads_a_running_server_and_every_panel_has_data(server, scraper):
    for _ in range(3):  # several scrapes with new counts, so that there are rates
        ask(server, 20)
        seen = scraper.value("sum(vllm:generation_tokens_total)")
        eventually(lambda seen=seen: scraper.value("sum(vllm:generation_tokens_total)") != seen, every=0.2)
    total = server.metric("vllm:generation_tokens_total")
    assert total == 3 * 2 * 20
    eventually(lambda: scraper.value("sum(vllm:generation_tokens_total)") == [total], every=0.2)

    silent = {"Engine restarts"}  # an annotation: nothing has died

    def holds(name: str, check: Callable[[list[float]], bool]) -> None:
        """Wait until it does: after a scrape that took too long, series are missing for a while."""
        expression = expressions()[name]
        try:
            eventually(lambda: check(scraper.value(expression)), every=0.2)
        except AssertionError:
            raise AssertionError(f"{name} is {scraper.value(expression)}: {expression}") from None

    for name in expressions():
        # NaN is what a quantile or a mean of nothing is: some series (an idle route) may be, a whole panel not.
        if name not in silent:
            holds(name, lambda values: any(math.isfinite(value) for value in values))
    holds("Servers up/A", lambda values: values == [1.0])
    holds("Lost blocks/A", lambda values: values == [0.0])
    holds("Blocks by state/A", lambda values: sum(values) == 200)
    holds("Prefix cache hit rate/A", lambda values: bool(values) and values[0] > 0.5)


@pytest.mark.slow
def test_the_alerts_are_evaluated_and_silent_over_a_healthy_server(scraper):
    def evaluated() -> list[dict[str, Any]]:
        rules = scraper.get("/api/v1/rules")["groups"][0]["rules"]
        return [] if any(rule["health"] != "ok" for rule in rules) else rules

    rules = eventually(evaluated, every=0.2)
    assert {rule["name"] for rule in rules} == set(alerts())
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


@pytest.mark.slow
def test_the_health_check_of_the_image_says_yes_to_a_running_server(server):
    assert health("/live", PEQUOD_PORT=str(server.port)) == 0
    assert health("/ready", PEQUOD_PORT=str(server.port)) == 0
