"""Names the pooled noise vector of each message by the norm test alone, one layer at a time.

The paper counts K^layers combinations. There are none to try: ‖(z_t − c·n_k − β)/γ‖² = d for RMSNorm, and for LayerNorm
mean 0 as well, says for each message by itself which of its K vectors was added. Only the norms of rows are used, no
correlation. Source: own derivation, against the argument in Symbiosis (Multi-Adapter Inference and Fine-Tuning),
section on privacy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from attacks.adversary import Adversary, Claim, StolenRows
from attacks.passes import Opened
from attacks.public_model import Norm, PublicModel
from attacks.view import Message, View

_USUAL_SIGMA = 1.0
_POOLS_BEFORE = 2
_FEW_MESSAGES = 32
"""Messages from which σ is estimated."""


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Rows of every forward message that a norm made; see `Adversary.attack`."""
    whole = view.with_tensors()
    norms = {block.q.group: block.attention_norm for block in public.blocks}
    norms |= {block.up[0].group: block.mlp_norm for block in public.blocks}
    masked = [m for m in whole.select("product", "forward") if m.group in norms and m.arithmetic == "float"]
    effects = {group: whole.select("effect", "forward", group) for group in norms}
    pools = {m.seq: pool for m in masked if (pool := _pool(effects[m.group], m, norms[m.group])) is not None}
    masked = [message for message in masked if message.seq in pools and message.num_rows > 0]
    sigma = _sigma([message for message in masked if message.num_rows > 1][:_FEW_MESSAGES], pools, norms)
    claims: list[Claim] = []
    for message in masked:
        rows, pool = message.request().to(torch.float64), pools[message.seq]
        strengths = _strengths(rows, pool, sigma)  # (2, K)
        misfit = torch.stack([_misfit(norms[message.group], rows, pool, strength) for strength in strengths])
        side, k = divmod(int(misfit.argmin()), pool.shape[0])
        claims.append(StolenRows(message.seq, rows - strengths[side, k] * pool[k]))
    return claims


def _pool(effects: Sequence[Message], message: Message, norm: Norm) -> torch.Tensor | None:
    """Vectors it may have been masked with, float64, shape (some K, d); None where none of its width were seen."""
    before = [effect for effect in effects if effect.seq < message.seq and effect.arithmetic == "float"]
    vectors = [effect.request().to(torch.float64) for effect in before[-_POOLS_BEFORE:]]
    width = norm.weight.shape[0]
    if not vectors or any(vector.shape[1] != width or vector.shape[0] == 0 for vector in vectors):
        return None
    return torch.cat(vectors)


def _sigma(messages: list[Message], pools: Mapping[int, torch.Tensor], norms: Mapping[int, Norm]) -> float:
    """Noise over data, from messages of several rows: one c must give all of them the norm of a normed row."""
    found = []
    for message in messages:
        rows, pool = message.request().to(torch.float64), pools[message.seq]
        strengths = _roots(norms[message.group], rows, pool)  # (2, K)
        misfit = torch.stack([_misfit(norms[message.group], rows, pool, strength) for strength in strengths])
        side, k = divmod(int(misfit.argmin()), pool.shape[0])
        strength = float(strengths[side, k])
        found.append(strength / float((rows - strength * pool[k]).pow(2).mean().sqrt()))
    sigma = statistics.median(found) if found else _USUAL_SIGMA
    near = float(f"{sigma:.2g}")  # a setting is a round number
    return near if near > 0 and abs(sigma - near) <= 5e-3 * near else max(sigma, 1e-6)


def _roots(norm: Norm, rows: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Both c for each vector with which the mean squared norm is right, shape (2, K)."""
    scaled = (rows if norm.bias is None else rows - norm.bias) / norm.weight
    directions = pool / norm.weight
    square, half = directions.pow(2).sum(1), directions @ scaled.mean(0)
    rest = scaled.pow(2).sum(1).mean() - rows.shape[1]
    root = (half * half - square * rest).clamp_min(0).sqrt()
    return torch.stack([half - root, half + root]) / square


def _misfit(norm: Norm, rows: torch.Tensor, pool: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    """How far the rows without each vector are from normed ones, shape (K,); infinite for a c that is not positive."""
    left = rows - (strengths[:, None] * pool)[:, None, :]  # (K, num_rows, d)
    left = (left if norm.bias is None else left - norm.bias) / norm.weight
    misfit = (left.pow(2).mean(-1) - 1).pow(2).mean(-1)
    if norm.bias is not None:
        misfit += left.mean(-1).pow(2).mean(-1)
    return torch.where(strengths > 0, misfit, torch.inf).nan_to_num(torch.inf, posinf=torch.inf)


def _strengths(rows: torch.Tensor, pool: torch.Tensor, sigma: float) -> torch.Tensor:
    """Both c of each vector from ‖Z − c·n‖² = T·d·(c/σ)², shape (2, K)."""
    num_rows, d = rows.shape
    square = num_rows * (pool.pow(2).sum(1) - d / sigma**2)
    half, whole = pool @ rows.sum(0), rows.pow(2).sum()
    root = (half * half - square * whole).clamp_min(0).sqrt()
    return torch.stack([whole / (half + root), (half + root) / square]).clamp_max(1e30)


ADVERSARY = Adversary(
    "which-of-K",
    "pooled noise vectors told apart by the norm of a normed row alone, layer by layer: the rows of normed inputs",
    attack,
)
