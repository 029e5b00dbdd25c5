"""The hatch build hook: `pip install`, `pip install -e .` and `pip wheel` compile the CPU kernels.

A wheel carries the library beside the sources and names its platform; an editable install finds it in the checkout.
Without a compiler, or on a machine that has no kernels, Pequod installs all the same and torch computes.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Compile before the wheel is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "standard" or "editable"; `build_data` tells hatchling what the wheel is."""
        build = _load(Path(self.root, "engine", "kernels", "build.py"))
        try:
            library = build.library(beside=True)
        except (build.BuildError, OSError) as error:
            lost = "torch will compute, slower and with results that depend on the batch"
            print(f"Pequod is installed without its CPU kernels ({error}): {lost}", file=sys.stderr)
            return
        for other in set(library.parent.glob("pequod-kernels-*.so")) - {library}:
            other.unlink()  # of older sources
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        # Ignored by git, and so by hatchling unless it is named.
        build_data["artifacts"].append(f"/engine/kernels/{library.name}")


def _load(path: Path) -> Any:
    """A module by its file: what it belongs to cannot be imported where Pequod is only being built."""
    spec = importlib.util.spec_from_file_location("pequod_kernels_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
