"""Service: counts the tokens that each flow has been served, so that the flow with the lowest counter is next.

A flow is the API key or client that a request is charged to. Among waiting requests, those of the flow with the lowest
counter are first. After Sheng et al. 2024, "Fairness in Serving Large Language Models" (virtual token counters): a
prompt is charged when it is admitted, output as it is sampled, and a flow gains no credit while none of its requests
waits: what it runs then is all that it wants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

OUTPUT_COST = 2.0  # of a sampled token, in prompt tokens: a decode row costs more than a token of a chunk
MAX_IDLE = 1024  # idle flows whose counters are kept, so that pausing does not clear a debt


class Service:
    """The weighted number of tokens that each flow has been served."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # of active flows, which have requests
        self._requests: dict[str, int] = {}  # of the same flows
        self._idle: OrderedDict[str, float] = OrderedDict()  # of idle flows, the longest idle first
        self._level = 0.0  # the counter of the flow that was the last to start a request

    @property
    def num_flows(self) -> int:
        """The number of flows that have requests."""
        return len(self._requests)

    def enter(self, flow: str, waiting: Collection[str] = ()) -> None:
        """Record that a request of the flow arrives. waiting: the flows of which requests wait already."""
        if flow not in waiting:
            own = self._served.get(flow, self._idle.pop(flow, 0.0))
            if waiting:
                least = min(self._served[other] for other in waiting)
            else:
                least = max(self._level, min(self._served.values(), default=0.0))
            self._served[flow] = max(own, least)
        self._requests[flow] = self._requests.get(flow, 0) + 1

    def start(self, flow: str) -> None:
        """Record that a waiting request of the flow starts."""
        self._level = self._served[flow]

    def leave(self, flow: str) -> None:
        """Record that a request of the flow has ended."""
        self._requests[flow] -= 1
        if self._requests[flow]:
            return
        del self._requests[flow]
        self._idle[flow] = self._served.pop(flow)
        if not self._requests:  # no flow is left to compare with
            self._idle.clear()
            self._level = 0.0
        elif len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)

    def charge(self, flow: str, tokens: float, weight: float) -> None:
        """Charge tokens to the flow."""
        self._served[flow] += tokens / weight

    def of(self, flow: str) -> float:
        """Return the counter of an active flow."""
        return self._served[flow]
