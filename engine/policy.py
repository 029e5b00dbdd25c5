"""The order of running sequences under each scheduling policy.

Other parts of a policy: in scheduler.py, `_cohort` admits sequences in batches under `static`, `schedule` sorts the
running ones whenever the policy is `priority`, `_serve_running` gives prompts the whole budget under `prefill-first`,
and `_yields_to` preempts nothing under `static`. `rank` in waiting.py sorts those that wait under `priority`.
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
