"""The store's file: it survives, belongs to one server and one user, and is refused where it is something else."""

import contextlib
import os
import socket
import sqlite3
import stat
import subprocess
import sys

import pytest

from engine import ConfigError
from server.api.responses import store_file
from server.api.responses.store import Store
from server.api.responses.store_file import APPLICATION_ID, VERSION, Record
from server.settings import Settings
from tests.fakes import FakeEngine, until
from tests.server.api.responses.stores import names, record, written


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def refused(path):
    """Why a file is refused; it stays what it is."""
    with pytest.raises(ConfigError) as caught:
        Store(path, 100, 1 << 20)
    beginning = f"--response-store {path} cannot be used: "
    assert str(caught.value).startswith(beginning)
    return str(caught.value).removeprefix(beginning)


async def test_a_file_survives_and_its_bounds_hold_when_they_shrink(tmp_path):
    path = tmp_path / "store.db"
    first = Store(path, 100, 1 << 20)
    with contextlib.closing(first):
        for name in ("one", "two", "three"):
            first.put(record(name))
        first.put(record("open", is_open=True))
    second = Store(path, 3, 1 << 20, interrupted=lambda answer: answer + b"!")
    with contextlib.closing(second):
        assert await names(second, "one", "two", "three", "open") == ["two", "three", "open"]
        assert await second.get("open", "a") == Record("open", "a", False, b"x" * 10 + b"!", b"[]")
        second.put(record("four"))
        await written(second)
        assert await names(second, "two", "four") == ["four"], "the order of use survives too"
        sizes = second._db.execute("SELECT sum(size) FROM responses").fetchone()[0]
        assert second._stored.num_bytes == sizes == 3 * record("").num_bytes + len(b"!")


async def test_a_killed_process_leaves_a_file_that_opens(tmp_path):
    path = tmp_path / "store.db"
    code = (
        "import asyncio, os, signal, sys, pathlib\n"
        "from server.api.responses.store_file import Record\n"
        "from server.api.responses.store import Store\n"
        "async def main():\n"
        "    store = Store(pathlib.Path(sys.argv[1]), 100, 1 << 20)\n"
        "    store.put(Record('one', 'a', False, b'{}', b'[]'))\n"
        "    await store.get('none', 'a')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    store = Store(path, 100, 1 << 20)
    with contextlib.closing(store):
        assert await names(store, "one") == ["one"]


async def test_what_is_deleted_is_in_no_file_any_more(tmp_path):
    def files():
        return b"".join(file.read_bytes() for file in tmp_path.iterdir())

    text = b"the whale " * 1000
    with contextlib.closing(Store(tmp_path / "store.db", 100, 1 << 20)) as store:
        for name in ("in the database", "in its log"):
            store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # moves what is there from the log to the database
            store.put(record(name)._replace(items=text))
            await written(store)
        assert text[:100] in files()
        for name in ("in the database", "in its log"):
            assert await store.delete(name, "a") is True
        await until(lambda: b"whale" not in files())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    assert refused(tmp_path / "none" / "store.db") == "No such file or directory"


def test_two_servers_do_not_share_a_file(tmp_path):
    path = tmp_path / "store.db"
    first = Store(path, 100, 1 << 20)
    code = (
        "import pathlib, sys\n"
        "from server.api.responses import store_file\n"
        "from server.api.responses.store import Store\n"
        "store_file.BUSY_S = 0.01\n"
        "Store(pathlib.Path(sys.argv[1]), 100, 1 << 20)\n"
    )
    second = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert f"ConfigError: --response-store {path} cannot be used: another process has it open" in second.stderr
    first.close()
    Store(path, 100, 1 << 20).close()


def test_the_setting_is_checked_at_start(tmp_path):
    from server.app import build_app

    (tmp_path / "store.db").write_text("the whale " * 1000)
    with pytest.raises(ConfigError, match="--response-store"):
        build_app(Settings(model=str(tmp_path), response_store=tmp_path / "store.db"), FakeEngine())


# Content


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "store.db"
    path.write_text("the whale " * 1000)
    path.chmod(0o644)
    assert refused(path) == "file is not a database"
    assert path.read_text().startswith("the whale")
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE ships (name TEXT)")
    other.close()
    path.chmod(0o644)
    before = path.read_bytes()
    assert refused(path) == "it is a database of something else"
    assert path.read_bytes() == before
    assert mode(path) == 0o644


def test_a_database_of_something_else_that_was_not_closed_is_refused(tmp_path):
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    other = sqlite3.connect(path)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE ships (name TEXT)")
    for suffix in ("", "-wal"):
        copy.with_name(copy.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    other.close()
    assert refused(copy) == "it is a database of something else"


def test_a_file_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "store.db"
    Store(path, 100, 1 << 20).close()
    with sqlite3.connect(path) as later:
        later.execute(f"PRAGMA user_version = {VERSION + 1}")
    later.close()
    assert refused(path) == f"its format has version {VERSION + 1}, and this server reads 1 to {VERSION}"


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "store.db"
    Store(path, 100, 1 << 20).close()
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" * (len(data) - 100))
    assert "malformed" in refused(path)


async def test_a_file_of_version_1_is_brought_to_this_version(tmp_path):
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.execute(
            "CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, is_open INTEGER NOT NULL, answer BLOB "
            "NOT NULL, items BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL)"
        )
        old.execute("CREATE INDEX by_use ON responses (used)")
        old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        old.execute("PRAGMA user_version = 1")
        kept = [record("b1", owner="b"), *(record(f"a{i}") for i in range(4)), record("b2", owner="b", is_open=True)]
        for used, each in enumerate(kept, 1):
            old.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", (*each[:5], each.num_bytes, used))
    old.close()
    store = Store(path, 6, 1 << 20, interrupted=lambda answer: answer + b"!")
    with contextlib.closing(store):
        assert await store.get("b2", "b") == record("b2", owner="b")._replace(answer=b"x" * 10 + b"!")
        store.put(record("a4"))
        await written(store)
        assert await names(store, *(f"a{i}" for i in range(5))) == ["a1", "a2", "a3", "a4"]
        assert await names(store, "b1", "b2", owner="b") == ["b1", "b2"], "the owner of most has lost one"
    Store(path, 6, 1 << 20).close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        indices = db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
    assert indices == [("by_share",)]


# Who may use it


@pytest.mark.parametrize("before", [None, 0o644, 0o666, 0o700])
async def test_only_its_user_may_read_it(tmp_path, caplog, before):
    path = tmp_path / "store.db"
    if before is not None:
        path.touch()
        path.chmod(before)
    mask = os.umask(0)
    try:
        with contextlib.closing(Store(path, 100, 1 << 20)) as store:
            store.put(record("one"))
            await written(store)
            assert {file.name: mode(file) for file in tmp_path.iterdir()} == {"store.db": 0o600, "store.db-wal": 0o600}
    finally:
        os.umask(mask)
    assert ("changed the mode of" in caplog.text) is (before is not None)


async def test_what_a_killed_process_left_becomes_private_too(tmp_path, caplog):
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    store = Store(path, 100, 1 << 20)
    with contextlib.closing(store):
        store.put(record("one"))
        await written(store)
        for suffix in ("", "-wal"):
            data = path.with_name(path.name + suffix).read_bytes()
            copy.with_name(copy.name + suffix).write_bytes(data)
    beside = [copy, copy.with_name("copy.db-wal"), copy.with_name("copy.db-shm")]
    for file in beside:
        file.touch()
        file.chmod(0o644)
    again = Store(copy, 100, 1 << 20)
    assert {mode(file) for file in beside if file.exists()} == {0o600}
    with contextlib.closing(again):
        assert await names(again, "one") == ["one"]
    assert caplog.text.count("from 0644 to 0600") == 3


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("exists", [True, False])
def test_no_link_is_followed(tmp_path, suffix, exists):
    target, path = tmp_path / "target", tmp_path / "store.db"
    if exists:
        target.touch(0o644)
    link = path.with_name(path.name + suffix)
    link.symlink_to(target)
    assert refused(path) == f"{link.name} is a symbolic link, which is not followed"
    assert target.exists() is exists
    if exists:
        assert (target.read_bytes(), mode(target)) == (b"", 0o644)


def test_a_link_in_a_folder_above_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Store(tmp_path / "link" / "store.db", 100, 1 << 20).close()
    assert (tmp_path / "real" / "store.db").exists()


def test_a_file_that_is_replaced_by_a_link_at_the_last_moment_is_refused(tmp_path, monkeypatch):
    path, target = tmp_path / "store.db", tmp_path / "target"
    target.touch()
    connect = sqlite3.connect

    def replace(*args, **kwargs):
        path.unlink()
        path.symlink_to(target)
        return connect(*args, **kwargs)

    monkeypatch.setattr(store_file.sqlite3, "connect", replace)
    assert refused(path) == "store.db was replaced while it was being opened"
    assert target.read_bytes() == b""


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_only_a_regular_file_is_used(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = tmp_path / "store.db"
    if kind == "pipe":
        os.mkfifo(path)
        assert refused(path) == "store.db is not a regular file"
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("store.db")
            assert refused(path) == "store.db is not a regular file"


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "store.db"
    path.touch(0o644)
    owner = path.stat().st_uid
    monkeypatch.setattr(store_file.os, "geteuid", lambda: owner + 1)
    assert refused(path) == f"store.db belongs to another user (uid {owner})"
    assert mode(path) == 0o644
