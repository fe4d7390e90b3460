"""Computes provable upper bounds on the probability that chance gives a measured value, as natural logarithms.

Each of the first five functions bounds p(x) = P(a statistic is at least as far out as x) for the honest distribution,
so that P(p ≤ a) ≤ a. With T such bounds, however they depend on each other, the probability that any is at or below a/T
is at most a (union bound). No limit theorem and no table of quantiles is used, so all bounds hold at every sample size.

Sources: Chernoff, "A measure of asymptotic efficiency for tests of a hypothesis based on the sum of observations", 1952
(the binomial tail by relative entropy); Boucheron, Lugosi, Massart, "Concentration inequalities", 2013, sections 2.3 to
2.8. A variable X is σ²-sub-Gaussian if E exp(λX) ≤ exp(λ²σ²/2) for all λ. With σ² its own variance this holds for
- the centred binomial, a sum of 2η signs that are ±1/2: E exp(λX) = cosh(λ/2)^2η ≤ exp(2η·λ²/8), variance η/2;
- a uniform trit: (1 + 2·cosh λ)/3 ≤ exp(λ²/3), term by term, since 2·3^(k−1)·k! ≤ (2k)!, variance 2/3;
- the discrete Gaussian over the integers: Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy",
  NeurIPS 2020, corollary 17, up to the 2^-71 by which a sampled table differs from it.
"""

from __future__ import annotations

import math

import torch

NEVER = -math.inf
"""The logarithm of a probability of zero."""
RATE = 8.0
"""The distance, in standard deviations, for which `products` gives the best bound: that of the alarms of a report with
10^6 to 10^8 tests. The bound holds for any number."""


def sub_gaussian(distance: float) -> float:
    """Returns the natural logarithm of a bound on the probability that a weighted sum is at least this far from zero.
    The bound is 2·exp(−distance²/2).

    `distance` is the sum in units of the square root of Σ weight²·σ². The weights may be random, as long as the summed
    variables are independent of them.
    """
    return min(0.0, math.log(2) - distance * distance / 2) if math.isfinite(distance) else NEVER


def products(totals: torch.Tensor, squares: torch.Tensor, counts: torch.Tensor, sigma: float) -> torch.Tensor:
    """Returns the natural logarithms of bounds on the probability that sums of products are at least this far from
    zero, if a product's one factor is a weight that comes from the same numbers as the other factor.

    Let M = Σ w·x, where each x is σ²-sub-Gaussian and independent of its own weight w and of all products before it.
    Then exp(λ·M − λ²σ²·V/2) with V = Σ w² is a supermartingale that starts at 1, so by Markov's inequality
    λ·|M| − λ²σ²·V/2 is at least t with probability 2·exp(−t) at most, for any λ that is chosen beforehand. Here
    λ = `RATE`/(σ²·√n) for n products. If the pairs (w, x) are disjoint and w is σ²-sub-Gaussian too, V may also be
    Σ (w² + x²)/2: by the inequality of Cauchy and Schwarz, E exp(λwx − λ²σ²(w² + x²)/4) is at most the root of
    E exp(λwx − λ²σ²w²/2) · E exp(λwx − λ²σ²x²/2), and either factor is at most 1.

    Args:
        totals: the sums M, float64.
        squares: V or more than that, the same shape.
        counts: n, above 0; a shape that broadcasts.
        sigma: σ of the numbers.

    Source: de la Peña, Klass, Leung Lai, "Self-normalized processes: exponential inequalities, moment bounds and
    iterated logarithm laws", 2004, section 1.
    """
    rate = RATE / (sigma**2 * counts.to(torch.float64).sqrt())
    return (math.log(2) - (rate * totals.abs() - (rate * sigma).square() * squares / 2)).clamp(max=0.0)


def binomial(count: int, num_trials: int, probability: float) -> float:
    """Returns the natural logarithm of a bound on the probability that a count is at least this far from its mean, on
    either side. The bound is 2·exp(−n·KL(count/n ‖ probability)), where n is `num_trials`."""
    share, rest = count / num_trials, 1 - count / num_trials
    if (count and probability <= 0) or (count < num_trials and probability >= 1):
        return NEVER
    entropy = share * math.log(share / probability) if count else 0.0
    entropy += rest * math.log(rest / (1 - probability)) if count < num_trials else 0.0
    return min(0.0, math.log(2) - num_trials * entropy)


def mean_square(ratio: float, num_numbers: int) -> float:
    """Returns the natural logarithm of a bound on the probability that a ratio is at least this far from 1. The ratio
    is Σ X²/(n·σ²), for n independent, σ²-sub-Gaussian X of variance σ²; n is `num_numbers`.

    If the ratio is above 1: exp(λX²/σ²) is the mean of exp(√(2λ)·g·X/σ) over a normal g, so
    E exp(λ·X²/σ²) ≤ (1 − 2λ)^(−1/2) for 0 ≤ λ < 1/2. Hence Σ X²/σ² has the Chernoff bound of chi-square,
    exp(−n/2·(x − ln(1 + x))), for a ratio of 1 + x. If the ratio is 1 − x: X² is not negative and E X⁴ ≤ 3σ⁴, so
    exp(−λX²) ≤ 1 − λX² + λ²X⁴/2 gives exp(−n·x²/6).
    """
    if ratio >= 1:
        bound = (ratio - 1 - math.log(ratio)) / 2 if math.isfinite(ratio) else math.inf
    else:
        bound = (1 - ratio) ** 2 / 6
    return min(0.0, math.log(2) - num_numbers * bound)


def collisions(num_items: int, log_probability: float) -> float:
    """Returns the natural logarithm of a bound on the probability that any two of several independent items are equal,
    if two given items are equal with probability exp(log_probability). For fewer than two items it returns 0."""
    pairs = num_items * (num_items - 1) / 2
    return min(0.0, math.log(pairs) + log_probability) if pairs else 0.0


def centred_binomial(eta: int) -> dict[int, float]:
    """Returns the distribution of Σ a_i − Σ b_i over η pairs of fair bits: value → probability."""
    return {value: math.comb(2 * eta, value + eta) / 4**eta for value in range(-eta, eta + 1)}


def discrete_gaussian(sigma: float) -> dict[int, float]:
    """Returns the discrete Gaussian over the integers within 11σ; less than 2^-86 of it lies beyond."""
    tail = math.ceil(11 * sigma)
    weights = {value: math.exp(-(value**2) / (2 * sigma**2)) for value in range(-tail, tail + 1)}
    total = sum(weights.values())
    return {value: weight / total for value, weight in weights.items()}
