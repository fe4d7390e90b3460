"""Recovers W_q and W_k of an attention layer from the probabilities of its softmax.

For each head, the input of o_proj is probabilities times values. If the values are known, the probabilities of token t
are a non-negative least-squares problem: t + 1 unknowns that add up to one, and head_dim equations. So tokens up to
position head_dim have one solution. The logarithm of the ratio of two probabilities is a difference of scores,
q_t·(k_s − k_r)/√head_dim. It is linear in W_q while k is known, and in W_k while q is known. If the adapter changed
both, the search varies W_k and computes the best W_q for each W_k (variable projection). Solving for W_q and W_k in
turn converges too slowly.

A softmax determines only the effect of q·k: W_q·G and W_k·G⁻ᵀ explain the outputs equally well for any G that commutes
with the rotary positions. Steps are damped, so that the result is near the public weights. If the systems of equations
have more than `_MAX_NUMBERS` numbers, as with wide heads, the layer is left to the descent of attention.py.
Source: our derivation, from the definition of attention; the search after Kaufman, BIT 15 (1975).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attacks.adversaries.attention import turn
from attacks.seen.public_model import Block, Layer, PublicModel

_MAX_NUMBERS = 1 << 25
"""The most numbers in a dense system of equations, which then takes a quarter of a GB."""
_SPARE = 1.05
"""The fewest equations per unknown. With fewer equations, some weights would fit any data."""
_EXPLAINED = 1e-4
"""The largest error with which a change of q alone, or of k alone, counts as an explanation of the probabilities. The
error is relative to the attention outputs from which the probabilities were read."""
_SWEEPS = 300
"""The number of sweeps of coordinate descent over the few least-squares problems whose unconstrained solution has
negative numbers."""
_LEAST_PROBABILITY = 1e-7
"""The smallest probability that is used in a ratio; a smaller one is only float32 rounding."""
_DEPENDENT = 1e7
"""If the system of equations for probabilities has a larger condition number than this, its solution is only float32
rounding."""
_STEPS = 60
_DAMPING, _RELAX, _LAST_DAMPING = 1e-3, 3.0, 1e6
_FLOOR = 1e-11
"""The smallest damping, relative to the diagonal. It stops weights from moving in directions that only float32 rounding
(1e-7, squared 1e-14) determines, such as that of keys along 1/γ with LayerNorm (γ: the norm's weight)."""
_SETTLED = 1e-3
"""The search ends after a step that lowers the residuals' norm by less than this share."""


def probabilities(values: torch.Tensor, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the attention probabilities of one token in each of several prompts, by non-negative least squares with
    a sum of one.

    Args:
        values: float64, shape (batch, num_keys, head_dim), num_keys <= head_dim + 1.
        outputs: probabilities times values, shape (batch, head_dim).

    Returns:
        Non-negative probabilities, and for each the factor by which it amplifies an error of the outputs. The factors
        of a prompt are infinite if its values leave the probabilities undetermined, as when a token comes twice. Both
        have shape (batch, num_keys).
    """
    size = values.norm(dim=(1, 2)).clamp_min(1e-300)  # the equation for the sum gets the weight of the others
    matrix = torch.cat([values, size[:, None, None].expand(-1, values.shape[1], 1)], dim=2).transpose(1, 2)
    wanted = torch.cat([outputs, size[:, None]], dim=1)
    inverse = torch.linalg.pinv(matrix)
    found = (inverse @ wanted[..., None])[..., 0]
    stretched = inverse.norm(dim=2)
    stretched[torch.linalg.cond(matrix) > _DEPENDENT] = torch.inf
    negative = (found < 0).any(1)
    if bool(negative.any()):
        found[negative] = _non_negative(matrix[negative], wanted[negative], found[negative].clamp_min(0))
    return found, stretched


def _non_negative(matrix: torch.Tensor, wanted: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Returns the p >= 0 that minimises ‖matrix·p − wanted‖, as far as `_SWEEPS` sweeps of coordinate descent find it.
    The problem is convex, so the descent has no other minimum to end in."""
    squares, right = matrix.transpose(1, 2) @ matrix, (matrix.transpose(1, 2) @ wanted[..., None])[..., 0]
    found = start.clone()
    for _ in range(_SWEEPS):
        for place in range(found.shape[1]):
            slope = (squares[:, place] * found).sum(1) - right[:, place]
            found[:, place] = (found[:, place] - slope / squares[:, place, place].clamp_min(1e-300)).clamp_min(0)
    return found


@dataclass(frozen=True)
class _Ratios:
    """Holds differences between attention scores of one head.

    Attributes:
        at, to, other: the indices of the query's token, of the first key's token and of the second key's token, in the
            tokens of all prompts one after another; int64, each of shape (num_ratios,).
        seen: the differences q_at·(k_to − k_other)/√head_dim of scores, from the recording, shape (num_ratios,).
        weights: the inverse of the error of `seen`, up to a factor, shape (num_ratios,).
    """

    at: torch.Tensor
    to: torch.Tensor
    other: torch.Tensor
    seen: torch.Tensor
    weights: torch.Tensor


def solve(
    block: Block, model: PublicModel, v: torch.Tensor, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the adapted weights W_q + ΔW_q and W_k + ΔW_k, the latter without the part that a softmax ignores.
    Returns None if there are too few equations, or if their matrix has more than `_MAX_NUMBERS` numbers.

    Args:
        v: the weight of the value projection with its adapter, W_v + ΔW_v.
        given: for each prompt the attention's input, shape (num_tokens, hidden).
        outputs: for each prompt o_proj's input, shape (num_tokens, num_heads · head_dim).
    """
    shared = model.num_heads // model.num_kv_heads
    unknowns = block.q.weight.shape[0] * model.head_dim
    lengths = [min(len(one), model.head_dim + 1) for one in given]
    if shared * unknowns * sum(length * (length - 1) // 2 for length in lengths) > _MAX_NUMBERS:
        return None
    ratios = _ratios(block, model, v, given, outputs)
    if min(len(one.at) for one in ratios) < _SPARE * unknowns:
        return None
    rows = torch.cat(list(given))
    positions = torch.cat([torch.arange(len(one), dtype=rows.dtype) for one in given])
    size = float(torch.cat(list(outputs)).pow(2).mean().sqrt())
    q, k = [], []
    for first in range(0, model.num_heads, shared):
        group = _Group(block, model, first, rows, positions, ratios[first : first + shared])
        found = group.solve(size)
        if found is None:
            return None
        q += found[0]
        k.append(found[1])
    return torch.cat(q, dim=1), block.k.weight + _visible(torch.cat(k, dim=1) - block.k.weight, block)


def _visible(delta: torch.Tensor, block: Block) -> torch.Tensor:
    """Returns ΔW_k without the part that a softmax ignores.

    After LayerNorm all rows have the same component along 1/γ (γ: the norm's weight), so a change of W_k along 1/γ adds
    the same vector to all keys.
    """
    if block.attention_norm.bias is None:
        return delta
    way = torch.nn.functional.normalize(1 / block.attention_norm.weight, dim=0)
    return delta - torch.outer(way, way @ delta)


def _ratios(
    block: Block, model: PublicModel, v: torch.Tensor, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[_Ratios]:
    """Computes, for every head, ratios of two attention probabilities of the same token.

    Each probability of a token is divided by the token's largest probability. The logarithm of this ratio is the
    difference of two attention scores. The arguments are those of `solve`.

    Returns:
        For each head, the differences for the tokens at positions 1 to head_dim of all prompts.
    """
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(model.num_heads)]
    starts = torch.tensor([0, *(len(one) for one in given)]).cumsum(0)
    for last in range(1, min(max(map(len, given)), model.head_dim + 1)):
        chosen = [place for place, one in enumerate(given) if len(one) > last]
        values = torch.stack([given[place][: last + 1] @ v for place in chosen])
        values = values if block.v.bias is None else values + block.v.bias
        seen = torch.stack([outputs[place][last] for place in chosen])
        first = starts[torch.tensor(chosen)]
        for head in range(model.num_heads):
            kv = head // (model.num_heads // model.num_kv_heads)
            own, shared = (slice(one * model.head_dim, (one + 1) * model.head_dim) for one in (head, kv))
            found[head].append(_of_one_token(*probabilities(values[..., shared], seen[:, own]), first))
    return [_Ratios(*(torch.cat(parts) for parts in zip(*one, strict=True))) for one in found]


def _of_one_token(share: torch.Tensor, stretched: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the fields of `_Ratios` for the query at position `num_keys` − 1 of each of several prompts.

    Args:
        share, stretched: the probabilities and the error factors from `probabilities`, shape (num_prompts, num_keys).
        first: the index of each prompt's first token in the tokens of all prompts, shape (num_prompts,).
    """
    most, at_most = share.max(dim=1, keepdim=True)
    used = (share > _LEAST_PROBABILITY) & (torch.arange(share.shape[1]) != at_most) & stretched.isfinite()
    prompt, to = used.nonzero(as_tuple=True)
    less, more = share[used], most[prompt, 0]
    errors = stretched[used] / less, stretched[prompt, at_most[prompt, 0]] / more  # errors of the logarithms
    weights = (errors[0].pow(2) + errors[1].pow(2)).rsqrt()
    start = first[prompt]
    return start + share.shape[1] - 1, start + to, start + at_most[prompt, 0], (less / more).log(), weights


_Solver = Callable[[torch.Tensor], torch.Tensor]


class _LeastSquares:
    """Computes least-squares steps with a fixed Jacobian."""

    def __init__(self, jacobian: torch.Tensor) -> None:
        self._jacobian, self._squares = jacobian, jacobian.T @ jacobian

    def solver(self, damping: float) -> _Solver:
        """Returns a function that maps residuals to the least-squares step.

        The mean square of the Jacobian's columns, times `damping`, is added to the diagonal of the normal equations.
        Residuals have shape (num_ratios,), or (num_ratios, n) for n right-hand sides.
        """
        squares = self._squares.clone()
        squares.diagonal().add_(damping * float(squares.diagonal().mean()))
        factors, pivots, _ = torch.linalg.lu_factor_ex(squares)

        def step(missed: torch.Tensor) -> torch.Tensor:
            several = missed if missed.ndim == 2 else missed[:, None]
            found: torch.Tensor = torch.linalg.lu_solve(factors, pivots, self._jacobian.T @ several).nan_to_num()
            return found if missed.ndim == 2 else found[:, 0]

        return step


class _Group:
    """Fits the weights of one head of k and of the heads of q that share this head."""

    def __init__(
        self,
        block: Block,
        model: PublicModel,
        first: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ratios: Sequence[_Ratios],
    ) -> None:
        self._rows, self._positions, self._ratios = rows, positions, ratios
        self._theta, self._root = model.rope_theta, math.sqrt(model.head_dim)
        width = model.head_dim
        heads = range(first, first + len(ratios))
        self._q = [_columns(block.q, slice(head * width, (head + 1) * width)) for head in heads]
        start = first // len(ratios) * width
        self._k = _columns(block.k, slice(start, start + width))
        self._kept: tuple[torch.Tensor, list[tuple[torch.Tensor, _Solver]]] | None = None

    def solve(self, size: float) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        """Returns the weights of each head of q, and those of the head of k, each of shape (hidden, head_dim). Returns
        None if the adapter changed both q and k and there are too few ratios to fit both.

        Args:
            size: the root mean square of the outputs' numbers.
        """
        public, k = [weight for weight, _ in self._q], self._k[0]
        q, other = self._solve_q(public, k), self._solve_k(public, k)
        count = sum(len(one.at) for one in self._ratios)
        if self._missed(public, other) < self._missed(q, k):  # the adapter changed k
            q, k = public, other
        if self._missed(q, k) < _EXPLAINED * size * math.sqrt(count):
            return q, k
        unknowns = (len(q) + 1) * k.numel() - k.shape[1] ** 2
        return self._together(q, k) if count >= _SPARE * unknowns else None

    def _together(self, q: list[torch.Tensor], k: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Improves the given weights and returns them, those of each head of q and those of the head of k. Runs
        Levenberg-Marquardt on W_k, with the best W_q for each W_k (variable projection, in Kaufman's form)."""
        best, damping, tighten = self._missed(q, k), _DAMPING, 2.0
        off_q, missed_off_q = self._off_q(q, k)
        for _ in range(_STEPS):
            moved_k = k + off_q.solver(damping)(missed_off_q).view_as(k)
            moved_q = self._solve_q(q, moved_k)
            missed = self._missed(moved_q, moved_k)
            if missed < best:
                settled = missed > best * (1 - _SETTLED)
                q, k, best = moved_q, moved_k, missed
                damping, tighten = max(damping / _RELAX, _FLOOR), 2.0
                if settled:
                    break
                off_q, missed_off_q = self._off_q(q, k)
            else:
                damping, tighten = damping * tighten, 2 * tighten
                if damping > _LAST_DAMPING:
                    break
        return q, k

    def _off_q(self, q: list[torch.Tensor], k: torch.Tensor) -> tuple[_LeastSquares, torch.Tensor]:
        """Returns a least-squares solver for a change of W_k, and the residuals that this change is to explain, for all
        heads together. The part that a change of W_q can explain is removed from both."""
        derivatives, residuals = [], []
        of_q, of_k, missed = self._best_q(k), self._of_k(q), self._residuals(q, k)
        for (a, best), b, c in zip(of_q, of_k, missed, strict=True):
            both = torch.cat([b, c[:, None]], dim=1)
            both = both - a @ best(both)
            derivatives.append(both[:, :-1])
            residuals.append(both[:, -1])
        return _LeastSquares(torch.cat(derivatives)), torch.cat(residuals)

    def _solve_q(self, q: Sequence[torch.Tensor], k: torch.Tensor) -> list[torch.Tensor]:
        """Returns the best W_q of each head for a fixed W_k; this is a linear problem."""
        parts = zip(q, self._best_q(k), self._residuals(q, k), strict=True)
        return [one + best(missed).view_as(one) for one, (_, best), missed in parts]

    def _best_q(self, k: torch.Tensor) -> list[tuple[torch.Tensor, _Solver]]:
        """Returns, for each head of q, the derivative from `_of_q` and a least-squares solver for W_q. The result for
        the last k is kept, because callers pass each improved k twice."""
        if self._kept is None or self._kept[0] is not k:
            self._kept = k, [(one, _LeastSquares(one).solver(_FLOOR)) for one in self._of_q(k)]
        return self._kept[1]

    def _solve_k(self, q: Sequence[torch.Tensor], k: torch.Tensor) -> torch.Tensor:
        """Returns the best W_k for fixed W_q of all heads; this is a linear problem."""
        best = _LeastSquares(torch.cat(self._of_k(q))).solver(_FLOOR)
        return k + best(torch.cat(self._residuals(q, k))).view_as(k)

    def _turned(self, rows: torch.Tensor, at: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
        """Returns rows, shape (num, head_dim), rotated to the positions of the tokens `at`, or rotated back if `sign`
        is −1. Without rotary positions the rows are unchanged."""
        return turn(rows, self._theta, sign * self._positions[at]) if self._theta else rows

    def _keys(self, k: torch.Tensor, one: _Ratios) -> torch.Tensor:
        """Returns, for each entry of `_Ratios`, the vector whose product with the unrotated query is the difference of
        two scores. It is the difference of the two rotated keys, rotated back by the query's position and divided by
        √head_dim.

        The result has shape (num_ratios, head_dim).
        """
        keys = _out(self._rows, k, self._k[1])
        difference = self._turned(keys[one.to], one.to) - self._turned(keys[one.other], one.other)
        return self._turned(difference, one.at, -1.0) / self._root

    def _residuals(self, q: Sequence[torch.Tensor], k: torch.Tensor) -> list[torch.Tensor]:
        """Returns, for each head of q, the recorded differences of scores minus those that these weights predict, times
        `weights`; shape (num_ratios,)."""
        found = []
        for weight, (_, bias), one in zip(q, self._q, self._ratios, strict=True):
            scores = (_out(self._rows, weight, bias)[one.at] * self._keys(k, one)).sum(1)
            found.append((one.seen - scores) * one.weights)
        return found

    def _missed(self, q: Sequence[torch.Tensor], k: torch.Tensor) -> float:
        return float(torch.cat(self._residuals(q, k)).norm())

    def _of_q(self, k: torch.Tensor) -> list[torch.Tensor]:
        """Returns, for each head of q, the derivative of the differences of scores by W_q, times `weights`; shape
        (num_ratios, hidden · head_dim)."""
        found = []
        for one in self._ratios:
            outer = self._rows[one.at][:, :, None] * self._keys(k, one)[:, None, :]
            found.append(outer.flatten(1) * one.weights[:, None])
        return found

    def _of_k(self, q: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns, for each head of q, the derivative of the differences of scores by W_k, times `weights`; shape
        (num_ratios, hidden · head_dim)."""
        found = []
        for weight, (_, bias), one in zip(q, self._q, self._ratios, strict=True):
            queries = self._turned(_out(self._rows, weight, bias)[one.at], one.at) / self._root
            to, other = (
                self._rows[at][:, :, None] * self._turned(queries, at, -1.0)[:, None, :] for at in (one.to, one.other)
            )
            found.append((to - other).flatten(1) * one.weights[:, None])
        return found


def _columns(layer: Layer, width: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    return layer.weight[:, width], None if layer.bias is None else layer.bias[width]


def _out(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows @ weight if bias is None else rows @ weight + bias
