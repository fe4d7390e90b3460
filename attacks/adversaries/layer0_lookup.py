"""Every prompt token, from the first layer's input: it is a function of one token (and of its position).

Compares each row with the normed embedding of every token, up to a factor: so it also reads ring rows, whose scale is
secret. Source for states of later layers: "Hidden No More" (ICML 2025).
"""

from __future__ import annotations

import torch

from attacks.adversary import Adversary, Claim, StolenTokens
from attacks.passes import Opened, prompts
from attacks.public_model import PublicModel
from attacks.view import View


def lookup(rows: torch.Tensor, model: PublicModel) -> torch.Tensor:
    """Token ids by largest cosine, shape (num_tokens,).

    Args:
        rows: what the first layer was given, shape (num_tokens, hidden), up to a positive factor each.
    """
    norm, ids = model.blocks[0].attention_norm, torch.empty(rows.shape[0], dtype=torch.int64)
    table = None if model.positions is not None else _unit(norm(model.embedding))
    for position, row in enumerate(_unit(rows)):
        here = table
        if model.positions is not None:
            here = _unit(norm(model.embedding + model.positions[position]))
        if here is not None:
            ids[position] = int((here @ row).argmax())
    return ids


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    group = model.blocks[0].q.group
    claims: list[Claim] = []
    for prompt in prompts(view.with_tensors(), opened):
        rows = prompt.rows.get(group)
        if rows is not None:
            claims.append(StolenTokens(prompt.number, tuple(lookup(rows, model).tolist())))
    return claims


ADVERSARY = Adversary("layer-0 lookup", "the first layer's input names every token of a prompt", _attack)
