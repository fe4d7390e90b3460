"""Implements `lattice-reduction`, which runs the primal attack on a lattice mask of toy dimension.

If a row is guessed to be zero, its masked numbers are LWE samples z = M·s + e mod q, with a matrix M that follows from
the public matrix A, a secret s, an error e and q = 2^32. The lattice {(ν·s, M·s + q·k)}, over all integer vectors s and
k, is reduced once for a matrix A. Row t has the secret X^-t·s in the same lattice (ring_lwe.py), so one reduction
serves every row of every block. A guess then adds the row (0, z, τ) to the reduced basis (Kannan's embedding) and
reduces again. If z was a sample, the result contains (ν·s, −e, −τ). The factors ν and τ bring s, e and the last
coordinate to one size.

Above `MOST_DIMENSION` the adversary does not try. Instead it states the published estimate for the parameters with that
dimension. The reduction is LLL, from the optional library fpylll. If that is not installed, the adversary says so.

Source: Kannan, "Minkowski's convex body theorem and integer programming", 1987; Bai, Galbraith, "Lattice decoding
attacks on binary LWE", ACISP 2014 (the scaling ν); Alkim, Ducas, Pöppelmann, Schwabe, "Post-quantum key exchange",
USENIX Security 2016, section 6.3 (when it succeeds).
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attacks.adversaries.ring_lwe import MODULUS, PublicMatrix, Stream, centred, public_seeds, ring_degrees, streams
from attacks.seen.adversary import Adversary, Claim, StolenFact
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from noise.params import NOMINAL_SIGMA, PARAMETERS
from wire.errors import ConfigurationError
from wire.ring.seeded_rows import SeededRows

# ---- lattice-reduction ----------------------------------------------------------------------------------------------

MOST_DIMENSION = 64
"""The largest dimension k·N that is tried; the first reduction takes half a second at this dimension."""
BUDGET = 1 << 23
"""The work that all guesses together may take. One guess takes (k·N)³ units, so this is enough for 32 guesses at
dimension 64 and 2,000 at dimension 16."""
MOST_REDUCTIONS = 6
LLL_ROOT_FACTOR = 1.0219
"""The usual root Hermite factor of LLL: Nguyen, Stehlé, "LLL on the average", ANTS 2006."""
TERNARY_SIGMA = math.sqrt(2 / 3)
ERROR_BOUND = 12
"""A number counts as an error if it is at most this multiple of σ. The shipped error, a centred binomial
with σ = 3.24, is at most 21."""


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Unmasks blocks (a block is the rows under one secret) of dimensions up to `MOST_DIMENSION`, within `BUDGET`. A
    block needs a row of known or zero plaintext, or several such rows if there are few features. For a larger dimension
    the claim is that of `estimate`."""
    claims: list[Claim] = [estimate(seed) for seed in public_seeds(view) if seed.num_rows > MOST_DIMENSION]
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    if not seeds:
        return claims
    try:
        load_fpylll()
    except ConfigurationError as exc:
        return [*claims, StolenFact("lattice reduction", f"not tried: {exc}")]
    targets: dict[tuple[bytes, int, int], _Target | None] = {}
    left = BUDGET
    for stream in streams(view, opened):
        share = left // 2  # a stream gets half of what is left, so none uses it all
        for seed in seeds:
            for degree in ring_degrees(seed.num_rows):
                num_features = min(stream.num_features, _samples_for_lll(seed.num_rows, NOMINAL_SIGMA) or 0)
                key = seed.seed, degree, num_features  # wider layers share a reduction
                if key not in targets and len(targets) < MOST_REDUCTIONS:
                    targets[key] = _Target.of(seed, degree, num_features)
                target = targets.get(key)
                spent = target.open(stream, share) if target is not None else 0
                share, left = share - spent, left - spent
        claims += stream.claims()
    return claims


def estimate(seed: SeededRows) -> StolenFact:
    """States what the attack would cost: the bits published for the shipped parameter set of this dimension. Without
    such a set, states that the attack was not tried."""
    bits = [chosen.bits for chosen in PARAMETERS.values() if chosen.dimension == seed.num_rows]
    if not bits:
        return StolenFact("lattice reduction", f"not tried at dimension {seed.num_rows}, which no shipped set has")
    return StolenFact("bits of work to open a mask, published estimate", min(bits))


class _Target:
    """Holds the reduced lattice of one public matrix."""

    def __init__(self, seed: SeededRows, degree: int, num_features: int, num_samples: int) -> None:
        self._seed, self._degree = seed, degree
        public = PublicMatrix.of(seed, degree, num_features)
        self._num_rows = -(-num_samples // num_features)
        self._equations = public.stacked_equations(self._num_rows, num_samples)
        self._scale = _secret_scale(NOMINAL_SIGMA)
        self._basis = _reduced_basis(self._equations, self._scale)

    @classmethod
    def of(cls, seed: SeededRows, degree: int, num_features: int) -> _Target | None:
        """Returns a target whose lattice is reduced; None if eight rows of a block have too few samples for LLL."""
        num_samples = _samples_for_lll(seed.num_rows, NOMINAL_SIGMA)
        if num_samples is None or num_samples > min(degree, 8) * num_features:
            return None
        return cls(seed, degree, num_features, num_samples)

    def open(self, stream: Stream, budget: int) -> int:
        """Tries to find the secret of each run of rows in a stream, and unmasks the rows whose secret is found. The
        work is limited to `budget`, in the units of `BUDGET`.

        Returns:
            The units of work that were used.
        """
        stream.restart()
        spent, cost = 0, self._seed.num_rows**3
        for start in stream.windows(self._num_rows):
            if bool(stream.is_done[start : start + self._num_rows].any()):
                continue
            if spent + cost > budget:
                break
            spent += cost
            masks = stream.masks(start, self._num_rows, len(self._equations))
            secret = self._secret(masks)
            if secret is not None:
                public = PublicMatrix.of(self._seed, self._degree, stream.num_features)
                stream.open_around(public, secret, start, self._num_rows)
        return spent

    def _secret(self, masks: torch.Tensor) -> torch.Tensor | None:
        if not bool(masks.any()):
            return None  # rows that were sent as zeros were not masked at all
        embedded = _embed(self._basis, masks, self._seed.num_rows, NOMINAL_SIGMA)
        load_fpylll().LLL.reduction(embedded)
        return _read_secret(embedded, self._equations, masks, self._scale, NOMINAL_SIGMA)


# ---- the lattice ----------------------------------------------------------------------------------------------------


def load_fpylll() -> Any:
    """Returns the fpylll library, imported on first use.

    Raises:
        ConfigurationError: the library is not installed.
    """
    try:
        return importlib.import_module("fpylll")
    except ImportError as exc:
        raise ConfigurationError("lattice reduction needs fpylll: pip install fpylll==0.6.4 cysignals==1.12.5") from exc


def _secret_scale(sigma: float) -> int:
    """Returns ν, the factor that makes a ternary secret as large as the error."""
    return max(1, round(sigma / TERNARY_SIGMA))


def _log2_gap(dimension: int, num_samples: int, sigma: float, root_factor: float) -> float:
    """Returns log2 of the length of a reduced basis's last Gram-Schmidt vectors, divided by the error σ.

    In a lattice of dimension d and volume vol, this length is about root_factor^-d·vol^(1/d). The error has the size σ
    in each coordinate. The reduction should find the secret if the length is larger, that is, if the result is above 0.
    """
    size = dimension + num_samples
    volume = 32 * num_samples + dimension * math.log2(_secret_scale(sigma))
    return volume / size - size * math.log2(root_factor) - math.log2(max(sigma, 1.0))


def _samples_for_lll(dimension: int, sigma: float) -> int | None:
    """Returns the fewest samples for which `_log2_gap` is at least 4 after LLL, so that LLL should find the secret;
    None if no number below 4·dimension + 8 suffices."""
    for num_samples in range(4, 4 * dimension + 8):
        if _log2_gap(dimension, num_samples, sigma, LLL_ROOT_FACTOR) >= 4:
            return num_samples
    return None


def _reduced_basis(equations: torch.Tensor, scale: int) -> Any:
    """Returns an LLL-reduced basis of {(ν·s, M·s + q·k)}.

    Args:
        equations: M, int64, shape (num_samples, n).
        scale: ν.

    Returns:
        fpylll's IntegerMatrix with n + num_samples rows and columns; the secrets are in the first n columns.
    """
    num_samples, n = equations.shape
    basis = torch.zeros(n + num_samples, n + num_samples, dtype=torch.int64)
    basis[:num_samples, n:] = MODULUS * torch.eye(num_samples, dtype=torch.int64)
    basis[num_samples:, :n] = scale * torch.eye(n, dtype=torch.int64)
    basis[num_samples:, n:] = centred(equations).t()
    fpylll = load_fpylll()
    matrix = fpylll.IntegerMatrix.from_matrix(basis.tolist())
    fpylll.LLL.reduction(matrix)
    return matrix


def _embed(basis: Any, masks: torch.Tensor, dimension: int, sigma: float) -> Any:
    """Returns Kannan's embedding of `masks`: the basis with one more column, which is zero, and with one more row
    (0, masks, τ). The zeros stand for the `dimension` numbers of a secret. τ is σ as an integer, at least 1."""
    size, tau = basis.nrows, max(1, round(sigma))
    rows = [[*basis[row], 0] for row in range(size)]
    target = [0] * dimension + masks.tolist() + [tau]
    return load_fpylll().IntegerMatrix.from_matrix([*rows, target])


def _read_secret(
    embedded: Any, equations: torch.Tensor, masks: torch.Tensor, scale: int, sigma: float
) -> torch.Tensor | None:
    """Reads the ternary secret s from the first four rows of a reduced embedding, int64, shape (n,). Returns None if
    none of these rows gives an s that satisfies every equation up to an error of `ERROR_BOUND`·σ."""
    n, tau = equations.shape[1], max(1, round(sigma))
    for row in range(min(4, embedded.nrows)):
        numbers = list(embedded[row])
        if abs(numbers[-1]) != tau or any(abs(number) not in (0, scale) for number in numbers[:n]):
            continue
        secret = torch.tensor(numbers[:n], dtype=torch.int64) // (-scale if numbers[-1] > 0 else scale)
        error = centred(masks - equations @ secret)
        if int(error.abs().max()) <= ERROR_BOUND * max(sigma, 1.0):
            return secret
    return None


LATTICE_REDUCTION = Adversary(
    "lattice-reduction",
    "a lattice mask of toy dimension: LLL on rows guessed to be zero; opens the block",
    attack,
    True,
)


# ---- how the time grows ---------------------------------------------------------------------------------------------
#
# Measures at toy size how the time of the primal attack grows with the dimension.
#
# An extrapolation from these times is an illustration and not an estimate. At toy size LLL, or BKZ with small blocks,
# suffices, and its time grows slowly. Dimension 1536 needs a block size β in the hundreds, at which sieving dominates
# with a cost of 2^0.292β. A line through toy points shows nothing of that, nor of better algorithms. The published bits
# of noise/params.py come from the lattice-estimator and are shown beside the line.
#
# With the true σ = 3.2 and q = 2^32, LLL alone succeeds at every dimension that is quick to measure. A measurement of
# growth therefore uses a larger error, `HARD_SIGMA`. This is another and harder problem, in which small dimensions need
# BKZ. The line's value at dimension 1536 changes by dozens of bits with σ and with the dimensions that were measured.
# The default result is in docs/security-evaluation.md, "What failing to break does not prove".

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


def measure_growth(
    dimensions: Sequence[int], sigma: float = HARD_SIGMA, seed: int = 0, say: Callable[[str], object] = lambda _: None
) -> list[Growth]:
    """Runs the primal attack on random LWE instances with a ternary secret, q = 2^32.

    Args:
        dimensions: n of each instance.
        sigma: σ of the rounded Gaussian error.
        seed: the seed of the instances.
        say: called with a line before each dimension.

    Raises:
        ConfigurationError: fpylll is not installed.
    """
    _measure(_WARM_UP, sigma, np.random.default_rng(seed))  # the first reduction of a process takes longer
    found = []
    for dimension in dimensions:
        say(f"reduces a lattice of dimension {dimension}, error {sigma:g}")
        found.append(_measure(dimension, sigma, np.random.default_rng((seed, dimension))))
    return found


def _measure(dimension: int, sigma: float, rng: np.random.Generator) -> Growth:
    num_samples = _best_num_samples(dimension, sigma)
    equations = torch.from_numpy(rng.integers(-(2**31), 2**31, (num_samples, dimension)))
    secret = torch.from_numpy(rng.integers(-1, 2, dimension))
    error = torch.from_numpy(np.rint(rng.normal(0.0, sigma, num_samples)).astype(np.int64))
    masks = equations @ secret + error
    start = time.perf_counter()
    scale = _secret_scale(sigma)
    embedded = _embed(_reduced_basis(equations, scale), masks.remainder(2**32), dimension, sigma)
    for block_size in BLOCK_SIZES:
        _reduce(embedded, block_size)
        found = _read_secret(embedded, equations, masks, scale, sigma)
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


def _best_num_samples(dimension: int, sigma: float) -> int:
    """Returns the fewest samples with which LLL should succeed. If no number suffices, returns the number with the
    largest gap (`lattice_reduction.log2_gap`) after LLL."""
    fewest = _samples_for_lll(dimension, sigma)
    if fewest is not None:
        return fewest
    return max(range(4, 6 * dimension + 8), key=lambda count: _log2_gap(dimension, count, sigma, LLL_ROOT_FACTOR))


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
