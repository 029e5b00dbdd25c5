"""The store's records and its SQLite file: its permissions, its lock, and the version of its table."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

APPLICATION_ID = 0x50657164  # "Peqd"
VERSION = 2  # 1 had another index
BUSY_S = 1.0  # for another process to release its lock
OWNER_ONLY = 0o600
ROW_BYTES = 512  # of a row besides its texts
SOMETHING_ELSE = "it is a database of something else"

log = logging.getLogger("pequod.store")


class Record(NamedTuple):
    """A stored response, and the conversation that led to it."""

    id: str
    owner: str  # the only one who may see it: a hash of the API key
    is_open: bool  # it is still being generated
    answer: bytes  # the response as JSON
    items: bytes  # the conversation before it as JSON
    payer: str = ""  # whose share it counts against; "": the owner's, as always where there are keys

    @property
    def share(self) -> str:
        return self.payer or self.owner

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.items) + ROW_BYTES


def open_database(path: Path | None) -> sqlite3.Connection:
    """Open and lock the database of a store, new or of an earlier process; raises OSError or sqlite3.Error."""
    if path is None:
        return prepared(sqlite3.connect(":memory:", check_same_thread=False))
    file = claim(path)
    try:
        db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        if not os.path.samestat(os.lstat(path), os.fstat(file)):
            db.close()
            raise OSError(errno.ESTALE, f"{path.name} was replaced while it was being opened")
    finally:
        os.close(file)  # before SQLite locks the file: closing any descriptor of a file drops the process's locks on it
    return prepared(db)


def prepared(db: sqlite3.Connection) -> sqlite3.Connection:
    """Lock a database and migrate it to this version; closes it on failure."""
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA secure_delete = ON")  # overwrites what is deleted; free pages would keep it
        # After a crash of the machine the last responses may be missing; the file stays whole.
        db.execute("PRAGMA synchronous = NORMAL")
        with db:
            db.execute("BEGIN IMMEDIATE")  # the lock is taken now, not with the first response
            migrate(db)
    except BaseException as error:
        db.close()
        if str(error) == "database is locked":
            raise sqlite3.OperationalError("another process has it open") from None
        raise
    return db


def migrate(db: sqlite3.Connection) -> None:
    """Create the table of a new database, or migrate an older one to this version; raises DatabaseError."""
    kind, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        db.execute(
            "CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, is_open INTEGER NOT NULL, "
            "answer BLOB NOT NULL, items BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL, "
            "share TEXT NOT NULL)"
        )
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    elif kind != APPLICATION_ID:
        raise sqlite3.DatabaseError(SOMETHING_ELSE)
    elif version == VERSION:
        return
    elif version == 1:
        db.execute("DROP INDEX by_use")
        db.execute("ALTER TABLE responses ADD COLUMN share TEXT NOT NULL DEFAULT ''")
        db.execute("UPDATE responses SET share = owner")
    else:
        raise sqlite3.DatabaseError(f"its format has version {version}, and this server reads 1 to {VERSION}")
    db.execute("CREATE INDEX by_share ON responses (share, used, size)")
    db.execute(f"PRAGMA user_version = {VERSION}")


def claim(path: Path) -> int:
    """Open the file of a store, new or checked, and deny other users access to it and to SQLite's files beside it.

    Returns its descriptor; raises OSError.
    """
    beside = [path.with_name(path.name + suffix) for suffix in ("-journal", "-shm", "-wal")]
    # The file of a killed process may lack the application's id, which is then in one of these.
    is_whole = not any(os.path.lexists(other) for other in beside)
    file = open_private(path, os.O_CREAT, lambda file: check_header(file, is_whole))
    try:
        for other in beside:
            with contextlib.suppress(FileNotFoundError):
                os.close(open_private(other))
    except BaseException:
        os.close(file)
        raise
    return file


def check_header(file: int, is_whole: bool) -> None:
    """Raise OSError for a file of another program, which must not be changed, not even its mode."""
    header = os.pread(file, 100, 0)
    if header and not header.startswith(b"SQLite format 3\0"):
        raise OSError(errno.EINVAL, "file is not a database")
    if header and is_whole and int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise OSError(errno.EINVAL, SOMETHING_ELSE)


def open_private(path: Path, flags: int = 0, check: Callable[[int], None] | None = None) -> int:
    """Open a file and give it the mode 0600; raises OSError unless it is a regular one of this user's that passes a
    check."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, OWNER_ONLY)
    except OSError as error:
        if path.is_symlink():
            raise OSError(error.errno, f"{path.name} is a symbolic link, which is not followed") from None
        if path.is_socket():
            raise OSError(error.errno, f"{path.name} is not a regular file") from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
        if found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{path.name} belongs to another user (uid {found.st_uid})")
        if check is not None:
            check(file)
        mode = stat.S_IMODE(found.st_mode)
        if mode & ~OWNER_ONLY:
            os.fchmod(file, OWNER_ONLY)
            log.warning("changed the mode of %s from %04o to %04o: conversations are private", path, mode, OWNER_ONLY)
    except BaseException:
        os.close(file)
        raise
    return file
