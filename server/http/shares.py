"""Shared: one bounded amount that callers share, so that none of them can take all of it."""

from __future__ import annotations

import math

# With n callers at work, one of equal weight may take SHARE / (1 + SHARE * n) of the whole: alone 4/5, of two 4/9 each.
# What is left over is for those who come next, who need not wait until somebody gives something back.
SHARE = 4


class Shared:
    """Amounts of one resource, such as places in the queue or bytes, by caller."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.open = 0  # taken, by all callers together
        self._taken: dict[str, int] = {}  # by caller; only those who hold something
        self._weights: dict[str, float] = {}  # of the same callers

    def of(self, caller: str) -> int:
        """What a caller holds."""
        return self._taken.get(caller, 0)

    def share(self, caller: str, weight: float = 1.0) -> int:
        """The most that a caller may hold while the others hold what they do now."""
        others = sum(self._weights.values()) - self._weights.get(caller, 0.0)
        count = len(self._weights) + (caller not in self._weights)
        mean = (others + weight) / count
        return math.ceil(self.total * SHARE * weight / (mean + SHARE * (others + weight)))

    def has_room(self, amount: int) -> bool:
        """Whether the amount is there at all, for whomever."""
        return self.open + amount <= self.total

    def take(self, caller: str, amount: int, weight: float = 1.0) -> None:
        """Count an amount for a caller; whether it may have it has been asked before."""
        if amount:
            self.open += amount
            self._taken[caller] = self._taken.get(caller, 0) + amount
            self._weights[caller] = weight

    def give_back(self, caller: str, amount: int) -> None:
        """Return what was taken."""
        if amount:
            self.open -= amount
            left = self._taken[caller] - amount
            if left:
                self._taken[caller] = left
            else:
                del self._taken[caller], self._weights[caller]
