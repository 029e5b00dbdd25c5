"""Metrics of single tokens: counted here and given to the library at a scrape.

The library takes a lock for each bucket, sum and counter, which for each of tens of thousands of tokens per second took
a tenth of the server's time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class TokenTimes:
    """The number of tokens delivered and the times between them, for histograms with any of the given buckets."""

    def __init__(self, *buckets: Sequence[float]) -> None:
        self.num_tokens = 0
        self._bounds = sorted({bound for each in buckets for bound in each})
        self._counts = [0] * (len(self._bounds) + 1)  # by bucket between two bounds, not cumulative
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Record `count` tokens, each of which came this long after the one before."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def counter(self, name: str, text: str, labels: Mapping[str, str]) -> CounterMetricFamily:
        """Return the number of tokens as a family."""
        family = CounterMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), self.num_tokens)
        return family

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Mapping[str, str]
    ) -> HistogramMetricFamily:
        """Return the times as a family with these buckets."""
        up_to = list(accumulate(self._counts))
        counts = [(floatToGoString(bound), up_to[self._bounds.index(bound)]) for bound in buckets]
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), [*counts, ("+Inf", up_to[-1])], self._sum)
        return family
