"""StepLimits: the largest step that is tried, which is smaller for a while after a step ran out of memory."""

from __future__ import annotations

# Number of successful steps after which the limits are raised again: each failure costs a request. The number doubles
# with each failure, up to MOST_GOOD_STEPS; after so many successful steps at full size the failures are forgotten.
GOOD_STEPS, MOST_GOOD_STEPS = 64, 1 << 14


class StepLimits:
    """The most sequences and tokens of a step, and whether a step may be launched while another one is in flight."""

    def __init__(self, max_seqs: int, budget: int) -> None:
        self._configured = max_seqs, budget
        self.max_seqs = max_seqs
        self.budget = budget  # tokens
        self.is_alone = False  # no other step may be in flight
        self._good_steps = 0  # since the last failure, or since the limits were last raised
        self._patience = GOOD_STEPS // 2  # number of them after which the limits are raised

    def share(self, num_prompts: int, long_prefill: int | None) -> int:
        """Return the most tokens that one sequence may take of a step: a part if several prompts want them."""
        if num_prompts <= 1:
            return self.budget
        return long_prefill or max(1, self.budget // 2)

    def shrink(self, num_rows: int) -> None:
        """Record that a step of `num_rows` rows ran out of memory."""
        self._patience = min(MOST_GOOD_STEPS, self._patience * 2)
        self._good_steps = 0
        if self.budget <= self.max_seqs:  # fewer tokens did not help: fewer rows
            self.max_seqs = max(1, min(self.max_seqs, num_rows) - 1)
        self.budget = max(self.max_seqs, self.budget // 2)

    def separate(self) -> None:
        """Record that a step ran out of memory while another one was in flight."""
        self._patience = min(MOST_GOOD_STEPS, self._patience * 2)
        self._good_steps = 0
        self.is_alone = True

    def recover(self) -> None:
        """Record that a step fitted into memory."""
        self._good_steps += 1
        max_seqs, budget = self._configured
        if self.max_seqs >= max_seqs and self.budget >= budget and not self.is_alone:
            if self._good_steps == MOST_GOOD_STEPS:
                self._patience = GOOD_STEPS // 2
        elif self._good_steps >= self._patience:
            self._good_steps = 0
            self.is_alone = False
            self.max_seqs = min(max_seqs, self.max_seqs + max(1, self.max_seqs // 2))
            self.budget = min(budget, max(2 * self.budget, self.max_seqs))
