"""Defines one line of the report's table, and decides whether a value is better than guessing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

NO_CLAIM = "no claim"
"""The verdict on an adversary that claimed nothing. Such an adversary is neither right nor wrong, and its silence is no
evidence that nothing leaked."""
FAILED = "failed"
"""The metric, fact and verdict of an adversary that raised an exception."""
SHARE_TRIED = "share tried"
"""A metric: the share of all tokens that an adversary named, right or wrong."""
SHARE_CLAIMED = "share claimed"
"""A metric: the share of the layers of a kind for which a change was claimed, right or wrong. Only layers that the
victim changed count."""
KL, OVERLAP = "KL to the victim", "subspace overlap"
"""Metrics that are shown but that the verdict ignores, because other metrics of the same claim say more."""
_DRAWS = 400
_TAIL = 0.005


@dataclass(frozen=True)
class Finding:
    """Holds one line of the table.

    Attributes:
        module: what the line is about: a kind of layer, `tokens`, `rows` or the name of a fact.
        interval: the 99% interval of the baseline (what a guess would get).
        verdict: one of wins, wins where tried, above baseline, at baseline, not judged, failed, or no claim (`value` is
            then NaN); for a count, it says what was counted.
        spread: 99% interval of the value itself, by bootstrap; None if nothing was drawn from a population.
        said: the claim or the answer, in words, if it can be shown.
    """

    module: str
    metric: str
    value: float
    baseline: float
    interval: tuple[float, float]
    verdict: str
    spread: tuple[float, float] | None = None
    said: str = ""


def unclaimed(module: str, metric: str, baseline: float = 0.0) -> Finding:
    """Returns the line for something that an adversary could have claimed but did not."""
    return Finding(module, metric, math.nan, baseline, (baseline, baseline), NO_CLAIM)


def verdict_on(value: float, interval: tuple[float, float], wins: bool, larger_is_better: bool = True) -> str:
    """Returns the verdict for `Finding.verdict`. `wins` says whether the value is as good as an attacker needs. A value
    that is not finite is at baseline."""
    if not math.isfinite(value):
        return "at baseline"
    if wins:
        return "wins"
    beyond = value > interval[1] if larger_is_better else value < interval[0]
    return "above baseline" if beyond else "at baseline"


def guesses(draw: Callable[[torch.Generator], float], draws: int = _DRAWS) -> tuple[float, tuple[float, float]]:
    """Returns the mean and the 99% interval of a baseline, from the values of `draws` random guesses."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([draw(generator) for _ in range(draws)], dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist()
    return float(values.mean()), (low, high)


def share_right(module: str, got: torch.Tensor, wanted: torch.Tensor) -> Finding:
    """Returns a line with the share of positions at which the claimed id is right.

    The baseline is the claim's own list in random order. So it is no win to claim the same id everywhere, or only ids
    that are the same in every prompt.

    Args:
        got, wanted: int64, the same shape (num_ids,), at least one.
    """
    rate = float((got == wanted).float().mean())

    def shuffle(generator: torch.Generator) -> float:
        return float((got[torch.randperm(len(got), generator=generator)] == wanted).float().mean())

    baseline, interval = guesses(shuffle)
    wins = rate > max(0.9, interval[1])
    return Finding(module, "recovery rate", rate, baseline, interval, verdict_on(rate, interval, wins))
