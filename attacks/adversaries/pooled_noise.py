"""Finds which noise vectors may mask a message, and how strong each one would be, for the two adversaries of pooled
noise (known_mask.py and which_of_k.py).

A message is Z = X + c·n, where n is one of the vectors that the provider has seen, and c = σ·rms(X) is an unknown
strength.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attacks.seen.public_model import Norm, PublicModel
from attacks.seen.view import Message, View

_USUAL_SIGMA = 1.0
_POOLS_BEFORE = 2
"""The number of pools that are tried: the latest one and the one before. A pool is the noise vectors of one request for
effects. A message that was on its way when the pool was renewed may still use the previous pool."""
_FEW_MESSAGES = 32
"""The largest number of messages from which σ is estimated."""
_NONE = 1e30
"""This value stands for a strength that is not possible."""
_ROUND = 5e-3
"""The relative tolerance of σ; the eps of a norm layer, which is ignored, moves an estimate by some thousandths."""


@dataclass(frozen=True)
class Masked:
    """Holds a message, and the vectors with which it may have been masked.

    Attributes:
        rows: float64, shape (num_rows, d).
        pool: the vectors, float64, shape (K, d).
        norm: the norm layer whose output the unmasked rows are; None if they come from no norm layer.
    """

    seq: int
    rows: torch.Tensor
    pool: torch.Tensor
    norm: Norm | None


def masked_messages(view: View, public: PublicModel) -> list[Masked]:
    """Returns every float message that came after noise effects (products of noise vectors with the weight) had been
    computed for its group and direction. Messages that are empty or not finite are left out."""
    norms = public.normed_inputs()
    effects: dict[tuple[int, str], list[Message]] = defaultdict(list)
    masked: list[Masked] = []
    for message in view.with_tensors().messages:
        if message.arithmetic == "float" and message.purpose == "effect":
            effects[message.group, message.direction].append(message)
        elif message.arithmetic == "float" and message.purpose == "product":
            norm = norms.get(message.group) if message.direction == "forward" else None
            one = _with_pool(message, effects[message.group, message.direction], norm)
            masked += [] if one is None else [one]
    return masked


def _with_pool(message: Message, effects: Sequence[Message], norm: Norm | None) -> Masked | None:
    """Returns the message with its pool; None if no vector of the message's width was seen before the message, or if
    the message is empty or not finite."""
    rows = message.request().to(torch.float64)
    vectors = [effect.request().to(torch.float64) for effect in effects[-_POOLS_BEFORE:]]
    vectors = [vector for vector in vectors if vector.shape[1] == rows.shape[1] and vector.shape[0] > 0]
    if not vectors or rows.shape[0] == 0 or not bool(torch.isfinite(rows).all()):
        return None
    return Masked(message.seq, rows, torch.cat(vectors), norm)


def usual_sigma(masked: Sequence[Masked]) -> float:
    """Returns σ, the noise's strength relative to the rows, estimated from messages of several normed rows; 1 if there
    are none."""
    several = [one for one in masked if one.norm is not None and one.rows.shape[0] > 1]
    estimates = [sigma for one in several[:_FEW_MESSAGES] if (sigma := _sigma(one)) is not None]
    return _settled(statistics.median(estimates)) if estimates else _USUAL_SIGMA


def take_off_normed(one: Masked, norm: Norm, sigma: float) -> torch.Tensor:
    """Returns the message's rows minus a scaled noise vector. The vector and its scale are those that leave rows most
    like the output of `norm`, the norm layer that made the unmasked rows."""
    roots = strengths(one.rows, one.pool, sigma)
    misfit = torch.stack([_misfit(norm, one.rows, one.pool, strength) for strength in roots])
    side, k = divmod(int(misfit.argmin()), one.pool.shape[0])
    return one.rows - roots[side, k] * one.pool[k]


def strengths(rows: torch.Tensor, pool: torch.Tensor, sigma: float) -> torch.Tensor:
    """Returns both solutions c of ‖Z − c·n‖² = T·d·(c/σ)² for each vector n, shape (2, K); 1e30 stands for a solution
    that is not positive.

    T is the number of rows, d the number of features. The first solution is the true strength unless ⟨X, n⟩ < −‖X‖²/c,
    which means that the rows X point against the noise. (At the true c, the left side minus the right side has the
    slope −2(‖X‖²/c + ⟨X, n⟩). At the first solution the slope is negative.)
    """
    num_rows, d = rows.shape
    square = num_rows * (pool.pow(2).sum(1) - d / sigma**2)
    half, whole = pool @ rows.sum(0), rows.pow(2).sum()
    root = (half * half - square * whole).clamp_min(0).sqrt()
    both = torch.stack([whole / (half + root), (half + root) / square])
    return torch.where((both > 0) & (both < _NONE), both, _NONE)


def _sigma(one: Masked) -> float | None:
    """Returns σ of a message of several normed rows, from the condition that a single strength c gives each row the
    norm of a normed row. Returns None if no norm layer made the rows."""
    if one.norm is None:
        return None
    scaled = one.norm.direction(one.rows)
    noise = one.pool / one.norm.weight
    square, half = noise.pow(2).sum(1), noise @ scaled.mean(0)
    rest = scaled.pow(2).sum(1).mean() - scaled.shape[1]
    root = (half * half - square * rest).clamp_min(0).sqrt()
    found = torch.stack([half - root, half + root]) / square  # (2, K)
    misfit = torch.stack([_misfit(one.norm, one.rows, one.pool, strength) for strength in found])
    side, k = divmod(int(misfit.argmin()), one.pool.shape[0])
    left = one.rows - found[side, k] * one.pool[k]
    return float(found[side, k] / left.pow(2).mean().sqrt().clamp_min(1e-30))


def _misfit(norm: Norm, rows: torch.Tensor, pool: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Returns, for each noise vector, how far the rows minus this vector times its strength are from normed rows, shape
    (K,); infinite for an impossible strength."""
    left = rows - (found[:, None] * pool)[:, None, :]  # (K, num_rows, d)
    left = norm.direction(left)
    misfit = (left.pow(2).mean(-1) - 1).pow(2).mean(-1)
    if norm.bias is not None:
        misfit = misfit + left.mean(-1).pow(2).mean(-1)
    return torch.where((found > 0) & (found < _NONE), misfit, torch.inf)


def _settled(sigma: float) -> float:
    """Rounds σ to two digits if the rounded value is within the error that the norm's eps causes, since users set round
    numbers."""
    near = float(f"{sigma:.2g}")
    return near if near > 0 and abs(sigma - near) <= _ROUND * near else max(sigma, 1e-6)
