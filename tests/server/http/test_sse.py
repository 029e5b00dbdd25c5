"""Frames of server-sent events, as a client's line splitter sees them."""

from __future__ import annotations

import json

import pytest

from server.http import sse


def test_frame() -> None:
    assert sse.frame('{"a":1}') == b'data: {"a":1}\n\n'
    assert sse.frame(b'{"a":"\xc3\xa9"}') == b'data: {"a":"\xc3\xa9"}\n\n'
    assert sse.frame("{}", event="response.created") == b"event: response.created\ndata: {}\n\n"


def test_end_and_keep_alive() -> None:
    assert sse.DONE == b"data: [DONE]\n\n"
    assert sse.HEARTBEAT.startswith(b":")
    assert sse.HEARTBEAT.endswith(b"\n\n")


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\u0085"])
def test_unicode_line_ends_are_escaped(letter: str) -> None:
    payload = json.dumps({"text": f"a{letter}b"}, ensure_ascii=False)
    framed = sse.frame(payload).decode()
    assert letter not in framed
    assert f"\\u{ord(letter):04x}" in framed
    assert len(framed.splitlines()) == 2
    assert json.loads(framed.removeprefix("data: ")) == {"text": f"a{letter}b"}


def test_other_characters_that_share_bytes_are_untouched() -> None:
    for text in ("\u2027\u202a", "\u0084\u0086", "\u0142\u0145", "é…€"):
        assert sse.frame(f'"{text}"') == f'data: "{text}"\n\n'.encode()


def test_indented_json_stays_one_event() -> None:
    framed = sse.frame(json.dumps({"a": [1]}, indent=1))
    lines = framed.decode().split("\n")
    assert lines[-2:] == ["", ""]
    assert all(line.startswith("data: ") for line in lines[:-2])
    assert json.loads("\n".join(line.removeprefix("data: ") for line in lines[:-2])) == {"a": [1]}
