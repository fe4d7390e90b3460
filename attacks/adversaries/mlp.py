"""Recovers what an adapter adds to gate and up (or c_fc) from an MLP's input and the input of its last layer.

With the MLP's input x, the input of its last layer is m = act(x W_gate) · (x W_up). Each column of m has its own
unknowns (a column of each of the two weights, or of one weight if there is no gate) and one equation per token. The
adapter is a small change of known weights, so Levenberg-Marquardt starts from these weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from attacks.seen.public_model import Layer

_FIRST_STEPS, _MAX_STEPS = 8, 80
_HOPELESS = 0.5
"""The fit is given up if nearly all columns have a larger relative error than this after the first steps, which shows
that no MLP made these rows."""
_COLUMNS = 64
"""The number of columns that are solved together; 64 systems of 1,152 unknowns take 0.7 GB."""
_FIRST_DAMPING, _LAST_DAMPING = 1e-3, 1e10
_RELAX, _TIGHTEN = 5.0, 4.0
_STUCK, _RESTARTS = 1e-3, 24
_SETTLED = 1e-2
"""A column that fits is finished after a step whose relative gain is below this."""
_PATIENCE, _STALLED = 12, 0.02
"""A column that does not fit is given up unless it improves by a share of `_STALLED` within `_PATIENCE` steps."""
_EXACT = 1e-9
"""The relative error at which a column is finished; float32 rounding of the data is far above it."""
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def has_enough_rows(layers: tuple[Layer, ...], num_rows: int) -> bool:
    """Returns whether there are at least two more equations (one per token) than unknowns of a column."""
    return num_rows >= sum(layer.weight.shape[0] for layer in layers) + 2


def fit_mlp(
    layers: tuple[Layer, ...],
    activation: str,
    given: torch.Tensor,
    outputs: torch.Tensor,
    deadline: float = float("inf"),
) -> tuple[tuple[torch.Tensor, ...], float] | None:
    """Returns the adapted weight W + ΔW of every layer, and the relative error ‖predicted − seen‖ / ‖seen‖. Returns
    None if the activation is unknown, if no MLP made the rows, or if the deadline passed before every column was tried.

    Args:
        layers: (gate, up) or (c_fc,), in the order of the product.
        activation: the activation, by transformers' name.
        given: float64, shape (num_tokens, hidden), with as many tokens as `has_enough_rows` needs.
        outputs: the last layer's input, shape (num_tokens, intermediate).
        deadline: a time on the clock of `time.thread_time`; columns that never converge would take hours on a real
            model.
    """
    act = _ACTIVATIONS.get(activation)
    if act is None:
        return None
    weights = [layer.weight.clone() for layer in layers]
    errors = torch.empty(outputs.shape[1], dtype=outputs.dtype)
    for start in range(0, outputs.shape[1], _COLUMNS):
        columns = torch.arange(start, min(start + _COLUMNS, outputs.shape[1]))
        found, errors[columns] = _Columns(layers, columns, act, given, outputs[:, columns]).solve(deadline=deadline)
        if time.thread_time() >= deadline:
            return None
        for weight, part in zip(weights, found, strict=True):
            weight[:, columns] = part
        if start == 0 and float((errors[columns] / outputs[:, columns].norm(dim=0)).quantile(0.1)) > _HOPELESS:
            return None
    _retry(layers, act, given, outputs, weights, errors, deadline)
    return tuple(weights), float(errors.norm() / outputs.norm())


def is_known(activation: str) -> bool:
    """Returns whether `predict` supports an activation."""
    return activation in _ACTIVATIONS


def predict(activation: str, terms: list[torch.Tensor]) -> torch.Tensor:
    """Returns act(gate) · up for two terms, or act(c_fc) for one.

    Raises:
        KeyError: the activation is not known.
    """
    act = _ACTIVATIONS[activation]
    return act(terms[0]) if len(terms) == 1 else act(terms[0]) * terms[1]


def error_of(layers: tuple[Layer, ...], activation: str, given: torch.Tensor, outputs: torch.Tensor) -> float:
    """Returns the relative error ‖predicted − seen‖ / ‖seen‖ of the last layer's input that `layers` predict; infinite
    for an unknown activation."""
    if activation not in _ACTIVATIONS:
        return torch.inf
    predicted = predict(activation, [layer(given) for layer in layers])
    return float((predicted - outputs).norm() / outputs.norm())


def _retry(
    layers: tuple[Layer, ...],
    act: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    outputs: torch.Tensor,
    weights: list[torch.Tensor],
    errors: torch.Tensor,
    deadline: float,
) -> None:
    """Restarts each column that stopped in a wrong minimum, from `_RESTARTS` other starts.

    The function changes `weights` and `errors` in place. An adapter has low rank, so the starts are drawn from the span
    of the changes that were found in other columns. If more than a quarter of the columns are wrong, nothing is done.
    After the deadline no further column is restarted.
    """
    stuck = (errors > outputs.norm(dim=0) * _STUCK).nonzero()[:, 0]
    if not 0 < len(stuck) <= outputs.shape[1] // 4:
        return
    generator = torch.Generator().manual_seed(0)
    good = torch.ones(outputs.shape[1], dtype=torch.bool)
    good[stuck] = False
    spans = [(weight - layer.weight)[:, good] for weight, layer in zip(weights, layers, strict=True)]
    for column in stuck.tolist():
        if time.thread_time() >= deadline:
            return
        columns = torch.full((_RESTARTS,), column)
        problem = _Columns(layers, columns, act, given, outputs[:, columns])
        found, after = problem.solve([span @ _normal(span.shape[1], generator) for span in spans])
        best = int(after.argmin())
        if after[best] < errors[column]:
            errors[column] = after[best]
            for weight, part in zip(weights, found, strict=True):
                weight[:, column] = part[:, best]


def _normal(count: int, generator: torch.Generator) -> torch.Tensor:
    """Returns random columns with a Euclidean norm of about 1, shape (count, _RESTARTS)."""
    start: torch.Tensor = torch.randn(count, _RESTARTS, generator=generator, dtype=torch.float64) / count**0.5
    return start


_ALL = slice(None)


class _Columns:
    """Fits some columns of one MLP; each column has its own problem, damping and history."""

    def __init__(
        self,
        layers: tuple[Layer, ...],
        columns: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor],
        given: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        self._act, self._given, self._outputs = act, given, outputs
        self._start = [layer.weight[:, columns] for layer in layers]
        self._biases = [None if layer.bias is None else layer.bias[columns] for layer in layers]

    def solve(
        self, offsets: list[torch.Tensor] | None = None, deadline: float = float("inf")
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Runs Levenberg-Marquardt (Nocedal and Wright, Numerical Optimization, section 10.3) on all columns together.

        Args:
            offsets: for each layer, the change of the public weights at the start; None starts from the public weights.
            deadline: a time on the clock of `time.thread_time`, after which no further step is made.

        Returns:
            For each layer, the weights of the columns, and for each column ‖predicted − seen‖.
        """
        weights = self._start
        if offsets is not None:
            weights = [weight + offset for weight, offset in zip(weights, offsets, strict=True)]
        errors = self._errors(weights)
        damping = torch.full_like(errors, _FIRST_DAMPING)
        sizes = self._outputs.norm(dim=0)
        is_open = errors > sizes * _EXACT
        reached, reached_at = errors, torch.zeros_like(errors)
        for step in range(_MAX_STEPS):
            if step == _FIRST_STEPS and float((errors > self._outputs.norm(dim=0) * _HOPELESS).double().mean()) > 0.9:
                break
            at = is_open.nonzero()[:, 0]
            if not len(at) or time.thread_time() >= deadline:
                break
            steps = self._steps(weights, damping, at)
            moved = [weight.index_add(1, at, step) for weight, step in zip(weights, steps, strict=True)]
            after = self._errors(moved)
            better = after < errors
            settled = better & (after > errors * (1 - _SETTLED)) & (after < sizes * _STUCK)  # the data are rounded
            weights = [torch.where(better, new, old) for new, old in zip(moved, weights, strict=True)]
            errors = torch.where(better, after, errors)
            damping = torch.where(better, damping / _RELAX, damping * _TIGHTEN).clamp_min(1e-14)
            gained = errors < reached * (1 - _STALLED)
            reached, reached_at = torch.where(gained, errors, reached), torch.where(gained, step, reached_at)
            is_open &= ~settled & (errors > sizes * _EXACT) & (damping < _LAST_DAMPING)
            is_open &= step < reached_at + _PATIENCE
        return weights, errors

    def _terms(self, weights: list[torch.Tensor], at: torch.Tensor | slice = _ALL) -> list[torch.Tensor]:
        return [
            self._given @ weight[:, at] if bias is None else self._given @ weight[:, at] + bias[at]
            for weight, bias in zip(weights, self._biases, strict=True)
        ]

    def _predict(self, terms: list[torch.Tensor]) -> torch.Tensor:
        return self._act(terms[0]) if len(terms) == 1 else self._act(terms[0]) * terms[1]

    def _errors(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """Returns ‖predicted − seen‖ of each column; the error of a column that overflowed is infinite."""
        errors = (self._predict(self._terms(weights)) - self._outputs).norm(dim=0)
        return torch.nan_to_num(errors, nan=torch.inf)

    def _steps(self, weights: list[torch.Tensor], damping: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        """Returns one Levenberg-Marquardt step of the weights of the columns `at`, one tensor for each layer.

        For each of these columns, the step solves (JᵀJ + λ diag JᵀJ)·step = Jᵀ(seen − predicted). J is the derivative
        of the column's predicted outputs by the column's weights in all layers, and λ is the column's damping.
        """
        terms = [term.requires_grad_() for term in self._terms(weights, at)]
        predicted = self._predict(terms)
        slopes = torch.autograd.grad(predicted.sum(), terms)  # elementwise, so each is its own column's derivative
        missed = self._outputs[:, at] - predicted.detach()
        rows = self._given
        squares = torch.cat(
            [torch.cat([((a * b).T[:, None] * rows.T) @ rows for b in slopes], dim=2) for a in slopes], dim=1
        )
        right = torch.cat([(slope * missed).T @ rows for slope in slopes], dim=1)
        diagonal = squares.diagonal(dim1=1, dim2=2)
        diagonal += damping[at, None] * diagonal + torch.finfo(torch.float64).tiny
        solution, _ = torch.linalg.solve_ex(squares, right[..., None])
        return [part.T for part in solution[..., 0].nan_to_num().split(rows.shape[1], dim=1)]
