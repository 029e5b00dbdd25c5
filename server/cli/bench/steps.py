"""The engine's own account of its steps, from the step log of a Pequod that was started here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observability.phases import PHASES
from .figures import Figures, median

if TYPE_CHECKING:
    from engine import Roofline


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine."""

    time: float  # seconds since the epoch, when it had ended
    rows: int
    prompt_tokens: int
    decode_tokens: int
    context: int  # tokens that its rows see, summed over them
    pairs: int  # pairs of a token and one that it sees
    logits: int  # positions whose logits are computed
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all phases; the masks of grammars are filled beside the forward pass."""
        return sum(self.seconds.get(phase, 0.0) for phase in PHASES)


class StepLog:
    """Reads what has been added to a step log since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def read(self) -> list[Step]:
        """The steps since the last call; a line that is still being written waits for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
        except OSError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._place += len(text)
        return [_step(json.loads(line)) for line in text.splitlines()]


def _step(line: dict[str, Any]) -> Step:
    return Step(
        time=line["time"],
        rows=len(line["rows"]),
        prompt_tokens=line["prompt_tokens"],
        decode_tokens=line["decode_tokens"],
        context=line["context"],
        pairs=line["pairs"],
        logits=line["logits"],
        seconds=line["seconds"],
    )


def decoding(steps: Sequence[Step], rows: int) -> list[Step]:
    """The steps in which so many rows drew one token each and nothing else was computed."""
    return [step for step in steps if step.rows == step.decode_tokens == rows and not step.prompt_tokens]


def prefilling(steps: Sequence[Step]) -> list[Step]:
    """The steps that computed prompts alone."""
    return [step for step in steps if step.prompt_tokens and not step.decode_tokens]


def least(limit: Roofline, step: Step) -> float:
    """The least seconds that a step could take."""
    return limit.seconds(step.prompt_tokens + step.decode_tokens, step.context, step.pairs, step.logits)


def phases(steps: Sequence[Step]) -> Figures:
    """Medians over the steps: of the whole, of each phase, of our CPU kernels within them, and of the rest.

    The rest is what is not in kernels; where there are none, torch or a GPU computes, what is not the forward pass.
    """
    found: Figures = {"step_s": median(step.total for step in steps)}
    for phase in PHASES:
        found[f"{phase}_s"] = median(step.seconds.get(phase, 0.0) for step in steps)
    found["kernels_s"] = median(step.seconds.get("kernels", 0.0) for step in steps)
    found["rest_s"] = median(
        step.total - (step.seconds.get("kernels") or step.seconds.get("forward", 0.0)) for step in steps
    )
    return found
