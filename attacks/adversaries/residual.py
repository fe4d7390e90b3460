"""Recovers what o_proj and down_proj add to the residual stream, and from this ΔW of both layers, by linear algebra.

A row u of the next norm's output gives the residual after the layer up to one factor c for each token: r' = c·v with
v = u/γ (γ: the norm's weight). The residual before the layer is r, and the provider sees the layer's input a, so

    c_t · v_t = r_t + a_t (W + ΔW) + b        for every token t, unknown c_t and ΔW, bias b.

Let A, V and R hold the rows a_t, v_t and r_t, and let P be the projector orthogonal to the columns of A. Multiplication
by P removes the term with ΔW: P · diag(c) · V = P · (R + b), with the normal equations (P ∘ VVᵀ) c = diag(P (R + b)
Vᵀ). Then ΔW = A⁺ (diag(c) V − R − b) − W, and c_t v_t is the residual for the next layer. This needs more tokens than
the layer has inputs. LayerNorm removes each row's mean, so with LayerNorm all quantities are taken without the mean. If
an adapter changes a row's mean, that has no effect on what the model computes. If another adversary unmasked a few rows
wrongly among many right ones, these rows are found by their misfit and left out (trimmed least squares).
Source: our derivation, from the residual recursion of the architecture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attacks.seen.public_model import Layer, Norm

# ---- a basis of the columns of a layer's input rows -----------------------------------------------------------------
#
# Computes an orthonormal basis of a matrix's column space, and solves linear equations with that matrix.
#
# The matrix holds the input rows of a layer. The decomposition consists of two Cholesky factorisations (CholeskyQR2:
# Yamamoto et al., ETNA 44, 2015), which take a tenth of the work of a singular value decomposition. If the columns are
# nearly dependent, the singular value decomposition is used instead, and singular values below `_LEAST` are left out.

_LEAST = 1e-12
"""Singular values below this share of the largest one are left out."""
_OFF = 0.1
"""The largest deviation from the identity that the first factorisation may leave in the Gram matrix. A larger deviation
means a condition number beyond 1e7, for which two factorisations do not suffice."""


@dataclass(frozen=True)
class _Columns:
    """Holds the decomposition of a matrix A.

    Attributes:
        left: an orthonormal basis of A's column space, shape (num_rows, rank).
    """

    left: torch.Tensor
    _inverse: torch.Tensor

    def solve(self, inside: torch.Tensor) -> torch.Tensor:
        """Returns the solution X of A·X = left·inside that has the smallest norm; `inside` has shape (rank, n)."""
        return self._inverse @ inside


def columns(given: torch.Tensor) -> _Columns:
    """Decomposes a float64 matrix, shape (num_rows, num_columns), with at least as many rows as columns."""
    found = _by_cholesky(given)
    if found is not None:
        return found
    left, sizes, right = torch.linalg.svd(given, full_matrices=False)
    kept = sizes > sizes[0] * _LEAST
    return _Columns(left[:, kept], right[kept].T / sizes[kept])


def _by_cholesky(given: torch.Tensor) -> _Columns | None:
    """Decomposes by Cholesky factorisations; returns None if the columns are too nearly dependent for them."""
    sizes = given.norm(dim=0)
    if given.shape[0] < given.shape[1] or not bool((sizes > 0).all()):
        return None
    unit = torch.eye(given.shape[1], dtype=given.dtype)
    left, inverse = given, unit / sizes
    for step in range(2):
        left = left / sizes if step == 0 else left
        square = left.T @ left
        if step and not float((square - unit).abs().max()) < _OFF:
            return None
        factor, failed = torch.linalg.cholesky_ex(square)
        if int(failed):
            return None
        undone = torch.linalg.solve_triangular(factor, unit, upper=False).T
        left, inverse = left @ undone, inverse @ undone
    return _Columns(left, inverse)


# ---- the equations --------------------------------------------------------------------------------------------------

_EXACT = 1e-4
"""The relative error up to which no row of a fit counts as wrong; float32 rounding leaves less."""
_FAR = 4.0
"""A row counts as wrong if its misfit is more than this many times the median over the rows that are still used."""
FEWEST = 0.75
"""The share of the tokens that must remain after wrong rows are left out, because wrong rows must be the exception."""


@dataclass(frozen=True)
class Fit:
    """Holds a layer with its adapter, and the residual after the layer.

    Attributes:
        weight: W + ΔW, shape (in_features, out_features), without the part that the next norm removes.
        after: the residual after the layer, shape (num_tokens, hidden); it is meaningful only for tokens that are
            sound.
        error: the relative difference, over sound tokens, between what the layer with `weight` adds to the residual and
            what was observed; small if the rows are unmasked. It is 0 in a fit of `explained`, which does not compute
            it, and infinite if ring_scales.py found no weight.
        sound: bool, shape (num_tokens,): the tokens whose rows fit.
        scales: float64, shape (num_tokens,): the factors by which the layer's input must be multiplied; 1 in float
            arithmetic.
    """

    weight: torch.Tensor
    after: torch.Tensor
    error: float
    sound: torch.Tensor
    scales: torch.Tensor


def has_enough_rows(layer: Layer, num_rows: int) -> bool:
    """Returns whether T·d equations suffice for in·d unknowns of the layer and T factors, with two tokens to spare.

    T is the number of rows; the layer has `in` inputs and d outputs.
    """
    inputs, d = layer.weight.shape
    return num_rows * (d - 1) >= inputs * d + 2 * d


def explained(
    layer: Layer, given: torch.Tensor, before: torch.Tensor, norm: Norm, normed: torch.Tensor
) -> tuple[torch.Tensor, Fit]:
    """Compares each row of the next norm's output with the row that the public layer would give. Returns the relative
    distances, shape (num_tokens,), and a fit that has the public weights and counts every token as sound."""
    predicted = before + layer(given)
    missed = (norm(predicted) - normed).norm(dim=1) / normed.norm(dim=1)
    ones = torch.ones(given.shape[0], dtype=given.dtype)
    return missed, Fit(norm.visible(layer.weight), norm.visible(predicted), 0.0, ones.bool(), ones)


def fit_layer(layer: Layer, given: torch.Tensor, before: torch.Tensor, norm: Norm, normed: torch.Tensor) -> Fit:
    """Solves the equations of this module for the layer's weight and the residual after the layer.

    Args:
        layer: o_proj or down_proj.
        given: the layer's input, float64, shape (num_tokens, in_features), with at least as many tokens as
            `has_enough_rows` needs.
        before: the residual before the layer, shape (num_tokens, hidden).
        norm, normed: the norm that follows the layer, and the norm's output, shape (num_tokens, hidden).
    """
    known = norm.visible(before if layer.bias is None else before + layer.bias)
    seen = norm.direction(normed)
    sound = torch.ones(given.shape[0], dtype=torch.bool)
    fewest = max(layer.weight.shape[0] + 3, math.ceil(FEWEST * given.shape[0]))
    while True:
        weight, error = _solve(given[sound], known[sound], seen[sound])
        predicted = known + given @ weight
        factors = (seen * predicted).sum(1) / seen.pow(2).sum(1).clamp_min(1e-300)
        after = factors[:, None] * seen
        if error < _EXACT:
            return Fit(weight, after, error, sound, torch.ones_like(factors))
        misfit = (after - predicted).norm(dim=1)
        fitting = sound & (misfit <= _FAR * misfit[sound].median())
        if bool((fitting == sound).all()) or int(fitting.sum()) < fewest:
            return Fit(weight, after, error, sound, torch.ones_like(factors))
        sound = fitting


def _solve(given: torch.Tensor, known: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns W + ΔW and the relative error of the fit."""
    spanned = columns(given)
    added = _factors(spanned.left, known, seen)[:, None] * seen - known
    inside = spanned.left.T @ added
    return spanned.solve(inside), float((added - spanned.left @ inside).norm() / added.norm())


def _factors(left: torch.Tensor, known: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Returns the factors c, shape (num_tokens,), that minimise ‖P (diag(c) V − known)‖, by the normal equations.

    Args:
        left: an orthonormal basis of the columns of A, the layer's input rows.
        known: R + b, the residuals before the layer plus the layer's bias.
        seen: V, the directions of the residuals after the layer.
    """
    off = torch.eye(left.shape[0], dtype=left.dtype) - left @ left.T
    squares = off * (seen @ seen.T)  # positive semidefinite, as an elementwise product of two such matrices (Schur)
    wanted = (off * (seen @ known.T)).sum(dim=1)
    factors: torch.Tensor = torch.linalg.solve_ex(squares, wanted)[0].nan_to_num()
    return factors
