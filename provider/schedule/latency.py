"""Predicts how long a product takes, as base_s + row_s · rows.

The products of each call have a base_s and a row_s of their own. These numbers are fitted to measured products by
exponentially weighted least squares. For a call without measurements, the prediction is the product's number of
multiplications times the mean seconds per multiplication of all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wire.frame import Call

_FORGET = 0.98
"""The factor by which each new measurement reduces the weight of older measurements, so that about the last 50
count."""
_FIRST_RATE = 2e-11
"""The seconds per multiplication that are assumed before anything was measured. They are those of one CPU core at 50
GFLOP/s."""
_APART = 4.0
"""The largest factor by which a call's slope (seconds per row) may differ from the slope that the mean rate of all
calls suggests."""
_OUTLIER = 5.0
"""The most that a measurement counts, as a multiple of the prediction, since a longer time is a pause of the
machine."""


@dataclass
class _Sums:
    """Holds the weighted sums of 1, rows, rows², seconds and rows · seconds over the measurements of a call."""

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
        """Fits a line to the measurements; returns the line's base in seconds and slope in seconds per row, both at
        least 0.

        Args:
            prior: the slope that the mean rate of all calls suggests. The fitted slope is kept near it, since
                measurements of nearly equal size say little about the slope, and a slope near zero would predict that
                more rows take no more time.
        """
        mean_rows, mean_s = self.rows / self.weight, self.seconds / self.weight
        spread = self.weight * self.rows2 - self.rows * self.rows
        slope = prior
        if spread > 1e-9 * self.weight * self.rows2:
            slope = (self.weight * self.product - self.rows * self.seconds) / spread
        slope = min(max(slope, prior / _APART), prior * _APART, mean_s / mean_rows)
        return mean_s - slope * mean_rows, slope


class LatencyModel:
    """Predicts the time of a product of each call. It is not safe under threads."""

    def __init__(self, products_per_row: Callable[[Call], int]) -> None:
        """Makes a model without measurements. `products_per_row` returns a call's multiplications per row."""
        self._products_per_row = products_per_row
        self._sums: dict[Call, _Sums] = {}
        self._lines: dict[Call, tuple[float, float]] = {}
        self._sum_base_s = 0.0
        """The sum over all measured calls of base_s, the seconds of a product that do not depend on its rows."""
        self._all = _Sums()

    def measured(self, call: Call, num_rows: int, seconds: float) -> None:
        """Adds the measured time of one product, which must have at least one row."""
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
        """Returns the mean over all measured calls of base_s, the seconds of a product that do not depend on its
        rows."""
        return max(0.0, self._sum_base_s) / max(1, len(self._lines))

    def predict_s(self, call: Call, num_rows: int) -> float:
        """Returns the predicted seconds of one product of a call with `num_rows` rows."""
        base, slope = self._line(call)
        return base + slope * num_rows

    def rows_within(self, call: Call, seconds: float) -> int:
        """Returns the largest number of rows whose product is predicted to take at most `seconds`; at least 1."""
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
        return self._all.seconds / self._all.rows if self._all.rows else _FIRST_RATE
