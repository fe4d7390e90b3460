"""Implements `layer-0 lookup` and `deep-state inversion`, which read the tokens of prompts from unmasked rows.

The first needs the first layer's input and knows every token at once. The second needs a deeper layer's input, and
finds one token after the other.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn import functional

from attacks.adversaries.attention import rotate_at
from attacks.adversaries.mlp import is_known, predict
from attacks.seen.adversary import Adversary, Claim, StolenTokens
from attacks.seen.forward_passes import Opened, prompts
from attacks.seen.public_model import Block, Layer, PublicModel
from attacks.seen.view import View

# ---- layer-0 lookup -------------------------------------------------------------------------------------------------
#
# Recovers every prompt token from the first layer's input, whose rows each depend on one token only (and on its
# position).
#
# Each row is compared with the normed embedding of every token, up to a factor. So the attack also works on rows in
# ring arithmetic, whose scale is secret. Source for states of later layers: "Hidden No More" (ICML 2025).

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


def _attack_layer0_lookup(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    group = model.blocks[0].q.group
    claims: list[Claim] = []
    for prompt in prompts(view.with_tensors(), opened, {group}):
        rows = prompt.rows.get(group)
        if rows is not None:
            claims.append(StolenTokens(prompt.number, tuple(lookup(rows, model).tolist())))
    return claims


LAYER0_LOOKUP = Adversary(
    "layer-0 lookup", "the first layer's input names every token of a prompt", _attack_layer0_lookup
)


# ---- deep-state inversion -------------------------------------------------------------------------------------------
#
# Recovers prompts from a deeper layer: from the second block's input, without the first layer's rows.
#
# Position by position, every token of the vocabulary is appended to the tokens found so far and sent through the public
# first block. The token whose state has the direction nearest to the row is chosen. The adapter moves states only a
# little, so the true token stays the nearest. Rows need to be known only up to a factor, so the attack also works on
# rows in ring arithmetic. `_BUDGET` and `_MAX_PROMPTS` bound the number of tokens that are tried and claimed. The
# report shows two shares: how many of the tried tokens are right, and how many tokens were tried.
# Source: "Hidden No More" (ICML 2025) and SipIt (2025), which invert states of any layer in the same way.

_BUDGET = 2_000_000_000_000
"""The most multiplications that are spent on one view; a token of SmolLM2 takes 1.7e11."""
_CANDIDATES = 4096
_MAX_PROMPTS = 16
_DTYPE = torch.float32
_MAX_HOPELESS = 3
"""Once this many prompts have a first token that fails the test of `_CHANCE`, no further prompt is tried."""
_CHANCE = 1.3
"""The best candidate for a first token must have a cosine that is this many times what chance gives: the largest cosine
among random directions, one for each token of the vocabulary. Otherwise the candidate is no evidence, and the prompt is
given up."""
_WIDE = 256
"""`_CHANCE` is tested only if the hidden size is at least this. In fewer dimensions, random directions come near the
true token's cosine, and trying every prompt is cheap."""


def _invert(rows: torch.Tensor, model: PublicModel, max_tokens: int) -> list[int]:
    """Finds the token ids behind the first `max_tokens` rows of the second block's input, shape (num_tokens, hidden).

    If no candidate's state is near the first row, only the best token for this row is returned.
    """
    found: list[int] = []
    block, norm = model.blocks[0], model.blocks[1].attention_norm
    num_tokens, hidden = model.embedding.shape
    by_chance = _CHANCE * math.sqrt(2 * math.log(num_tokens) / hidden) if hidden >= _WIDE else -1.0
    keys = torch.empty(model.num_kv_heads, 0, model.head_dim, dtype=rows.dtype)
    values = keys.clone()
    for position, row in enumerate(functional.normalize(rows[:max_tokens], dim=-1)):
        best, best_score = 0, -torch.inf
        for start in range(0, model.embedding.shape[0], _CANDIDATES):
            states, _, _ = _step(block, model, model.embedding[start : start + _CANDIDATES], position, keys, values)
            scores = functional.normalize(norm(states), dim=-1) @ row
            place = int(scores.argmax())
            if float(scores[place]) > best_score:
                best, best_score = start + place, float(scores[place])
        found.append(best)
        if position == 0 and best_score < by_chance:
            break
        _, key, value = _step(block, model, model.embedding[best : best + 1], position, keys, values)
        keys, values = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
    return found


def _step(
    block: Block, model: PublicModel, embedded: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the first block on candidates for one position.

    Args:
        embedded: embeddings of the candidates, shape (num_candidates, hidden).
        keys, values: keys and values of the earlier tokens, shape (num_kv_heads, position, head_dim), keys already
            rotated.

    Returns:
        States after the block, shape (num_candidates, hidden); keys and values of the candidates, each of shape
        (num_kv_heads, num_candidates, head_dim).
    """
    start = embedded if model.positions is None else embedded + model.positions[position]
    given = block.attention_norm(start)
    q, own_k, own_v = (_heads(layer, given, model.head_dim) for layer in (block.q, block.k, block.v))
    if model.rope_theta:
        q, own_k = (rotate_at(x, model.rope_theta, position) for x in (q, own_k))
    repeats = model.num_heads // model.num_kv_heads
    old_k, old_v, k, v = (x.repeat_interleave(repeats, dim=0) for x in (keys, values, own_k, own_v))
    before = q @ old_k.transpose(1, 2)  # (heads, candidates, position)
    here = (q * k).sum(-1, keepdim=True)
    weights = functional.softmax(torch.cat([before, here], dim=-1) * model.head_dim**-0.5, dim=-1)
    mixed = weights[..., :-1] @ old_v + weights[..., -1:] * v
    middle = start + block.o(mixed.transpose(0, 1).reshape(start.shape[0], -1))
    inner = predict(model.activation, [layer(block.mlp_norm(middle)) for layer in block.up])
    return middle + block.down(inner), own_k, own_v


def _heads(layer: Layer, rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the layer's output for the rows, split by head, shape (heads, num_candidates, head_dim)."""
    return layer(rows).view(rows.shape[0], -1, head_dim).transpose(0, 1)


def _attack_deep_state(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    if len(model.blocks) < 2 or not is_known(model.activation):
        return []
    group = model.blocks[1].q.group
    layers = (model.blocks[0].q, model.blocks[0].k, model.blocks[0].v, model.blocks[0].o, *model.blocks[0].up)
    cost = model.embedding.shape[0] * sum(layer.weight.numel() for layer in (*layers, model.blocks[0].down))
    left = _BUDGET // cost
    beginning = _beginning(model)
    claims: list[Claim] = []
    num_hopeless = 0
    for prompt in prompts(view.with_tensors(), opened, {group})[:_MAX_PROMPTS]:
        rows = prompt.rows.get(group)
        if rows is not None and rows.shape[0] and left > 0 and num_hopeless < _MAX_HOPELESS:
            ids = _invert(rows.to(_DTYPE), beginning, min(left, rows.shape[0]))
            left -= len(ids)
            num_hopeless += len(ids) == 1 < rows.shape[0]
            claims.append(StolenTokens(prompt.number, tuple(ids)))
    return claims


def _beginning(model: PublicModel) -> PublicModel:
    """Returns the model with only the first two blocks, which `_invert` needs, in float32. The last digits do not
    decide which candidate is nearest."""
    positions = None if model.positions is None else model.positions.to(_DTYPE)
    blocks = tuple(block.to(_DTYPE) for block in model.blocks[:2])
    return replace(model, embedding=model.embedding.to(_DTYPE), positions=positions, blocks=blocks)


DEEP_STATE = Adversary(
    "deep-state inversion", "the second block's input, token by token over the vocabulary", _attack_deep_state
)
