"""Where Pequod keeps files that it can make again: the user's cache directory, or a private temporary one."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_root() -> Path:
    """Return the directory of Pequod's caches. It need not exist, and may be impossible to create."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen, "pequod")
    home = os.path.expanduser("~")  # unlike Path.home(), it does not raise for a user without a home directory
    return Path("/nonexistent" if home == "~" else home, ".cache", "pequod")


def temporary_root() -> Path:
    """Return the directory for what does not fit into `cache_root`; all processes of a user share it."""
    return Path(os.environ.get("TMPDIR") or "/tmp", f"pequod-{os.getuid()}")


def is_private(folder: Path) -> bool:
    """Return whether a directory exists that only this user can read and write: others can create one in /tmp, too."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def make_private(folder: Path) -> None:
    """Create a directory for this user alone, unless it exists. Raises PermissionError for one of another user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is not this user's alone")
