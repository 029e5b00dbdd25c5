"""The command line itself: which command, which flags, which exit code, and how soon."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server import settings
from server.__main__ import COMMANDS, main
from server.cli import foreign_flags
from server.cli.commands import UsageError, bench
from server.cli.commands.serve import listen
from server.settings import Settings
from tests.live import Server, eventually

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def pequod(capsys):
    """Runs a command line in this process: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as leave:  # argparse, after --help
            code = leave.code
        return code, *capsys.readouterr()

    return run


def shown(pequod, *argv: str) -> dict[str, dict[str, object]]:
    code, out, err = pequod("config", "show", "--json", *argv)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_help_lists_every_command(pequod):
    code, out, _ = pequod("--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_no_command_is_an_error_that_shows_the_help(pequod):
    code, out, _ = pequod()
    assert code == 2
    assert "pequod serve" in out


def test_version(pequod):
    code, out, _ = pequod("--version")
    assert code == 0
    assert out.startswith("pequod ")


@pytest.mark.parametrize("module", ["pequod", "server"])
def test_the_modules_can_be_run_like_the_command(module):
    command = [sys.executable, "-m", module, "server"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pequod: unknown command server; did you mean serve?\n"


@pytest.mark.parametrize("command", [*COMMANDS, *(f"bench {part}" for part in bench.PARTS)])
def test_help_of_each_command_imports_nothing_heavy(command):
    # What makes help slow is what it imports; a clock would depend on the neighbours.
    script = (
        "import sys; from server.__main__ import main\n"
        f"try: main([*{command.split()!r}, '--help'])\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'httpx', 'huggingface_hub', 'rich', 'engine.client',"
        " 'tokenizers', 'jinja2', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: pequod {command}" in done.stdout


@pytest.mark.parametrize("command", ["serve", "config"])
def test_help_lists_every_setting(pequod, command):
    code, out, _ = pequod(command, "--help")
    assert code == 0
    assert [name for name in settings.FIELDS if settings.flag(name) not in out] == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["srve"], "unknown command srve; did you mean serve?"),
        (["dokter"], "did you mean doctor?"),
        (["qwertz"], "unknown command qwertz; see `pequod --help`"),
        (["--hlep"], "did you mean --help?"),
        (["--port", "8001"], "a command comes first"),
        (["serve", "--prot", "8001"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--max-modle-len=5"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["serve", "--max-model"], "did you mean --max-model-len?"),
        (["serve", "m", "--enable-auto-tool-choice"], "--enable-auto-tool-choice; leave it out: tool calls are always"),
        (["serve", "m", "--tensor_parallel_size=2"], "a server uses one device"),
        (["serve", "m", "-c", "4096"], "unknown flag -c; use --max-model-len"),
        (["serve", "m", "-hf", "a/b"], "unknown flag -hf; use --model"),
        (["serve", "m", "-O3"], "unknown flag -O3; use --enforce-eager"),
        (["serve", "m", "--tensor-parallel-size", "1"], "leave it out: a server uses one device"),
        (["serve", "m", "--tokenizer", "x"], "leave it out: the model's own tokenizer"),
        (["serve", "m", "--metrics"], "leave it out: /metrics is always served"),
        (["serve", "m", "--performance-mode", "x"], "--performance-mode; see `pequod serve --help`"),
        (["serve", "m", "--mm-encoder-tp-mode=a"], "--mm-encoder-tp-mode; see `pequod serve --help`"),
        (["bench", "latency", "--helo"], "did you mean --help?"),
        (["bench", "startup", "--temp", "1"], "clients send it with requests"),
        (["serve", "m", "--quantization", "compressed-tensors"], "leave it out: a quantized checkpoint needs no flag"),
        (["serve", "--quantization", "int9"], "must be one of none, int8, int4"),
        (["serve", "--zzzzzz"], "unknown flag --zzzzzz; see `pequod serve --help`"),
        (["complete", "--pormpt", "x"], "did you mean --prompt?"),
        (["doctor", "a", "b"], "unexpected argument 'b'"),
        (["serve", "a", "--model", "b"], "two models are named"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "none"], "--port none is not a whole number"),
        (["serve", "--dtype", "flaot32"], "did you mean float32?"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml: cannot be read"),
        (["serve", "--host", "256.1.1.1"], "--host 256.1.1.1 is not an address of this machine"),
        (["config", "shwo"], "shwo"),
        (["complete"], "give either --prompt TEXT or --prompt-ids"),
        (["complete", "--prompt", "a", "--prompt-ids", "1"], "give either --prompt TEXT or --prompt-ids"),
        (["complete", "--prompt-ids", "1,x"], "1,x is not a list of token ids"),
        (["complete", "--prompt", "a", "--temperature", "nan"], "nan is not a number from 0 to 2"),
        (["complete", "--prompt", "a", "--max-tokens", "0"], "0 is not a whole number of at least 1"),
        (["complete", "--prompt", "a", "--url", "localhost:8000"], "is not a URL such as http://"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(pequod, argv, said):
    code, out, err = pequod(*argv)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("pequod: ") and err.count("\n") == 1


def test_flags_of_other_servers_are_not_ours_and_lead_to_ours():
    known = {settings.flag(name) for name in settings.FIELDS}
    assert known.isdisjoint(foreign_flags.FLAGS)
    named = {word for remedy in foreign_flags.FLAGS.values() for word in re.findall("--[a-z-]+", remedy)}
    assert named - known == set()
    table = (ROOT / "docs/settings.md").read_text().partition("## Coming from vLLM")[2]
    theirs = {
        word for row in re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE) for word in re.findall("--[a-z-]+", row)
    }
    assert theirs - known - foreign_flags.FLAGS.keys() == set()


def test_config_show_prints_value_and_source(pequod, monkeypatch, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("block_size = 32\nport = 1\n")
    monkeypatch.setenv("PEQUOD_SEED", "7")
    told = shown(pequod, "some/model", "--config", str(path), "--port", "9", "--no-enable-prefix-caching")
    assert set(told) == set(settings.FIELDS)
    assert told["model"] == {"value": "some/model", "source": "flag --model"}
    assert told["port"] == {"value": 9, "source": "flag --port"}
    assert told["enable_prefix_caching"] == {"value": False, "source": "flag --enable-prefix-caching"}
    assert told["seed"] == {"value": 7, "source": "env PEQUOD_SEED"}
    assert told["block_size"] == {"value": 32, "source": f"{path}: block_size"}
    assert told["host"] == {"value": "127.0.0.1", "source": "default"}


def test_the_config_file_may_come_from_the_environment(pequod, monkeypatch, tmp_path):
    (tmp_path / "my.toml").write_text("port = 77\n")
    monkeypatch.setenv("PEQUOD_CONFIG", str(tmp_path / "my.toml"))
    assert shown(pequod)["port"]["value"] == 77


def test_config_show_as_text_masks_keys(pequod, monkeypatch):
    monkeypatch.setenv("PEQUOD_METRICS_KEY", "canary-env")
    for form in ([], ["--json"]):
        code, out, err = pequod("config", "show", "--api-key", "canary-a", "canary-b", *form)
        assert code == 0
        assert "canary" not in out + err
        assert out.count("***") == 3
    assert "env PEQUOD_METRICS_KEY" in out


def test_flags_with_several_values(pequod):
    once = shown(pequod, "m", "--served-model-name", "a", "b")["served_model_name"]["value"]
    twice = shown(pequod, "m", "--served-model-name", "a", "--served-model-name", "b")["served_model_name"]["value"]
    assert once == twice == ["a", "b"]
    assert shown(pequod, "--ignore-fields", "user,store")["ignore_fields"]["value"] == ["user", "store"]
    assert shown(pequod, "--allowed-origins", '["*"]')["allowed_origins"]["value"] == ["*"]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["serve", "--api-key", "canary", "builtin"], "--api-key"),
        (["serve", "--api-key", "canary", "smollm2", "--port", "1"], "--api-key"),
        (["serve", "--served-model-name", "gpt", str(ROOT)], "--served-model-name"),
        (["config", "show", "--served-model-name", "gpt", "Qwen/Qwen3-0.6B"], "--served-model-name"),
        (["bench", "latency", "--api-key", "canary", "builtin"], "--api-key"),
    ],
)
def test_a_model_after_a_flag_with_several_values_is_not_one_of_them(pequod, argv, flag):
    code, out, err = pequod(*argv)
    assert (code, out) == (2, "")
    assert f"MODEL comes before {flag}" in err and "canary" not in err


def test_values_that_look_like_a_model_are_accepted_if_there_is_one(pequod, monkeypatch):
    words = ["--served-model-name", "gpt", "org/name"]
    assert shown(pequod, "builtin", *words)["served_model_name"]["value"] == words[1:]
    assert shown(pequod, *words, "--model", "builtin")["served_model_name"]["value"] == words[1:]
    assert shown(pequod, "--served-model-name", "org/name")["served_model_name"]["value"] == ["org/name"]
    assert shown(pequod, "--served-model-name", "gpt,org/name")["served_model_name"]["value"] == words[1:]
    monkeypatch.setenv("PEQUOD_MODEL", "builtin")
    assert shown(pequod, *words)["served_model_name"]["value"] == words[1:]


def test_flags_may_be_written_with_underscores(pequod):
    assert shown(pequod, "--max_model_len", "64")["max_model_len"]["value"] == 64
    assert shown(pequod, "--max_model_len=65")["max_model_len"]["value"] == 65


def test_a_misspelled_variable_is_a_warning(pequod, monkeypatch):
    monkeypatch.setenv("PEQUOD_MAX_MODLE_LEN", "5")
    code, _, err = pequod("config", "show")
    assert code == 0
    assert "did you mean PEQUOD_MAX_MODEL_LEN?" in err


def test_a_port_in_use_is_one_sentence(pequod):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, out, err = pequod("serve", "--port", str(port))
    assert (code, out) == (2, "")
    assert err == f"pequod: port {port} of 127.0.0.1 is in use; choose another with --port\n"


def test_clients_that_come_before_the_app_are_held():
    with listen(Settings(port=0)) as listener, socket.create_connection(listener.getsockname(), timeout=5) as client:
        client.sendall(b"early")
        accepted, address = listener.accept()
        with accepted:
            assert address == client.getsockname()
            assert accepted.recv(5, socket.MSG_WAITALL) == b"early"


def test_a_stale_socket_file_is_replaced_and_a_used_one_is_not(tmp_path):
    settings_ = Settings(uds=tmp_path / "p.sock")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "p.sock"))
    left.close()
    with listen(settings_), pytest.raises(UsageError, match="in use by another server"), listen(settings_):
        pass
    assert not (tmp_path / "p.sock").exists()


def test_a_file_is_never_replaced_by_a_socket(tmp_path):
    (tmp_path / "precious").write_text("text")
    with pytest.raises(UsageError, match="not a socket"), listen(Settings(uds=tmp_path / "precious")):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_a_certificate_that_is_none_is_one_sentence(pequod, tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    code, _, err = pequod("serve", "--port", "0", "--ssl-certfile", str(tmp_path / "cert.pem"))
    assert code == 2
    assert "cannot be used" in err and err.count("\n") == 1


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_server_runs_ends_it_also_as_process_1(sig):
    # Process 1 of a container, like every process that has no handler, is not ended by a signal. Here a signal that
    # arrives while an import of `serve` is under way shows whether there is a handler.
    script = (
        "import os, signal, sys; from server import __main__\n"
        "def early(name):\n"
        f"    os.kill(os.getpid(), {int(sig)})\n"
        "    raise OSError\n"
        "__main__.import_module = early\n"
        f"signal.signal({int(sig)}, signal.SIG_DFL)\n"
        "__main__.main(['serve', '--port', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + sig, "")  # not ended by the signal itself: that would be -sig


@pytest.mark.parametrize("closed", ["2>&-", "1>&- 2>&-"])
def test_output_that_is_closed_is_no_error(closed):
    command = f"{sys.executable} -m server complete builtin --prompt Hello --max-tokens 2 {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("keys", [None, "canary", "canary,second"])
def test_the_banners_curl_line_gets_an_answer(keys):
    key = {} if keys is None else {"PEQUOD_API_KEY": keys}
    with Server(env=key) as server:
        (line,) = eventually(lambda: re.findall("^  (curl .*)\n", server.log, re.M))  # the banner follows /ready
        done = subprocess.run(
            ["bash", "-c", line], env={**os.environ, **key}, capture_output=True, text=True, timeout=60, check=True
        )
    answer = json.loads(done.stdout)
    assert "batch" in answer["choices"][0]["message"]["content"]
    assert "canary" not in line


def test_a_completion_in_process_imports_neither_torch_nor_a_server():
    script = (
        "import sys; from server.__main__ import main\n"
        "assert main(['complete', '--prompt', 'x', '--max-tokens', '2']) == 0\n"
        "heavy = {'torch', 'transformers', 'uvicorn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["config show", "--help", "serve --help", "bench --help"])
def test_a_closed_stdout_ends_the_command_quietly(words):
    # The pipe has no reader any more when the command writes: `wait` returns after `true` has ended.
    command = f"exec 3> >(true); wait $!; {sys.executable} -m server {words} >&3; echo $?"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["config show", "--help", "serve --help", "--version"])
def test_output_that_cannot_be_written_is_one_sentence(words):
    command = f"{sys.executable} -m server {words} >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "pequod: the output cannot be written: No space left on device\n"


def test_input_that_is_closed_is_empty(tmp_path):
    program = "import sys; from server.__main__ import main; main(['--version']); print(repr(sys.stdin.read()))"
    command = f'{sys.executable} -c "{program}" <&-'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[1:] == ["''"], done.stderr


def test_input_that_is_not_utf_8_is_one_sentence():
    command = f"printf '\\377' | {sys.executable} -m server complete builtin --prompt -"
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (2, "pequod: the text is not valid UTF-8\n")
