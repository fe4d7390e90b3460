"""Counts the products that the executor computes, and collects these and the provider's other counts as Prometheus
metrics.

A `Meter` keeps histograms of the products' sizes and times, and of the requests' waits and latencies. A
`ProviderCollector` collects the provider's counts, such as the tenants' usage, each time that the metrics are read.

Guarantees: at most `MAX_TENANTS` tenants are named, and all others are added up under the label `OTHER`. No label holds
a value of a tensor, or a text that a tenant chose. While the metrics are read, requests go on: a counter is locked only
while it is copied.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from provider.operations.usage import Usage, UsageBook
from provider.schedule.ticket import Piece, RequestClass

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
_REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """Counts observed values in buckets, each of which has an upper bound. This class is not thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Makes an empty bucket for each upper bound in `bounds`, which must rise, and a last bucket without a
        bound."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts one observed value in the bucket for this value, and adds the value to the sum."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the buckets in the form that Prometheus uses: each upper bound, with the number of observations that
        are not above it."""
        rising, total = [], 0
        for bound, count in zip((*(str(float(one)) for one in self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rising.append((bound, float(total)))
        return rising

    def copy(self) -> Histogram:
        """Returns a copy that later observations do not change."""
        other = Histogram(self.bounds)
        other.counts, other.sum = list(self.counts), self.sum
        return other


class GroupWait(NamedTuple):
    """Holds the number of requests of one layer group, and the sum of the seconds that they waited for their first
    product."""

    requests: int
    seconds: float


class Meter:
    """Counts products, and measures how long requests wait for their first product. This class is thread-safe."""

    def __init__(self) -> None:
        """Sets all counters and histograms to zero."""
        self._lock = threading.Lock()
        self._inline = 0
        self._waits: dict[int, list[float]] = {}
        """For each layer group's id, the two fields of `GroupWait`; a list is faster to change than a tuple."""
        self._histograms = {
            "batch_rows": Histogram(_ROWS),
            "batch_requests": Histogram(_REQUESTS),
            "execution_seconds": Histogram(_SECONDS),
        }
        for one in RequestClass:
            self._histograms[_wait_name(one)] = Histogram(_SECONDS)
            self._histograms[latency_name(one)] = Histogram(_SECONDS)
        self._decode_latency = self._histograms[latency_name(RequestClass.DECODE)]

    def batch(self, pieces: Sequence[Piece], began_s: float, seconds: float) -> None:
        """Counts one product that the executor computed for a batch of queued requests.

        Args:
            pieces: the pieces of requests (each is some rows of a request) that were in the batch.
            began_s: the time at which the product began, on the clock by which tickets record when requests arrived.
            seconds: the time that the product took, in seconds.
        """
        with self._lock:
            for piece in pieces:
                ticket = piece.ticket
                waited_s = max(0.0, began_s - ticket.arrived_s)
                if piece.first_row == 0:
                    self._histograms[_wait_name(ticket.request_class)].add(waited_s)
                    self._waited(ticket.call.group, waited_s)
                if piece.is_last:
                    self._histograms[latency_name(ticket.request_class)].add(waited_s + seconds)
            self._histograms["batch_rows"].add(sum(piece.num_rows for piece in pieces))
            self._histograms["batch_requests"].add(len(pieces))
            self._histograms["execution_seconds"].add(seconds)

    def inline(self, group: int, seconds: float) -> None:
        """Counts a small decode request whose product was computed without a queue, by the thread that received the
        request."""
        with self._lock:
            self._inline += 1
            self._waited(group, 0.0)
            self._decode_latency.add(seconds)

    def _waited(self, group: int, seconds: float) -> None:
        counts = self._waits.get(group)
        if counts is None:
            counts = self._waits[group] = [0, 0.0]
        counts[0] += 1
        counts[1] += seconds

    def waits(self) -> dict[int, GroupWait]:
        """Returns, for each layer group's id, how many requests waited and for how long in total. Figure 7 of the
        Symbiosis paper shows these two quantities."""
        with self._lock:
            return {group: GroupWait(int(requests), seconds) for group, (requests, seconds) in self._waits.items()}

    def snapshot(self) -> tuple[int, dict[str, Histogram]]:
        """Returns the number of requests that `inline` counted, and copies of the histograms by name."""
        with self._lock:
            return self._inline, {name: one.copy() for name, one in self._histograms.items()}


def _wait_name(request_class: RequestClass) -> str:
    """Returns the name of the histogram that shows how many seconds requests of a class wait for their first
    product."""
    return f"wait_{request_class.name.lower()}"


def latency_name(request_class: RequestClass) -> str:
    """Returns the name of the histogram that shows how many seconds requests of a class spend inside the provider, from
    their arrival until their last product is computed; the time to send the reply does not count."""
    return f"latency_{request_class.name.lower()}"


MAX_TENANTS = 50
OTHER = "other tenants"
"""The label for the sum over all tenants that have no label with their own name. No tenant can have this name."""
REGISTRY_LEFT = "veilbase_registry_left_seconds"
"""The metric for how long a copy of the registry still admits tenants; a provider without a copy has no such metric."""
_HISTOGRAMS = {
    "batch_rows": "Rows of a product.",
    "batch_requests": "Requests that shared a product.",
    "execution_seconds": "Time of a product.",
}


class ProviderCollector(Collector):
    """Makes Prometheus metrics from the executor's counts and the tenants' usage."""

    def __init__(
        self,
        meter: Meter,
        usage: UsageBook,
        queue_depth: Callable[[], int],
        num_streams: Callable[[], int],
        num_replicas: Callable[[], Sequence[tuple[int, int]]],
        num_given_up: Callable[[], int] = lambda: 0,
        num_connections: Callable[[], tuple[int, int]] = lambda: (0, 0),
        registry_seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Keeps the sources, which are read by `collect` only.

        Args:
            meter: the executor's counts.
            usage: the tenants' usage.
            queue_depth: returns the number of requests in the queues.
            num_streams: returns the number of open streams.
            num_replicas: returns two counts for each shard: replicas that can compute products, and replicas that there
                should be.
            num_given_up: returns the number of shards that have lost all replicas for good.
            num_connections: returns two counts of connections to the ports of streams: those with a stream, and those
                without.
            registry_seconds_left: returns the seconds for which a copy of the registry still admits tenants; None if
                the registry is no copy.
        """
        self._registry_seconds_left = registry_seconds_left
        self._num_given_up, self._num_connections = num_given_up, num_connections
        self._meter, self._usage, self._num_replicas = meter, usage, num_replicas
        self._queue_depth, self._num_streams = queue_depth, num_streams
        self._began_s = time.time()
        self._named: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        """Yields the present values of all metrics, for Prometheus."""
        yield GaugeMetricFamily("veilbase_start_time_seconds", "When the provider began.", self._began_s)
        yield GaugeMetricFamily("veilbase_queue_depth", "Requests that wait for the executor.", self._queue_depth())
        yield GaugeMetricFamily("veilbase_streams", "Streams that are open.", self._num_streams())
        connections = GaugeMetricFamily("veilbase_connections", "Connections to ports of streams.", labels=["state"])
        for state, number in zip(("stream", "guest"), self._num_connections(), strict=True):
            connections.add_metric([state], number)
        yield connections
        replicas = GaugeMetricFamily("veilbase_replicas", "Holders of a shard's weights.", labels=["shard", "state"])
        for shard, (num_live, num_all) in enumerate(self._num_replicas()):
            replicas.add_metric([str(shard), "live"], num_live)
            replicas.add_metric([str(shard), "lost"], num_all - num_live)
        yield replicas
        yield GaugeMetricFamily("veilbase_shards_given_up", "Shards that nobody will hold again.", self._num_given_up())
        if (left_s := self._registry_seconds_left()) is not None:
            yield GaugeMetricFamily(REGISTRY_LEFT, "How long the copy of the registry still counts.", left_s)
        yield CounterMetricFamily(
            "veilbase_usage_save_failures", "Times that usage could not be written.", self._usage.failed_saves
        )
        yield from self._executor()
        totals = _bounded(self._usage.totals(), self._named)
        self._named |= totals.keys() - {OTHER}
        yield from _tenants(totals)

    def _executor(self) -> Iterator[Metric]:
        inline, histograms = self._meter.snapshot()
        yield CounterMetricFamily("veilbase_inline_requests", "Small requests computed where they are read.", inline)
        for name, text in _HISTOGRAMS.items():
            one = histograms[name]
            yield HistogramMetricFamily(f"veilbase_{name}", text, buckets=one.buckets(), sum_value=one.sum)
        waits = HistogramMetricFamily("veilbase_wait_seconds", "From arrival to the first product.", labels=["kind"])
        whole = HistogramMetricFamily("veilbase_latency_seconds", "From arrival to the reply.", labels=["kind"])
        for request_class in RequestClass:
            for family, name in ((waits, _wait_name(request_class)), (whole, latency_name(request_class))):
                one = histograms[name]
                family.add_metric([request_class.name.lower()], buckets=one.buckets(), sum_value=one.sum)
        yield from (waits, whole)
        requests = CounterMetricFamily("veilbase_group_requests", "Requests of a layer group.", labels=["group"])
        seconds = CounterMetricFamily(
            "veilbase_group_wait_seconds", "From arrival to the first product, added up.", labels=["group"]
        )
        for group, waited in sorted(self._meter.waits().items()):
            requests.add_metric([str(group)], waited.requests)
            seconds.add_metric([str(group)], waited.seconds)
        yield from (requests, seconds)


def _bounded(totals: dict[str, Usage], named: Collection[str] = ()) -> dict[str, Usage]:
    """Returns the usage of the `MAX_TENANTS` tenants with the most rows, and the sum of all others as `OTHER`.

    Args:
        totals: the usage of each tenant, by name.
        named: names of tenants that were returned before and must be returned again. Otherwise another tenant could
            move out of `OTHER`. The sum in `OTHER` would then fall, and Prometheus takes a falling counter for a
            restart.
    """
    ranked = sorted(totals, key=lambda name: (name not in named, -sum(totals[name].rows.values()), name))
    shown = {name: totals[name] for name in ranked[:MAX_TENANTS]}
    if len(ranked) > MAX_TENANTS:
        rest = Usage()
        for name in ranked[MAX_TENANTS:]:
            rest = rest.plus(totals[name])
        shown[OTHER] = rest
    return shown


def _tenants(totals: dict[str, Usage]) -> Iterator[Metric]:
    requests = CounterMetricFamily("veilbase_requests", "Requests answered.", labels=["tenant", "kind"])
    rows = CounterMetricFamily("veilbase_rows", "Rows of requests answered.", labels=["tenant", "kind"])
    moved = CounterMetricFamily("veilbase_bytes", "Payloads of requests and replies.", labels=["tenant", "direction"])
    seconds = CounterMetricFamily("veilbase_compute_seconds", "Share of products' time.", labels=["tenant"])
    errors = CounterMetricFamily("veilbase_errors", "Requests refused or failed.", labels=["tenant", "code"])
    for name, total in totals.items():
        for kind, count in total.requests.items():
            requests.add_metric([name, kind], count)
        for kind, count in total.rows.items():
            rows.add_metric([name, kind], count)
        moved.add_metric([name, "up"], total.bytes_up)
        moved.add_metric([name, "down"], total.bytes_down)
        seconds.add_metric([name], total.seconds)
        for code, count in total.errors.items():
            errors.add_metric([name, code], count)
    yield from (requests, rows, moved, seconds, errors)


def registry(collector: ProviderCollector) -> CollectorRegistry:
    """Returns a new Prometheus registry with only this collector. The process's global registry is not used, since it
    would also show the Python version."""
    made = CollectorRegistry()
    made.register(collector)
    return made
