"""What an adapter adds to gate and up (or c_fc), from an MLP's input and the input of its last layer.

m = act(x W_gate) · (x W_up) column by column: each column has its own unknowns (two columns of weights, or one without a
gate), one equation per token, and the adapter is a small change of known weights: damped Gauss-Newton from there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from attacks.public_model import Layer

_MAX_STEPS = 40
_MAX_HALVINGS = 12
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def has_enough_rows(layers: tuple[Layer, ...], num_rows: int) -> bool:
    """An equation per token against the unknowns of a column, and two to spare."""
    return num_rows >= sum(layer.weight.shape[0] for layer in layers) + 2


def fit_mlp(
    layers: tuple[Layer, ...], activation: str, given: torch.Tensor, outputs: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], float] | None:
    """W + ΔW of every layer and ‖predicted − seen‖ / ‖seen‖; None for an activation that is not known.

    Args:
        layers: (gate, up) or (c_fc,), in the order of the product.
        given: float64, shape (num_tokens, hidden); num_tokens as `has_enough_rows` asks.
        outputs: what the last layer was given, shape (num_tokens, intermediate).
    """
    act = _ACTIVATIONS.get(activation)
    if act is None:
        return None
    weights = [layer.weight.clone() for layer in layers]
    errors = _column_errors(layers, weights, act, given, outputs)
    for _ in range(_MAX_STEPS):
        steps = _gauss_newton(layers, weights, act, given, outputs)
        moved, after = _move(layers, weights, steps, act, given, outputs, errors)
        done = bool((after > errors * 0.999).all())
        weights, errors = moved, after
        if done:
            break
    return tuple(weights), float(errors.norm() / outputs.norm())


def _move(
    layers: tuple[Layer, ...],
    weights: list[torch.Tensor],
    steps: list[torch.Tensor],
    act: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    outputs: torch.Tensor,
    errors: torch.Tensor,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each column goes the whole step, or the largest power of a half that brings it nearer, or stays."""
    size = torch.ones_like(errors)
    for _ in range(_MAX_HALVINGS):
        moved = [weight + size * step for weight, step in zip(weights, steps, strict=True)]
        after = _column_errors(layers, moved, act, given, outputs)
        worse = ~(after < errors)
        if not bool(worse.any()):
            return moved, after
        size = torch.where(worse, size / 2, size)
    size = torch.where(worse, torch.zeros_like(size), size)
    moved = [weight + size * step for weight, step in zip(weights, steps, strict=True)]
    return moved, _column_errors(layers, moved, act, given, outputs)


def _terms(layers: tuple[Layer, ...], weights: list[torch.Tensor], given: torch.Tensor) -> list[torch.Tensor]:
    return [
        given @ weight if layer.bias is None else given @ weight + layer.bias
        for layer, weight in zip(layers, weights, strict=True)
    ]


def _predict(act: Callable[[torch.Tensor], torch.Tensor], terms: list[torch.Tensor]) -> torch.Tensor:
    return act(terms[0]) if len(terms) == 1 else act(terms[0]) * terms[1]


def _column_errors(
    layers: tuple[Layer, ...],
    weights: list[torch.Tensor],
    act: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    outputs: torch.Tensor,
) -> torch.Tensor:
    """‖predicted − seen‖ of each column, shape (intermediate,)."""
    return (_predict(act, _terms(layers, weights, given)) - outputs).norm(dim=0)


def _gauss_newton(
    layers: tuple[Layer, ...],
    weights: list[torch.Tensor],
    act: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    outputs: torch.Tensor,
) -> list[torch.Tensor]:
    """One step for every column: least squares of its own Jacobian, of shape (num_tokens, inputs of all layers)."""
    terms = [term.requires_grad_() for term in _terms(layers, weights, given)]
    predicted = _predict(act, terms)
    slopes = torch.autograd.grad(predicted.sum(), terms)  # elementwise, so each is its own column's derivative
    missed = outputs - predicted.detach()
    steps = [torch.empty_like(weight) for weight in weights]
    for column in range(outputs.shape[1]):
        jacobian = torch.cat([given * slope[:, column : column + 1] for slope in slopes], dim=1)
        solution = torch.linalg.lstsq(jacobian, missed[:, column : column + 1], driver="gelsd").solution[:, 0]
        for step, part in zip(steps, solution.split(given.shape[1]), strict=True):
            step[:, column] = part
    return steps
