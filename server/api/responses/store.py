"""Store: responses that can be retrieved later, bounded in number and bytes, in memory or in a file.

One SQLite database either way, which only the store's own thread uses. A change is held in memory, where it is found at
once, until the database has it; what the database refuses is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine import ConfigError

from ...http.errors import unavailable
from .store_file import Record, open_database

T = TypeVar("T")

# Delay between attempts to write, doubled after each failure. A new change brings the next attempt forward,
# but never to less than the first delay after the last failure.
FIRST_DELAY_S = 2.0
MAX_DELAY_S = 30.0
MAX_UNWRITTEN_BYTES = 512 << 20  # in memory; --max-stored-bytes may be meant for a large disk
MAX_FAILURES = 10  # in one attempt; a full disk refuses all, so there is no point in trying thousands of changes
SLICE_S = 0.1  # of writing before waiting readers are served
CLOSE_S = 5.0  # to write what is left
INTERRUPT_S = 1.0  # for the statement that is running then to end

log = logging.getLogger("pequod.store")


@dataclass(slots=True, eq=False)
class Change:
    """A record that is not in the database yet, or one that must be deleted from it."""

    id: str
    owner: str
    record: Record | None = None  # None: delete it
    is_replacement: bool = False  # the database may hold an older version
    used: int = 0
    failures: int = 0

    @property
    def priority(self) -> tuple[int, int]:
        """Sort key: changes that have not failed yet first, then deletions, which free space, then small records."""
        return self.failures, self.record.num_bytes if self.record else 0


class Shares:
    """Numbers and bytes of each owner's records, and the owner whose record is evicted if a total exceeds its limit.

    That is the owner with the largest share of the exceeded total, so that no owner loses a record to one that has
    more; among equals the one whose share has not changed for longest. All operations take O(log owners) steps,
    besides moving pointers in a list.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.count = 0
        self.num_bytes = 0
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = 0
        self._owners: dict[str, tuple[int, int, int]] = {}  # records, bytes, when they changed
        self._by_count: list[tuple[int, int, str]] = []  # ascending: records, when they changed (negated), owner
        self._by_bytes: list[tuple[int, int, str]] = []

    def add(self, owner: str, count: int, num_bytes: int) -> None:
        """Add to an owner's share; negative numbers subtract."""
        self.count += count
        self.num_bytes += num_bytes
        self._clock += 1
        old = self._owners.pop(owner, (0, 0, 0))
        new = (old[0] + count, old[1] + num_bytes, self._clock)
        for order, i in ((self._by_count, 0), (self._by_bytes, 1)):
            if old[0]:
                del order[bisect_left(order, (old[i], -old[2], owner))]
            if new[0]:
                insort(order, (new[i], -new[2], owner))
        if new[0]:
            self._owners[owner] = new

    def victim(self) -> str | None:
        """Return the owner whose record is to be evicted; None: both totals are within their limits."""
        if self.num_bytes > self._max_bytes:
            return self._by_bytes[-1][2]
        return self._by_count[-1][2] if self.count > self._max_count else None


class Store:
    """Holds at most `max_count` records and `max_bytes` bytes.

    Above that the owner with the largest share loses the record that has been unused for longest. Open records are not
    counted and stay, since a response in progress must be found to be cancelled; admission limits their number. `path`
    is a file that survives the process and that one server has to itself; None: memory. Raises ConfigError when the
    file cannot be used. Records whose work was going on when the last process ended are closed by `interrupted`, which
    takes and returns a response's JSON.
    """

    def __init__(
        self, path: Path | None, max_count: int, max_bytes: int, interrupted: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.max_bytes = max_bytes
        self._path = path
        self._thread: threading.Thread | None = None  # started by the first work for it
        self._wake = threading.Condition()  # the lock of all that both threads use, from here to the blank line
        self._changes: dict[str, Change] = {}  # by id
        self._unwritten: dict[str, OrderedDict[str, Change]] = {}  # closed records by owner, the longest unused first
        self._waiting = Shares(max_count, min(max_bytes, MAX_UNWRITTEN_BYTES))  # of `_unwritten`
        self._jobs: deque[Callable[[], None]] = deque()
        self._flush_at: float | None = None  # when changes are to be written; None: there are none
        self._failed_at = float("-inf")  # the last attempt; -inf: it succeeded
        self._clock = 0
        self._is_closed = False
        self._deadline = float("inf")  # for the writing, once it is closed

        self._delay_s = 0.0
        self._stored = Shares(max_count, max_bytes)
        self._moved: list[tuple[str, int, int]] = []  # what the transaction has added to _stored
        self._has_deleted = False  # the file may still have the text of deleted records
        try:
            self._db = open_database(path)
            try:
                self._close_interrupted(interrupted)
                self._load_shares()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"--response-store {path} cannot be used: {reason}") from None

    # From the event loop

    def put(self, record: Record, is_replacement: bool = True) -> None:
        """Keep a record, in place of an older version of it. It is found at once, and written later.

        A record that is larger than the bound on all of them is not kept, and neither is its older version, which would
        be out of date. `is_replacement` false promises that there is no older version.
        """
        with self._wake:
            if self._is_closed:
                return
            old = self._forget(record.id)
            is_replacement |= old is not None and (old.record is None or old.is_replacement)
            if (size := record.num_bytes) > self.max_bytes:
                log.warning("a response of %d bytes is larger than --max-stored-bytes and is not kept", size)
                if is_replacement:
                    self._changes[record.id] = Change(record.id, record.owner)
            else:
                self._hold(Change(record.id, record.owner, record, is_replacement, self._tick()))
            # Unwritten records are limited too. A single one stays, however large: it may be about to be written.
            while self._waiting.count > 1 and (owner := self._waiting.victim()) is not None:
                evicted = next(iter(self._unwritten[owner].values()))
                self._forget(evicted.id)
                if evicted.is_replacement:
                    self._changes[evicted.id] = Change(evicted.id, evicted.owner)
            self._flush_soon()

    async def get(self, id: str, owner: str) -> Record | None:
        """Return a record; None: there is none, or it is another owner's. Raises 503 if the file cannot be read."""
        with self._wake:
            change = self._changes.get(id)
            if change is not None:
                if change.record is None or change.owner != owner:
                    return None
                change.used = self._tick()
                if not change.record.is_open:
                    self._unwritten[change.record.share].move_to_end(id)
                return change.record
        return await self._run(lambda: self._read(id, owner))

    async def delete(self, id: str, owner: str) -> bool:
        """Delete an owner's record, and return whether there was one.

        Raises 503 where the file cannot be written. The record is not found any more even then, and it is deleted from
        the file as soon as that is possible; until then deleting it again gives the same.
        """
        with self._wake:
            change = self._changes.get(id)
        is_known = await self._run(lambda: self._has(id, owner)) if change is None else change.owner == owner
        if not is_known:
            return False
        with self._wake:
            deletion = self._changes.get(id)
            if deletion is None or deletion.record is not None:
                self._forget(id)
                deletion = self._changes[id] = Change(id, owner)
                self._flush_soon()
        await self._run(lambda: self._save(deletion))
        return True

    def close(self) -> None:
        """Write what is not written and close the file, within CLOSE_S + INTERRUPT_S; log what could not be written."""
        with self._wake:
            if self._is_closed:
                return
            self._is_closed = True
            self._deadline = time.monotonic() + CLOSE_S
            thread = self._wake_thread()
        thread.join(CLOSE_S)
        if thread.is_alive():
            with contextlib.suppress(sqlite3.Error):
                self._db.interrupt()
            thread.join(INTERRUPT_S)
        if self._path is None:
            return
        if thread.is_alive():
            log.error("--response-store %s did not close within %g s", self._path, CLOSE_S + INTERRUPT_S)
        records, deletions = self._num_pending()
        if records or deletions:
            log.error("--response-store %s could not be written. Lost responses: %d, deleted responses that are still "
                      "in the file: %d", self._path, records, deletions)  # fmt: skip

    async def _run(self, work: Callable[[], T]) -> T:
        """Run a function on the store's thread."""
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        with self._wake:
            if self._is_closed:
                raise unavailable("The server is shutting down.", "draining")
            self._jobs.append(job)
            self._wake_thread()
        try:
            return await asyncio.wrap_future(future)
        except sqlite3.Error as error:
            log.error("stored responses cannot be used: %s", error)
            raise unavailable("Stored responses cannot be used at the moment.", "store_failed") from None

    # With the lock held

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _hold(self, change: Change) -> None:
        """Add a record that is not written."""
        assert change.record is not None
        self._changes[change.id] = change
        if change.record.is_open:
            return
        share = change.record.share
        self._unwritten.setdefault(share, OrderedDict())[change.id] = change
        self._waiting.add(share, 1, change.record.num_bytes)

    def _forget(self, id: str) -> Change | None:
        """Drop the change of a record and return it, if there is one."""
        change = self._changes.pop(id, None)
        if change is not None and change.record is not None and not change.record.is_open:
            share = change.record.share
            self._waiting.add(share, -1, -change.record.num_bytes)
            del self._unwritten[share][id]
            if not self._unwritten[share]:
                del self._unwritten[share]
        return change

    def _flush_soon(self) -> None:
        """Have the thread write the changes now, or FIRST_DELAY_S after the last failure."""
        at = max(time.monotonic(), self._failed_at + FIRST_DELAY_S)
        self._flush_at = at if self._flush_at is None else min(at, self._flush_at)
        self._wake_thread()

    def _wake_thread(self) -> threading.Thread:
        if self._thread is None:
            # A daemon, because a disk that hangs must not keep the process from exiting.
            self._thread = threading.Thread(target=self._work, name="store", daemon=True)
            self._thread.start()
        self._wake.notify_all()
        return self._thread

    # On the thread

    def _work(self) -> None:
        """Write changes when they are due and run jobs in order, until the store is closed."""
        while True:
            with self._wake:
                while not (self._jobs or self._is_closed or self._wait_s() == 0):
                    self._wake.wait(self._wait_s())
                is_due = self._wait_s() == 0
                job = self._jobs.popleft() if self._jobs else None
                is_over = self._is_closed and job is None
            if is_over:
                break
            if is_due and not self._is_closed:
                self._flush()
            if job is not None:
                job()
            if self._has_deleted and not self._jobs:  # once after many deletions: it waits for the disk
                self._erase()
        self._write_changes(self._deadline)
        try:
            self._db.close()
        except sqlite3.Error as error:
            log.error("--response-store %s could not be closed: %s", self._path, error)

    def _wait_s(self) -> float | None:
        """Return the seconds until changes are due; None: there are none."""
        return None if self._flush_at is None else max(0.0, self._flush_at - time.monotonic())

    def _flush(self) -> None:
        """Write changes for SLICE_S, and schedule the next attempt if some are left."""
        with self._wake:
            self._flush_at = None
        is_done, error = self._write_changes(time.monotonic() + SLICE_S)
        if error is not None:
            self._delay_s = min(max(FIRST_DELAY_S, 2 * self._delay_s), MAX_DELAY_S)
            with self._wake:
                self._failed_at = time.monotonic()
                self._flush_at = self._failed_at + self._delay_s
            log.error("--response-store cannot be written: %s. Waiting in memory for the next attempt in %g s: "
                      "responses %d, deletions %d", error, self._delay_s, *self._num_pending())  # fmt: skip
        elif not is_done:
            with self._wake:
                self._flush_at = time.monotonic()
        elif self._delay_s:
            self._delay_s = 0.0
            with self._wake:
                self._failed_at = float("-inf")
            log.info("all stored responses are written to --response-store again")

    def _write_changes(self, until: float) -> tuple[bool, Exception | None]:
        """Write changes until time.monotonic() is `until`; return whether all were tried, and the last failure."""
        with self._wake:
            changes = list(self._changes.values())
        failures: list[Exception] = []
        for change in sorted(changes, key=lambda change: change.priority):
            if time.monotonic() > until or len(failures) == MAX_FAILURES:
                return False, failures[-1] if failures else None
            try:
                self._save(change)
            except Exception as error:  # the thread must survive any failure
                change.failures += 1
                failures.append(error)
        return True, failures[-1] if failures else None

    def _num_pending(self) -> tuple[int, int]:
        """Return the numbers of unwritten records and of unwritten deletions."""
        with self._wake:
            num_records = sum(change.record is not None for change in self._changes.values())
            return num_records, len(self._changes) - num_records

    def _save(self, change: Change) -> None:
        """Write a change, unless it was replaced by another."""
        with self._wake:
            if self._changes.get(change.id) is not change:
                return
        with self._transaction():
            self._remove(change.id)
            if change.record is not None:
                self._insert(change.record, change.used)
        self._has_deleted |= change.record is None
        with self._wake:
            if self._changes.get(change.id) is change:
                self._forget(change.id)

    def _erase(self) -> None:
        """Empty the write-ahead log, which has the text of records that were deleted."""
        with contextlib.suppress(sqlite3.Error):  # as on a full disk: it is tried again
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._has_deleted = False

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit or roll back the block's statements, and the shares with them."""
        self._moved = []
        try:
            with self._db:
                yield
        except BaseException:
            for owner, count, num_bytes in self._moved:
                self._stored.add(owner, -count, -num_bytes)
            raise

    def _move(self, owner: str, count: int, num_bytes: int) -> None:
        self._stored.add(owner, count, num_bytes)
        self._moved.append((owner, count, num_bytes))

    def _insert(self, record: Record, used: int) -> None:
        size, share = record.num_bytes, record.share
        row = (record.id, record.owner, record.is_open, record.answer, record.items, size, used, share)
        self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        if not record.is_open:
            self._move(share, 1, size)
            self._trim()

    def _remove(self, id: str) -> None:
        rows = self._db.execute("DELETE FROM responses WHERE id = ? RETURNING share, size, is_open", (id,)).fetchall()
        for owner, size, is_open in rows:
            if not is_open:
                self._move(owner, -1, -size)

    def _trim(self) -> None:
        """Evict records until both totals are within their limits."""
        while (owner := self._stored.victim()) is not None:
            query = "SELECT id FROM responses WHERE share = ? AND NOT is_open ORDER BY used LIMIT 1"
            self._remove(self._db.execute(query, (owner,)).fetchone()[0])

    def _has(self, id: str, owner: str) -> bool:
        query = "SELECT 1 FROM responses WHERE id = ? AND owner = ?"
        return self._db.execute(query, (id, owner)).fetchone() is not None

    def _read(self, id: str, owner: str) -> Record | None:
        query = "SELECT id, owner, is_open, answer, items, share FROM responses WHERE id = ? AND owner = ?"
        row = self._db.execute(query, (id, owner)).fetchone()
        if row is None:
            return None
        with self._wake:
            used = self._tick()
        with contextlib.suppress(sqlite3.Error), self._db:  # a full disk can still be read
            self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (used, id))
        return Record(row[0], row[1], bool(row[2]), row[3], row[4], "" if row[5] == row[1] else row[5])

    # At the start

    def _close_interrupted(self, interrupted: Callable[[bytes], bytes]) -> None:
        """Close the records that were still open when the last process ended."""
        rows = self._db.execute("SELECT id, answer FROM responses WHERE is_open").fetchall()
        with self._db:
            for id, answer in rows:
                closed = interrupted(answer)
                self._db.execute(
                    "UPDATE responses SET is_open = 0, answer = ?, size = size + ? WHERE id = ?",
                    (closed, len(closed) - len(answer), id),
                )

    def _load_shares(self) -> None:
        query = "SELECT share, count(*), sum(size), max(used) FROM responses GROUP BY share ORDER BY max(used)"
        for owner, count, num_bytes, used in self._db.execute(query).fetchall():
            self._stored.add(owner, count, num_bytes)
            self._clock = used
        with self._transaction():
            self._trim()
