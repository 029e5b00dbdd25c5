"""FairShares: a bounded resource of which no caller can take everything."""

from __future__ import annotations

import math

# Each of n callers of equal weight may hold SHARE / (1 + SHARE * n) of the total: 4/5 of it alone, 4/9 with one other.
# The rest is for new callers, so that they need not wait for a release.
SHARE = 4


class FairShares:
    """The amounts of one resource, such as bytes, that callers hold."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.open = 0  # held by all callers together
        self._held: dict[str, int] = {}  # by caller, only if it is not 0
        self._weights: dict[str, float] = {}  # of the same callers

    def of(self, caller: str) -> int:
        """The amount that a caller holds."""
        return self._held.get(caller, 0)

    def share(self, caller: str, weight: float = 1.0) -> int:
        """The most that a caller may hold, given the callers that hold something now."""
        others = sum(self._weights.values()) - self._weights.get(caller, 0.0)
        count = len(self._weights) + (caller not in self._weights)
        mean = (others + weight) / count
        return math.ceil(self.total * SHARE * weight / (mean + SHARE * (others + weight)))

    def fits(self, amount: int) -> bool:
        """Whether the amount is available, regardless of shares."""
        return self.open + amount <= self.total

    def acquire(self, caller: str, amount: int, weight: float = 1.0) -> None:
        """Count an amount for a caller, unchecked."""
        if amount:
            self.open += amount
            self._held[caller] = self.of(caller) + amount
            self._weights[caller] = weight

    def release(self, caller: str, amount: int) -> None:
        """Return an amount that was acquired."""
        if amount:
            self.open -= amount
            self._held[caller] -= amount
            if not self._held[caller]:
                del self._held[caller], self._weights[caller]
