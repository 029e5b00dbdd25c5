"""The order of running sequences under each scheduling policy.

Other parts of a policy: in scheduler.py, `_cohort` admits sequences in batches under `static`, `schedule` sorts the
running ones whenever the policy is `priority`, `_serve_running` gives prompts the whole budget under `prefill-first`,
and `_yields_to` preempts nothing under `static`. `rank` in waiting.py sorts those that wait under `priority`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .sequence import Sequence


def order(policy: str, served: Callable[[Sequence], float]) -> Callable[[Sequence], tuple]:
    """Return the key that sorts running sequences: the first gets its tokens first, the last is preempted first.

    served: how much a sequence's flow has been served.
    """
    if policy == "priority":
        return lambda seq: (seq.request.priority, seq.is_prompt, served(seq), seq.arrival)
    if policy == "prefill-first":
        return lambda seq: (not seq.is_prompt, served(seq), seq.arrival)
    return lambda seq: (seq.is_prompt, served(seq), seq.arrival)


def crowd(
    running: Iterable[Sequence],
    key: Callable[[Sequence], tuple],
    may_yield: Callable[[Sequence], bool],
    starved: Sequence,
) -> list[Sequence]:
    """Return the sequences that make way for a starved one if they may, in the order of preemption.

    These are what flows run besides one sequence each, and what has passed the starved one: it then waits at most for
    those that ran when it was first held up, and not for their successors.
    """
    last_first = sorted(running, key=key, reverse=True)
    left = Counter(seq.flow for seq in last_first)
    found = []
    for seq in last_first:
        if (left[seq.flow] > 1 or seq.passed == starved.id) and may_yield(seq):
            left[seq.flow] -= 1
            found.append(seq)
    return found
