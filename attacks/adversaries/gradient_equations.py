"""Implements `gradient-equations`, which recovers what an adapter adds to down_proj from the gradients of a training
step.

The provider receives the gradient g of down_proj's output and computes g·Wᵀ. The tenant itself adds g·ΔWᵀ, which the
provider does not receive. But the tenant propagates the sum backward through the activation, m = act(gate)·up, and
sends the results to the provider as the gradients of gate and up:

    g_gate = g (W + ΔW)ᵀ ∘ ∂m/∂gate,    g_up = g (W + ΔW)ᵀ ∘ ∂m/∂up.

These equations are linear in ΔW, and can be solved for one input of down_proj at a time. gate and up with their own
adapters follow from the same step's forward rows (mlp.py). The attack needs as many tokens with a gradient as down_proj
has outputs. It also works for the last down_proj, about which forward rows say nothing if the output head stays with
the tenant. The claim is about the adapter of the latest step that shows one. A fresh adapter changes nothing, so
nothing is claimed about a fresh adapter.

The attack does not recover o_proj, whose gradient comes back through a softmax. Nor does it recover q, k, v, gate and
up. Their gradients come back through a norm that divides each token by its size, and the step does not show this size.
In ring arithmetic the attack recovers nothing, because each row has a secret factor.
Source: our derivation, from the chain rule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attacks.adversaries import mlp
from attacks.adversaries.gradient_view import rows_of
from attacks.seen.adversary import Adversary, Claim, StolenDelta
from attacks.seen.forward_passes import ForwardPass, Opened, forward_passes
from attacks.seen.public_model import Block, Layer, PublicModel
from attacks.seen.view import View

_UNCHANGED = 1e-5
"""The relative error up to which public weights explain the gradients, as in closed_form.py."""
_EXPLAINED = 1e-3
"""The relative error up to which weights that the attack found explain the gradients; unmasked rows leave 1e-5 or
less, masked rows 0.1 or more."""
_RANK = 1e-5
"""A direction of the gradients counts only if its singular value is above this share of the largest one. Float32
rounding is at 1e-7."""
_NOTHING = 1e-3
"""A token counts as having no gradient if its gradient's norm is below this share of the largest one. Removing a mask
leaves 1e-7 for a token without a gradient."""
_COLUMNS = 64
"""The number of inputs of down_proj whose equations are solved together."""
_MAX_S = 60.0
"""The seconds that the fits of gate and up may take, over all blocks and steps. Columns of weights that never converge
would take hours on a real model."""


@dataclass(frozen=True)
class _Rows:
    """Holds the rows of one MLP in one training step, float64: the inputs of its layers and the gradients of their
    outputs.

    Attributes:
        given: the input of gate and up, shape (num_tokens, hidden).
        inner: the input of down, shape (num_tokens, intermediate).
        of_up: for each layer of `Block.up`, the gradient of its output, shape (num_tokens, intermediate).
        of_down: the gradient of down's output, shape (num_tokens, hidden).
    """

    given: torch.Tensor
    inner: torch.Tensor
    of_up: tuple[torch.Tensor, ...]
    of_down: torch.Tensor


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    deadline = time.monotonic() + _MAX_S
    for step in _steps(view):
        claims: list[Claim] = []
        for block in model.blocks:
            rows = _read(step, block, opened)
            up = None if rows is None else _fit_up(block, model, rows, deadline)
            delta = None if rows is None or up is None else _fit_down(block, model, up, rows)
            if delta is not None and bool(delta.any()):
                claims.append(StolenDelta(block.down.name, delta))
        if claims:
            return claims
    return []


def last_down(
    view: View, model: PublicModel, opened: Opened | None, stolen: Mapping[str, torch.Tensor]
) -> StolenDelta | None:
    """Recovers ΔW of the last block's down_proj, if ΔW of gate and up (or c_fc) of that block is already known.

    ΔW is computed from a training step of the same adapter. A step counts as one of this adapter if the known ΔW
    explain the step's activations and gradients in every MLP whose ΔW is known.

    Args:
        view: the view of one tenant.
        model: the public model.
        opened: unmasked rows by message, to use in place of the recorded ones; None uses the recorded ones.
        stolen: the known ΔW by layer name, found from other traffic.

    Returns:
        The claim about down_proj; None if its ΔW is already known, that of gate or up is not, or no step gives it.
    """
    *lower, last = model.blocks
    if last.down.name in stolen or any(layer.name not in stolen for layer in last.up):
        return None
    for step in _steps(view):
        rows = _read(step, last, opened)
        if rows is None or not all(_is_of(step, block, model, opened, stolen) for block in lower):
            continue
        up = _with(last.up, stolen)
        if mlp.error_of(up, model.activation, rows.given, rows.inner) < _EXPLAINED:
            delta = _fit_down(last, model, up, rows)
            if delta is not None:
                return StolenDelta(last.down.name, delta)
    return None


def _is_of(
    step: ForwardPass, block: Block, model: PublicModel, opened: Opened | None, stolen: Mapping[str, torch.Tensor]
) -> bool:
    """Returns whether the public weights plus the stolen ΔW explain the rows of a block's MLP in the step. A block
    without gradients, or without a stolen ΔW for each layer of its MLP, counts as explained."""
    rows = _read(step, block, opened)
    if rows is None or any(layer.name not in stolen for layer in (*block.up, block.down)):
        return True
    up, (down,) = _with(block.up, stolen), _with((block.down,), stolen)
    matches = mlp.error_of(up, model.activation, rows.given, rows.inner) < _EXPLAINED
    return matches and _Equations(up, down, model.activation, rows).missed < _EXPLAINED


def _with(layers: Sequence[Layer], stolen: Mapping[str, torch.Tensor]) -> tuple[Layer, ...]:
    return tuple(replace(layer, weight=layer.weight + stolen[layer.name]) for layer in layers)


def _steps(view: View) -> Iterator[ForwardPass]:
    """Yields the training steps in float arithmetic, the latest first. Steps of adapters that change a layer's input
    are left out."""
    for step in reversed(forward_passes(view.with_tensors())):
        messages = [*step.forward.values(), *step.backward.values()]
        if step.is_training and not step.repeats and all(one.arithmetic == "float" for one in messages):
            yield step


def _read(step: ForwardPass, block: Block, opened: Opened | None) -> _Rows | None:
    """Returns the block's rows. Returns None if some are missing, as in layers below the lowest adapted one, which have
    no gradients, or if their numbers of rows differ."""
    groups = (step.forward, block.up[0].group), (step.forward, block.down.group), \
        (step.backward, block.up[0].group), (step.backward, block.down.group)  # fmt: skip
    parts = [rows_of(messages.get(group), opened) for messages, group in groups]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part.shape[0] for part in found}) > 1:
        return None
    given, inner, of_up, of_down = found
    return _Rows(given, inner, tuple(of_up[:, layer.columns] for layer in block.up), of_down)


def _fit_up(block: Block, model: PublicModel, rows: _Rows, deadline: float) -> tuple[Layer, ...] | None:
    """Returns gate and up (or c_fc) with their adapted weights; None if the forward rows do not determine them."""
    if mlp.error_of(block.up, model.activation, rows.given, rows.inner) < _UNCHANGED:
        return block.up
    if not mlp.has_enough_rows(block.up, rows.given.shape[0]):
        return None
    found = mlp.fit_mlp(block.up, model.activation, rows.given, rows.inner, deadline)
    if found is None or not found[1] < _EXPLAINED:
        return None
    return tuple(replace(layer, weight=weight) for layer, weight in zip(block.up, found[0], strict=True))


def _fit_down(block: Block, model: PublicModel, up: tuple[Layer, ...], rows: _Rows) -> torch.Tensor | None:
    """Returns ΔW of down_proj, shape (intermediate, hidden), without the part that a LayerNorm hides.

    The result is zero if the public weights explain the gradients. It is None if no weights explain the gradients, or
    if there are too few gradients.
    """
    equations = _Equations(up, block.down, model.activation, rows)
    if equations.missed < _UNCHANGED:
        return torch.zeros_like(block.down.weight)
    hidden_ways = 0 if block.mlp_norm.bias is None else 1  # with LayerNorm all gradients have mean zero
    if equations.rank < block.down.weight.shape[1] - hidden_ways:
        return None
    delta = equations.solve()
    changed = replace(block.down, weight=block.down.weight + delta)
    return delta if _Equations(up, changed, model.activation, rows).missed < _EXPLAINED else None


class _Equations:
    """Holds the equations g_j = (g (W + ΔW)ᵀ) ∘ ∂m/∂j for j of gate and up.

    Tokens without a gradient are left out. The gradients of all other tokens are scaled to equal size, because float32
    rounds every row relative to itself.
    """

    def __init__(self, up: tuple[Layer, ...], down: Layer, activation: str, rows: _Rows) -> None:
        sizes = rows.of_down.norm(dim=1)
        used = sizes > _NOTHING * sizes.max()
        scale = 1 / sizes[used, None]
        terms = [layer(rows.given[used]).requires_grad_() for layer in up]
        slopes = torch.autograd.grad(mlp.predict(activation, terms).sum(), terms)  # elementwise
        self._g = rows.of_down[used] * scale
        self._slopes = torch.stack(slopes)  # (len(up), num_tokens, intermediate)
        self._seen = torch.stack([part[used] * scale for part in rows.of_up])
        self._off = self._seen - self._slopes * (self._g @ down.weight.T)

    @property
    def missed(self) -> float:
        """Returns the relative error ‖predicted − seen‖ / ‖seen‖ of the gradients of gate and up that the weight of
        `down` predicts; NaN if no token has a gradient."""
        return float(self._off.norm() / self._seen.norm())

    @property
    def rank(self) -> int:
        """Returns the number of independent directions of the gradients."""
        sizes = torch.linalg.svdvals(self._g)
        return int((sizes > sizes[0] * _RANK).sum()) if len(sizes) else 0

    def solve(self) -> torch.Tensor:
        """Returns the least-squares ΔW, relative to `down`, of smallest norm, shape (intermediate, hidden)."""
        found = []
        for start in range(0, self._off.shape[2], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            slopes, off = (part[:, :, columns].permute(2, 0, 1) for part in (self._slopes, self._off))
            matrix = (slopes[..., None] * self._g).flatten(1, 2)  # (columns, len(up) · num_tokens, hidden)
            solved = torch.linalg.lstsq(matrix, off.flatten(1)[..., None], rcond=_RANK, driver="gelsd").solution
            found.append(solved[..., 0])
        return torch.cat(found)


ADVERSARY = Adversary(
    "gradient-equations", "g (W + ΔW)ᵀ of a training step, through the activation; yields every down_proj's ΔW", _attack
)
