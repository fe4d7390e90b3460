"""Decides whether stolen adapters are right. The stolen ΔW of each kind of layer is compared with that part of the
victim's ΔW on which the model's results depend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attacks.report.finding import OVERLAP, SHARE_CLAIMED, Finding, unclaimed, verdict_on
from attacks.seen.adversary import StolenDelta
from attacks.seen.public_model import Block
from attacks.truth.secrets import Truth

_MOST_RANK, _RANK_FLOOR = 17, 1e-4
"""A change whose rank is `_MOST_RANK` or more has no subspace to compare. Singular values below the share `_RANK_FLOOR`
of the largest one are rounding."""
_SHRUNK = 0.99
"""A claim with at least this relative error counts as a guess, because a guess near zero has an error a little below 1
without any knowledge."""


def judge_deltas(claims: Sequence[StolenDelta], truth: Truth) -> list[Finding]:
    """Computes the error, the cosine and the subspace overlap of claims, over all blocks, for each kind of layer that
    the victim adapted. q and k are judged together, without an overlap. If nothing was claimed, there are no findings.

    If the adversary claims adapters, but claimed nothing about some or all layers of a kind, a line says so.
    """
    claimed = {claim.layer: claim.delta for claim in claims}
    if not claimed:
        return []
    compared: dict[str, list[_Compared | None]] = {}
    for layer in truth.public.layers():
        wanted = _visible(layer, truth)
        if kind_of(layer) not in ("q_proj", "k_proj") and bool(wanted.any()):
            compared.setdefault(kind_of(layer), []).append(_compare(layer, wanted, claimed, truth))
    for block in truth.public.blocks:  # q and k are judged together, because only their product is determined
        if _changes_scores(block, truth):
            compared.setdefault("q·k", []).append(_compare_scores(block, claimed, truth))
    return [finding for kind, each in compared.items() for finding in _findings(kind, each)]


@dataclass(frozen=True)
class _Compared:
    """Holds how the claim about one layer, or about q and k of one block, compares with the truth.

    Attributes:
        error, cosine: the error and the cosine of the claimed change.
        size: the number of elements of the change.
        overlap: three numbers: the share of the true change's input directions that lie in the span of the claimed
            change's leading input directions, the same share for random directions, and its standard deviation; None if
            the change is not of low rank.
    """

    error: float
    cosine: float
    size: int
    overlap: tuple[float, float, float] | None = None


def _findings(kind: str, each: Sequence[_Compared | None]) -> Iterator[Finding]:
    """Yields the table's lines for one kind of layer.

    Args:
        kind: the kind of layer.
        each: the comparison of each block in which the victim changed this kind; None if nothing was claimed.
    """
    judged = [one for one in each if one is not None]
    if judged:
        error, bounds = _median(one.error for one in judged), (_SHRUNK, 1.0)
        yield Finding(kind, "relative error", error, 1.0, (1.0, 1.0), verdict_on(error, bounds, error < 0.1, False))
        half = 2.576 / math.sqrt(min(one.size for one in judged) * len(judged))
        value = sum(one.cosine for one in judged) / len(judged)
        worst = max(one.error for one in judged)
        yield Finding(kind, "largest error", worst, 1.0, (1.0, 1.0), verdict_on(worst, bounds, worst < 0.1, False))
        count = f"{len(judged)} of {len(each)}"
        yield Finding(kind, SHARE_CLAIMED, len(judged) / len(each), 0.0, (0.0, 0.0), count)
        yield from _overlap([one.overlap for one in judged if one.overlap is not None], kind)
        yield Finding(kind, "cosine with ΔW", value, 0.0, (-half, half), verdict_on(value, (-half, half), value > 0.99))
    if len(judged) < len(each):
        part = f" ({len(each) - len(judged)} of {len(each)} layers)" if judged else ""
        yield unclaimed(kind + part, "relative error", 1.0)


def _overlap(each: Sequence[tuple[float, float, float]], kind: str) -> Iterator[Finding]:
    if each:
        value, baseline, deviation = (sum(parts) / len(each) for parts in zip(*each, strict=True))
        half = 2.576 * deviation / math.sqrt(len(each))
        bounds = baseline - half, baseline + half
        yield Finding(kind, OVERLAP, value, baseline, bounds, verdict_on(value, bounds, value > 0.99))


def _overlap_of(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float, float] | None:
    """Returns (overlap, its value by chance, its standard deviation by chance); None if `wanted` is not of low rank.

    The overlap is the mean squared cosine of the principal angles between the two input subspaces, ‖U₁ᵀU₂‖²/r, where r
    is the rank of `wanted`, d its number of inputs, and U₁ and U₂ are orthonormal bases of the subspaces. By chance it
    is r/d. For random subspaces the entries of U₁ᵀU₂ are about Gaussian with variance 1/d. So the mean of r² of their
    squares, times r, has a standard deviation of √2/d.
    """
    torch.manual_seed(0)  # svd_lowrank draws random numbers
    found, values, _ = torch.svd_lowrank(wanted, min(_MOST_RANK, *wanted.shape))
    rank = int((values > _RANK_FLOOR * values[0]).sum())
    if rank >= min(_MOST_RANK, *wanted.shape):
        return None
    claimed, _, _ = torch.svd_lowrank(got, min(_MOST_RANK, *wanted.shape))
    value = float((found[:, :rank].T @ claimed[:, :rank]).square().sum()) / rank
    return value, rank / wanted.shape[0], math.sqrt(2) / wanted.shape[0]


def _compare(layer: str, wanted: torch.Tensor, claimed: Mapping[str, torch.Tensor], truth: Truth) -> _Compared | None:
    if layer not in claimed:
        return None
    got, public = claimed[layer], truth.public.layers()[layer].weight
    overlap = _overlap_of(got, wanted) if bool(got.isfinite().all()) else None
    return _Compared(_relative(got, wanted), _cosine(_off(got, public), _off(wanted, public)), wanted.numel(), overlap)


def kind_of(layer: str) -> str:
    """Returns the name that Llama gives to a layer with this function, whatever the model calls the layer."""
    module, _, part = layer.partition("[")
    if part:
        return {"q": "q_proj", "k": "k_proj", "v": "v_proj"}[part[0]]
    tail = module.rsplit(".", 1)[-1]
    if tail == "c_proj":
        return "o_proj" if ".attn." in module else "down_proj"
    return {"c_fc": "up_proj"}.get(tail, tail)


def _visible(layer: str, truth: Truth) -> torch.Tensor:
    """Returns the part of ΔW on which the model's results depend. In GPT-2 models a LayerNorm removes the mean of each
    row that o_proj and down_proj add to. For these two, the mean over the outputs is therefore removed here, too."""
    delta = truth.deltas[layer]
    lost = truth.public.style == "gpt2" and kind_of(layer) in ("o_proj", "down_proj")
    return delta - delta.mean(1, keepdim=True) if lost else delta


def _changes_scores(block: Block, truth: Truth) -> bool:
    return any(
        float((found - base).norm()) > 1e-12 * float(base.norm())
        for base, found in zip(_products(block, {}, truth), _products(block, truth.deltas, truth), strict=True)
    )


def _compare_scores(block: Block, claimed: Mapping[str, torch.Tensor], truth: Truth) -> _Compared | None:
    """Compares the claimed change of W_q W_kᵀ with the true change, by the median error and the mean cosine over the
    heads. Returns None if there is no claim about q or none about k."""
    if block.q.name not in claimed or block.k.name not in claimed:
        return None
    errors, cosines = [], []
    products = (_products(block, deltas, truth) for deltas in ({}, claimed, truth.deltas))
    for base, got, wanted in zip(*products, strict=True):
        errors.append(_relative(got - base, wanted - base))
        cosines.append(_cosine(_off(got - base, base), _off(wanted - base, base)))
    size = block.q.weight.shape[0] * truth.public.head_dim
    return _Compared(_median(errors), sum(cosines) / len(cosines), size)


def _products(block: Block, deltas: Mapping[str, torch.Tensor], truth: Truth) -> list[torch.Tensor]:
    """Returns, for each head, the result of `_scores` for the public weights of q and k, plus those ΔW that `deltas`
    holds."""
    public = truth.public
    q, k = (one.weight + deltas.get(one.name, torch.zeros(())) for one in (block.q, block.k))
    found = []
    for head in range(public.num_heads):
        group = head // (public.num_heads // public.num_kv_heads)
        own, shared = (slice(place * public.head_dim, (place + 1) * public.head_dim) for place in (head, group))
        found.append(_scores(block, q[:, own], k[:, shared], own))
    return found


def _scores(block: Block, q: torch.Tensor, k: torch.Tensor, columns: slice) -> torch.Tensor:
    """Returns the part of one head's W_q W_kᵀ that affects a softmax, which depends only on the differences between
    keys.

    After LayerNorm, rows differ only orthogonally to 1/γ, and all have the same coordinate along 1/γ (γ: the norm's
    weight). This direction adds a constant to each query, as the bias of q does, and no data can separate the two. Both
    are therefore one row of the result. After RMSNorm, rows differ in all directions.

    Args:
        q, k: shape (hidden, head_dim).
        columns: the head's columns in the layer's bias.
    """
    norm = block.attention_norm
    if norm.bias is None:
        return q @ k.T
    way = torch.nn.functional.normalize(1 / norm.weight, dim=0)
    place = (norm.bias * way).sum()
    shared = place * (way @ q) + (0 if block.q.bias is None else block.q.bias[columns])
    off = torch.eye(len(way), dtype=way.dtype) - torch.outer(way, way)
    return torch.cat([off @ q, shared[None]]) @ k.T @ off


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    value = float((got - wanted).norm() / wanted.norm())
    return value if math.isfinite(value) else math.inf


def _cosine(got: torch.Tensor, wanted: torch.Tensor) -> float:
    size = float(got.norm() * wanted.norm())
    value = float((got * wanted).sum()) / size if size > 0 else 0.0
    return value if math.isfinite(value) else 0.0


def _off(delta: torch.Tensor, public: torch.Tensor) -> torch.Tensor:
    """Returns ΔW without its component along W. IA3, OFT and BOFT change W by nearly a multiple of −W, and a claim of
    such a multiple needs no knowledge, since W is public."""
    return delta - public * ((delta * public).sum() / public.pow(2).sum())


def _median(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(0.5))  # `median` takes the lower of two
