"""Defines the scores of the distinguisher game, in which the adversary must say which of two known inputs a masked
message hides.

A score is a function of the message, of both candidates as the integers x̃ that a tenant would encode, and of
everything public. A positive score favours the second candidate. attacks/programs/game.py plays the game. It also has a
control for each score, which is traffic on which that score must win. If a score names the true candidate in half of
the runs, this shows only that this score finds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from wire.ring.widths import FULL_BITS

_LOW_BITS = 4
_COLUMNS = 8
"""The number of features that `public_matrix` reads. In 512 rows these are 4,096 numbers, enough to win the control of
`public_matrix`. More features would cost time."""


@dataclass(frozen=True)
class Known:
    """Holds what the adversary knows before the message comes.

    Attributes:
        candidates: both encoded inputs x̃, int32, shape (num_rows, features) each.
        phases: exp(2πi·x̃/q) of both candidates, q = 2^32; complex64, same shapes.
        public_hat: Fourier transforms of the public matrix's phases, complex64, shape (rank, 2·num_rows, columns).
        bits: how many upper bits of each number are sent; the others are zero in a message.
    """

    candidates: tuple[torch.Tensor, torch.Tensor]
    phases: tuple[torch.Tensor, torch.Tensor]
    public_hat: torch.Tensor
    bits: int = FULL_BITS


@dataclass(frozen=True)
class Seen:
    """Holds what the adversary sees in one run of the game.

    Attributes:
        sent: the message, int32, shape (num_rows, features), which uses a whole block of mask rows.
        before: an earlier message, same shape.
        before_plain: the encoded rows of that earlier message, which the adversary has learned; int32.
    """

    sent: torch.Tensor
    before: torch.Tensor
    before_plain: torch.Tensor


Score = Callable[[Known, Seen], float]


def known(candidates: tuple[torch.Tensor, torch.Tensor], public: torch.Tensor, bits: int = FULL_BITS) -> Known:
    """Computes what the adversary knows before any message, which is the same in all runs.

    Args:
        candidates: int32, shape (num_rows, features) each.
        public: the matrix A, int32, shape (rank·num_rows, features).
        bits: how many upper bits of each number are sent.
    """
    num_rows = candidates[0].shape[0]
    forward = _phase(public[:, :_COLUMNS].reshape(-1, num_rows, min(_COLUMNS, public.shape[1])))
    # A, then −A: multiplication by X negates the coefficient that overflows, so 2·num_rows multiplications give A again
    extended = torch.cat((forward, forward.conj()), dim=1)
    phases = _phase(candidates[0]), _phase(candidates[1])
    return Known(candidates, phases, torch.fft.fft(extended, dim=1), bits)


def _phase(numbers: torch.Tensor) -> torch.Tensor:
    angles = numbers.to(torch.float32) * (math.pi / 2**31)
    return torch.complex(angles.cos(), angles.sin())


# ---- scores ---------------------------------------------------------------------------------------------------------


def size(known: Known, seen: Seen) -> float:
    """Subtracts each candidate from the message, and returns the size of the first remainder less that of the second. A
    size is a sum of squares of centred numbers. If the mask is uniform mod q, both sizes are alike; if the mask is
    small, the size is smaller for the true candidate."""
    first, second = (_squares(seen.sent - candidate) for candidate in known.candidates)
    return first - second


def phase(known: Known, seen: Seen) -> float:
    """Subtracts each candidate from the message, and takes the sum of cos(2πr/q) over the numbers r of each remainder.
    Returns the second sum less the first. If a mask is not uniform mod q, the sum for the true candidate may be far
    from zero."""
    first, second = known.phases
    # Re Σ exp(i·sent)·(exp(−i·second) − exp(−i·first))
    return float(torch.vdot((second - first).flatten(), _phase(seen.sent).flatten()).real)


def _low_bits(known: Known, seen: Seen) -> float:
    """Subtracts each candidate from the message, and returns how much less uniform the lowest bits that are sent are
    for the second candidate than for the first. If the mask lies on a coarse grid, the lowest bits have only one value
    for the true candidate."""
    # Of what is left of a rounded message, the bits below those that were sent say nothing.
    dropped = FULL_BITS - known.bits
    first, second = (_unevenness((seen.sent - candidate) >> dropped) for candidate in known.candidates)
    return second - first


def public_matrix(known: Known, seen: Seen) -> float:
    """Subtracts each candidate from the message, and compares how strongly the phases of the remainders correlate with
    a polynomial of the public matrix A times a power of X. Returns the largest correlation for the second candidate,
    less that for the first. A secret with very few non-zero coefficients would leave such a correlation."""
    first, second = (_largest(known, seen.sent[:, :_COLUMNS] - each[:, :_COLUMNS]) for each in known.candidates)
    return second - first


def difference(known: Known, seen: Seen) -> float:
    """Subtracts each candidate and the mask of an earlier message from the message, and returns the size of the first
    remainder less that of the second. A size is a sum of squares of centred numbers. If masks repeat, the size is small
    for the true candidate."""
    masks = seen.sent - seen.before + seen.before_plain  # int32 wraps, as the ring does
    first, second = (_squares(masks - candidate) for candidate in known.candidates)
    return first - second


def _squares(centred: torch.Tensor) -> float:
    return float(centred.to(torch.float64).square().sum())


def _unevenness(residual: torch.Tensor) -> float:
    counts = torch.bincount((residual & ((1 << _LOW_BITS) - 1)).flatten(), minlength=1 << _LOW_BITS)
    return float((counts.to(torch.float64) - residual.numel() / (1 << _LOW_BITS)).square().sum())


def _largest(known: Known, residual: torch.Tensor) -> float:
    """Returns the maximum, over i and the powers X^j, of Σ cos(2π(residual − X^j·A_i)/q). A_i holds the i-th polynomial
    of each column of the public matrix A, and the sum is over all numbers of `residual`."""
    hat = torch.fft.fft(_phase(residual), n=known.public_hat.shape[1], dim=0)  # (2·num_rows, columns)
    joined = (hat * known.public_hat.conj()).sum(2)  # (rank, 2·num_rows)
    return float(torch.fft.ifft(joined, dim=1).real.max())


SCORES: Mapping[str, Score] = MappingProxyType(
    {
        "size": size,
        "phase": phase,
        "low bits": _low_bits,
        "public matrix": public_matrix,
        "difference": difference,
    }
)
"""The scores, by name. They are fixed before any game is played, and the report shows all of them, not only the
best."""
