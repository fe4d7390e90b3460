"""Solves `residual.py`'s equations in ring arithmetic, which shows a layer's input rows only up to secret factors.

The notation is that of residual.py. With a_t = s_t·ã_t and an unknown s_t > 0, the equation of a token becomes
c_t v_t = r_t + b + s_t ã_t (W + ΔW). After division by s_t the equation is linear in p_t = 1/s_t, in q_t = c_t/s_t and
in the layer's weight. Multiplication by P, the projector orthogonal to the columns of Ã, eliminates the weight:

    P (diag(q) V − diag(p) (R + b)) = 0.

For T tokens this has 2·T unknowns. They are determined up to one common factor if T is more than in·d/(d − 2), for a
layer with `in` inputs and d outputs: the vector of unknowns is the eigenvector of the smallest eigenvalue. The common
factor makes the whole layer unknown up to a factor λ. If the adapter's rank is below half of the layer's, most
eigenvalues of W⁺(W + ΔW) are one, which determines λ.
Source: our derivation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attacks.adversaries.residual import Fit, columns
from attacks.seen.public_model import Layer, Norm

_SEEN, _ALIKE = 128, 1e-3
"""The factor λ is first computed from `_SEEN` directions. This suffices if most eigenvalues there differ from
their median by less than this share, `_ALIKE`."""
_ITERATIONS, _SETTLED = 12, 1e-13
"""The inverse iteration ends after `_ITERATIONS` steps, or when its vector changes by less than `_SETTLED`."""
_SHIFT = 1e-13
"""This share of the largest diagonal element is added to the diagonal, to keep the factorisation positive definite."""


def rescaled(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    """Scales rows of a norm layer's output, shape (num_rows, hidden), to their true size. Each row is known up to a
    positive factor.

    For a row x̃ of d numbers, the factor is the larger root s of ‖(s·x̃ − β)/γ‖² = d, with the norm's weight γ and bias
    β. The norm's eps is ignored.
    """
    scaled = rows / norm.weight
    square = scaled.pow(2).sum(1, keepdim=True).clamp_min(1e-300)
    if norm.bias is None:
        return rows * (rows.shape[1] / square).sqrt()
    offset = norm.bias / norm.weight
    half = (scaled * offset).sum(1, keepdim=True)
    root = (half * half - square * (offset.pow(2).sum() - rows.shape[1])).clamp_min(0).sqrt()
    return rows * ((half + root) / square)


def has_enough_rows(layer: Layer, num_rows: int) -> bool:
    """Returns whether T·d equations suffice for in·d unknowns of the layer and 2·T factors, with four tokens to spare.

    T is the number of rows; the layer has `in` inputs and d outputs.
    """
    inputs, d = layer.weight.shape
    return num_rows * (d - 2) >= inputs * d + 4 * d


def explained(
    layer: Layer, given: torch.Tensor, before: torch.Tensor, norm: Norm, normed: torch.Tensor
) -> tuple[torch.Tensor, Fit]:
    """Compares each token's residual with the result of the public layer. Returns the distances, relative to the
    residual, and a fit that has the public weights."""
    known = norm.visible(before if layer.bias is None else before + layer.bias)
    fit = _with_weight(norm.visible(layer.weight), given, known, norm.direction(normed))
    predicted = known + given * fit.scales[:, None] @ fit.weight
    return (predicted - fit.after).norm(dim=1) / fit.after.norm(dim=1), fit


def fit_layer(layer: Layer, given: torch.Tensor, before: torch.Tensor, norm: Norm, normed: torch.Tensor) -> Fit:
    """Solves for the layer's weight and the factor of each input row.

    The arguments are those of `residual.fit_layer`, but the rows of `given` are known only up to a factor each. If λ
    cannot be determined, the returned fit has the public weights and an infinite error.

    Args:
        normed: the norm's output, scaled to its true size by `rescaled`.
    """
    known = norm.visible(before if layer.bias is None else before + layer.bias)
    seen = norm.direction(normed)
    public = norm.visible(layer.weight)
    spanned = columns(given)
    q, p = _null_vector(spanned.left, known, seen)
    added = q[:, None] * seen - p[:, None] * known
    weight = spanned.solve(spanned.left.T @ added)
    factor = _factor(public, weight)
    if not factor > 0:  # the inputs have too low a rank, or the change is not of low rank
        return replace(_with_weight(public, given, known, seen), error=math.inf)
    return _with_weight(weight / factor, given, known, seen)


def _null_vector(left: torch.Tensor, known: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens' factors q and p, up to one common factor, each of shape (num_tokens,), by inverse
    iteration."""
    num_tokens = left.shape[0]
    off = torch.eye(num_tokens, dtype=left.dtype) - left @ left.T
    sizes = torch.cat([seen.norm(dim=1), known.norm(dim=1)]).clamp_min(1e-300)
    both = torch.cat([seen, -known]) / sizes[:, None]
    system = both @ both.T
    system.view(2, num_tokens, 2, num_tokens).mul_(off[:, None])
    system.diagonal().add_(_SHIFT * system.diagonal().max())
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        system.diagonal().add_(1e3 * _SHIFT * system.diagonal().max())
        factor, _ = torch.linalg.cholesky_ex(system)
    vector = sizes[:, None] / sizes.norm()  # the start: all factors are equal
    for _ in range(_ITERATIONS):
        before, vector = vector, torch.cholesky_solve(vector, factor)
        vector = vector / vector.norm()
        if float((vector - before).norm()) < _SETTLED:
            break
    found = (vector[:, 0] / sizes).nan_to_num()
    found = found if float(found[num_tokens:].sum()) > 0 else -found
    return found[:num_tokens], found[num_tokens:]


def _factor(public: torch.Tensor, weight: torch.Tensor) -> float:
    """Returns the factor λ in weight ≈ λ·(public + low rank), which is the value of most eigenvalues of the ratio of
    `weight` to `public`. A few directions are tried first."""
    wide = public.shape[0] < public.shape[1]
    ratio = weight @ torch.linalg.pinv(public) if wide else torch.linalg.pinv(public) @ weight
    if ratio.shape[0] > _SEEN:
        generator = torch.Generator().manual_seed(0)  # the choice of directions is no secret
        some = torch.randn(ratio.shape[0], _SEEN, generator=generator, dtype=ratio.dtype)
        some = torch.linalg.qr(some).Q
        values = torch.linalg.eigvals(some.T @ ratio @ some).real
        middle = values.median()
        if int(((values - middle).abs() < _ALIKE * middle.abs()).sum()) > _SEEN / 2:
            return float(middle)
    return float(torch.linalg.eigvals(ratio).real.median())


def _with_weight(weight: torch.Tensor, given: torch.Tensor, known: torch.Tensor, seen: torch.Tensor) -> Fit:
    """Returns the fit of a layer whose weight is known. For each token, c·v − s·(ã W) = r is solved for c and s by
    least squares."""
    moved = given @ weight
    vv, mm, vm = seen.pow(2).sum(1), moved.pow(2).sum(1), (seen * moved).sum(1)
    vr, mr = (seen * known).sum(1), (moved * known).sum(1)
    det = (vv * mm - vm * vm).clamp_min(1e-300)
    c, s = (vr * mm - mr * vm) / det, (vr * vm - mr * vv) / det
    after = c[:, None] * seen
    added = s[:, None] * moved
    error = float((after - known - added).norm() / added.norm())
    return Fit(weight, after, error, (c > 0) & (s > 0), s)
