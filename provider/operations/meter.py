"""Counts the products that the executor computes, and keeps histograms of the products' sizes and times and of the
requests' waits."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from typing import NamedTuple

from provider.schedule.request_class import RequestClass
from provider.schedule.ticket import Piece

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
            self._histograms[wait_name(one)] = Histogram(_SECONDS)
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
                    self._histograms[wait_name(ticket.request_class)].add(waited_s)
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


def wait_name(request_class: RequestClass) -> str:
    """Returns the name of the histogram that shows how many seconds requests of a class wait for their first
    product."""
    return f"wait_{request_class.name.lower()}"


def latency_name(request_class: RequestClass) -> str:
    """Returns the name of the histogram that shows how many seconds requests of a class spend inside the provider, from
    their arrival until their last product is computed; the time to send the reply does not count."""
    return f"latency_{request_class.name.lower()}"
