"""Suspects: which request kills the engine, found by letting those that may be it run in ever smaller groups.

Pure bookkeeping about request ids; whoever supervises the engine says what happens and asks who may run.

When the engine dies, all requests that were running are handed to the next one together: most deaths are nobody's
fault. A request that was running at two deaths in a row, and came no further in between, is a suspect. Suspects run by
halves while everybody else waits. A group in which each request comes past the place where it was is cleared; one in
which the engine dies again is halved; and a request with which the engine dies while nothing else has run in its life
is guilty. With 16 requests that takes six deaths, and 15 of the requests lose nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# A request that was running at a death is past the place that may have caused it when it has sampled this many tokens
# to the power of its deaths before: what kills after some more tokens each time is found too.
TOKENS_FACTOR = 4
FAR = 256  # tokens after which its deaths are forgotten, and the most that it must sample to be past one


class Suspects:
    """All ids are of requests that are open; those that end are taken out with `ended`."""

    def __init__(self) -> None:
        self._ran: set[int] = set()  # in this life of the engine, and is open
        self._has_closed = False  # whether a request that is no longer open has run in this life too
        self._deaths: dict[int, int] = {}  # at which a request was running, until it has come far
        self._came: dict[int, int] = {}  # tokens since the last of them
        self._doubtful: set[int] = set()  # was running at the last death, and is not past it
        self._group: list[int] = []  # runs now alone, as far as it is not cleared
        self._groups: list[list[int]] = []  # is to run after it

    def may_run(self, request_id: int) -> bool:
        """Whether the engine may get a request, or has it."""
        return not self._group or request_id in self._group or request_id in self._ran

    def ran(self, request_id: int) -> None:
        """The engine has begun to work on a request."""
        self._ran.add(request_id)

    def ran_closed(self) -> None:
        """The engine has begun to work on a request that has ended in the meantime."""
        self._has_closed = True

    def has_run(self, request_id: int) -> bool:
        """Whether it has, in this life."""
        return request_id in self._ran

    def came(self, request_id: int, tokens: int) -> bool:
        """A request has this many more tokens; returns whether others may run now that might not before."""
        if request_id not in self._deaths:
            return False
        self._came[request_id] += tokens
        needed = min(FAR, TOKENS_FACTOR ** (self._deaths[request_id] - 1))
        if self._came[request_id] >= FAR:
            del self._deaths[request_id], self._came[request_id]
            return self._clear(request_id)
        return self._came[request_id] >= needed and self._clear(request_id)

    def ended(self, request_id: int) -> bool:
        """A request is over, however it was; returns whether others may run now that might not before."""
        self._deaths.pop(request_id, None)
        self._came.pop(request_id, None)
        if request_id in self._ran:
            self._ran.remove(request_id)
            self._has_closed = True  # the engine may learn of it too late: it can still be what kills it
        return self._clear(request_id)

    def _clear(self, request_id: int) -> bool:
        """A request is no suspect any more; returns whether its group was waiting for this."""
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
        """The engine has died; returns the request that killed it once that is certain: the caller ends it.

        `open_ids`: all requests, in the order of their arrival.
        """
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
    """The ids in two groups, or in one where there is but one."""
    middle = (len(ids) + 1) // 2
    return [list(half) for half in (ids[:middle], ids[middle:]) if half]
