"""What o_proj and down_proj add to the residual stream, and so ΔW of both, by linear algebra.

A row u of the next normed input gives the residual after the layer up to one factor c per token: r' = c·v, v = u/γ.
Before the layer it was r, and the layer's input a is on the wire, so

    c_t · v_t = r_t + a_t (W + ΔW) + b        for every token t, unknown c_t and ΔW.

Multiplied by the projector P off the columns of A, ΔW is gone: P · diag(c) · V = P · (R + b), whose normal equations are
(P ∘ VVᵀ) c = diag(P (R + b) Vᵀ). Then ΔW = A⁺ (diag(c) V − R − b) − W, and c_t v_t is the residual for the next layer.
More tokens than the layer has inputs are needed. LayerNorm takes off each row's mean, so there everything is meant after
the mean is taken off: what an adapter adds to it changes nothing that the model computes.
Source: our derivation, from the residual recursion of the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attacks.public_model import Layer, Norm


@dataclass(frozen=True)
class Fit:
    """A layer with its adapter, and where the residual stands after it.

    Attributes:
        weight: W + ΔW, shape (in_features, out_features), as far as the norm after it lets it through.
        after: residual after the layer, shape (num_tokens, hidden).
    """

    weight: torch.Tensor
    after: torch.Tensor


def has_enough_rows(layer: Layer, num_rows: int) -> bool:
    """More tokens than unknowns: in_features, and at least two to spare."""
    return num_rows >= layer.weight.shape[0] + 2


def fit_layer(layer: Layer, given: torch.Tensor, before: torch.Tensor, norm: Norm, normed: torch.Tensor) -> Fit:
    """Solves for the layer.

    Args:
        layer: o_proj or down_proj.
        given: its input, float64, shape (num_tokens, in_features); num_tokens as `has_enough_rows` asks.
        before: the residual in front of it, shape (num_tokens, hidden).
        norm, normed: the norm that follows, and what it gave, shape (num_tokens, hidden).
    """
    known = norm.visible(before if layer.bias is None else before + layer.bias)
    after = _factors(given, known, norm.direction(normed))[:, None] * norm.direction(normed)
    weight = torch.linalg.lstsq(given, after - known, driver="gelsd").solution
    return Fit(weight, after)


def _factors(given: torch.Tensor, known: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """c, shape (num_tokens,): least squares of ‖P (diag(c) V − known)‖ by its normal equations."""
    basis, sizes, _ = torch.linalg.svd(given, full_matrices=False)
    basis = basis[:, sizes > sizes[0] * 1e-12]
    off = torch.eye(given.shape[0], dtype=given.dtype) - basis @ basis.T
    right = (off * (seen @ known.T)).sum(dim=1)
    return torch.linalg.lstsq(off * (seen @ seen.T), right[:, None], driver="gelsd").solution[:, 0]
