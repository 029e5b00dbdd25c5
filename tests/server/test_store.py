"""The store of responses: bounds, owners, files, and what happens when the file is broken, locked or full."""

import asyncio
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest

from engine import ConfigError
from server.errors import ApiError
from server.settings import Settings
from server.store import ROW_BYTES, VERSION, Record, Store
from tests.fakes import FakeEngine, model_folder
from tests.server.wire import RESPONSES, ask, run, saying


def record(name, size=10, owner="a", is_open=False):
    return Record(name, owner, is_open, b"x" * size, b"[]")


def use(store, work):
    """Let `work()` do something with the store, which is closed after it."""

    async def main():
        try:
            return await work()
        finally:
            store.close()

    return asyncio.run(main())


def names(store, *wanted):
    """Which of these are there."""

    async def look():
        return [name for name in wanted if await store.get(name, "a") is not None]

    return look()


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """A store of either kind."""
    path = None if request.param == "memory" else tmp_path / "store.db"
    return lambda count=100, size=1 << 20: Store(path, count, size)


def test_what_is_put_is_found_at_once_and_by_its_owner_alone(make):
    store = make()

    async def work():
        for each in (record("one"), record("two", owner="b")):
            store.put(each)
            assert await store.get(each.id, each.owner) == each
            await store._run(lambda: None)  # by now it is written
            assert await store.get(each.id, each.owner) == each
        assert await store.get("two", "a") is None
        assert await store.get("three", "a") is None

    use(store, work)


def test_a_later_record_takes_the_place_of_an_earlier_one(make):
    store = make()

    async def work():
        store.put(record("one", is_open=True))
        await store._run(lambda: None)
        store.put(record("one", 20))
        assert await store.get("one", "a") == record("one", 20)
        await store.delete("one")
        assert await store.get("one", "a") is None
        await store.delete("one")
        assert (store._count, store._bytes) == (0, 0)

    use(store, work)


def test_a_deleted_record_is_not_written_later(make):
    store = make()

    async def work():
        blocked = threading.Event()
        store._thread.submit(blocked.wait)
        store.put(record("one"))
        gone = asyncio.create_task(store.delete("one"))
        await asyncio.sleep(0)
        blocked.set()
        await gone
        assert await store.get("one", "a") is None

    use(store, work)


def test_what_was_used_longest_ago_goes_first(make):
    store = make(count=3)

    async def work():
        for name in ("one", "two", "three"):
            store.put(record(name))
        await store._run(lambda: None)
        assert await names(store, "one") == ["one"]
        store.put(record("four"))
        await store._run(lambda: None)
        assert await names(store, "one", "two", "three", "four") == ["one", "three", "four"]

    use(store, work)


def test_bytes_are_bounded_too(make):
    size = 1000 + len(b"[]") + ROW_BYTES
    store = make(size=3 * size)

    async def work():
        for name in ("one", "two", "three", "four"):
            store.put(record(name, 1000))
        await store._run(lambda: None)
        assert await names(store, "one", "two", "three", "four") == ["two", "three", "four"]
        assert store._bytes == 3 * size
        store.put(record("huge", 10_000))
        await store._run(lambda: None)
        assert await names(store, "huge", "four") == ["four"], "what never fits drives nothing out"

    use(store, work)


def test_what_is_too_large_is_refused_before_it_drives_out_what_waits_to_be_written(make, caplog):
    store = make(size=10_000)
    is_free = threading.Event()

    async def work():
        store.put(record("old", is_open=True))
        await store._run(lambda: None)
        store._thread.submit(is_free.wait)  # a slow disk
        store.put(record("one"))
        store.put(record("two", is_open=True))
        for name in ("huge", "two", "old"):
            store.put(record(name, 10_000))
        assert list(store._unwritten) == ["one"]
        is_free.set()
        assert await names(store, "one", "two", "old", "huge") == ["one"], "an older one is out of date"
        assert (store._count, store._bytes) == (1, record("one").num_bytes)

    use(store, work)
    assert caplog.text.count("is larger than --max-stored-bytes and is not kept") == 3


def test_what_is_too_large_is_no_crash_where_the_file_fails(tmp_path, caplog):
    store = Store(tmp_path / "store.db", 2, 10_000)

    async def work():
        store.put(record("one"))
        await spoil(store)
        store.put(record("one", 10_000))
        await store._run(lambda: None)

    use(store, work)
    assert "could not be deleted" in caplog.text


# Files


def test_a_file_survives_and_its_bounds_hold_when_they_shrink(tmp_path):
    path = tmp_path / "store.db"
    first = Store(path, 100, 1 << 20)

    async def fill():
        for name in ("one", "two", "three"):
            first.put(record(name))
        first.put(record("open", is_open=True))

    use(first, fill)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = Store(path, 3, 1 << 20, interrupted=lambda answer: answer + b"!")

    async def look():
        assert await names(second, "one", "two", "three", "open") == ["two", "three", "open"]
        assert await second.get("open", "a") == Record("open", "a", False, b"x" * 10 + b"!", b"[]")
        second.put(record("four"))
        await second._run(lambda: None)
        assert await names(second, "two", "four") == ["four"], "the order of use survives too"

    use(second, look)


def test_a_killed_process_leaves_a_file_that_opens(tmp_path):
    path = tmp_path / "store.db"
    code = (
        "import asyncio, os, signal, sys, pathlib\n"
        "from server.store import Record, Store\n"
        "async def main():\n"
        "    store = Store(pathlib.Path(sys.argv[1]), 100, 1 << 20)\n"
        "    store.put(Record('one', 'a', False, b'{}', b'[]'))\n"
        "    await store.get('none', 'a')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    store = Store(path, 100, 1 << 20)

    async def look():
        assert await names(store, "one") == ["one"]

    use(store, look)


def broken(path):
    with pytest.raises(ConfigError) as caught:
        Store(path, 100, 1 << 20)
    assert str(caught.value).startswith(f"--response-store {path} cannot be used: ")
    return str(caught.value)


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "store.db"
    path.write_text("the whale " * 1000)
    assert "not a database" in broken(path)
    assert path.read_text().startswith("the whale")
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE ships (name TEXT)")
    other.close()
    assert "something else" in broken(path)


def test_a_file_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "store.db"
    Store(path, 100, 1 << 20).close()
    with sqlite3.connect(path) as later:
        later.execute(f"PRAGMA user_version = {VERSION + 1}")
    later.close()
    assert "another version" in broken(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "store.db"
    Store(path, 100, 1 << 20).close()
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" * (len(data) - 100))
    broken(path)


def test_two_servers_do_not_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("server.store.BUSY_S", 0.01)
    path = tmp_path / "store.db"
    first = Store(path, 100, 1 << 20)
    assert "another process has it open" in broken(path)
    first.close()
    Store(path, 100, 1 << 20).close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    assert broken(tmp_path / "none" / "store.db").endswith("No such file or directory")


def test_the_setting_is_checked_at_start(tmp_path):
    from server.app import build_app

    (tmp_path / "store.db").write_text("the whale " * 1000)
    with pytest.raises(ConfigError, match="--response-store"):
        build_app(Settings(model=str(tmp_path), response_store=tmp_path / "store.db"), FakeEngine())


# What goes wrong later


def spoil(store):
    """Let nothing be written from now on."""
    return store._run(lambda: store._db.execute("PRAGMA query_only = ON"))


def test_what_cannot_be_written_stays_in_memory_within_the_bounds(tmp_path, caplog):
    store = Store(tmp_path / "store.db", 2, 1 << 20)

    async def work():
        await spoil(store)
        for name in ("one", "two", "three"):
            store.put(record(name))
        await asyncio.to_thread(lambda: store._thread.submit(lambda: None).result())
        assert [name in store._unwritten for name in ("one", "two", "three")] == [False, True, True]
        assert await store.get("three", "a") == record("three")

    use(store, work)
    assert "could not be written" in caplog.text


def test_a_file_that_fails_is_a_503_and_no_crash(tmp_path):
    store = Store(tmp_path / "store.db", 2, 1 << 20)

    async def work():
        await store._run(lambda: store._db.execute("DROP TABLE responses"))
        with pytest.raises(ApiError) as caught:
            await store.get("one", "a")
        assert (caught.value.status, caught.value.code) == (503, "store_failed")

    use(store, work)


def test_a_closed_store_keeps_nothing_more(make):
    store = make()
    store.close()
    store.put(record("one"))
    store.close()


def test_a_response_is_answered_though_the_file_fails(tmp_path):
    folder = model_folder(tmp_path / "fake")
    engine = FakeEngine(saying("the whale"))
    path = tmp_path / "store.db"
    assert ask(folder, RESPONSES, {"input": "a"}, engine, response_store=path).status_code == 200

    async def use_spoilt(client):
        await spoil(client._transport.app.state.pequod.store)
        made = await client.post(RESPONSES, json={"input": "a"})
        assert made.status_code == 200
        assert (await client.get(f"{RESPONSES}/{made.json()['id']}")).json() == made.json()

    run(folder, use_spoilt, FakeEngine(saying("the whale")), response_store=path)
