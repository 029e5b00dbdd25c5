"""The hatch build hook that compiles the CPU kernels for `pip install`, `pip install -e .` and `pip wheel`.

A wheel contains the library beside the sources and names its platform; an editable install uses the one in the
checkout. Without a compiler, or on a machine that the kernels do not support, Pequod is installed without them and uses
torch.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Compiles the kernels before the wheel is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the library to the wheel. `version` is "standard" or "editable"."""
        build = _load(Path(self.root, "engine", "kernels", "build.py"))
        try:
            library = build.library(beside=True)
        except (build.BuildError, OSError) as error:
            consequence = "torch will compute, slower and with results that depend on the batch"
            print(f"Pequod is installed without its CPU kernels ({error}): {consequence}", file=sys.stderr)
            return
        for other in set(library.parent.glob("pequod-kernels-*.so")) - {library}:
            other.unlink()  # built from older sources
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        # Git ignores the library, and so would hatchling unless it is an artifact.
        build_data["artifacts"].append(f"/engine/kernels/{library.name}")


def _load(path: Path) -> Any:
    """Import a module by its path, because its package cannot be imported while Pequod is being built."""
    spec = importlib.util.spec_from_file_location("pequod_kernels_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
