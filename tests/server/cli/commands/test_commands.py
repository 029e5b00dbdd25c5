"""The output of complete, chat, plan, models and the banner, with a fake engine and a fake server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

import engine
from engine import (
    ConfigError,
    EngineConfig,
    EngineDied,
    EngineInfo,
    EngineRequest,
    ModelError,
    packaged,
)
from engine.gguf import folder
from engine.hub import Folder
from server import settings
from server.__main__ import main
from server.cli import banner
from server.cli.commands import Parser, add_settings, chat_model, settings_from
from server.observability import logs
from server.settings import Settings
from server.settings_sources import Loaded
from server.tokenization.tokenizer import Tokenizer
from tests import fakes
from tests.engine.test_gguf import write

BUILTIN = Path(engine.__file__).parent / "builtin" / "model"
INFO = EngineInfo(
    model="builtin",
    architecture="Qwen3ForCausalLM",
    max_len=256,
    vocab_size=2048,
    block_size=16,
    num_blocks=100,
    max_seqs=16,
    max_batched_tokens=256,
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    attention="reference",
    implementation="native",
    exact=False,
    num_params=2_500_000,
    weights_bytes=10_000_000,
    kv_bytes_per_token=1024,
    weights_hash="abc",
    load_seconds=0.5,
    torch="2.13",
    notes=("the longest request was lowered to 256 tokens",),
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    for name in list(os.environ):
        if name.startswith(settings.PREFIX):
            monkeypatch.delenv(name)


class FakeEngine(fakes.FakeEngine):
    """Generates the same text for every request, then the end token, and records the requests."""

    says = " Aye, aye."
    made: FakeEngine
    error: Exception | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(self.words, info=INFO)
        FakeEngine.made = self
        self.closed = False
        self.tokenizer = Tokenizer(BUILTIN)

    def words(self, _: EngineRequest) -> list[int]:
        return [*self.tokenizer.encode(self.says, add_special=False), self.tokenizer.eos_ids[0]]

    async def ready(self) -> EngineInfo:
        if self.error is not None:
            raise self.error
        return await super().ready()

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.fixture
def fake(monkeypatch):
    if not (BUILTIN / "tokenizer.json").is_file():
        pytest.skip("the built-in model is not made")
    monkeypatch.setattr("server.offline.ProcessEngine", FakeEngine)
    monkeypatch.setattr(engine, "fetch", lambda *_, **__: Folder(BUILTIN), raising=False)
    monkeypatch.setattr(FakeEngine, "error", None)
    return FakeEngine


@pytest.fixture
def pequod(capsys, monkeypatch):
    """Return a function that runs a command line in this process, with text on its standard input."""

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return main(list(argv)), *capsys.readouterr()

    return run


def test_complete_prints_the_text_and_ends_with_the_figures(pequod, fake):
    code, out, err = pequod("complete", "--prompt", "Hello", "--temperature", "0", "--seed", "5", "--show-stats")
    assert (code, err) == (0, "")
    text, line, rest = out.split("\n")
    assert (text, rest) == (fake.says, "")
    figures = dict(word.split("=") for word in line.split())
    assert list(figures) == [
        "prompt_tokens",
        "generated_tokens",
        "elapsed_seconds",
        "tokens_per_second",
        "ttft_seconds",
        "device",
        "dtype",
    ]
    tokenizer = Tokenizer(BUILTIN)
    tokens = tokenizer.encode(fake.says, add_special=False)
    assert int(figures["prompt_tokens"]) == len(tokenizer.encode("Hello"))
    assert int(figures["generated_tokens"]) == len(tokens) + 1  # with the end token
    assert float(figures["ttft_seconds"]) <= float(figures["elapsed_seconds"])
    assert (figures["device"], figures["dtype"]) == ("cpu", "float32")
    request = fake.made.requests[0]
    assert request.prompt_ids == tuple(tokenizer.encode("Hello"))
    assert (request.params.temperature, request.params.seed, request.params.max_tokens) == (0.0, 5, 100)
    assert request.params.stop_ids == tokenizer.eos_ids
    assert fake.made.closed


def test_complete_takes_token_ids_and_prints_json(pequod, fake):
    code, out, _ = pequod("complete", "--prompt-ids", "5,6 7", "--max-tokens", "2", "--ignore-eos", "--json")
    result = json.loads(out)
    assert code == 0
    assert fake.made.requests[0].prompt_ids == (5, 6, 7)
    assert fake.made.requests[0].params.stop_ids == ()
    assert result["prompt_tokens"] == 3
    assert result["generated_tokens"] == len(result["token_ids"]) == 2
    assert result["finish_reason"] == "length"
    assert fake.says.startswith(result["text"])


def test_complete_reads_standard_input(pequod, fake):
    pequod("complete", "--prompt", "-", stdin="from a pipe")
    assert fake.made.requests[0].prompt_ids == tuple(fake.made.tokenizer.encode("from a pipe"))


def test_the_default_length_shrinks_to_what_fits(pequod, fake):
    code, _, _ = pequod("complete", "--prompt-ids", ",".join(["5"] * 200))
    assert code == 0
    assert fake.made.requests[0].params.max_tokens == INFO.max_len - 200


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt-ids", ",".join(["5"] * 256)], "256 tokens"),
        (["--prompt-ids", "2048"], "0..2047"),
    ],
)
def test_a_refused_completion_is_one_sentence(pequod, fake, argv, message):
    code, out, err = pequod("complete", *argv)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert fake.made.closed and not fake.made.requests


@pytest.mark.parametrize(
    ("error", "code"), [(ModelError("broken folder"), 2), (ConfigError("no such backend"), 2), (EngineDied("gone"), 1)]
)
def test_an_engine_that_cannot_load_is_one_sentence(pequod, fake, monkeypatch, error, code):
    monkeypatch.setattr(FakeEngine, "error", error)
    assert pequod("complete", "--prompt", "x") == (code, "", f"pequod: {error}\n")
    assert fake.made.closed


def test_chat_from_a_pipe_keeps_the_conversation(pequod, fake):
    code, out, err = pequod("chat", "--system", "Be brief.", stdin="Hello\n\n/clear\nAgain\nMore\n/exit\nnever\n")
    assert code == 0
    assert out == f"{fake.says}\n" * 3  # only the responses: the figures go to stderr
    assert err.count("tokens/s") == 3
    prompts = [fake.made.tokenizer.decode(request.prompt_ids) for request in fake.made.requests]
    assert "Hello" in prompts[0] and "Be brief." in prompts[0]
    assert "Hello" not in prompts[1] and "Be brief." in prompts[1]
    assert "Again" in prompts[2] and "Aye" in prompts[2] and "More" in prompts[2]
    assert fake.made.closed


def test_chat_commands(pequod, fake):
    code, out, err = pequod("chat", stdin="/system Speak like a whale.\n/sistem x\n/help\nHello\n")
    assert code == 1  # of the unknown command
    assert "unknown command /sistem; did you mean /system?" in err
    assert "/clear" in out
    assert len(fake.made.requests) == 1
    assert "whale" in fake.made.tokenizer.decode(fake.made.requests[0].prompt_ids)


def test_chat_continues_after_a_message_that_is_too_long(pequod, fake):
    code, out, err = pequod("chat", stdin="word " * 2000 + "\nHello\n")
    assert code == 1  # a script must see that a line failed
    assert fake.says in out
    assert "tokens" in err
    assert "word" not in fake.made.tokenizer.decode(fake.made.requests[-1].prompt_ids)


def test_chat_suggests_clear_when_the_conversation_is_full(pequod, fake):
    code, out, err = pequod(
        "chat", "--ignore-eos", "--max-tokens", "5", stdin="Hello\n" + "word " * 2000 + "\n/clear\nHi\n"
    )
    assert code == 1
    assert out.count("\n") == 2  # a refused request leaves no empty line
    assert err.count("; /clear forgets the conversation\n") == 1


def test_chat_without_a_template_ends_before_the_first_message(pequod, fake, monkeypatch):
    monkeypatch.setattr("server.tokenization.encoder.Prompts.has_template", False)
    code, out, err = pequod("chat", stdin="Hello\n")
    assert (code, out) == (2, "")
    assert "--chat-template" in err and err.count("\n") == 1
    assert fake.made.closed


def test_complete_warns_of_nonsense_with_the_built_in_model(pequod, fake, monkeypatch):
    assert pequod("complete", "--prompt", "Once")[2] == ""  # no terminal: scripts see the text alone
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = pequod("complete", "--prompt", "Once")
    assert (code, out) == (0, fake.says + "\n")
    assert "pequod chat" in err


def test_ctrl_c_stops_one_response_and_not_the_conversation(fake, monkeypatch, capsys):
    from server.cli.commands.chat import Talk
    from server.cli.source import opened

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        source = runner.run(stack.enter_async_context(opened(Loaded(Settings(), {}), None)))
        talk = Talk(runner, source, {}, None)
        talk.is_terminal = True
        stream = talk._stream

        async def interrupted(messages, pieces):
            await stream(messages, pieces)
            raise KeyboardInterrupt

        talk._stream = interrupted  # type: ignore[method-assign]
        talk._respond("Hello")
        runner.run(stack.aclose())
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant"]
    assert talk.turns[1]["content"] == fake.says
    assert "[stopped]" in capsys.readouterr().err


def test_sampling_defaults_come_from_the_model_and_a_flag_replaces_them(pequod, fake, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": -1, "top_p": 0.5}')
    pequod("complete", "--prompt", "x", "--generation-config", str(path))
    params = fake.made.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 0, 0.5)
    pequod("complete", "--prompt", "x", "--generation-config", str(tmp_path), "--temperature", "0")
    assert fake.made.requests[0].params.temperature == 0
    pequod("complete", "--prompt", "x", "--generation-config", "engine")
    params = fake.made.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)


# Over HTTP


class Handler(BaseHTTPRequestHandler):
    """An OpenAI server with one line per event; `bodies` are the requests."""

    bodies: list[tuple[str, dict]] = []
    keys: list[str | None] = []
    models: tuple[int, dict] = (200, {"data": [{"id": "whale"}]})
    status = 200
    events: list[dict] = []

    def log_message(self, *_: object) -> None:
        pass

    def _json(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        if self.path == "/v1/models":
            self._json(*self.models)
        elif self.path == "/version":
            self._json(200, {"version": "1", "device": "cuda", "dtype": "bfloat16"})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.bodies.append((self.path, json.loads(self.rfile.read(length))))
        if self.status != 200:
            self._json(self.status, {"error": {"message": "not today"}})
            return
        self.send_response(200)
        self.end_headers()
        # A heartbeat, an event cut in two, and U+2028, which is no end of line here.
        data = b": wait\n\n" + b"".join(
            b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in self.events
        )
        for part in (data[:20], data[20:], b"data: [DONE]\n\n"):
            self.wfile.write(part)
            self.wfile.flush()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Handler, "bodies", [])
    monkeypatch.setattr(Handler, "keys", [])
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


USAGE = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 100}}


def test_complete_over_http(pequod, server, monkeypatch):
    events = [
        {"choices": [{"text": "one\u2028", "finish_reason": None}]},
        {"choices": [{"text": " two", "finish_reason": "length"}]},
        USAGE,
    ]
    monkeypatch.setattr(Handler, "events", events)
    argv = ["--url", server + "/v1/", "--prompt", "Hi", "--max-tokens", "9", "--temperature", "0", "--seed", "3"]
    code, out, err = pequod("complete", *argv, "--api-key", "k", "--show-stats")
    assert (code, err) == (0, "")
    text, line, _ = out.split("\n")
    assert text == "one\u2028 two"
    assert line.startswith("prompt_tokens=8 generated_tokens=100 elapsed_seconds=")
    assert line.endswith("device=cuda dtype=bfloat16")
    path, body = Handler.bodies[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "whale",
        "prompt": "Hi",
        "max_tokens": 9,
        "temperature": 0.0,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert set(Handler.keys) == {"Bearer k"}


def test_chat_over_http(pequod, server, monkeypatch):
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Aye"}}]},
    ]
    monkeypatch.setattr(Handler, "events", [*events, USAGE])
    code, out, err = pequod("chat", "orca", "--url", server, stdin="One\nTwo\n")
    assert (code, out) == (0, "Aye\nAye\n")
    assert "[100 tokens, " in err
    assert Handler.bodies[1][1]["model"] == "orca"
    assert Handler.bodies[1][1]["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Aye"},
        {"role": "user", "content": "Two"},
    ]


def test_a_refusal_over_http_is_reported(pequod, server, monkeypatch):
    monkeypatch.setattr(Handler, "status", 503)
    code, _, err = pequod("complete", "--url", server, "--prompt", "Hi")
    assert (code, err) == (1, "pequod: the server responded with status 503: not today\n")
    monkeypatch.setattr(Handler, "status", 400)
    code, _, err = pequod("complete", "--url", server, "--prompt", "Hi")
    assert (code, err) == (2, "pequod: the server responded with status 400: not today\n")


@pytest.mark.parametrize("command", [["chat"], ["complete", "--prompt", "Hi"]])
def test_a_server_that_is_loading_is_reported_with_its_message(pequod, server, monkeypatch, command):
    monkeypatch.setattr(Handler, "models", (503, {"error": {"message": "loading the model"}}))
    code, out, err = pequod(*command, "--url", server, stdin="One\n")
    assert (code, out) == (1, "")
    assert err.endswith("the server responded with status 503: loading the model\n") and err.count("\n") == 1


def test_an_error_event_after_the_first_text_is_reported(pequod, server, monkeypatch):
    monkeypatch.setattr(Handler, "events", [{"choices": [{"text": "one"}]}, {"error": {"message": "the end"}}])
    code, out, err = pequod("complete", "--url", server, "--prompt", "Hi")
    assert (code, out, err) == (1, "one", "pequod: the end\n")


def test_complete_writes_no_control_characters_to_a_terminal(pequod, server, monkeypatch):
    monkeypatch.setattr(Handler, "events", [{"choices": [{"text": "\033[31mred"}]}, USAGE])
    words = ["complete", "--url", server, "--prompt", "Hi"]
    assert pequod(*words)[1] == "\033[31mred\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert pequod(*words)[1] == "[31mred\n"


def test_no_server_is_one_sentence(pequod):
    code, _, err = pequod("complete", "--url", "http://127.0.0.1:9", "--prompt", "Hi")
    assert code == 1
    assert "no server responds at http://127.0.0.1:9" in err and err.count("\n") == 1


# plan and models


@pytest.fixture
def child(monkeypatch):
    """Replaces `python -m engine.plan`: its output and exit code."""
    process = SimpleNamespace(stdout="", stderr="", returncode=0, commands=[])

    def run(command, **_):
        process.commands.append(command)
        return process

    monkeypatch.setattr(subprocess, "run", run)
    return process


def test_plan_prints_a_table_or_json(pequod, child):
    plan = {"model": "m", "weights_bytes": 3 << 30, "num_tokens": 12345, "full_length_users": 1.5, "notes": ["a", "b"]}
    child.stdout = json.dumps(plan)
    code, out, _ = pequod("plan", "m", "--max-model-len", "77")
    assert code == 0
    assert "weights               3.0 GiB (3,221,225,472 bytes)\n" in out
    assert "tokens in the cache   12,345\n" in out
    assert child.commands[0][1:4] == ["-m", "engine.plan", "--json"]
    assert json.loads(child.commands[0][4])["max_len"] == 77
    code, out, _ = pequod("plan", "m", "--json")
    assert json.loads(out) == plan


def test_an_impossible_plan_ends_with_three_suggestions(pequod, child):
    named = ["`max_len=77`, one", "two", "`max_seqs=4` `max_batched_tokens=64`, three"]
    child.stdout = json.dumps({"error": "it does not fit", "try": named})
    child.returncode = 2
    code, out, err = pequod("plan", "m")
    assert (code, out) == (2, "")
    tries = ["--max-model-len 77, one", "two", "--max-num-seqs 4 --max-num-batched-tokens 64, three"]
    assert err == "pequod: it does not fit\n" + "".join(f"try: {each}\n" for each in tries)


def test_a_plan_that_fails_is_one_sentence(pequod, child):
    child.stderr, child.returncode = "Traceback\nImportError: no torch", 1
    assert pequod("plan", "m") == (1, "", "pequod: the plan could not be computed: ImportError: no torch\n")


def test_models_lists_the_cache_and_why_one_cannot_be_served(pequod, fake, child, tmp_path, monkeypatch):
    whole, gguf, torn = (tmp_path / f"models--org--{name}" for name in ("whole", "gguf", "torn"))
    for repo in (whole, gguf, torn):
        snapshot = repo / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("a" * 40)
        (snapshot / "config.json").write_text('{"architectures": ["WhaleForCausalLM"]}')
        if repo is not gguf:
            (snapshot / "model-1.safetensors").write_bytes(b"x" * 2048)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (torn / "snapshots" / ("a" * 40) / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    child.stdout = "{}"
    code, out, _ = pequod("models", "--json")
    assert code == 0
    models = {model["name"]: model for model in json.loads(out)["models"]}
    assert list(models) == ["builtin", "org/gguf", "org/torn", "org/whole"]
    assert models["builtin"]["can_serve"] and models["builtin"]["architecture"] == "Qwen3ForCausalLM"
    assert models["org/whole"]["can_serve"] and models["org/whole"]["architecture"] == "WhaleForCausalLM"
    assert models["org/gguf"]["problem"] == "no *.safetensors weights were downloaded"
    assert models["org/torn"]["problem"] == "1 of 2 weight files were not downloaded"
    assert len(child.commands) == 2  # incomplete models are not planned
    code, out, _ = pequod("models")
    assert "no: 1 of 2 weight files were not downloaded" in out
    assert "pequod serve org/whole" in out


def test_models_lists_those_of_packages(pequod, child, tmp_path, monkeypatch):
    file = write(tmp_path / "small.gguf")
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "converted")
    monkeypatch.setattr(packaged, "find", lambda name: file)
    monkeypatch.setattr(engine, "packaged_models", packaged.on_this_machine)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    child.stdout = "{}"
    _, out, _ = pequod("models", "--json")
    models = {model["name"]: model for model in json.loads(out)["models"]}
    assert list(models) == ["builtin", "smollm2"]
    assert models["smollm2"]["can_serve"] and models["smollm2"]["bytes"] == file.stat().st_size
    assert "has no models; `pequod serve NAME` downloads one" in pequod("models")[1]


def test_without_a_model_the_packaged_one_is_the_default_if_it_is_here(monkeypatch):
    parser = Parser()
    add_settings(parser, "model")

    def chosen(*argv: str) -> tuple[str, str]:
        loaded = settings_from(parser.parse(argv), default_model=chat_model)
        return loaded.settings.model, loaded.sources["model"]

    assert chosen() == ("builtin", "default")
    monkeypatch.setattr(engine, "packaged_models", lambda: {"smollm2": Path("small.gguf")})
    assert chosen() == ("smollm2", "default")
    assert chosen("builtin") == ("builtin", "flag --model")
    assert chosen("--revision", "main") == ("smollm2", "default")
    monkeypatch.setenv("PEQUOD_MODEL", "/models/orca")
    assert chosen() == ("/models/orca", "env PEQUOD_MODEL")


def test_config_show_and_plan_use_the_model_that_serve_uses(pequod, child, monkeypatch):
    monkeypatch.setattr(engine, "packaged_models", lambda: {"smollm2": Path("small.gguf")})
    shown = json.loads(pequod("config", "show", "--json")[1])["model"]
    assert shown == {"value": "smollm2", "source": "default"}
    child.stdout = "{}"
    pequod("plan")
    assert json.loads(child.commands[0][-1])["model"] == "smollm2"


# banner and logs


def printed(tmp=None, where=("127.0.0.1", 8000), has_template=True, **given) -> str:
    stream = io.StringIO()
    banner.announce(INFO, Settings(**given), where, 2.34, has_template, stream=stream)
    return stream.getvalue()


def test_the_banner_shows_model_cache_and_url():
    text = printed()
    for words in (
        "builtin (Qwen3ForCausalLM, native code)",
        "2.5 M parameters",
        "float32 on cpu",
        "100 blocks of 16 = 1,600 tokens in float32 = 6.2 users at the full 256 tokens",
        "equal up to rounding",
        "http://127.0.0.1:8000/v1",
        "in 2.3 s",
        "lowered to 256 tokens",
        "demonstration",
    ):
        assert words in text
    assert "\x1b" not in text
    assert "demonstration" not in printed(model="other")


def test_the_banner_of_an_open_server_says_which_names_it_refuses():
    assert "host.docker.internal" in printed(host="0.0.0.0")
    assert "host.docker.internal" not in printed(host="0.0.0.0", api_key=["k"])
    assert "host.docker.internal" not in printed()


def test_the_banner_shows_whether_steps_are_replayed():
    screen = io.StringIO()
    banner.announce(structs.replace(INFO, graphs=15), Settings(), ("127.0.0.1", 8000), 1.0, True, stream=screen)
    assert "torch products, CUDA graphs\n" in screen.getvalue() and "CUDA graphs" not in printed()


def test_the_banner_shows_that_weights_are_quantized():
    screen = io.StringIO()
    info = structs.replace(INFO, quantization="int8")
    banner.announce(info, Settings(), ("127.0.0.1", 8000), 1.0, True, stream=screen)
    assert "in int8, computed in float32 on cpu" in screen.getvalue()


def test_the_banner_warns_of_a_server_without_a_key():
    assert "set --api-key" in printed(host="0.0.0.0")
    assert "set --api-key" not in printed(host="0.0.0.0", api_key=["k"])
    assert "set --api-key" not in printed()


def test_the_banner_names_the_chat_page_where_a_browser_can_open_it(tmp_path):
    assert "Chat in a browser: http://127.0.0.1:8000/\n" in printed()
    assert "Chat in a browser: http://localhost:81/\n" in printed(where=("0.0.0.0", 81), host="0.0.0.0")
    assert "Chat in a browser: http://[::1]:8000/\n" in printed(host="::1")
    assert "Chat in a browser: http://127.0.0.1:8000/\n" in printed(allowed_hosts=["llm.org", "127.0.0.1"])
    for given in (
        {"webui": False},
        {"has_template": False},
        {"where": tmp_path / "socket"},
        {"allowed_hosts": ["llm.org"]},
    ):
        assert "Chat in a browser" not in printed(**given), given


def curl_of(text: str) -> list[str]:
    return shlex.split(text.strip().splitlines()[-1])


def test_the_curl_line_fits_the_model_and_the_server(tmp_path):
    words = curl_of(printed())
    assert words[0] == "curl" and "http://127.0.0.1:8000/v1/chat/completions" in words
    assert json.loads(words[-1])["max_tokens"] == 100  # a small model may not end by itself
    assert json.loads(words[-1])["model"] == "builtin"
    words = curl_of(printed(has_template=False, served_model_name=["it's"], where=("0.0.0.0", 81), host="0.0.0.0"))
    assert "http://localhost:81/v1/completions" in words
    assert json.loads(words[-1])["model"] == "it's"
    words = curl_of(printed(api_key=["canary"]))
    assert "Authorization: Bearer $PEQUOD_API_KEY" in words
    assert "canary" not in printed(api_key=["canary"])
    assert "with a key in PEQUOD_API_KEY" in printed(api_key=["canary"])
    assert curl_of(printed(allowed_hosts=["llm.org"]))[1:3] == ["-H", "Host: llm.org"]
    assert curl_of(printed(where=tmp_path / "s"))[1:3] == ["--unix-socket", str(tmp_path / "s")]
    assert "http://[::1]:8000/v1/chat/completions" in curl_of(printed(host="::1"))


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_the_banner_on_a_terminal(monkeypatch, no_color):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    banner.announce(INFO, Settings(), ("127.0.0.1", 8000), 1.0, True, stream=screen)
    text = screen.getvalue()
    assert ("\x1b[32m" in text) is not no_color
    assert banner.QUESTION in text
    assert sum("curl" in line for line in text.splitlines()) == 1  # unbroken, to be copied


def test_json_logs_have_one_line_instead_of_a_banner(capsys):
    import logging

    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        lines = logs.configure("json", "info")
        banner.announce(INFO, Settings(log_format="json"), ("127.0.0.1", 8000), 1.0, True)
        logging.getLogger("pequod.request").info("request\nforged", extra={"fields": {"id": "a\nb", "ms": 1.5}})
        lines.close()
        out, err = capsys.readouterr()
        ready, request = map(json.loads, err.splitlines())
        assert out == ""
        assert (ready["message"], ready["url"], ready["num_blocks"]) == ("ready", "http://127.0.0.1:8000", 100)
        assert (request["id"], request["ms"], request["level"]) == ("a\nb", 1.5, "info")
        lines = logs.configure("text", "info")
        logging.getLogger("pequod.request").info("request\nforged", extra={"fields": {"id": "a b", "x": "c\nd"}})
        lines.close()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith('info request\\nforged id="a b" x="c\\nd"')
    finally:
        logging.basicConfig(handlers=before[0], level=before[1], force=True)
