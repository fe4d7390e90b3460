"""Implements `gradient-view` and `gradient-equations`, which read one training step of unmasked rows and gradients.

The first recovers the step's batch: its tokens and labels. The second recovers what the adapter adds to down_proj.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attacks.adversaries import mlp
from attacks.adversaries.prompt_inversion import lookup
from attacks.seen.adversary import Adversary, Claim, StolenDelta, StolenFact
from attacks.seen.forward_passes import ForwardPass, Opened, forward_passes
from attacks.seen.public_model import Block, Layer, PublicModel
from attacks.seen.view import Message, View

# ---- gradient-view --------------------------------------------------------------------------------------------------
#
# Implements `gradient-view`, which recovers the batch of a training step from the step's activations x and gradients g.
#
# Tokens come from the first layer's rows, as in layer-0 lookup. Labels come from the output head's gradient, which is
# softmax minus one-hot. The only negative number of a row is at the label. A row without a negative number was not
# trained on. If the recording has x and g of a layer in float arithmetic, xᵀg is the full gradient of the layer's
# weight in that step. In ring arithmetic each row has a secret factor. It does not affect tokens and labels, but it
# hides the sum xᵀg.
#
# Limits: labels are not visible if the output head stays with the tenant. The lowest layer to which LoRA was added has
# no backward call, since nothing below it is trained.
# Source: DAGER (NeurIPS 2024) recovers a batch from the gradient alone; here the view holds both factors of the
# gradient.

TOKENS = "training tokens"
LABELS = "training labels"
NO_LABEL = -100
"""The label that transformers gives to a position that is not trained on."""
_NOTHING = 1e-3
"""A row whose size is below this share of the largest row's counts as zero. Normed rows all have about the same size;
in ring arithmetic the sizes differ by a small factor."""
_SINGLE = 0.25
"""A row has a label if the magnitude of its lowest number is more than this share of the sum of all magnitudes of the
row. Softmax minus one-hot sums to zero, so its one negative number has half of the sum. Noise has many negative
numbers."""


def weight_gradient(step: ForwardPass, group: int, opened: Opened | None = None) -> torch.Tensor | None:
    """Returns the weight gradient xᵀg of one group (layers that read the same input) in one training pass, float64,
    shape (in_features, out_features); None if x or g is missing, or if their numbers of rows differ.

    Args:
        step: a training pass of float messages.
        group: the group's id in the manifest.
        opened: rows to use in place of the recorded ones.
    """
    inputs, gradients = rows_of(step.forward.get(group), opened), rows_of(step.backward.get(group), opened)
    if inputs is None or gradients is None or inputs.shape[0] != gradients.shape[0]:
        return None
    return inputs.t() @ gradients


def batch_tokens(rows: torch.Tensor, model: PublicModel) -> torch.Tensor:
    """Returns the token ids of a whole batch, shape (num_rows,). The sequences, padded to one length, follow each
    other.

    Args:
        rows: the first layer's input, shape (num_rows, hidden), each row up to a positive factor.
    """
    if model.positions is None:
        sizes = rows.norm(dim=1)
        # many models have a zero embedding for padding: its row is zero, or nearly zero after a mask was removed
        nothing = model.embedding.norm(dim=1).argmin()
        return torch.where(sizes > _NOTHING * sizes.max(), lookup(rows, model), nothing)
    lengths = [length for length in range(1, len(rows) + 1) if len(rows) % length == 0]
    guesses = [
        torch.cat([lookup(part, model) for part in rows.split(length)])
        for length in lengths
        if length <= len(model.positions)
    ]
    fits = [_same_rows(rows, ids, length, model) for ids, length in zip(guesses, lengths, strict=False)]
    return guesses[int(torch.tensor(fits).argmax())]


def _same_rows(rows: torch.Tensor, ids: torch.Tensor, length: int, model: PublicModel) -> float:
    """Returns the mean cosine of the rows with the first layer's input for these tokens in sequences of one length."""
    starts = torch.cat([model.residual_start(part) for part in ids.split(length)])
    return float(torch.cosine_similarity(model.blocks[0].attention_norm(starts), rows, dim=-1).mean())


def batch_labels(gradients: torch.Tensor) -> torch.Tensor:
    """Returns each row's label, shape (num_rows,), from the head's gradient, shape (num_rows, vocab); NO_LABEL for rows
    of zeros or noise."""
    least, labels = gradients.min(dim=-1)
    labels[-least <= _SINGLE * gradients.abs().sum(dim=-1)] = NO_LABEL
    return labels


def rows_of(message: Message | None, opened: Opened | None) -> torch.Tensor | None:
    """Returns the rows of a message's request, float64: the recorded ones or, if `opened` is given, those in `opened`.
    Returns None if `message` is None, or if `opened` does not hold its rows."""
    if message is None:
        return None
    return message.request().to(torch.float64) if opened is None else opened.get(message.seq)


def _attack_gradient_view(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims the tokens and the labels of the first training pass, each as comma-separated text, row by row. What the
    pass does not show is not claimed."""
    step = next((one for one in forward_passes(view.with_tensors()) if one.is_training and one.num_rows), None)
    if step is None:
        return []
    claims: list[Claim] = []
    rows = rows_of(step.forward.get(model.blocks[0].q.group), opened)
    if rows is not None:
        claims.append(StolenFact(TOKENS, _listed(batch_tokens(rows, model))))
    head = None if model.head_group is None else step.backward.get(model.head_group)
    gradients = rows_of(head, opened)
    labels = None if gradients is None else batch_labels(gradients)
    if labels is not None and bool((labels != NO_LABEL).any()):
        claims.append(StolenFact(LABELS, _listed(labels)))
    return claims


def _listed(ids: torch.Tensor) -> str:
    return ",".join(map(str, ids.tolist()))


GRADIENT_VIEW = Adversary(
    "gradient-view",
    "first rows and last gradients of a training step; yields the batch's tokens and labels",
    _attack_gradient_view,
)


# ---- gradient-equations ---------------------------------------------------------------------------------------------
#
# Implements `gradient-equations`, which recovers what an adapter adds to down_proj from the gradients of a training
# step.
#
# The provider receives the gradient g of down_proj's output and computes g·Wᵀ. The tenant itself adds g·ΔWᵀ, which the
# provider does not receive. But the tenant propagates the sum backward through the activation, m = act(gate)·up, and
# sends the results to the provider as the gradients of gate and up:
#
#     g_gate = g (W + ΔW)ᵀ ∘ ∂m/∂gate,    g_up = g (W + ΔW)ᵀ ∘ ∂m/∂up.
#
# These equations are linear in ΔW, and can be solved for one input of down_proj at a time. gate and up with their own
# adapters follow from the same step's forward rows (mlp.py). The attack needs as many tokens with a gradient as
# down_proj has outputs. It also works for the last down_proj, about which forward rows say nothing if the output head
# stays with the tenant. The claim is about the adapter of the latest step that shows one. A fresh adapter changes
# nothing, so nothing is claimed about a fresh adapter.
#
# The attack does not recover o_proj, whose gradient comes back through a softmax. Nor does it recover q, k, v, gate and
# up. Their gradients come back through a norm that divides each token by its size, and the step does not show this
# size. In ring arithmetic the attack recovers nothing, because each row has a secret factor.
# Source: our derivation, from the chain rule.

_UNCHANGED = 1e-5
"""The relative error up to which public weights explain the gradients, as in closed_form.py."""
_EXPLAINED = 1e-3
"""The relative error up to which weights that the attack found explain the gradients; unmasked rows leave 1e-5 or
less, masked rows 0.1 or more."""
_RANK = 1e-5
"""A direction of the gradients counts only if its singular value is above this share of the largest one. Float32
rounding is at 1e-7."""
_NO_GRADIENT = 1e-3
"""A token counts as having no gradient if its gradient's norm is below this share of the largest one. Removing a mask
leaves 1e-7 for a token without a gradient."""
_COLUMNS = 64
"""The number of inputs of down_proj whose equations are solved together."""
_MAX_S = 60.0
"""The seconds of this thread's own time that the fits of gate and up may take, over all blocks and steps. Columns of
weights that never converge would take hours on a real model."""


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


def _attack_gradient_equations(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    deadline = time.thread_time() + _MAX_S
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
        used = sizes > _NO_GRADIENT * sizes.max()
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


GRADIENT_EQUATIONS = Adversary(
    "gradient-equations",
    "g (W + ΔW)ᵀ of a training step, through the activation; yields every down_proj's ΔW",
    _attack_gradient_equations,
)
