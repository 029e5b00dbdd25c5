"""What users send stays between them and the model: no word of it is in a log, a metric, a process's title or an error.

Each test plants texts that exist nowhere else, in every place of every request, and looks for them where they must not
be. A `secret` is content: a value of the request. A `name` is what an error may repeat, shortened to SHOWN characters,
for nothing else says what was meant: the name of a field, of a model or of a stored response. What a schema or grammar
says may be repeated too, but only in the 400 that refuses it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from server.cli.bench.processes import tree
from server.http.excerpt import SHOWN
from tests.live import RESTART_S, WAIT_S, PacedServer, eventually
from tests.server.api.effects.places import EXAMPLES
from tests.server.http.hostile import head
from tests.server.wire import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES

pytestmark = pytest.mark.slow

PLANTED = re.compile(r"q(?:secret|name|key)\d{6}")
SECRET = re.compile(r"q(?:secret|key)\d{6}")
ASKED = {"messages": [{"role": "user", "content": "And now?"}]}
BODIES = {
    **EXAMPLES,
    EMBEDDINGS: [{"input": ["a whale"], "encoding_format": "float", "user": "Ann"}],
    "/detokenize": [{"tokens": [5]}],
}
DEFAULTS = {
    CHAT: {**ASKED, "max_tokens": 4},
    COMPLETIONS: {"prompt": "Go", "max_tokens": 4},
    RESPONSES: {"max_output_tokens": 16},  # no fewer are allowed
    "/v1/messages": {**ASKED, "max_tokens": 4},
}
# Beside what EXAMPLES have: fields of texts at the top.
FIELDS = {
    CHAT: {"user": "u", "stop": ["x"], "metadata": {"a": "b"}, "cache_salt": "s", "chat_template_kwargs": {"a": "b"},
           "structured_outputs": {"regex": "a"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    COMPLETIONS: {"user": "u", "stop": "x", "bad_words": ["x"], "structured_outputs": {"choice": ["a"]}},
    RESPONSES: {"instructions": "i", "metadata": {"a": "b"}, "user": "u"},
    "/v1/messages": {"stop_sequences": ["x"], "metadata": {"user_id": "u"}},
}  # fmt: skip
# Where a text is part of a grammar.
GRAMMARS = {"parameters", "schema", "input_schema", "structured_outputs"}


class Planted:
    """Texts that exist nowhere else, and where each was put."""

    def __init__(self):
        self.places = {}

    def plant(self, kind, *place):
        text = f"q{kind}{len(self.places):06}"
        self.places[text] = place
        return text

    def found(self, text, what=PLANTED):
        return sorted((each, *self.places[each]) for each in {*what.findall(text)})


class Watched(PacedServer):
    """A server with three kinds of keys, of which everything that is not an answer is kept."""

    def __init__(self, folder: Path):
        self.planted = Planted()
        self.keys = {kind: self.planted.plant("key", kind) for kind in ("flag", "file", "metrics", "overridden")}
        (folder / "keys").write_text(f"{self.keys['file']} weight=2\n")
        self.steps = folder / "steps.jsonl"
        super().__init__(
            "--log-level", "debug", "--step-log", str(self.steps), "--max-num-queued-reqs", "8",
            "--api-key", self.keys["flag"], "--api-key-file", str(folder / "keys"),
            env={"PEQUOD_METRICS_KEY": self.keys["metrics"], "PEQUOD_API_KEY": self.keys["overridden"]},
        )  # fmt: skip
        self.client.headers["Authorization"] = f"Bearer {self.keys['flag']}"
        self._numbers = itertools.count()

    def assert_silent(self):
        """Nothing that was planted so far is where operators and neighbours look."""
        mark = f"mark-{next(self._numbers)}"
        self.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": mark})
        eventually(lambda: mark in self.log)  # lines are written in their order, by a thread
        page = self.client.get("/metrics", headers={"Authorization": f"Bearer {self.keys['metrics']}"})
        assert page.status_code == 200
        assert "vllm:num_requests_running" in page.text
        seen = {"log": self.log, "metrics": page.text, "step log": self.steps.read_text()}
        for path in ("/openapi.json", "/docs", "/version", "/v1/models", "/v1/capabilities", "/live", "/ready"):
            seen[path] = self.client.get(path).text
        own = cmdline(self.process.pid)
        for pid in tree(self.process.pid):
            with contextlib.suppress(OSError):  # a process that has ended meanwhile
                command, threads = cmdline(pid), list(Path(f"/proc/{pid}/task").glob("*/comm"))
                seen[f"command of {pid}"] = command.decode(errors="replace")
                # The variables of the server are as they were given, and so are those of a child until it has one of
                # its own.
                if command != own:
                    seen[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_text(errors="replace")
                for path in threads:
                    with contextlib.suppress(OSError):
                        seen[str(path)] = path.read_text(errors="replace")
        assert len(tree(self.process.pid)) >= 3, "the server, its engine and what renders templates"
        assert {name: self.planted.found(text) for name, text in seen.items() if PLANTED.search(text)} == {}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Watched(tmp_path_factory.mktemp("canaries")) as running:
        yield running


def spots(value, path=()):
    """The place of every value in a body, and of every object."""
    if isinstance(value, dict):
        yield path, True
        for name, inner in value.items():
            yield from spots(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from spots(inner, (*path, index))
    else:
        yield path, False


def changed(body, path, value):
    made = copy.deepcopy(body)
    here = made
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return made


def kind_of(body, path):
    """What tells one place from another: the names on the way to it, what objects there say of themselves, and what is
    there. A second text in a list, or the same field in another message of its kind, is the same place."""
    way = []
    for part in path:
        way.append("item" if isinstance(part, int) else (part, *(str(body.get(key)) for key in ("type", "role"))))
        body = body[part]
    return *way, type(body).__name__


def variants(planted, route, body, seen):
    """The body with a secret in each of its places: as a text, as an object, and under a name that is unknown.

    Places of a kind that is among `seen`, to which this adds, are left out.
    """
    for path, is_object in spots(body):
        if (kind := kind_of(body, path)) in seen:
            continue
        seen.add(kind)
        if is_object:
            name, secret = planted.plant("name", route, *path), planted.plant("secret", route, *path)
            yield path, changed(body, (*path, name), secret)
        else:
            yield path, changed(body, path, planted.plant("secret", route, *path))
            name, secret = planted.plant("name", route, *path), planted.plant("secret", route, *path)
            yield path, changed(body, path, [{name: secret}])


@pytest.mark.parametrize("route", BODIES)
def test_no_body_leaves_a_word_in_the_error_that_refuses_it_or_in_any_log(server, route):
    planted = server.planted
    bodies = [DEFAULTS.get(route, {}) | body for body in BODIES[route]]
    bodies[0] = bodies[0] | FIELDS.get(route, {})
    seen = set()
    jobs = [(path, made) for body in bodies for path, made in variants(planted, route, body, seen)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda job: server.client.post(route, json=job[1]), jobs))
    refused = 0
    for (path, _), answer in zip(jobs, answers, strict=True):
        assert answer.status_code in (200, 400, 404), (path, answer.text)
        if answer.status_code != 200:
            refused += 1
            is_grammar = answer.json()["error"]["code"] == "invalid_grammar" and GRAMMARS & {*path}
            assert is_grammar or not planted.found(answer.text, SECRET), answer.text
    assert refused > len(jobs) / 4
    server.assert_silent()


def test_what_is_no_json_is_not_repeated(server):
    secret = server.planted.plant("secret", "broken JSON")
    bodies = [
        f'{{"prompt": "{secret}',
        f'{{"prompt": "{secret}"}}{secret}',
        f'{{"prompt": {secret}}}',
        f'{{"prompt": "{secret}", "temperature": NaN}}',
        f'{{"prompt": "{secret}\\ud800"}}',
        f'"{secret}"',
        f"prompt={secret}",
        b"\xff" + secret.encode(),
    ]
    for body in bodies:
        answer = server.client.post(COMPLETIONS, content=body)
        assert answer.status_code == 400
        assert secret not in answer.text
    server.assert_silent()


def test_a_name_is_repeated_in_part_and_a_long_value_not_at_all(server):
    name = "q" * SHOWN + server.planted.plant("secret", "behind what is shown")
    for path, body in (
        (CHAT, {**ASKED, name: 1}),
        (CHAT, {**ASKED, "model": name}),
        (CHAT, {**ASKED, "tool_choice": {"type": "function", "function": {"name": name}}}),
        (CHAT, {"messages": [{"role": name, "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": name}]}]}),
        (CHAT, {**ASKED, "logit_bias": {name: 1}}),
        (RESPONSES, {"input": "a", "previous_response_id": name}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": name}]}),
        (RESPONSES, {"input": "a", "include": [name]}),
    ):
        answer = server.client.post(path, json=body)
        assert answer.status_code in (400, 404), path
        assert not server.planted.found(answer.text), answer.text
    for path in (f"/v1/models/{name}", f"/v1/responses/{name}", f"/v1/responses/{name}/input_items"):
        answer = server.client.get(path)
        assert answer.status_code == 404
        assert not server.planted.found(answer.text), answer.text
    server.assert_silent()


def test_heads_leave_no_word(server):
    plant = server.planted.plant
    answers = [
        server.client.get(f"/{plant('secret', 'path')}"),
        server.client.post(f"{COMPLETIONS}/{plant('secret', 'path')}", json={}),
        server.client.get("/v1/models", params={plant("name", "query"): plant("secret", "query")}),
        server.client.get("/v1/responses/resp_1", params={"a": plant("secret", "query")}),
        *(
            server.client.post(COMPLETIONS, json={"prompt": 1}, headers={name: plant("secret", name)})
            for name in (
                "Cookie", "User-Agent", "Referer", "Origin", "X-Forwarded-For", "Traceparent", "X-Deadline-Ms",
                "Content-Type", "Content-Encoding", "OpenAI-Organization", "Anthropic-Version", "Anthropic-Beta",
                "X-Unknown", "Accept", "Expect", "Authorization",
            )
        ),
        *(
            server.client.get(path, headers={name: form.format(plant("key", "wrong"))})
            for path in ("/v1/models", "/metrics")
            for name, form in (("Authorization", "Bearer {}"), ("Authorization", "Basic {}"), ("X-Api-Key", "{}"))
        ),
        server.client.get("/ready", headers={"Host": f"{plant('name', 'host')}.example"}),
    ]  # fmt: skip
    for answer in answers:
        assert not server.planted.found(answer.text, SECRET), answer.text
        assert not server.planted.found(str(answer.headers), SECRET), answer.headers
    server.assert_silent()


def test_what_is_no_http_leaves_no_word(server):
    import socket

    secret = server.planted.plant("secret", "bytes")
    for data in (
        f"{secret}\r\n\r\n".encode(),
        head(f"X-A: {secret}\0"),
        head(f"Content-Length: {secret}"),
        head(f"Transfer-Encoding: {secret}"),
        head("Content-Type: application/json", "Transfer-Encoding: chunked") + f"{secret}\r\n".encode(),
        head("Content-Length: 100") + secret.encode(),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert secret.encode() not in b"".join(iter(lambda: connection.recv(1 << 16), b""))
    server.assert_silent()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda sig: sig.name)
def test_an_engine_that_dies_under_streams_leaves_no_word(server, sig):
    plant = server.planted.plant
    function = {"name": "look", "description": plant("secret", "tool"), "parameters": {"type": "object"}}
    long = {"max_tokens": 500, "ignore_eos": True, "stream": True}
    asks = [
        (COMPLETIONS, {"prompt": plant("secret", "prompt"), **long}),
        (CHAT, {"messages": [{"role": "user", "content": plant("secret", "message")}], **long}),
        (CHAT, {**ASKED, "tools": [{"type": "function", "function": function}], **long}),
        (CHAT, {**ASKED, "structured_outputs": {"choice": [plant("secret", "choice") * 20]}, "stream": True}),
        (RESPONSES, {"input": plant("secret", "input"), "stream": True, "max_output_tokens": 500}),
    ]
    begun = threading.Semaphore(0)

    def read(ask):
        path, body = ask
        with server.client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            first = next(lines)
            begun.release()
            return [first, *lines]

    engine = server.engine_pid
    with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool, server.paced():
        reading = [pool.submit(read, ask) for ask in asks]
        assert all(begun.acquire(timeout=WAIT_S) for _ in asks)
        assert not reading[0].done(), "the engine dies too late to prove anything"
        os.kill(engine, sig)
        server.pace(0)
        for each in reading:
            assert not any('"error":{' in line for line in each.result(RESTART_S))
    server.wait_ready()
    server.assert_silent()


def test_refusals_of_a_full_server_leave_no_word(server):
    secret = server.planted.plant("secret", "a full queue")
    body = {"prompt": secret, "max_tokens": 200, "ignore_eos": True, "n": 8}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: server.client.post(COMPLETIONS, json=body), range(12)))
    refused = [answer for answer in answers if answer.status_code in (429, 503)]
    assert refused
    assert not any(secret in answer.text for answer in refused)
    large = server.client.post(COMPLETIONS, content=json.dumps({"prompt": secret * 10**6}))
    assert large.status_code == 413
    assert secret not in large.text
    server.assert_silent()


@pytest.mark.parametrize(
    "given",
    [
        ["--api-key", '["qkey000001'],
        ["--api-key", "qkey000001", "--api-kye", "qkey000002"],
        ["--api-key=qkey000001", "--port", "none"],
        ["--api-key", ""],
        ["--metrics-key", "qkey000001", "--metrics-key", ""],
        ["--config", "{folder}/settings.toml"],
        ["--api-key-file", "{folder}/keys"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["serve", "config show"])
def test_settings_that_are_wrong_are_refused_without_their_keys(tmp_path, command, given):
    (tmp_path / "settings.toml").write_text('api_key = "qkey000001\nmetrics_key = qkey000002\n')
    (tmp_path / "keys").write_text("qkey000001 qkey000002\n")
    words = [word.replace("{folder}", str(tmp_path)) for word in given]
    done = subprocess.run(
        [sys.executable, "-m", "server", *command.split(), *words],
        env={**os.environ, "PEQUOD_METRICS_KEY": "qkey000003", "PEQUOD_API_KEYS": "qkey000004"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert not PLANTED.search(done.stdout + done.stderr)


def test_a_client_shows_its_key_to_the_server_alone(server):
    command = [sys.executable, "-m", "server", "chat", "--url", server.url, "--api-key", server.keys["file"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as chat:
        try:
            shown = eventually(lambda: b"--api-key\0xxxx" in (line := cmdline(chat.pid)) and line)
            assert server.keys["file"].encode() not in shown
        finally:
            chat.kill()


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()
