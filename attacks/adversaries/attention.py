"""Recovers what an adapter adds to q, k and v from an attention layer's input and output alone.

For v: if q and k are not adapted, attention mixes values in a known way that is linear in W_v. Otherwise position 0
helps: it attends only to itself, so a₀ = x₀ (W_v + ΔW_v) is linear. Position 0 suffices only if the prompts have at
least as many different first tokens as the layer has inputs.

For q and k: if v is known, `attention_scores` reads q and k from the softmax. If there are too few tokens for that, or
if heads are too wide, q and k are found by descent from the public weights: the outputs are a smooth function of the
weights, and adapters are small. The descent finds them up to a change that leaves q·k as it is. If first tokens do not
suffice for v, the descent is over all three together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attacks.seen.public_model import Block, Layer, PublicModel

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
