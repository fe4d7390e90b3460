"""This module holds the parameter sets of the lattice mask, each with its source, and refuses anything weaker.

`choose` accepts a set only if it is at least as hard as a row of the table below and claims no more bits than that row.
It also accepts sets marked `toy` if the caller allows toys, as attacks and tests do. The bits are an estimate of known
attacks, not a proof. `make estimate` computes them again (docs/parameters.md, "Estimate it again").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.command_line import nearest
from wire.errors import ConfigurationError, WeakParameters

MODULUS_BITS = 32
"""The bits of the modulus: q = 2^32, the ring of wire/SPEC.md. The estimates below hold for this modulus and no
other."""

SECURITY_TARGET_BITS = 128
"""Bits of security that must remain although many secrets share one seed; see `LatticeParameters.max_secrets`."""

NOMINAL_SIGMA = 3.2
"""The smallest allowed standard deviation of the error, except in toy sets. HomomorphicEncryption.org Security Standard
(2018), table 1 and section 2.1.1; smaller errors fall to Arora and Ge, "New algorithms for learning with errors in
presence of noise" (ICALP 2011)."""

MAX_RING_DEGREE = 2048
MAX_RANK = 6
"""MAX_RING_DEGREE and MAX_RANK are the largest ring degree N and rank k for which noise/polynomial/negacyclic.py is
tested to be exact."""

MAX_SIGMA = 1024.0
"""The largest σ that is accepted. Beyond it the loss of quality is plain (2.7166 at σ = 1024 against 2.7054, in the
simulation of docs/masks.md, "How good are answers") and the sampler's tables grow large."""

_UNLIMITED = 2**62
_ESTIMATE = "lattice-estimator, MATZOV cost model, minimum of uSVP, BDD and dual-hybrid, unlimited samples, q=2^32"


@dataclass(frozen=True)
class LatticeParameters:
    """Describes one Module-LWE instance with a uniform ternary secret over Z_q[X]/(X^N + 1), q = 2^32.

    Attributes:
        name: the name that a user writes.
        ring_degree: N, a power of two; also the number of mask rows in a block.
        rank: k, the number of polynomials in a secret.
        sigma: the standard deviation of the error; 3.2 stands for the centred binomial with η = 21 (σ = 3.24).
        bits: the estimated cost of the best known attack, as a power of two.
        source: where `bits` comes from.
        toy: whether the set is weak on purpose, for attacks and tests.
    """

    name: str
    ring_degree: int
    rank: int
    sigma: float
    bits: int
    source: str
    toy: bool = False

    @property
    def dimension(self) -> int:
        """Returns k·N, the dimension of the lattice problem, and the number of rows of A and of a hint."""
        return self.rank * self.ring_degree

    @property
    def max_secrets(self) -> int:
        """Returns how many secrets one seed of the public matrix A may serve; there is one secret for each block, group
        and direction.

        If T secrets share one A, an attacker who is content with any one of them saves at most a factor T, by a hybrid
        argument. With 2^(bits − 128) secrets, 128 bits remain. A set that claims 128 bits or fewer gets one secret for
        each seed, and a toy set has no such limit.
        """
        return _UNLIMITED if self.toy else 1 << max(self.bits - SECURITY_TARGET_BITS, 0)


def _estimated(name: str, ring_degree: int, rank: int, sigma: float, bits: int) -> LatticeParameters:
    return LatticeParameters(name, ring_degree, rank, sigma, bits, _ESTIMATE)


PARAMETERS: dict[str, LatticeParameters] = {
    chosen.name: chosen
    for chosen in (
        _estimated("default", 512, 3, NOMINAL_SIGMA, 161),
        _estimated("conservative", 512, 4, NOMINAL_SIGMA, 219),
        _estimated("lean", 256, 5, 32.0, 149),
    )
}
"""The sets that are accepted by name: the first table of docs/parameters.md."""

REFUSED = _estimated("1024", 512, 2, NOMINAL_SIGMA, 106)
"""A set that is refused, since it is below SECURITY_TARGET_BITS (the second table of docs/parameters.md).
benchmarks/estimate.py estimates it too."""


def choose(name_or_parameters: str | LatticeParameters, allow_toy: bool = False) -> LatticeParameters:
    """Returns the parameter set to use, after checking it.

    Args:
        name_or_parameters: a key of PARAMETERS, or the user's own set.
        allow_toy: whether to accept a set marked `toy`. Only attacks and tests do.

    Raises:
        ConfigurationError: the name is unknown, or a number of the set is outside the range that the arithmetic
            supports.
        WeakParameters: the set is weaker than every row of the table, or claims more bits than the rows that it
            reaches, or is a toy and toys are not allowed.
    """
    if isinstance(name_or_parameters, str):
        if name_or_parameters not in PARAMETERS:
            known, meant = ", ".join(PARAMETERS), nearest(name_or_parameters[:100], PARAMETERS)
            advice = "" if meant is None else f": did you mean {meant}?"
            raise ConfigurationError(f"lattice parameters are one of {known}, got {name_or_parameters!r}{advice}")
        return PARAMETERS[name_or_parameters]
    _check_numbers(name_or_parameters)
    _check_strength(name_or_parameters, allow_toy)
    return name_or_parameters


def _check_numbers(parameters: LatticeParameters) -> None:
    degree, rank, sigma = parameters.ring_degree, parameters.rank, parameters.sigma
    if not 2 <= degree <= MAX_RING_DEGREE or degree & (degree - 1):
        raise ConfigurationError(f"ring_degree is a power of two from 2 to {MAX_RING_DEGREE}, got {degree}")
    if not 1 <= rank <= MAX_RANK:
        raise ConfigurationError(f"rank is 1 to {MAX_RANK}, got {rank}")
    if not 0 <= sigma <= MAX_SIGMA or not math.isfinite(sigma):
        raise ConfigurationError(f"sigma is 0 to {MAX_SIGMA:g}, got {sigma}")
    if parameters.bits < 0:
        raise ConfigurationError(f"bits is not negative, got {parameters.bits}")


def _check_strength(parameters: LatticeParameters, allow_toy: bool) -> None:
    if parameters.toy and allow_toy:
        return
    if parameters.toy:
        raise WeakParameters(f"the lattice parameters {parameters.name!r} are a toy, for attacks and tests only")
    if not any(_at_least(parameters, row) for row in PARAMETERS.values()):
        raise WeakParameters(
            f"the lattice parameters {parameters.name!r} (dimension {parameters.dimension}, sigma {parameters.sigma:g}"
            f", {parameters.bits} bits claimed) are weaker than every row of docs/parameters.md"
        )


def _at_least(parameters: LatticeParameters, row: LatticeParameters) -> bool:
    """Returns whether a set is at least as hard to break as a row of the table. At fixed q, LWE gets harder with
    dimension and with error.

    `bits` is a claim of the set's author, and decides how many secrets a seed may serve. So a set may not claim more
    bits than the row.
    """
    harder = parameters.dimension >= row.dimension and parameters.sigma >= row.sigma
    return harder and parameters.bits <= row.bits
