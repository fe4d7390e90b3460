"""This module counts what the endpoint does, for `/metrics` in Prometheus' text format.

Guarantees: names and labels are fixed words and statuses. No model name, key or text of a request becomes a label.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WEIGHT = 0.2
"""The weight of the newest request in the moving average of how long requests take."""
_MOST_BUSY_S = 60.0


class Metrics:
    """Holds the counters of one endpoint."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """Makes counters that start at 0.

        Args:
            gauges: a function that returns the present value of each gauge, by name.
        """
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "veilbase_endpoint_requests", "Requests.", ("route", "status"), registry=self._registry
        )  # fmt: skip
        self._seconds = Histogram(
            "veilbase_endpoint_request_seconds", "Seconds from the first byte of a request to the end of its answer.",
            ("route",), buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter(
            "veilbase_endpoint_tokens", "Tokens of prompts and of answers.", ("kind",), registry=self._registry
        )
        self._registry.register(_Gauges(gauges))
        self._lock = threading.Lock()
        self._mean_s = 1.0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Counts one request; a status of 0 stands for a client that left before the response."""
        self._requests.labels(route, str(status or "gone")).inc()
        self._seconds.labels(route).observe(seconds)

    def count_answer(self, num_prompt: int, num_new: int, seconds: float) -> None:
        """Counts the tokens of one request and its answers, and records how long the request took."""
        self._tokens.labels("prompt").inc(num_prompt)
        self._tokens.labels("answer").inc(num_new)
        with self._lock:
            self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def busy_s(self) -> float:
        """Returns the seconds after which a full engine is expected to take another request: a moving average of how
        long requests took, but at least 1 and at most 60."""
        with self._lock:
            return min(_MOST_BUSY_S, max(1.0, self._mean_s))

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Reads the values of the gauges each time Prometheus collects them."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yields one gauge for each name."""
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"veilbase_endpoint_{name}", f"Present {name.replace('_', ' ')}.", value)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Returns an empty list, so that no gauge is read when this collector is registered."""
        return ()
