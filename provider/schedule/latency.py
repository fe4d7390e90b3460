"""Predicts how long a product takes: base_s + row_s · rows, for every lane, profiled at the start and then corrected.

The method is exponentially weighted least squares; a lane that was never seen borrows the rate of all others by its
multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wire.frame import Call

_FORGET = 0.98
"""Factor that a measurement's weight falls by with each newer one, so that about the last 50 count."""
_FIRST_RATE = 2e-11
"""Seconds per multiplication before anything was measured: one CPU core at 50 GFLOP/s."""
_APART = 4.0
"""Largest factor between a lane's slope and what its multiplications cost elsewhere."""
_OUTLIER = 5.0
"""Largest multiple of the prediction that a measurement counts as, since a pause of the machine is no product."""


@dataclass
class _Sums:
    """Weighted sums of 1, rows, rows², seconds and rows · seconds."""

    weight: float = 0.0
    rows: float = 0.0
    rows2: float = 0.0
    seconds: float = 0.0
    product: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self.weight = self.weight * _FORGET + 1.0
        self.rows = self.rows * _FORGET + rows
        self.rows2 = self.rows2 * _FORGET + rows * rows
        self.seconds = self.seconds * _FORGET + seconds
        self.product = self.product * _FORGET + rows * seconds

    def line(self, prior: float) -> tuple[float, float]:
        """Returns base and slope, neither below zero.

        Args:
            prior: the slope that other lanes suggest. Sizes that hardly differ say little about a slope, and one near
                zero would promise that any number of rows is done at once, so the lane's own is kept near this one.
        """
        mean_rows, mean_s = self.rows / self.weight, self.seconds / self.weight
        spread = self.weight * self.rows2 - self.rows * self.rows
        slope = prior
        if spread > 1e-9 * self.weight * self.rows2:
            slope = (self.weight * self.product - self.rows * self.seconds) / spread
        slope = min(max(slope, prior / _APART), prior * _APART, mean_s / mean_rows)
        return mean_s - slope * mean_rows, slope


class LatencyModel:
    """Makes predictions for each lane. It is not safe under threads."""

    def __init__(self, products_per_row: Callable[[Call], int]) -> None:
        """Args: products_per_row: gives in_features · out_features of a lane."""
        self._products_per_row = products_per_row
        self._sums: dict[Call, _Sums] = {}
        self._lines: dict[Call, tuple[float, float]] = {}
        self._sum_base_s = 0.0
        """The sum of base seconds over all lanes that were seen."""
        self._all = _Sums()

    def measured(self, call: Call, num_rows: int, seconds: float) -> None:
        """Adds a measurement of one product of at least one row."""
        if call in self._lines:
            seconds = min(seconds, _OUTLIER * self.predict_s(call, num_rows))
            self._sum_base_s -= self._lines[call][0]
        sums = self._sums.setdefault(call, _Sums())
        sums.add(num_rows, seconds)
        self._all.add(num_rows * self._products_per_row(call), seconds)
        self._lines[call] = sums.line(self._rate() * self._products_per_row(call))
        self._sum_base_s += self._lines[call][0]

    @property
    def mean_base_s(self) -> float:
        """Returns the seconds that a product takes beside its rows, in the mean over all lanes that were seen."""
        return max(0.0, self._sum_base_s) / max(1, len(self._lines))

    def predict_s(self, call: Call, num_rows: int) -> float:
        """Returns the seconds that one product takes."""
        base, slope = self._line(call)
        return base + slope * num_rows

    def rows_within(self, call: Call, seconds: float) -> int:
        """Returns how many rows a product may have to be done in time; at least one."""
        base, slope = self._line(call)
        if slope <= 0:
            return 1 << 30 if base <= seconds else 1
        return max(1, int((seconds - base) / slope))

    def _line(self, call: Call) -> tuple[float, float]:
        line = self._lines.get(call)
        if line is not None:
            return line
        return 0.0, self._rate() * self._products_per_row(call)

    def _rate(self) -> float:
        """Returns the seconds per multiplication, over all lanes."""
        return self._all.seconds / self._all.rows if self._all.rows else _FIRST_RATE
