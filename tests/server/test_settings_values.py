"""Suggestions for misspelled names, and a file of API keys with the weights of their shares."""

from __future__ import annotations

import pytest

from server.settings import Settings
from server.settings_sources import load
from server.settings_values import MAX_KEY_FILE, SettingsError, nearest, read_keys


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--prot", "--port"),
        ("--max-modle-len", "--max-model-len"),
        ("--model-len", "--max-model-len"),
        ("kv_dtype", "--kv-cache-dtype"),
        ("--prefix-caching", "--enable-prefix-caching"),
        ("--prefix-cache", "--enable-prefix-caching"),
        ("--max-batch-tokens", "--max-num-batched-tokens"),
        ("--quantize", "--quantization"),
        ("--mamba-cache-dtype", None),
        ("--code-revision", None),
        ("--max-num-scheduled-tokens", None),
        ("--quantization-config", None),
    ],
)
def test_a_misspelled_name_is_known_and_a_name_of_something_else_is_not(name, meant):
    known = (
        *("--port", "--max-model-len", "--kv-cache-dtype", "--enable-prefix-caching", "--revision"),
        *("--max-num-batched-tokens", "--quantization"),
    )
    assert nearest(name, known) == meant


def test_a_key_in_each_line_with_its_weight(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# the team\nfirst\n\n  second weight=2.5  \nthird\tweight=0.1\n")
    assert read_keys(file) == {"first": 1.0, "second": 2.5, "third": 0.1}
    assert Settings(api_key=["given"], api_key_file=file).keys == {"given": 1.0, **read_keys(file)}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst weight=2\r\nsecond\r\n")
    assert read_keys(file) == {"first": 2.0, "second": 1.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        ("canary\ncanary\n", "repeats a key in line 2"),
        ("a\ncanary weight=none\n", "in line 2"),
        ("canary weight=0\n", "in line 1"),
        ("canary weight=-1\n", "in line 1"),
        ("canary weight=nan\n", "in line 1"),
        ("canary weight=1e9\n", "in line 1"),
        ("canary weight=1 more\n", "in line 1"),
        ("canary wait=1\n", "in line 1"),
        ("canary canary\n", "in line 1"),
        ("a" * (MAX_KEY_FILE + 1), "more than"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_without_repeating_it(tmp_path, text, reason):
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=reason) as caught:
        load({"api_key_file": str(file)})
    assert "--api-key-file" in str(caught.value) and "canary" not in str(caught.value)


def test_a_file_that_is_not_there_leaves_no_server_open(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match="is not a file"):
        load({"api_key_file": str(tmp_path / "none")})
    monkeypatch.setenv("PEQUOD_API_KEY_FILE", "")
    with pytest.raises(SettingsError, match="is not a file"):
        load({})
