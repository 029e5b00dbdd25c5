"""Suspects: finds the request that kills the engine by bisection.

This is bookkeeping about request ids. The supervisor reports events and queries which requests may run.

After a crash all running requests are resumed together, because most crashes are not caused by a request. A request
that was running at two crashes in a row without progress in between is a suspect. Suspects run in groups of half their
number while all other requests wait. A group is cleared when each of its requests has made progress, and halved when
the engine crashes again. A request is guilty if the engine crashes while it is the only one that has run in that
process. With 16 requests this takes six crashes, and the other 15 only lose time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# After its n-th crash a request has made progress once it has sampled TOKENS_FACTOR ** (n - 1) tokens. The number grows
# so that a request which crashes the engine some tokens later each time is found too.
TOKENS_FACTOR = 4
FAR = 256  # tokens after which a request's crashes are forgotten; never more are needed for progress


class Suspects:
    """Tracks open requests by id, until `ended` removes them."""

    def __init__(self) -> None:
        self._ran: set[int] = set()  # open requests that have run in this process of the engine
        self._has_closed = False  # whether a request that is no longer open has run in it
        self._deaths: dict[int, int] = {}  # crashes at which a request was running, until it has sampled FAR tokens
        self._came: dict[int, int] = {}  # tokens sampled since the last of them
        self._doubtful: set[int] = set()  # was running at the last crash, and has made no progress since
        self._group: list[int] = []  # runs now, and is not yet cleared
        self._groups: list[list[int]] = []  # to run next

    def may_run(self, request_id: int) -> bool:
        """Return whether a request may be sent to the engine, or has been."""
        return not self._group or request_id in self._group or request_id in self._ran

    def ran(self, request_id: int) -> None:
        """Record that the engine has started a request."""
        self._ran.add(request_id)

    def ran_closed(self) -> None:
        """Record that the engine has started a request that has ended in the meantime."""
        self._has_closed = True

    def has_run(self, request_id: int) -> bool:
        """Return whether this process of the engine has started a request."""
        return request_id in self._ran

    def came(self, request_id: int, tokens: int) -> bool:
        """Record new tokens of a request; returns whether more requests may run now."""
        if request_id not in self._deaths:
            return False
        self._came[request_id] += tokens
        needed = min(FAR, TOKENS_FACTOR ** (self._deaths[request_id] - 1))
        if self._came[request_id] >= FAR:
            del self._deaths[request_id], self._came[request_id]
            return self._clear(request_id)
        return self._came[request_id] >= needed and self._clear(request_id)

    def ended(self, request_id: int) -> bool:
        """Record that a request has ended; returns whether more requests may run now."""
        self._deaths.pop(request_id, None)
        self._came.pop(request_id, None)
        if request_id in self._ran:
            self._ran.remove(request_id)
            self._has_closed = True  # it may still crash the engine, which may learn of its end too late
        return self._clear(request_id)

    def _clear(self, request_id: int) -> bool:
        """Clear a request of suspicion; returns whether the next group may run now."""
        self._doubtful.discard(request_id)
        self._groups = [rest for group in self._groups if (rest := [each for each in group if each != request_id])]
        if request_id not in self._group:
            return False
        self._group.remove(request_id)
        if not self._group:
            self._group = self._groups.pop(0) if self._groups else []
            return True
        return False

    def died(self, open_ids: Iterable[int]) -> int | None:
        """Record a crash of the engine; returns the guilty request, which the caller ends, or None if it is not known.

        `open_ids`: all open requests, in arrival order.
        """
        if not self._ran and not self._has_closed:  # it died while it loaded, or could not be started
            return None
        ran, self._ran = self._ran, set()
        has_closed, self._has_closed = self._has_closed, False
        running = [request_id for request_id in open_ids if request_id in ran]
        suspects = [each for each in running if (each in self._group if self._group else each in self._doubtful)]
        for request_id in running:
            self._deaths[request_id] = self._deaths.get(request_id, 0) + 1
            self._came[request_id] = 0
        self._doubtful = set(running)
        if suspects and running == suspects[:1] and not has_closed:
            return suspects[0]
        if suspects:
            self._groups[:0] = halves(suspects)
            self._group = self._groups.pop(0)
        return None


def halves(ids: Sequence[int]) -> list[list[int]]:
    """Split the ids into two groups, or one if there is only one id."""
    middle = (len(ids) + 1) // 2
    return [list(half) for half in (ids[:middle], ids[middle:]) if half]
