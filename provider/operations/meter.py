"""Counts the executor's products, with histograms of their sizes, times and waits."""

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
    """Counts observations in buckets with upper bounds. It is not safe under threads."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Makes empty buckets. `bounds` are their upper bounds, in rising order."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Adds one observed value to its bucket and to the sum."""
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
    """Counts products and the waits of requests. It is safe under threads."""

    def __init__(self) -> None:
        """Sets all counters and histograms to zero."""
        self._lock = threading.Lock()
        self._inline = 0
        self._waits: dict[int, list[float]] = {}
        """By layer group, the two fields of `GroupWait`, as a list for speed, since they change most often."""
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
        """Counts a product of a batch.

        Args:
            pieces: the pieces of requests that the product computed.
            began_s: the time at which the product began, on the clock of the tickets.
            seconds: the time that the product took.
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
        """Counts a small decode request that the thread that received it computed at once."""
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
        """Returns the waits by layer group. Symbiosis, figure 7, shows the same numbers."""
        with self._lock:
            return {group: GroupWait(int(requests), seconds) for group, (requests, seconds) in self._waits.items()}

    def snapshot(self) -> tuple[int, dict[str, Histogram]]:
        """Returns the number of requests that `inline` counted, and copies of the histograms by name."""
        with self._lock:
            return self._inline, {name: one.copy() for name, one in self._histograms.items()}


def wait_name(request_class: RequestClass) -> str:
    """Returns the name of the histogram of a class's waits, from arrival to the first product."""
    return f"wait_{request_class.name.lower()}"


def latency_name(request_class: RequestClass) -> str:
    """Returns the name of the histogram of a class's times from arrival to reply, inside the provider."""
    return f"latency_{request_class.name.lower()}"
