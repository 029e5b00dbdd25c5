"""Service: which flow has had the least of the engine, and is served next.

A flow is whoever a request counts against: an API key, a client. Each has a counter of the tokens that it has been
served; among requests that wait the flow with the lowest counter is first. After Sheng et al. 2024, "Fairness in
Serving Large Language Models" (virtual token counters): a prompt counts when it is admitted, output as it is sampled,
and a flow that comes back after a pause has saved nothing up.
"""

from __future__ import annotations

from collections import OrderedDict

OUTPUT_COST = 2.0  # of a sampled token, in prompt tokens: a step of one token costs more than its part of a chunk
MAX_ABSENT = 1024  # flows without a request whose counters are kept, so that leaving does not clear a debt


class Service:
    """Weighted tokens that each flow has been served."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # of flows that have requests
        self._requests: dict[str, int] = {}  # of the same flows
        self._absent: OrderedDict[str, float] = OrderedDict()  # of flows that have none, the longest absent first

    @property
    def num_flows(self) -> int:
        """Flows that have requests."""
        return len(self._requests)

    def enter(self, flow: str) -> None:
        """A request of the flow arrives."""
        if flow not in self._requests:
            least = min(self._served.values(), default=0.0)
            self._served[flow] = max(self._absent.pop(flow, 0.0), least)
        self._requests[flow] = self._requests.get(flow, 0) + 1

    def leave(self, flow: str) -> None:
        """A request of the flow has ended."""
        self._requests[flow] -= 1
        if self._requests[flow]:
            return
        del self._requests[flow]
        self._absent[flow] = self._served.pop(flow)
        if not self._requests:  # nobody is there to be compared with
            self._absent.clear()
        elif len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def charge(self, flow: str, tokens: float, weight: float) -> None:
        """Count tokens that the flow has been served."""
        self._served[flow] += tokens / weight

    def of(self, flow: str) -> float:
        """What a flow that has requests has been served."""
        return self._served[flow]
