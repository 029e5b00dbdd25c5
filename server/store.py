"""Store: responses that can be asked for later, bounded in number and bytes, in memory or in a file.

One SQLite database either way. All work on it is done by one thread; what has been put is found from then on, also
while the thread has not written it, and where it cannot be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine import ConfigError

from .errors import unavailable

T = TypeVar("T")
Json = dict[str, Any]

APPLICATION_ID = 0x50657164  # "Peqd"
VERSION = 1
BUSY_S = 1.0  # for another process to let go of the file
ROW_BYTES = 512  # what a row costs beside its texts
RETRY_S = 5

log = logging.getLogger("pequod.store")


class Record(NamedTuple):
    """A stored response, and the conversation that led to it."""

    id: str
    owner: str  # who alone may see it: a hash of the API key
    is_open: bool  # its work goes on
    answer: bytes  # the response as JSON
    items: bytes  # the conversation before it as JSON

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.items) + ROW_BYTES


class Store:
    """Holds at most `max_count` records and `max_bytes` bytes; what was used longest ago goes first.

    `path` is a file that survives the process and that one server has to itself; None: memory. Raises ConfigError when
    the file cannot be used. Records whose work was going on when the last process ended are closed by `interrupted`,
    which gets and gives a response's JSON.
    """

    def __init__(
        self, path: Path | None, max_count: int, max_bytes: int, interrupted: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._path = path
        self._unwritten: OrderedDict[str, Record] = OrderedDict()
        self._lock = threading.Lock()  # of _unwritten, which both threads change
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self._db = self._open()
            self._close_interrupted(interrupted)
            self._count, self._bytes, self._clock = self._db.execute(
                "SELECT count(*), coalesce(sum(size), 0), coalesce(max(used), 0) FROM responses"
            ).fetchone()
            self._trim()
        except (sqlite3.Error, OSError) as error:
            told = error.strerror if isinstance(error, OSError) else str(error)
            if told == "database is locked":
                told = "another process has it open"
            raise ConfigError(f"--response-store {path} cannot be used: {told}") from None

    # From the event loop

    def put(self, record: Record) -> None:
        """Keep a record, in the place of an older one with its id. It is written later, and found at once.

        One that is larger than all that may be kept is not kept, nor is the older one: it tells what is no longer so.
        """
        if self._is_closed:
            return
        if record.num_bytes > self.max_bytes:
            log.warning("a response of %d bytes is larger than --max-stored-bytes and is not kept", record.num_bytes)
            with self._lock:
                self._unwritten.pop(record.id, None)
            self._thread.submit(self._outdated, record.id)
            return
        with self._lock:
            self._unwritten.pop(record.id, None)
            self._unwritten[record.id] = record
            # Where nothing can be written this is all that there is, and it has the same bounds.
            total = sum(each.num_bytes for each in self._unwritten.values())
            while len(self._unwritten) > self.max_count or total > self.max_bytes:
                total -= self._unwritten.popitem(last=False)[1].num_bytes
        self._thread.submit(self._written, record)

    async def get(self, id: str, owner: str) -> Record | None:
        """A record, unless there is none or it is somebody else's; raises 503 where the file cannot be read."""
        with self._lock:
            record = self._unwritten.get(id)
        if record is None:
            record = await self._run(lambda: self._read(id))
        return record if record is not None and record.owner == owner else None

    async def delete(self, id: str) -> None:
        """Forget a record; raises 503 where the file cannot be written."""
        with self._lock:
            self._unwritten.pop(id, None)
        await self._run(lambda: self._delete(id))

    def close(self) -> None:
        """Write what is not written, and close the file; takes as long as that does."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._db.close)
            self._thread.shutdown(wait=True)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            log.error("stored responses cannot be used: %s", error)
            raise unavailable("Stored responses cannot be used at the moment.", "store_failed", RETRY_S) from None

    # On the thread

    def _written(self, record: Record) -> None:
        """Write a record, unless it has been replaced or deleted meanwhile."""
        with self._lock:
            is_wanted = self._unwritten.get(record.id) is record
        if not is_wanted:
            return
        try:
            self._write(record)
        except sqlite3.Error as error:
            log.error("a response could not be written to --response-store and stays in memory: %s", error)
            return
        with self._lock:
            if self._unwritten.get(record.id) is record:
                del self._unwritten[record.id]

    def _outdated(self, id: str) -> None:
        try:
            self._delete(id)
        except sqlite3.Error as error:
            log.error("an outdated response could not be deleted from --response-store: %s", error)

    def _write(self, record: Record) -> None:
        self._delete(record.id)
        self._clock += 1
        row = (record.id, record.owner, record.is_open, record.answer, record.items, record.num_bytes, self._clock)
        with self._db:
            self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._count += 1
        self._bytes += record.num_bytes
        self._trim()

    def _read(self, id: str) -> Record | None:
        row = self._db.execute("SELECT id, owner, is_open, answer, items FROM responses WHERE id = ?", (id,)).fetchone()
        if row is None:
            return None
        self._clock += 1
        with contextlib.suppress(sqlite3.Error), self._db:  # a full disk can still be read
            self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (self._clock, id))
        return Record(row[0], row[1], bool(row[2]), row[3], row[4])

    def _delete(self, id: str) -> None:
        with self._db:
            gone = self._db.execute("DELETE FROM responses WHERE id = ? RETURNING size", (id,)).fetchall()
        self._count -= len(gone)
        self._bytes -= sum(size for (size,) in gone)

    def _trim(self) -> None:
        """Keep within the bounds."""
        while self._count > self.max_count or self._bytes > self.max_bytes:
            (oldest,) = self._db.execute("SELECT id FROM responses ORDER BY used LIMIT 1").fetchone()
            self._delete(oldest)

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:  # conversations are nobody else's business
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(self._path or ":memory:", timeout=BUSY_S, check_same_thread=False)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        # After a crash of the machine the last responses may be missing; the file stays whole.
        db.execute("PRAGMA synchronous = NORMAL")
        with db:
            db.execute("BEGIN IMMEDIATE")  # the lock is taken now, not with the first response
            kind, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            if not is_new and (kind, version) != (APPLICATION_ID, VERSION):
                raise sqlite3.DatabaseError("it is a database of something else or of another version")
            db.execute(
                "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, is_open INTEGER NOT "
                "NULL, answer BLOB NOT NULL, items BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL)"
            )
            db.execute("CREATE INDEX IF NOT EXISTS by_use ON responses (used)")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {VERSION}")

    def _close_interrupted(self, interrupted: Callable[[bytes], bytes]) -> None:
        """What was under way when the last process ended will never be finished."""
        rows = self._db.execute("SELECT id, answer FROM responses WHERE is_open").fetchall()
        with self._db:
            for id, answer in rows:
                self._db.execute("UPDATE responses SET is_open = 0, answer = ? WHERE id = ?", (interrupted(answer), id))


def packed(value: Any) -> bytes:
    """JSON as a record holds it."""
    return msgspec.json.encode(value)


def unpacked(data: bytes) -> Any:
    """What a record's JSON says."""
    return msgspec.json.decode(data)
