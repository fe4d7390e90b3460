"""Tests that every bound is at least as large as the probability that it bounds, which is computed exactly."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from attacks.victim import tails

Distribution = dict[float, float]
TRITS: Distribution = {-1.0: 1 / 3, 0.0: 1 / 3, 1.0: 1 / 3}
SLACK = 1 + 1e-9
"""The tolerance for rounding of floating point."""


def summed(terms: list[Distribution]) -> Distribution:
    """Returns the distribution of a sum of independent numbers."""
    total: Distribution = {0.0: 1.0}
    for term in terms:
        added: Distribution = defaultdict(float)
        for (value, chance), (more, its) in itertools.product(total.items(), term.items()):
            added[value + more] += chance * its
        total = dict(added)
    return total


def named(name: str) -> tuple[Distribution, float]:
    """Returns a distribution by its name, with its standard deviation."""
    if name == "trits":
        return TRITS, math.sqrt(2 / 3)
    if name == "gaussian":
        return {float(value): chance for value, chance in tails.discrete_gaussian(3.2).items()}, 3.2
    return {float(value): chance for value, chance in tails.centred_binomial(21).items()}, math.sqrt(10.5)


@pytest.mark.parametrize("probability", [1 / 3, 2 / 3, 0.12, 1e-4])
@pytest.mark.parametrize("num_trials", [1, 7, 60])
def test_binomial(num_trials: int, probability: float) -> None:
    exact = [
        math.comb(num_trials, k) * probability**k * (1 - probability) ** (num_trials - k) for k in range(num_trials + 1)
    ]
    for count in range(num_trials + 1):
        farther = [
            exact[k] for k in range(num_trials + 1)
            if tails.binomial(k, num_trials, probability) <= tails.binomial(count, num_trials, probability)
        ]  # fmt: skip
        assert sum(farther) <= math.exp(tails.binomial(count, num_trials, probability)) * SLACK


def test_binomial_is_not_far_from_the_truth_where_it_counts() -> None:
    """A secret of 1,536 trits has 1,024 that are not zero on average. The bound raises an alarm (among 10,000 tests) at
    some count between 100 and 150 below this."""
    limit = math.log(1e-6 / 10_000)
    assert tails.binomial(1024, 1536, 2 / 3) == 0.0
    assert tails.binomial(1024 - 150, 1536, 2 / 3) < limit < tails.binomial(1024 - 100, 1536, 2 / 3)


@pytest.mark.parametrize("name", ["trits", "binomial", "gaussian"])
def test_sums_with_weights(name: str) -> None:
    one, sigma = named(name)
    weights = [1.0, -3.0, 2.0]
    total = summed([{value * weight: chance for value, chance in one.items()} for weight in weights])
    length = sigma * math.sqrt(sum(weight * weight for weight in weights))
    for distance in sorted({abs(value) / length for value in total}):
        farther = sum(chance for value, chance in total.items() if abs(value) / length >= distance)
        assert farther <= math.exp(tails.sub_gaussian(distance)) * SLACK


@pytest.mark.parametrize("name", ["trits", "binomial", "gaussian"])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_mean_squares(name: str, count: int) -> None:
    one, sigma = named(name)
    square: Distribution = defaultdict(float)
    for value, chance in one.items():
        square[value * value] += chance
    total = summed([dict(square)] * count)
    below = above = 0.0
    values = sorted(total)
    upper = sum(total[value] for value in values)
    for value in values:
        ratio = value / (count * sigma * sigma)
        below += total[value]
        above, upper = upper, upper - total[value]
        exact = above if ratio >= 1 else below
        assert exact <= math.exp(tails.mean_square(ratio, count)) * SLACK + 1e-12, ratio


@pytest.mark.parametrize("bits", [10, 40])
def test_collisions(bits: int) -> None:
    for count in (2, 5, 30):
        unequal = math.prod(1 - k / 2**bits for k in range(count))
        assert 1 - unequal <= math.exp(tails.collisions(count, -bits * math.log(2))) * (1 + 1e-3)
    assert tails.collisions(1, -1.0) == tails.collisions(0, -1.0) == 0.0


def test_what_cannot_be_never_is() -> None:
    assert tails.binomial(1, 5, 0.0) == tails.sub_gaussian(math.inf) == tails.sub_gaussian(math.nan) == tails.NEVER
    assert tails.mean_square(math.inf, 3) == tails.NEVER


def test_distributions_are_those_of_the_parameters() -> None:
    for distribution, variance in ((tails.centred_binomial(21), 10.5), (tails.discrete_gaussian(32.0), 1024.0)):
        assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
        assert sum(value**2 * chance for value, chance in distribution.items()) == pytest.approx(variance, rel=1e-9)


SMALL: dict[str, Distribution] = {"trits": TRITS, "signs": {-1.0: 0.5, 1.0: 0.5}}
"""Distributions with so few values that all samples can be listed; each is sub-Gaussian with its own variance."""


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("rate", [0.7, 1.0, 1.4])
def test_sums_of_products(name: str, is_mirrored: bool, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks every sample of eight numbers, for products with the number two places on, and with the mirror image."""
    monkeypatch.setattr(tails, "RATE", rate)
    values, chances = (torch.tensor(list(each), dtype=torch.float64) for each in zip(*SMALL[name].items(), strict=True))
    chosen = torch.cartesian_prod(*[torch.arange(len(values))] * 8)
    samples, weights = values[chosen], chances[chosen].prod(1)
    if is_mirrored:
        totals = (samples[:, :4] * samples.flip(1)[:, :4]).sum(1)
        squares = samples.square().sum(1) / 2
    else:
        totals, squares = (samples[:, 2:] * samples[:, :-2]).sum(1), samples[:, :-2].square().sum(1)
    sigma = math.sqrt(float(chances @ values.square()))
    bounds = tails.products(totals, squares, torch.tensor(4 if is_mirrored else 6), sigma)
    assert float(bounds.min()) < 0, "some sample has a bound that says something"
    for bound in bounds.unique().tolist():
        assert float(weights[bounds <= bound].sum()) <= math.exp(bound) * SLACK


def test_sums_of_products_are_not_far_from_the_truth_where_it_counts() -> None:
    """At eight standard deviations, the bound is that for weights which are independent of the numbers."""
    squares = torch.tensor(10_000.0, dtype=torch.float64)
    (at_eight,) = tails.products(torch.tensor([800.0]), squares, torch.tensor(10_000), 1.0).tolist()
    assert at_eight == pytest.approx(tails.sub_gaussian(8.0))
    (far,) = tails.products(torch.tensor([5_000.0]), squares, torch.tensor(10_000), 1.0).tolist()
    assert far < -300
