"""Resolving a model's name to its files: local folders, a prepared cache, and a small hub on a local port."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from gguf import GGMLQuantizationType as Type

from engine import EngineConfig, ModelError, hub
from engine.build import describe
from engine.builtin import path as builtin_path
from engine.grammar.grammars import Grammars
from tests.engine.test_gguf import write

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights of main",
    "consolidated.safetensors": b"the same again",
    "original/config.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"# words",
}


class FakeHub(BaseHTTPRequestHandler):
    """The endpoints of a hub that a download needs. Models: ours/open, ours/gated, ours/down, ours/secret."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str | None]]  # (path, authorization), set on a subclass per test

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append((path, self.headers.get("Authorization")))
        if "ours/gated" in path:
            return self.fail(403, "GatedRepo")
        if "ours/down" in path:
            return self.fail(503, None)
        if "ours/secret" in path and self.headers.get("Authorization") != "Bearer right":
            return self.fail(401, "RepoNotFound")
        for name in ("ours/open", "ours/secret"):
            if path.startswith(f"/api/models/{name}"):
                return self.api(path.removeprefix(f"/api/models/{name}"), body)
            if path.startswith(f"/{name}/resolve/"):
                revision, _, file = path.removeprefix(f"/{name}/resolve/").partition("/")
                return self.file(revision, file, body)
        return self.fail(404, "RepoNotFound")

    def api(self, rest: str, body: bool) -> None:
        kind, _, revision = rest.strip("/").partition("/")
        revision = revision.split("/")[0] or "main"
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        if kind == "tree":
            found: Any = [
                {"type": "file", "path": name, "size": len(self.content(commit, name)), "oid": self.tag(commit, name)}
                for name in FILES
            ]
        else:
            found = {"id": "ours/open", "sha": commit, "siblings": [{"rfilename": name} for name in FILES]}
        self.send(200, json.dumps(found).encode(), body, {"Content-Type": "application/json"})

    def file(self, revision: str, name: str, body: bool) -> None:
        commit = COMMITS.get(revision, revision)
        if name not in FILES:
            return self.fail(404, "EntryNotFound")
        headers = {"ETag": f'"{self.tag(commit, name)}"', "X-Repo-Commit": commit}
        self.send(200, self.content(commit, name), body, headers)

    @staticmethod
    def content(commit: str, name: str) -> bytes:
        return b"weights of v2" if commit == COMMITS["v2"] and name == "model.safetensors" else FILES[name]

    def tag(self, commit: str, name: str) -> str:
        return hashlib.sha1(self.content(commit, name)).hexdigest()

    def fail(self, status: int, code: str | None) -> None:
        self.send(status, b"{}", True, {"X-Error-Code": code} if code else {})

    def send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Site:
    """A running fake hub with a separate cache; fetches run in a new process, because the library reads the environment
    when it is imported."""

    def __init__(self, home: Path, port: int, asked: list[tuple[str, str | None]]) -> None:
        self.home, self.url, self.asked = home, f"http://127.0.0.1:{port}", asked

    def fetch(
        self,
        model: str,
        revision: str | None = None,
        *,
        weights: bool = True,
        local_files_only: bool = False,
        **env: str,
    ) -> Any:
        """Return the folder's (files, revision), or the message of a ModelError."""
        code = """
import json, sys
from engine import ModelError, hub
model, revision, weights, local_files_only = json.loads(sys.argv[1])
try:
    folder = hub.fetch(model, revision, weights=weights, local_files_only=local_files_only)
    print(json.dumps([str(folder.path), folder.revision]))
except ModelError as error:
    print(json.dumps(str(error)))
assert "torch" not in sys.modules
"""
        # Not the caller's own hub settings and proxies
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps([model, revision, weights, local_files_only])],
            env={**clean, "HF_HOME": str(self.home), "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        found = json.loads(done.stdout.splitlines()[-1])
        if isinstance(found, str):
            assert "\n" not in found
            return found
        root = Path(found[0])
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}, found[1]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    asked: list[tuple[str, str | None]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (FakeHub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Site(tmp_path / "home", server.server_port, asked)
    server.shutdown()
    server.server_close()
    thread.join()


def cache(home: Path, model: str, files: dict[str, bytes], *, revision: str = "main") -> None:
    """Write files into a hub's cache, as a download leaves them."""
    root = home / "hub" / f"models--{model.replace('/', '--')}"
    folder = root / "snapshots" / COMMITS[revision]
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (root / "refs").mkdir()
    (root / "refs" / revision).write_text(COMMITS[revision])


def test_local_folder_is_used_unchanged(tmp_path, monkeypatch):
    assert hub.fetch(str(tmp_path), weights=True) == hub.Folder(tmp_path)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.fetch("sub", weights=False).path == Path("sub")


def test_the_builtin_model_has_a_name():
    assert hub.fetch("builtin", weights=True) == hub.fetch("", weights=True) == hub.Folder(builtin_path())


@pytest.mark.parametrize("model", ["/no/such/folder", "./here", "~/nowhere", "a/b/c", "what is this", "http://x/y"])
def test_invalid_names_are_refused(model):
    with pytest.raises(ModelError, match="there is no folder"):
        hub.fetch(model, weights=True)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file; give a GGUF file, or the folder"):
        hub.fetch(str(tmp_path / "model.safetensors"), weights=True)


def test_a_folder_of_another_user_is_reported(monkeypatch, tmp_path):
    def is_dir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(ModelError, match=f"^{tmp_path} cannot be read: Permission denied$"):
        hub.fetch(str(tmp_path), weights=True)


def test_a_file_of_statistics_or_of_an_image_encoder_is_not_the_model_of_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "tiny-Q8_0.gguf")
    for name in ("tiny-imatrix.gguf", "imatrix_unsloth.gguf", "tiny-mmproj-f16.gguf", "mmproj-tiny.gguf"):
        (tmp_path / name).touch()
    assert hub.fetch(str(tmp_path), weights=True).path.name == "tiny-Q8_0"


def test_download_of_what_is_needed_and_no_more(site):
    files, revision = site.fetch("ours/open", weights=False)
    assert files == {name: FILES[name] for name in ("config.json", "tokenizer.json", "chat_template.jinja")}
    assert revision == COMMITS["main"]
    files, revision = site.fetch("ours/open")
    assert set(files) == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (site.home / "hub" / "models--ours--open").is_dir()
    site.asked.clear()
    assert site.fetch("ours/open")[0] == files
    assert not [path for path, _ in site.asked if "safetensors" in path]


def test_revision_is_downloaded_and_reported(site):
    for revision in ("v2", COMMITS["v2"]):
        files, commit = site.fetch("ours/open", revision)
        assert (files["model.safetensors"], commit) == (b"weights of v2", COMMITS["v2"])
    assert site.fetch("ours/open", "v3") == f"the model ours/open on {site.url} has no revision 'v3'"


def test_hf_token_is_sent(site):
    assert "or it is private and HF_TOKEN gives no access" in site.fetch("ours/secret")
    assert site.fetch("ours/secret", HF_TOKEN="right")[1] == COMMITS["main"]
    assert any(token == "Bearer right" for _, token in site.asked)


def test_refusals_of_the_hub_are_reported_in_one_sentence(site):
    assert f"no such model on {site.url}" in site.fetch("ours/nothing")
    assert f"ask for access at {site.url}/ours/gated and set HF_TOKEN" in site.fetch("ours/gated")
    assert site.fetch("ours/down").endswith(f"{site.url} cannot be reached")


def test_offline_and_unreachable_hubs_are_reported(site):
    text = site.fetch("ours/open", HF_HUB_OFFLINE="1")
    assert "neither a folder here nor complete in the cache" in text and text.endswith("HF_HUB_OFFLINE is set")
    nobody = "http://127.0.0.1:9"
    assert site.fetch("ours/open", HF_ENDPOINT=nobody).endswith(f"{nobody} cannot be reached")
    small, _ = site.fetch("ours/open", weights=False)
    assert site.fetch("ours/open", weights=False, HF_HUB_OFFLINE="1")[0] == small
    assert "nor complete in the cache" in site.fetch("ours/open", HF_HUB_OFFLINE="1")
    files, _ = site.fetch("ours/open")
    assert site.fetch("ours/open", HF_HUB_OFFLINE="1")[0] == files
    assert site.fetch("ours/open", HF_ENDPOINT=nobody)[0] == files


def test_a_proxy_that_fails_gets_a_sentence_and_what_is_in_the_cache_is_used(site):
    failing = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": site.url}  # it answers CONNECT with 501
    text = site.fetch("ours/open", **failing)
    assert text.startswith("cannot download ours/open from https://hub.invalid: ") and "501" in text
    files, _ = site.fetch("ours/open")
    assert site.fetch("ours/open", **failing)[0] == files


def test_a_prepared_cache_serves_offline(site):
    cache(site.home, "theirs/model", {"config.json": b"{}", "model.safetensors": b"prepared"}, revision="v2")
    files, commit = site.fetch("theirs/model", "v2", HF_HUB_OFFLINE="1")
    assert files["model.safetensors"] == b"prepared" and commit == COMMITS["v2"]
    assert "nor complete in the cache" in site.fetch("theirs/model", HF_HUB_OFFLINE="1")
    assert not site.asked


def test_local_files_alone_are_used_without_a_request_to_the_hub(site):
    for model in ("theirs/model", "theirs/model:Q8_0"):
        text = site.fetch(model, local_files_only=True)
        assert "nor complete in the cache" in text and text.endswith("`local_files_only` is set")
    cache(site.home, "theirs/model", {"config.json": b"{}", "model.safetensors": b"prepared"})
    files, commit = site.fetch("theirs/model", local_files_only=True)
    assert files["model.safetensors"] == b"prepared" and commit == COMMITS["main"]
    assert not site.asked


def test_neither_the_weights_nor_the_grammars_of_an_engine_are_downloaded_with_local_files_alone():
    config = EngineConfig(model="nobody/nothing", local_files_only=True)
    with pytest.raises(ModelError, match="`local_files_only` is set"):
        describe(config)
    grammars = Grammars(config, width=8)
    assert "`local_files_only` is set" in str(grammars._table)
    grammars.close()


def test_the_type_of_a_gguf_file_may_follow_the_name(site, tmp_path):
    files = {
        f"tiny-{kind.name}.gguf": write(tmp_path / kind.name, kind).read_bytes() for kind in (Type.Q4_0, Type.Q8_0)
    }
    cache(site.home, "ours/gguf", {**files, "README.md": b"# words"})
    offline = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for kind in ("Q8_0", "q8_0"):
        found, revision = site.fetch(f"ours/gguf:{kind}", **offline)
        assert json.loads(found["config.json"])["quantization_config"]["types"] == ["Q8_0"]
        assert revision == COMMITS["main"]
    assert site.fetch("ours/gguf:Q5_K_M", **offline) == "ours/gguf has no GGUF file of the type Q5_K_M"


def test_the_type_of_a_gguf_file_to_download_may_be_written_in_small_letters(site, tmp_path, monkeypatch):
    for kind in (Type.Q4_0, Type.Q8_0):
        monkeypatch.setitem(FILES, f"tiny-{kind.name}.gguf", write(tmp_path / kind.name, kind).read_bytes())
    for kind in ("q8_0", "Q8_0"):
        found, revision = site.fetch(f"ours/open:{kind}", XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert json.loads(found["config.json"])["quantization_config"]["types"] == ["Q8_0"]
        assert revision == COMMITS["main"]
    assert not [path for path, _ in site.asked if path.endswith(("Q4_0.gguf", ".safetensors"))]


def test_only_files_of_the_type_are_downloaded(site, tmp_path, monkeypatch):
    model = write(tmp_path / "f16", Type.F16).read_bytes()
    for name in ("tiny-BF16.gguf", "tiny-F16.gguf", "tiny-F16_L.gguf", "mmproj-F16.gguf"):
        monkeypatch.setitem(FILES, name, model)
    found, _ = site.fetch("ours/open:F16", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert json.loads(found["config.json"])["dtype"] == "bfloat16"
    downloaded = {path.rpartition("/")[2] for path, _ in site.asked if path.endswith(".gguf")}
    assert downloaded == {"tiny-F16.gguf"}


def test_a_repository_of_gguf_files_needs_a_type(site):
    text = site.fetch("ours/open-GGUF")
    assert text == (
        "the name of ours/open-GGUF needs the type of a GGUF file after a colon, such as ours/open-GGUF:Q4_K_M"
    )
    assert not site.asked
