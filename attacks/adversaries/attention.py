"""Recovers what an adapter adds to q, k and v from an attention layer's input and output alone.

For v: if q and k are not adapted, attention mixes values in a known way that is linear in W_v. Otherwise position 0
helps: it attends only to itself, so a₀ = x₀ (W_v + ΔW_v) is linear. Position 0 suffices only if the prompts have at
least as many different first tokens as the layer has inputs.

For q and k: if v is known, `solve_scores` reads q and k from the softmax. If there are too few tokens for that, or if
heads are too wide, q and k are found by descent from the public weights: the outputs are a smooth function of the
weights, and adapters are small. The descent finds them up to a change that leaves q·k as it is. If first tokens do not
suffice for v, the descent is over all three together.

This module claims nothing itself. `closed-form`, `substitute` and `deep-state inversion` use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attacks.seen.public_model import Block, Layer, PublicModel

# ---- from the outputs alone -----------------------------------------------------------------------------------------

_FIRST_STEPS, _MAX_STEPS = 40, 250
_HOPELESS = 0.1
"""The relative error that the descent must fall below in its first steps. If it does not, the rows are not the output
of attention, and the descent is given up."""
_HISTORY = 50


@dataclass(frozen=True)
class Heads:
    """Holds the adapted weights W + ΔW of q, k and v, each (hidden, out_features), and how well they predict the
    outputs.

    Attributes:
        error: ‖predicted − seen‖ / ‖seen‖ over all attention outputs; infinite if nothing could be compared.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    error: float


def fit_first_position(
    block: Block, model: PublicModel, given: torch.Tensor, outputs: torch.Tensor
) -> torch.Tensor | None:
    """Computes the adapted value weight W_v + ΔW_v from position 0 of many prompts. Returns None if there are too few
    prompts, or if their first tokens differ too little.

    Args:
        given: the attention's input at position 0, shape (num_prompts, hidden).
        outputs: o_proj's input at position 0, shape (num_prompts, num_heads · head_dim).
    """
    sizes = torch.linalg.svdvals(given)
    if given.shape[0] < given.shape[1] or sizes[-1] < sizes[0] * 1e-7:
        return None
    shared = outputs.reshape(outputs.shape[0], model.num_kv_heads, -1, model.head_dim).mean(2)
    values = shared.reshape(outputs.shape[0], -1)
    if block.v.bias is not None:
        values = values - block.v.bias
    weight: torch.Tensor = torch.linalg.lstsq(given, values, driver="gelsd").solution
    return weight


def fit_values(
    block: Block, model: PublicModel, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Heads:
    """Fits W_v while q and k have their public weights. Attention is then a known mixture of the values, and linear in
    W_v.

    Args:
        block, model: a transformer block and the public model that the block belongs to.
        given, outputs: as in `fit_all`.
    """
    hidden, repeats = block.v.weight.shape[0], model.num_heads // model.num_kv_heads
    squares = torch.zeros(model.num_kv_heads, hidden, hidden, dtype=torch.float64)
    right = torch.zeros(model.num_kv_heads, hidden, model.head_dim, dtype=torch.float64)
    for rows, seen in _batches(given, outputs):
        mixed = _mix(block, model, (block.q.weight, block.k.weight), rows)  # (prompts, heads, tokens, hidden)
        seen = seen.view(*seen.shape[:2], model.num_heads, model.head_dim).transpose(1, 2)
        if block.v.bias is not None:  # the weights of a mixture add up to one
            bias = block.v.bias.view(model.num_kv_heads, model.head_dim).repeat_interleave(repeats, dim=0)
            seen = seen - bias[:, None]
        for head in range(model.num_heads):
            one = mixed[:, head].reshape(-1, hidden)
            squares[head // repeats] += one.T @ one
            right[head // repeats] += one.T @ seen[:, head].reshape(-1, model.head_dim)
    shrunk = squares.diagonal(dim1=1, dim2=2).mean(1) * 1e-14
    squares.diagonal(dim1=1, dim2=2).add_(shrunk[:, None])
    solution, _ = torch.linalg.solve_ex(squares, right)
    v = solution.nan_to_num().transpose(0, 1).reshape(hidden, -1)
    return tried(block, model, (block.q.weight, block.k.weight, v), given, outputs)


def tried(
    block: Block,
    model: PublicModel,
    weights: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> Heads:
    """Returns the given weights of q, k and v together with the error of the attention outputs that these weights
    predict."""
    missed = size = 0.0
    with torch.no_grad():
        for rows, seen in _batches(given, outputs):
            missed += float((attention(block, model, weights, rows) - seen).pow(2).sum())
            size += float(seen.pow(2).sum())
    q, k, v = weights
    return Heads(q, k, v, float((missed / size) ** 0.5) if size else float("inf"))


def _mix(block: Block, model: PublicModel, weights: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Returns, for each head, the input rows averaged with the head's attention probabilities, shape (num_prompts,
    num_heads, num_tokens, hidden)."""
    num_prompts, num_tokens, hidden = rows.shape
    q, k = _queries_and_keys(block, model, weights, rows)
    everywhere = rows[:, None].expand(num_prompts, model.num_heads, num_tokens, hidden)
    return torch.nn.functional.scaled_dot_product_attention(q, k, everywhere, is_causal=True)


def _queries_and_keys(
    block: Block, model: PublicModel, weights: Sequence[torch.Tensor], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries and keys, each of shape (num_prompts, num_heads, num_tokens, head_dim). If the model has rotary
    positions, they are already applied. `weights` holds the weights of q and k."""
    q, k = (_heads(layer, weight, model, rows) for layer, weight in zip((block.q, block.k), weights, strict=True))
    if model.rope_theta:
        q, k = _rotate(q, model.rope_theta), _rotate(k, model.rope_theta)
    return q, k.repeat_interleave(model.num_heads // model.num_kv_heads, dim=1)


def _heads(layer: Layer, weight: torch.Tensor, model: PublicModel, rows: torch.Tensor) -> torch.Tensor:
    """Returns a projection of the rows, split by head, shape (num_prompts, heads, num_tokens, head_dim)."""
    out = rows @ weight
    out = out if layer.bias is None else out + layer.bias
    return out.view(*rows.shape[:2], -1, model.head_dim).transpose(1, 2)


def fit_all(
    block: Block,
    model: PublicModel,
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    v: torch.Tensor | None = None,
) -> Heads:
    """Fits the weights of q and k, and those of v if they are not given, by descent from the public weights.

    Args:
        given: for each prompt the attention's input, shape (num_tokens, hidden).
        outputs: for each prompt o_proj's input, shape (num_tokens, num_heads · head_dim).
        v: the adapted value weight W_v + ΔW_v, if it is known already.
    """
    start = [block.q.weight, block.k.weight, *([block.v.weight] if v is None else [])]
    deltas = [torch.zeros(weight.shape, dtype=weight.dtype, requires_grad=True) for weight in start]

    def weights() -> list[torch.Tensor]:
        moved = [weight + delta for weight, delta in zip(start, deltas, strict=True)]
        return moved if v is None else [*moved, v]

    return _descend(block, model, given, outputs, deltas, weights)


def fit_scales(
    block: Block,
    model: PublicModel,
    weights: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> Heads:
    """Fits weights of q, k and v that are known up to one factor for each output; BOFT adapters train such factors.

    The factors of v come from position 0 in closed form. The factors of q and k are found by descent.

    Args:
        weights: the weights of q, k and v, with every factor set to one.
        given, outputs: as in `fit_all`.
    """
    v = weights[2] * _first_factors(block, model, weights[2], given, outputs)
    logs = [torch.zeros(weight.shape[1], dtype=weight.dtype, requires_grad=True) for weight in weights[:2]]
    return _descend(
        block, model, given, outputs, logs,
        lambda: [*(weight * log.exp() for weight, log in zip(weights[:2], logs, strict=True)), v],
    )  # fmt: skip


def _first_factors(
    block: Block,
    model: PublicModel,
    weight: torch.Tensor,
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Returns, for each output of v, the factor by which `weight` has to be multiplied to give the values that were
    seen. The factors are fitted at position 0, which attends only to itself; those that are not positive are replaced
    by 1."""
    values = torch.stack([rows[0] for rows in given]) @ weight
    seen = torch.stack([rows[0] for rows in outputs]).view(len(outputs), model.num_kv_heads, -1, model.head_dim)
    seen = seen.mean(dim=2).reshape(values.shape)  # heads of q that share a head of v see the same values
    seen = seen if block.v.bias is None else seen - block.v.bias
    factors = (seen * values).sum(dim=0) / values.pow(2).sum(dim=0).clamp_min(1e-300)
    return torch.where(factors > 0, factors, torch.ones_like(factors))


def _descend(
    block: Block,
    model: PublicModel,
    given: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parameters: list[torch.Tensor],
    weights: Callable[[], Sequence[torch.Tensor]],
) -> Heads:
    """Minimises the misfit of the outputs with L-BFGS. It changes `parameters` in place, from which `weights` computes
    the weights of q, k and v. It stops after `_FIRST_STEPS` if the relative error is not below `_HOPELESS` then."""
    size = sum(float(one.pow(2).sum()) for one in outputs)
    batches = _batches(given, outputs)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=_FIRST_STEPS, max_eval=2 * _FIRST_STEPS, history_size=_HISTORY,
        tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rows, seen in batches:
            total = total + (attention(block, model, weights(), rows) - seen).pow(2).sum() / size
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    if float(loss().detach()) ** 0.5 < _HOPELESS:
        optimizer.param_groups[0]["max_iter"] = _MAX_STEPS - _FIRST_STEPS
        optimizer.param_groups[0]["max_eval"] = 2 * _MAX_STEPS
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return tried(block, model, [weight.detach() for weight in weights()], given, outputs)


def _batches(given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Groups prompts by length, and returns the inputs and the outputs for each length, each of shape (num_prompts,
    num_tokens, features)."""
    lengths = sorted({rows.shape[0] for rows in given})
    return [
        (
            torch.stack([rows for rows in given if rows.shape[0] == length]),
            torch.stack([rows for rows in outputs if rows.shape[0] == length]),
        )
        for length in lengths
    ]


def attention(block: Block, model: PublicModel, weights: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Computes causal attention without the output projection.

    Args:
        weights: the weights of q, k and v, each (hidden, out_features).
        rows: the normed input, shape (num_prompts, num_tokens, hidden).

    Returns:
        The mixed values, shape (num_prompts, num_tokens, num_heads · head_dim).
    """
    num_prompts, num_tokens, _ = rows.shape
    q, k = _queries_and_keys(block, model, weights[:2], rows)
    v = _heads(block.v, weights[2], model, rows).repeat_interleave(model.num_heads // model.num_kv_heads, dim=1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(num_prompts, num_tokens, -1)


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Applies rotary positions 0, 1, … to x, shape (..., num_tokens, head_dim).

    As in transformers, the rotation pairs each number of a head's first half with one of the second half, not adjacent
    numbers.
    """
    return turn(x, theta, torch.arange(x.shape[-2], dtype=x.dtype))


def rotate_at(x: torch.Tensor, theta: float, position: int) -> torch.Tensor:
    """Applies one rotary position to every row of x, shape (..., num_rows, head_dim)."""
    return turn(x, theta, torch.full((1,), float(position), dtype=x.dtype))


def turn(x: torch.Tensor, theta: float, positions: torch.Tensor) -> torch.Tensor:
    """Applies the rotary positions, shape (num_rows,), to the rows of x, shape (..., num_rows, head_dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# ---- from the probabilities of the softmax --------------------------------------------------------------------------
#
# Recovers W_q and W_k of an attention layer from the probabilities of its softmax.
#
# For each head, the input of o_proj is probabilities times values. If the values are known, the probabilities of token
# t are a non-negative least-squares problem: t + 1 unknowns that add up to one, and head_dim equations. So tokens up to
# position head_dim have one solution. The logarithm of the ratio of two probabilities is a difference of scores,
# q_t·(k_s − k_r)/√head_dim. It is linear in W_q while k is known, and in W_k while q is known. If the adapter changed
# both, the search varies W_k and computes the best W_q for each W_k (variable projection). Solving for W_q and W_k in
# turn converges too slowly.
#
# A softmax determines only the effect of q·k: W_q·G and W_k·G⁻ᵀ explain the outputs equally well for any G that
# commutes with the rotary positions. Steps are damped, so that the result is near the public weights. If the systems of
# equations have more than `_MAX_NUMBERS` numbers, as with wide heads, the layer is left to the descent above.
# Source: our derivation, from the definition of attention; the search after Kaufman, BIT 15 (1975).

_MAX_NUMBERS = 1 << 25
"""The most numbers in a dense system of equations, which then takes a quarter of a GB."""
_SPARE = 1.05
"""The fewest equations per unknown. With fewer equations, some weights would fit any data."""
_SCORES_EXPLAINED = 1e-4
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
_SCORE_STEPS = 60
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


def solve_scores(
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
        if self._missed(q, k) < _SCORES_EXPLAINED * size * math.sqrt(count):
            return q, k
        unknowns = (len(q) + 1) * k.numel() - k.shape[1] ** 2
        return self._together(q, k) if count >= _SPARE * unknowns else None

    def _together(self, q: list[torch.Tensor], k: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Improves the given weights and returns them, those of each head of q and those of the head of k. Runs
        Levenberg-Marquardt on W_k, with the best W_q for each W_k (variable projection, in Kaufman's form)."""
        best, damping, tighten = self._missed(q, k), _DAMPING, 2.0
        off_q, missed_off_q = self._off_q(q, k)
        for _ in range(_SCORE_STEPS):
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
