"""Defines the results of tests of a tenant's random numbers. A result says how unlikely a test's value is, and holds
none of the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FALSE_ALARM = 1e-6
"""The largest probability that a whole report raises any alarm by chance."""


@dataclass(frozen=True)
class Check:
    """Holds the most extreme result among the tests of one kind.

    Attributes:
        name: what was tested.
        num_tests: the number of tests of this kind.
        value: the most extreme test's value, in the unit that `unit` names.
        log10_chance: log10 of an upper bound on the probability that one test has such a value by chance; minus
            infinity for a value that is impossible.
        is_alarm: whether that bound is so small that chance does not explain it, given the number of all tests.
    """

    name: str
    num_tests: int
    value: float
    unit: str
    log10_chance: float
    is_alarm: bool


def to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Converts checks to values for JSON. JSON has no infinity, so null stands for the logarithm of probability
    zero."""
    return [
        asdict(one) | {"log10_chance": one.log10_chance if math.isfinite(one.log10_chance) else None} for one in checks
    ]


def from_json(said: Sequence[dict[str, Any]]) -> list[Check]:
    """Returns the checks that `to_json` turned into JSON values."""
    return [Check(**(one | {"log10_chance": -math.inf if one["log10_chance"] is None else one["log10_chance"]}))
            for one in said]  # fmt: skip


def alarms(checks: Sequence[Check]) -> list[str]:
    """Returns a line of text for each alarm, the most extreme first."""
    return [
        f"{one.name}: {one.value:.4g} {one.unit}, chance below 10^{one.log10_chance:.0f}"
        if math.isfinite(one.log10_chance) else f"{one.name}: {one.value:.4g} {one.unit}, which cannot be"
        for one in sorted(checks, key=lambda each: each.log10_chance)
        if one.is_alarm
    ]  # fmt: skip


def total_tests(checks: Sequence[Check]) -> int:
    """Returns the number of all tests of a report, over all kinds."""
    return sum(one.num_tests for one in checks)
