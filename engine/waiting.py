"""WaitingQueue: the sequences that hold no blocks, and the order in which they may start."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush

from .sequence import Sequence
from .service import Service

Claim = tuple[int, bool, bool, float, int, str]


class WaitingQueue:
    """A queue per flow. Each is in order of priority, under that policy, and then of arrival."""

    def __init__(self, service: Service, by_priority: bool) -> None:
        self._service = service
        self._by_priority = by_priority
        self._queues: dict[str, list[Sequence]] = {}  # by flow; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order of priority and arrival, over all flows."""
        return iter(sorted((seq for queue in self._queues.values() for seq in queue), key=self.rank))

    def priority(self, seq: Sequence) -> int:
        """Return a sequence's priority, which counts only under that policy; lower is first."""
        return seq.request.priority if self._by_priority else 0

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """Return the key by which the sequences of a flow are sorted."""
        return self.priority(seq), seq.arrival

    @property
    def flows(self) -> Collection[str]:
        """The flows that have waiting sequences."""
        return self._queues.keys()

    def add(self, seq: Sequence) -> None:
        insort(self._queues.setdefault(seq.request.flow, []), seq, key=self.rank)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        queue = self._queues[seq.request.flow]
        queue.remove(seq)
        self._count -= 1
        if not queue:
            del self._queues[seq.request.flow]

    def in_turn(self, running: set[str]) -> Iterator[Sequence]:
        """Iterate in the order in which the sequences may start; each may be removed when it is reached.

        running: the flows that run sequences. First are flows that run nothing, among these sequences that were
        preempted because blocks ran out, then the flow that has been served least.
        """
        queues = {flow: iter(list(queue)) for flow, queue in self._queues.items()}
        if self._service.num_flows <= 1:
            for queue in queues.values():
                yield from queue
            return
        running = set(running)
        heads = {flow: next(queue) for flow, queue in queues.items()}
        claims = [self._claim(seq, running) for seq in heads.values()]
        heapify(claims)
        while claims:
            flow = heappop(claims)[-1]
            yield heads[flow]
            running.add(flow)
            following = next(queues[flow], None)
            if following is not None:  # its claim counts what the flow was charged for the one before
                heads[flow] = following
                heappush(claims, self._claim(following, running))

    def starved(self, running: Iterable[Sequence]) -> Sequence | None:
        """Return the next sequence in turn if its flow is not among those of `running`, which are others."""
        if not self._queues or self._service.num_flows < 2:
            return None
        flows = {seq.flow for seq in running}
        first = min(self._claim(queue[0], flows) for queue in self._queues.values())[-1]
        return self._queues[first][0] if flows and first not in flows else None

    def _claim(self, seq: Sequence, running: set[str]) -> Claim:
        """Return the key by which the first sequences of the flows are sorted."""
        flow = seq.request.flow
        return self.priority(seq), flow in running, not seq.lacked_blocks, self._service.of(flow), seq.arrival, flow
