"""The mutants of mutants.toml, and a copy of the tree with one of them in it."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
COPIED = ("engine", "server", "tests")
# State that the sampler keeps from step to step; its arithmetic has tests that take longer.
SAMPLER = (
    "splitmix or position_counts or same_seed or min_tokens or penalties_follow or reused_slot or minus_100"
    " or bad_word_matches or only_allowed"
)
CHECKS = {
    "simulation": ["tests.simulation", "--steps", "30000", "--seed", "1", "--workers", "1"],
    "scheduler": ["tests.simulation.scheduler", "--steps", "20000", "--seed", "1"],
    "states": ["tests.simulation.scheduler", "--steps", "20000", "--seed", "6", "--depth", "1", "--states"],
    "sampler": ["pytest", "-q", "-x", "tests/engine/test_sampler.py", "-k", SAMPLER],
}


class Mutant(NamedTuple):
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    why: str  # what would be wrong
    check: str  # one of CHECKS, or a file of tests, or one test

    @property
    def env(self) -> dict[str, str]:
        """Variables that the command needs: Triton interprets in a whole process or not at all."""
        return {"TRITON_INTERPRET": "1"} if Path(self.check).name.startswith("interpreted") else {}

    @property
    def command(self) -> list[str]:
        """Arguments of `python -m` that must fail where the mutant is."""
        return CHECKS.get(self.check) or ["pytest", "-q", "-x", self.check]

    def source(self) -> str:
        """The file with the fault in it; raises ValueError when the place is not there, or not only once."""
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    return [Mutant(**row) for row in tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]]


def plant(mutant: Mutant | None, folder: Path) -> None:
    """Make a copy of the tree in a folder, with the mutant in it; None: as it is."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, copy_function=_copy)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutant is not None:
        (folder / mutant.file).write_text(mutant.source())


def _copy(source: str, target: str) -> None:
    """Link what is large, such as weights and compiled kernels, and only read; copy the rest."""
    try:
        if os.path.getsize(source) < 1 << 20:
            raise OSError
        os.link(source, target)
    except OSError:  # or it is on another file system
        shutil.copy2(source, target)
