"""Recovers every prompt token from the first layer's input, whose rows each depend on one token only (and on its
position).

Each row is compared with the normed embedding of every token, up to a factor. So the attack also works on rows in ring
arithmetic, whose scale is secret. Source for states of later layers: "Hidden No More" (ICML 2025).
"""

from __future__ import annotations

import torch

from attacks.seen.adversary import Adversary, Claim, StolenTokens
from attacks.seen.forward_passes import Opened, prompts
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View

_ROWS = 256


def lookup(rows: torch.Tensor, model: PublicModel) -> torch.Tensor:
    """Returns, for each row, the id of the token whose normed embedding has the largest cosine with the row; shape
    (num_tokens,). If the model has learned positions, rows beyond the last position get the id 0.

    Args:
        rows: the first layer's input for one sequence, shape (num_tokens, hidden), each row up to a positive factor.
    """
    norm = model.blocks[0].attention_norm
    if model.positions is None:
        table = _unit(norm(model.embedding)).T
        return torch.cat([(_unit(some) @ table).argmax(dim=1) for some in rows.split(_ROWS)])
    ids = torch.zeros(rows.shape[0], dtype=torch.int64)  # the model has no embedding for later positions
    for position, row in enumerate(_unit(rows[: model.positions.shape[0]])):
        ids[position] = (_unit(norm(model.embedding + model.positions[position])) @ row).argmax()
    return ids


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    group = model.blocks[0].q.group
    claims: list[Claim] = []
    for prompt in prompts(view.with_tensors(), opened, {group}):
        rows = prompt.rows.get(group)
        if rows is not None:
            claims.append(StolenTokens(prompt.number, tuple(lookup(rows, model).tolist())))
    return claims


ADVERSARY = Adversary("layer-0 lookup", "the first layer's input names every token of a prompt", _attack)
