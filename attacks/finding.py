"""One line of the report's table, and how a value is told from what a guess would get."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

_DRAWS = 400
_TAIL = 0.005
NO_CLAIM = "no claim"
"""Verdict on an adversary that said nothing: neither right nor wrong, and no evidence that nothing was there."""


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        module: kind of layer, `tokens`, `rows` or the name of a fact.
        interval: 99% interval of the baseline.
        verdict: wins, above baseline, at baseline, or no claim, where value is not a number.
        spread: 99% interval of the value itself, by bootstrap; None where nothing was drawn from a population.
    """

    module: str
    metric: str
    value: float
    baseline: float
    interval: tuple[float, float]
    verdict: str
    spread: tuple[float, float] | None = None


def unclaimed(module: str, metric: str, baseline: float = 0.0) -> Finding:
    """The line of something that an adversary might have claimed and did not."""
    return Finding(module, metric, math.nan, baseline, (baseline, baseline), NO_CLAIM)


def verdict_on(value: float, interval: tuple[float, float], wins: bool, larger_is_better: bool = True) -> str:
    """One of `Finding.verdict`; `wins` says whether the value is what a thief needs."""
    if not math.isfinite(value):
        return "at baseline"
    if wins:
        return "wins"
    beyond = value > interval[1] if larger_is_better else value < interval[0]
    return "above baseline" if beyond else "at baseline"


def guesses(draw: Callable[[torch.Generator], float], draws: int = _DRAWS) -> tuple[float, tuple[float, float]]:
    """Mean of a baseline, and its 99% interval."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([draw(generator) for _ in range(draws)], dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist()
    return float(values.mean()), (low, high)
