"""The order of running sequences under each scheduling policy.

Other parts of a policy: `_cohort` in scheduler.py admits sequences in batches under `static`, and in_turn in waiting.py
sorts those that wait under `priority`.
"""

from __future__ import annotations

from collections.abc import Callable

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
