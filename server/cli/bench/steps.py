"""The engine's steps, read from the step log of a Pequod that was started here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ...observability.phases import PHASES
from .figures import Figures, median

if TYPE_CHECKING:
    from engine import Roofline


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine."""

    rows: int
    prompt_tokens: int
    decode_tokens: int
    output_tokens: int  # added to outputs
    context: int  # tokens that the rows attend to, summed over the rows
    pairs: int  # of a token and one that it attends to
    logits: int  # positions whose logits are computed
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Return the seconds of all phases. Grammar masks are not one: they are computed during the forward pass."""
        return sum(self.seconds.get(phase, 0.0) for phase in PHASES)


class StepLog:
    """A reader of a step log that returns each step once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Step]:
        """Return the steps since the last call. An incomplete last line is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        lines = [json.loads(line) for line in text.splitlines()]
        names = [field.name for field in fields(Step)]
        return [Step(**{name: line[name] for name in names} | {"rows": len(line["rows"])}) for line in lines]


def decoding(steps: Sequence[Step], rows: int) -> list[Step]:
    """Return the steps in which this number of rows sampled a token each, and nothing else was computed."""
    return [step for step in steps if step.rows == step.decode_tokens == rows and not step.prompt_tokens]


def prefilling(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that computed prompt tokens only."""
    return [step for step in steps if step.prompt_tokens and not step.decode_tokens]


def limit_seconds(limit: Roofline, step: Step) -> float:
    """Return the minimum time of a step on this machine."""
    return limit.seconds(step.prompt_tokens + step.decode_tokens, step.context, step.pairs, step.logits)


def phases(steps: Sequence[Step]) -> Figures:
    """Return medians over the steps, in seconds: of the step, of each phase, of our CPU kernels, and of the rest.

    The rest is the time outside our kernels; if they are not used, as with torch or a GPU, outside the forward pass.
    """
    found: Figures = {"step_s": median(step.total for step in steps)}
    for phase in PHASES:
        found[f"{phase}_s"] = median(step.seconds.get(phase, 0.0) for step in steps)
    found["kernels_s"] = median(step.seconds.get("kernels", 0.0) for step in steps)
    found["rest_s"] = median(
        step.total - (step.seconds.get("kernels") or step.seconds.get("forward", 0.0)) for step in steps
    )
    return found
