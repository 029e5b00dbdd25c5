"""Reading the small files of a model folder within bounds; hostile ones are in tests/server/test_hostile_folders.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import ModelError
from engine.files import MAX_VALUES, SMALL_BYTES, read_file, read_json, read_text


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345678")
    assert read_file(tmp_path / "a", 8) == b"12345678"
    with pytest.raises(ModelError, match="is larger than"):
        read_file(tmp_path / "a", 7)


def test_a_file_that_does_not_exist_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("missing", "broken"):
        path = tmp_path / name
        assert (read_file(path, 8), read_text(path), read_json(path)) == (None, None, None)


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, "ü"]}', encoding="utf-8")
    (tmp_path / "b.json").symlink_to("a.json")
    assert read_json(tmp_path / "b.json") == {"a": [1, "ü"]}
    assert read_text(tmp_path / "b.json") == '{"a": [1, "ü"]}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff", "is not valid JSON"),
        (b'{"a": ' * 2000, "is nested too deeply"),
        (b" " * (SMALL_BYTES + 1), "is larger than the 4 MiB"),
        (b"," * (MAX_VALUES + 1), "holds more than 2,000,000 values"),
    ],
)
def test_anything_but_a_json_object_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ModelError, match=says) as error:
        read_json(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(error.value)


def test_a_file_below_a_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(ModelError, match="cannot be read: Not a directory"):
        read_json(tmp_path / "a" / "config.json")
