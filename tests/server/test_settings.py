"""Settings: four sources in order, bounds, and errors that name where a value was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import settings
from server.cli.commands import TITLES
from server.cli.commands import _default as default_text
from server.parsers.formats import REASONING_ALIASES, REASONING_FORMATS, TOOL_ALIASES, TOOL_FORMATS
from server.settings import Settings, with_flags
from server.settings_sources import load, misspelled, read_toml
from server.settings_values import SettingsError, num_bytes

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "my.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(flags=None, config=None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(flags or {}, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(toml):
    assert read_toml(toml("\ufeffport = 1\n")) == {"port": 1}


def test_flag_over_environment_over_file_over_default(monkeypatch, toml):
    path = toml("port = 1\nblock_size = 2\nmax-num-seqs = 3\n")
    monkeypatch.setenv("PEQUOD_PORT", "11")
    monkeypatch.setenv("PEQUOD_BLOCK_SIZE", "12")
    loaded = load({"port": "21"}, path)
    assert (loaded.settings.port, loaded.settings.block_size, loaded.settings.max_num_seqs) == (21, 12, 3)
    assert loaded.settings.host == "127.0.0.1"
    assert loaded.sources["port"] == "flag --port"
    assert loaded.sources["block_size"] == "env PEQUOD_BLOCK_SIZE"
    assert loaded.sources["max_num_seqs"] == f"{path}: max_num_seqs"
    assert loaded.sources["host"] == "default"


def test_a_value_that_a_higher_source_replaces_is_not_an_error(monkeypatch):
    monkeypatch.setenv("PEQUOD_PORT", "no port")
    assert load({"port": "21"}).settings.port == 21


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "my.toml: unknown key prot; did you mean port?"),
        ("max-modle-len = 1", "my.toml: unknown key max-modle-len; did you mean max_model_len?"),
        ("zzz = 1", "my.toml: unknown key zzz; `pequod config show` lists the keys"),
        ("[serve]\nport = 1", "my.toml: unknown key serve"),
        ('port = "8000"', "my.toml: port must be a whole number, not '8000'"),
        ("port = true", "my.toml: port must be a whole number, not true"),
        ("port = 1.5", "my.toml: port must be a whole number, not 1.5"),
        ("enable_prefix_caching = 1", "my.toml: enable_prefix_caching must be true or false, not 1"),
        ("model = 7", "my.toml: model must be a string in quotes, not 7"),
        ('api_key = "secret-canary"', "my.toml: api_key must be a list of strings"),
        ("served_model_name = [1]", "my.toml: served_model_name must be a list of strings"),
        ("max_num_seqs = 0", "my.toml: max_num_seqs must be at least 1, not 0"),
        ('dtype = "bf16"', "float64, not bf16; did you mean bfloat16?"),
        ("port = 1\nport = 2", "my.toml: is not TOML"),
        ("max_num_seqs = 1\nmax-num-seqs = 2", "my.toml: max_num_seqs is set twice"),
    ],
)
def test_a_toml_error_names_file_and_key(toml, text, said):
    sentence = refusal(config=toml(text))
    assert said in sentence
    assert "canary" not in sentence


def test_a_toml_file_that_is_not_there_is_named(tmp_path):
    assert "none.toml: cannot be read" in refusal(config=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": "abc"}, "--port abc is not a whole number"),
        ({"port": "65536"}, "--port must be at most 65535, not 65536"),
        ({"port": "-1"}, "--port must be at least 0, not -1"),
        ({"gpu_memory_utilization": "0"}, "--gpu-memory-utilization must be above 0, not 0"),
        ({"gpu_memory_utilization": "nan"}, "--gpu-memory-utilization nan is not a number"),
        ({"drain_seconds": "inf"}, "--drain-seconds"),
        ({"scheduling_policy": "prioritty"}, "did you mean priority?"),
        ({"kv_cache_dtype": "int9"}, "--kv-cache-dtype must be one of auto, int8, fp8, not int9; did you mean int8?"),
        ({"kv_cache_memory": "4 parsecs"}, "--kv-cache-memory 4 parsecs is not a size"),
        ({"device": "tpu"}, "--device must be auto, cpu, cuda or cuda:N, not tpu"),
        ({"chat_template": "/nowhere/x.jinja"}, "--chat-template /nowhere/x.jinja is not a file"),
        ({"step_log": "/nowhere/steps.jsonl"}, "--step-log"),
        ({"model": ""}, "--model is empty"),
        ({"api_key": ["good", ""]}, "--api-key has an empty entry"),
        ({"root_path": "llm"}, "--root-path must be a path such as /llm, not llm"),
        ({"seed": str(2**64)}, "--seed"),
        ({"uds": "/tmp/" + "x" * 200}, "--uds is longer"),
        ({"log_level": "x" * 500}, "--log-level must be one of"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value(flags, said):
    assert said in refusal(flags)


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ({"max_model_len": "8k"}, 8000),
        ({"max_model_len": "8K"}, 8192),
        ({"max_model_len": " 1.5k"}, 1500),
        ({"max_model_len": "auto"}, None),
        ({"max_model_len": "-1"}, None),
        ({"max_model_len": -1}, None),
        ({"max_num_batched_tokens": "2K"}, 2048),
        ({"max_num_seqs": "1k"}, 1000),
        ({"block_size": "1K"}, 1024),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8"),
        ({"load_format": "safetensors"}, "auto"),
    ],
)
def test_values_are_written_as_for_vllm(flags, meant):
    (name,) = flags
    assert getattr(load(flags).settings, name) == meant


@pytest.mark.parametrize("text", ["8x", "k", "8kb", "8 k k", "-8k", "1e3"])
def test_what_is_not_a_number_is_refused_with_or_without_a_unit(text):
    assert refusal({"max_model_len": text}) == f"--max-model-len {text} is not a whole number"


def test_an_environment_error_names_the_variable(monkeypatch):
    monkeypatch.setenv("PEQUOD_MAX_NUM_SEQS", "many")
    assert refusal() == "PEQUOD_MAX_NUM_SEQS many is not a whole number"


def test_tls_needs_both_files(tmp_path):
    (tmp_path / "key.pem").write_text("")
    assert refusal({"ssl_keyfile": str(tmp_path / "key.pem")}) == "--ssl-keyfile needs --ssl-certfile"


def test_an_empty_variable_is_absent_but_an_empty_key_is_refused(monkeypatch):
    monkeypatch.setenv("PEQUOD_REVISION", "")
    assert load({}).settings.revision is None
    monkeypatch.setenv("PEQUOD_API_KEY", "")
    assert "PEQUOD_API_KEY has an empty entry" in refusal()


def test_what_kubernetes_sets_for_a_service_named_pequod_is_not_a_port(monkeypatch):
    monkeypatch.setenv("PEQUOD_PORT", "tcp://10.0.0.7:8000")
    loaded = load({})
    assert (loaded.settings.port, loaded.sources["port"]) == (8000, "default")


def test_lists_from_every_source(monkeypatch, toml):
    monkeypatch.setenv("PEQUOD_API_KEY", "a, b")
    monkeypatch.setenv("PEQUOD_ALLOWED_ORIGINS", '["https://x.org", "https://y.org"]')
    loaded = load({"ignore_fields": ["user", "store"]}, toml('served_model_name = ["m", "n,o"]')).settings
    assert [*loaded.keys] == ["a", "b"]
    assert loaded.allowed_origins == ["https://x.org", "https://y.org"]
    assert loaded.ignore_fields == ["user", "store"]
    assert loaded.names == ["m", "n,o"]
    assert Settings().names == ["builtin"]


@pytest.mark.parametrize(
    ("text", "num"),
    [("4096", 4096), ("4GiB", 4 << 30), ("4g", 4 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("1kb", 1000)],
)
def test_sizes(text, num):
    assert num_bytes(text) == num
    assert load({"kv_cache_memory": text}).settings.kv_cache_memory == num


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 GiBs", "٤", "1" * 40])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        num_bytes(text)


def test_keys_stay_out_of_texts():
    made = Settings(api_key=["canary-1"], metrics_key="canary-2")
    assert made.keys == {"canary-1": 1.0}
    for text in (repr(made), str(made), made.model_dump_json(), repr(made.model_dump())):
        assert "canary" not in text


def test_a_misspelled_variable_is_reported():
    told = misspelled({"PEQUOD_MAX_MODLE_LEN": "1", "PEQUOD_TEST_DATA": "/d", "PEQUOD_CONFIG": "x", "PATH": "/bin"})
    assert told == ["PEQUOD_MAX_MODLE_LEN is not a setting; did you mean PEQUOD_MAX_MODEL_LEN?"]


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, ["127.0.0.1", "localhost", "::1"]),
        ({"host": "127.0.0.9"}, ["127.0.0.1", "localhost", "::1", "127.0.0.9"]),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example.org"]}, ["llm.example.org"]),
        ({"allowed_hosts": ["*"]}, None),
        ({"uds": "/tmp/pequod-test.sock"}, None),
    ],
)
def test_which_host_headers_are_answered(given, hosts):
    assert Settings(**given).hosts == hosts


def test_the_engine_gets_what_was_set():
    flags = {
        "model": "m",
        "revision": "r",
        "device": "cpu",
        "dtype": "half",
        "model_impl": "native",
        "attention_backend": "reference",
        "kv_cache_dtype": "int8",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": "10",
        "max_num_seqs": "2",
        "max_num_batched_tokens": "9",
        "long_prefill_token_threshold": "4",
        "scheduling_policy": "static",
        "enable_prefix_caching": False,
        "block_size": "8",
        "num_gpu_blocks_override": "7",
        "kv_cache_memory": "1MiB",
        "gpu_memory_utilization": "0.5",
        "threads": "2",
        "local_files_only": True,
    }
    config = load(flags).settings.engine_config()
    assert (config.model, config.revision, config.device, config.dtype) == ("m", "r", "cpu", "float16")
    assert (config.implementation, config.attention, config.policy) == ("native", "reference", "static")
    assert (config.kv_dtype, config.logprobs_mode) == ("int8", "processed_logprobs")
    assert (config.max_len, config.max_seqs, config.max_batched_tokens, config.long_prefill_tokens) == (10, 2, 9, 4)
    assert (config.prefix_caching, config.block_size, config.num_blocks) == (False, 8, 7)
    assert (config.kv_cache_memory, config.gpu_memory_utilization, config.threads) == (1 << 20, 0.5, 2)
    assert config.local_files_only


def test_formats_have_vllms_names_too():
    made = Settings(tool_call_parser="openai", reasoning_parser="qwen3")
    assert (made.tool_call_parser, made.reasoning_parser) == ("gpt_oss", "think")
    assert set(TOOL_ALIASES.values()) <= set(TOOL_FORMATS) and TOOL_ALIASES.keys().isdisjoint(TOOL_FORMATS)
    assert set(REASONING_ALIASES.values()) <= set(REASONING_FORMATS)
    assert REASONING_ALIASES.keys().isdisjoint(REASONING_FORMATS)
    with pytest.raises(ValueError, match="must be one of auto, none, think"):
        Settings(reasoning_parser="thinker")


def test_settings_never_change():
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_that_come_along(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 30 and lines[0].startswith("# ")
    loaded = load({}, path)
    assert {name for name, source in loaded.sources.items() if source != "default"} == set(read_toml(path))
    loaded.settings.engine_config()


def test_there_are_configs():
    assert 4 <= len(CONFIGS) <= 6


def test_every_field_is_described_and_grouped():
    for name, field in settings.FIELDS.items():
        assert field.description and len(field.description) < 100, name
        assert settings.group(name) in ("model", "engine", "http", "limits", "logs")
        assert settings.shape(name)[0] in (bool, int, float, list, str)


def row(name: str) -> str:
    """A setting's row of the settings page."""
    field = settings.FIELDS[name]
    text, found, default = str(field.description).partition(" (default: ")
    if found:
        default = default.removesuffix(")")
    elif field.default is not None and field.default not in ("", []):
        default = f"`{default_text(name, field.default)}`"
    choices = settings.shape(name)[1]
    values = f". One of {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
    return f"| `{settings.flag(name)}` | {default} | {text}{values} |"


@pytest.mark.parametrize("group", TITLES)
def test_the_settings_page_has_every_setting_with_its_default(group):
    page = (Path(__file__).parents[2] / "docs/settings.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ")[1:] if part.splitlines()[0] == TITLES[group]]
    rows = [line for line in section.splitlines() if line.startswith("| `--")]
    assert rows == [row(name) for name in settings.FIELDS if settings.group(name) == group]


@pytest.mark.parametrize(
    ("name", "formats", "aliases"),
    [
        ("tool_call_parser", TOOL_FORMATS, TOOL_ALIASES),
        ("reasoning_parser", REASONING_FORMATS, REASONING_ALIASES),
    ],
)
def test_the_settings_page_has_the_names_of_all_parsers(name, formats, aliases):
    page = " ".join((Path(__file__).parents[2] / "docs/settings.md").read_text(encoding="utf-8").split())
    others = {each: ", ".join(f"`{alias}`" for alias, meant in aliases.items() if meant == each) for each in formats}
    names = ", ".join(f"`{each}`" + (f" ({others[each]})" if others[each] else "") for each in formats)
    assert f"- `{settings.flag(name)}`: {names} " in page


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("set `max_len`, or `kv_cache_memory=1048576`", "set --max-model-len, or --kv-cache-memory 1MiB"),
        ("leave `implementation` to auto", "leave --model-impl to auto"),
        ("x is not here, and `local_files_only` is set", "x is not here, and --local-files-only is set"),
        ("the model `x` of `products` has no `y=1`", "the model `x` of `products` has no `y=1`"),
    ],
)
def test_fields_that_the_engine_names_become_flags(said, told):
    assert with_flags(said) == told


@pytest.mark.parametrize(
    ("model", "name", "accepted"),
    [
        ("builtin", "builtin", {"builtin"}),
        ("ours/open", "ours/open", {"ours/open", "open"}),
        ("/models/tiny/", "/models/tiny/", {"/models/tiny/", "tiny"}),
        ("/models/tiny-Q4_0.gguf", "tiny-Q4_0", {"tiny-Q4_0", "tiny-Q4_0.gguf", "/models/tiny-Q4_0.gguf"}),
        ("big-00001-of-00003.gguf", "big", {"big", "big-00001-of-00003.gguf"}),
        ("ours/gguf:Q4_K_M", "ours/gguf:Q4_K_M", {"ours/gguf:Q4_K_M", "gguf:Q4_K_M"}),
    ],
)
def test_a_model_has_a_name_and_accepts_others(model, name, accepted):
    chosen = Settings(model=model)
    assert chosen.names == [name]
    for each in {"builtin", "open", "tiny", "tiny-Q4_0", "big", *accepted}:
        assert chosen.accepts(each) == (each in accepted)
    named = Settings(model=model, served_model_name=["chosen"])
    assert named.accepts("chosen") and not any(map(named.accepts, accepted))
