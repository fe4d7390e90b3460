"""Implements `gradient-view`, which recovers the batch of a training step from the step's activations x and gradients
g.

Tokens come from the first layer's rows, as in layer-0 lookup. Labels come from the output head's gradient, which is
softmax minus one-hot. The only negative number of a row is at the label. A row without a negative number was not
trained on. If the recording has x and g of a layer in float arithmetic, xᵀg is the full gradient of the layer's weight
in that step. In ring arithmetic each row has a secret factor. It does not affect tokens and labels, but it hides the
sum xᵀg.

Limits: labels are not visible if the output head stays with the tenant. The lowest layer to which LoRA was added has no
backward call, since nothing below it is trained.
Source: DAGER (NeurIPS 2024) recovers a batch from the gradient alone; here the view holds both factors of the gradient.
"""

from __future__ import annotations

import torch

from attacks.adversaries.layer0_lookup import lookup
from attacks.seen.adversary import Adversary, Claim, StolenFact
from attacks.seen.forward_passes import ForwardPass, Opened, forward_passes
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View

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
    fits = [_fit(rows, ids, length, model) for ids, length in zip(guesses, lengths, strict=False)]
    return guesses[int(torch.tensor(fits).argmax())]


def _fit(rows: torch.Tensor, ids: torch.Tensor, length: int, model: PublicModel) -> float:
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


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
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


ADVERSARY = Adversary(
    "gradient-view", "first rows and last gradients of a training step; yields the batch's tokens and labels", attack
)
