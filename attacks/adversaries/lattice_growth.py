"""Measures at toy size how the time of the primal attack grows with the dimension.

An extrapolation from these times is an illustration and not an estimate. At toy size LLL, or BKZ with small blocks,
suffices, and its time grows slowly. Dimension 1536 needs a block size β in the hundreds, at which sieving dominates
with a cost of 2^0.292β. A line through toy points shows nothing of that, nor of better algorithms. The published bits
of noise/params.py come from the lattice-estimator and are shown beside the line.

With the true σ = 3.2 and q = 2^32, LLL alone succeeds at every dimension that is quick to measure. A measurement of
growth therefore uses a larger error, `HARD_SIGMA`. This is another and harder problem, in which small dimensions need
BKZ. The line's value at dimension 1536 changes by dozens of bits with σ and with the dimensions that were measured. The
default result is in docs/security-evaluation.md, "What failing to break does not prove".
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attacks.adversaries.lattice_reduction import (
    LLL_ROOT_FACTOR,
    embed,
    load_fpylll,
    log2_gap,
    read_secret,
    reduced_basis,
    samples_for_lll,
    secret_scale,
)
from noise.params import PARAMETERS

HARD_SIGMA = float(1 << 24)
"""σ of the harder problem. Over three seeds, LLL finds the secret up to dimension 48. Dimensions 64 and 68 need block
sizes of 16 to 20, and dimension 76 needs 28 to 32."""
BLOCK_SIZES = (2, 10, 16, 20, 24, 28, 32)
"""The block sizes of BKZ, which are tried in ascending order; 2 stands for LLL. Larger blocks take minutes, because
fpylll's wheel has no pruning strategies."""
OPS_A_SECOND_LOG2 = 31.0
"""log2 of the operations that one core is assumed to do in a second; it converts seconds into bits of work."""


@dataclass(frozen=True)
class Growth:
    """Holds one measurement of the time that lattice reduction takes to find a secret.

    Attributes:
        dimension: n, the number of unknowns.
        sigma: σ of the error.
        num_samples: the number of equations used.
        seconds: time until the secret was found or the search was given up, including the time of smaller block sizes.
        block_size: the block size that found the secret, 2 for LLL; None if none did.
    """

    dimension: int
    sigma: float
    num_samples: int
    seconds: float
    block_size: int | None


_WARM_UP = 16


def measure_growth(dimensions: Sequence[int], sigma: float = HARD_SIGMA, seed: int = 0) -> list[Growth]:
    """Runs the primal attack on random LWE instances with a ternary secret, q = 2^32.

    Args:
        dimensions: n of each instance.
        sigma: σ of the rounded Gaussian error.
        seed: the seed of the instances.

    Raises:
        ConfigurationError: fpylll is not installed.
    """
    _measure(_WARM_UP, sigma, np.random.default_rng(seed))  # the first reduction of a process takes longer
    return [_measure(dimension, sigma, np.random.default_rng((seed, dimension))) for dimension in dimensions]


def _measure(dimension: int, sigma: float, rng: np.random.Generator) -> Growth:
    num_samples = best_num_samples(dimension, sigma)
    equations = torch.from_numpy(rng.integers(-(2**31), 2**31, (num_samples, dimension)))
    secret = torch.from_numpy(rng.integers(-1, 2, dimension))
    error = torch.from_numpy(np.rint(rng.normal(0.0, sigma, num_samples)).astype(np.int64))
    masks = equations @ secret + error
    start = time.perf_counter()
    scale = secret_scale(sigma)
    embedded = embed(reduced_basis(equations, scale), masks.remainder(2**32), dimension, sigma)
    for block_size in BLOCK_SIZES:
        _reduce(embedded, block_size)
        found = read_secret(embedded, equations, masks, scale, sigma)
        if found is not None and torch.equal(found, secret):
            return Growth(dimension, sigma, num_samples, time.perf_counter() - start, block_size)
    return Growth(dimension, sigma, num_samples, time.perf_counter() - start, None)


def _reduce(matrix: Any, block_size: int) -> None:
    fpylll = load_fpylll()
    if block_size == 2:
        fpylll.LLL.reduction(matrix)
        return
    flags = fpylll.BKZ.AUTO_ABORT | fpylll.BKZ.MAX_LOOPS
    fpylll.BKZ.reduction(matrix, fpylll.BKZ.Param(block_size, flags=flags, max_loops=8))


def best_num_samples(dimension: int, sigma: float) -> int:
    """Returns the fewest samples with which LLL should succeed. If no number suffices, returns the number with the
    largest gap (`lattice_reduction.log2_gap`) after LLL."""
    fewest = samples_for_lll(dimension, sigma)
    if fewest is not None:
        return fewest
    return max(range(4, 6 * dimension + 8), key=lambda count: log2_gap(dimension, count, sigma, LLL_ROOT_FACTOR))


def fit(measured: Sequence[Growth]) -> tuple[float, float]:
    """Returns slope and intercept of log2(seconds) against the dimension, over measurements that found the secret.

    Both are NaN if the points give no rising line, because there are too few points, or because the times are so short
    that other work on the machine hides their growth.
    """
    points = [(one.dimension, math.log2(one.seconds)) for one in measured if one.block_size is not None]
    if len({dimension for dimension, _ in points}) < 2:
        return math.nan, math.nan
    slope, intercept = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return (float(slope), float(intercept)) if slope > 0 else (math.nan, math.nan)


def extrapolate(measured: Sequence[Growth]) -> dict[str, tuple[float, int]]:
    """Returns, by name of a shipped parameter set, log2 of operations on the fitted line and the published bits.

    The operations are an illustration and not an estimate: see the module's docstring. Their log2 is NaN if `fit` gives
    no line.
    """
    slope, intercept = fit(measured)
    return {
        name: (slope * chosen.dimension + intercept + OPS_A_SECOND_LOG2, chosen.bits)
        for name, chosen in PARAMETERS.items()
    }
