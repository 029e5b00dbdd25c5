"""What the tests of the store share: records, disks that are full, and a run of a store on a real one.

`python -m tests.server.api.responses.stores FOLDER` is that run, on a file system of a few MB.
"""

import asyncio
import contextlib
import sqlite3
import sys
from pathlib import Path

from server.api.responses import store as module
from server.api.responses.store import Store
from server.api.responses.store_file import Record
from server.http.errors import ApiError
from tests.fakes import until

FULL = "database or disk is full"


def record(name, size=10, owner="a", is_open=False):
    return Record(name, owner, is_open, b"x" * size, b"[]")


async def names(store, *wanted, owner="a"):
    """Which of these are there."""
    return [name for name in wanted if await store.get(name, owner) is not None]


async def written(store):
    """Wait until the store has written what was put, or failed to."""
    await store._run(lambda: None)
    while store._changes and not store._delay_s:  # it was not done within a slice
        await store._run(lambda: None)


async def blocked(store, event):
    """Let the store's thread wait for an event, as for a slow disk; returns the task that ends with it."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait():
        loop.call_soon_threadsafe(begun.set)
        event.wait()

    task = asyncio.create_task(store._run(wait))
    await begun.wait()
    return task


class Faulty:
    """A connection that refuses to commit changes while `is_full`, and always what concerns the ids in `damaged`."""

    def __init__(self, store):
        self.is_full = False
        self.refused = 0
        self.damaged = ()
        self._db = store._db
        store._db = self

    def __getattr__(self, name):
        return getattr(self._db, name)

    def execute(self, sql, values=()):
        if any(id in values for id in self.damaged):
            raise sqlite3.DatabaseError("database disk image is malformed")
        return self._db.execute(sql, values)

    def __enter__(self):
        self._before = self._db.total_changes
        return self._db.__enter__()

    def __exit__(self, kind, error, trace):
        if kind is None and self.is_full and self._db.total_changes > self._before:
            self._db.rollback()
            self.refused += 1
            raise sqlite3.OperationalError(FULL)
        return self._db.__exit__(kind, error, trace)


def fill(path):
    """Write a file until the disk is full."""
    with open(path, "wb", buffering=0) as filler, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while filler.write(b"x" * size):
                    pass


async def reopened(path, count=60):
    """Which of "old" and the numbered records a store still has after a restart."""
    with contextlib.closing(Store(path, 1000, 1 << 26)) as store:
        return await names(store, "old", *map(str, range(count)))


async def on_full_disk(folder, *, is_retried):
    """Sixty records while the disk is full, and a deletion; all of them are written once there is space again."""
    store = Store(folder / "store.db", 1000, 1 << 26)
    store.put(record("old"))
    await written(store)
    fill(folder / "filler")
    for name in range(60):
        store.put(record(str(name), 8192))
    await written(store)
    assert store._num_pending() == (60, 0), "nothing fits"
    try:
        await store.delete("old", "a")
    except ApiError as error:
        assert error.status == 503
    else:
        raise AssertionError("the disk is not full")
    assert len(await names(store, "old", *map(str, range(60)))) == 60
    (folder / "filler").unlink()
    if is_retried:
        await until(lambda: store._num_pending() == (0, 0))
    store.close()


async def main(folder):
    for is_retried in (True, False):
        module.FIRST_DELAY_S = 0.05 if is_retried else 1000.0
        module.MAX_DELAY_S = module.FIRST_DELAY_S
        own = folder / str(is_retried)
        own.mkdir()
        await on_full_disk(own, is_retried=is_retried)
        assert await reopened(own / "store.db") == [str(name) for name in range(60)]
    print("all written")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
