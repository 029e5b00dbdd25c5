"""The memory of this machine: what it has, and what is available now."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Share of the memory that is available now. The rest lets other processes grow without the OOM killer ending this one.
AVAILABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of one device, in bytes."""

    kind: str  # cpu | cuda
    total: int
    available: int  # free or reclaimable
    share: float = AVAILABLE_SHARE  # of what is available that may be taken, on CPU


def measure(device: str, root: Path = Path("/")) -> Machine:
    """Return the current memory of a device, "cpu" or "cuda[:N]". `root` is the parent of /proc and /sys."""
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(torch.device(device))
        if torch.cuda.get_device_properties(torch.device(device)).is_integrated:
            # The memory is the machine's, and what its page cache holds of files counts as used.
            free = min(total, max(free, measure("cpu", root).available))
        return Machine("cuda", total, free)
    total = available = 0
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                size = int(rest.split()[0]) * 1024
                total, available = (size, available) if name == "MemTotal" else (total, size)
    except OSError:  # not Linux
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used in _cgroups(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Machine("cpu", total, available)


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for each control group of this process and its parents, versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit_file, used_file, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, cache = root / "sys/fs/cgroup/memory", "total_inactive_file"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            try:
                limit = int((folder / limit_file).read_text())
                used = int((folder / used_file).read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                found.append((limit, used - int(stat.get(cache, 0))))
            except (OSError, ValueError):  # no such file (a container sees only part of the tree), or "max"
                pass
            if folder == base:
                break
    return found
