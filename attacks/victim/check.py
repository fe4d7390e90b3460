"""What a look at a tenant's draws came to: tests and how far out they are, without any of the draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FALSE_ALARM = 1e-6
"""Of a whole report, by chance."""


@dataclass(frozen=True)
class Check:
    """The farthest of the tests of one kind.

    Attributes:
        name: what was tested.
        num_tests: of this kind.
        value: of the farthest, in the words of `unit`.
        log10_chance: of the bound on how likely chance gives it, one test; minus infinity for what cannot be.
        is_alarm: whether that is too little for all tests together.
    """

    name: str
    num_tests: int
    value: float
    unit: str
    log10_chance: float
    is_alarm: bool


def to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """For json, which has no infinity: null where chance is none."""
    return [
        asdict(one) | {"log10_chance": one.log10_chance if math.isfinite(one.log10_chance) else None} for one in checks
    ]


def from_json(said: Sequence[dict[str, Any]]) -> list[Check]:
    """What `to_json` wrote."""
    return [Check(**(one | {"log10_chance": -math.inf if one["log10_chance"] is None else one["log10_chance"]}))
            for one in said]  # fmt: skip


def alarms(checks: Sequence[Check]) -> list[str]:
    """What is too far out, in words, the farthest first."""
    return [
        f"{one.name}: {one.value:.4g} {one.unit}, chance below 10^{one.log10_chance:.0f}"
        if math.isfinite(one.log10_chance) else f"{one.name}: {one.value:.4g} {one.unit}, which cannot be"
        for one in sorted(checks, key=lambda each: each.log10_chance)
        if one.is_alarm
    ]  # fmt: skip


def total_tests(checks: Sequence[Check]) -> int:
    """T of the module's text."""
    return sum(one.num_tests for one in checks)
