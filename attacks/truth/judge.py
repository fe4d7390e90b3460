"""Decides whether claims are right, by computing metrics and their random baselines from the victim's secrets.

Every metric has a baseline, which is the value of a guess. If guesses differ in value, the baseline has a 99% interval.
A value in the interval is "at baseline". This means only that, by this metric, the adversary did no better than
guessing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from attacks.adversaries.gradients import LABELS, TOKENS
from attacks.adversaries.traffic_shape import BOFT, IA3, KIND, KIND_IF_FINETUNE, KINDS, LORA, LOWEST, MEMBERS, OFT
from attacks.report.table import OVERLAP, SHARE_CLAIMED, SHARE_TRIED, Finding, share_right, unclaimed, verdict_on
from attacks.seen.adversary import Claim, StolenDelta, StolenDifference, StolenFact, StolenRows, StolenTokens
from attacks.seen.forward_passes import ForwardPass, forward_passes, places
from attacks.seen.public_model import Block, PublicModel
from attacks.seen.view import Message, View
from attacks.truth.secrets import Batch, Truth
from wire.ring import coding

# ---- stolen adapters ------------------------------------------------------------------------------------------------
#
# Decides whether stolen adapters are right. The stolen ΔW of each kind of layer is compared with that part of the
# victim's ΔW on which the model's results depend.

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


# ---- tokens and facts -----------------------------------------------------------------------------------------------

_KIND_OF = {"LORA": LORA, "ADALORA": LORA, "VERA": LORA, "IA3": IA3, "OFT": OFT, "BOFT": BOFT}
"""Maps the names that PEFT uses to kinds of adapter, for those adapters whose ΔW the judge can compute."""
_WHOLE = 0.9
"""If an adversary tried less than this share of all tokens, a win counts only for the tokens that were tried."""


def judge_tokens(claims: Sequence[StolenTokens], sent: Sequence[Sequence[int]]) -> list[Finding]:
    """Computes the share of tried tokens that are right, and the share of all tokens that were tried. The list is empty
    if none was tried.

    A full win needs both: an adversary that tries a few easy tokens reads these tokens, but not the prompts.
    """
    pairs = [
        (got, wanted)
        for claim in claims
        if claim.prompt < len(sent)
        for got, wanted in zip(claim.token_ids, sent[claim.prompt], strict=False)
    ]
    if not pairs:
        return []
    got, wanted = torch.tensor(pairs).T
    rate = share_right("tokens", got, wanted)
    num_all = sum(map(len, sent))
    share = len(pairs) / num_all
    if rate.verdict == "wins" and share < _WHOLE:
        rate = replace(rate, verdict="wins where tried")
    return [rate, Finding("tokens", SHARE_TRIED, share, 0.0, (0.0, 0.0), f"{len(pairs)} of {num_all}")]


def _judge_facts(claims: Sequence[StolenFact], truth: Truth, sent: Sequence[Sequence[int]]) -> list[Finding]:
    """Judges facts that were read from metadata. Facts whose truth the judge does not know are left out.

    If a claim names several kinds or layers, its baseline is the probability that as many random names include the
    right one.
    """
    answers: dict[str, tuple[str, float]] = {}
    if sent:
        answers["prompt tokens"] = ",".join(str(len(ids)) for ids in sent), math.inf
    kind = _KIND_OF.get(next(iter(truth.adapted.peft_config.values())).peft_type.value)
    if kind is not None:
        answers[KIND] = answers[KIND_IF_FINETUNE] = kind, len(KINDS)
    adapted = {layer.partition("[")[0] for layer, delta in truth.deltas.items() if bool(delta.any())}
    groups = [[layer.name for layer in group.layers] for group in truth.manifest.groups]
    lowest = next((names for names in groups if adapted & set(names)), None)
    if lowest is not None:
        answers[LOWEST] = lowest[0], len(groups)
    changed = adapted & _changing_inputs(truth, kind)
    for names in groups:
        if len(names) > 1 and changed & set(names):
            answers[MEMBERS] = "+".join(name for name in names if name in changed), 2 ** len(names) - 1
            break
    return [_fact_finding(claim, *answers[claim.name]) for claim in claims if claim.name in answers]


def _changing_inputs(truth: Truth, kind: str | None) -> set[str]:
    """Returns the names of the modules whose input an adapter of this kind would change if it adapted them: all for OFT
    and BOFT, the feed-forward layers for IA3, and none for other kinds."""
    modules = dict(truth.adapted.base_model.model.named_modules())
    return {
        name
        for name in modules
        if kind in (OFT, BOFT) or (kind == IA3 and getattr(modules[name], "is_feedforward", False))
    }


def _fact_finding(claim: StolenFact, answer: str, num_choices: float) -> Finding:
    named = claim.value if isinstance(claim.value, tuple) else (str(claim.value),)
    right = answer in named
    baseline = min(1.0, len(named) / num_choices)
    verdict = "at baseline" if not right or baseline == 1.0 else "wins" if len(named) == 1 else "above baseline"
    return Finding(claim.name, "right", float(right), baseline, (baseline, baseline), verdict, said=in_words(claim))


def in_words(claim: StolenFact) -> str:
    """Returns the claim's value as text for the report. Several possible values become `one of a, b`."""
    if not isinstance(claim.value, tuple):
        return str(claim.value)
    return claim.value[0] if len(claim.value) == 1 else f"one of {', '.join(claim.value)}"


def _first_step(view: View) -> ForwardPass | None:
    """Returns the first forward pass of training in the view; None if there is none."""
    return next((one for one in forward_passes(view) if one.is_training), None)


def _judge_batch(
    claims: Sequence[StolenFact], view: View, public: PublicModel, trained: Sequence[Batch]
) -> list[Finding]:
    """Judges tokens and labels of the first training pass, padding included, row by row as the provider received them.
    The list is empty if there was no training."""
    step = _first_step(view)
    if step is None or not trained:
        return []
    wanted = {TOKENS: trained[0].token_ids.flatten()}
    head = None if public.head_group is None else step.backward.get(public.head_group)
    if head is not None:
        targets = trained[0].targets
        is_whole = head.num_rows == targets.numel()
        wanted[LABELS] = targets.flatten() if is_whole else targets[trained[0].has_logits]
    return [_listed_finding(claim, wanted[claim.name]) for claim in claims if claim.name in wanted and claim.value]


def _listed_finding(claim: StolenFact, wanted: torch.Tensor) -> Finding:
    """Computes the share of a whole batch that is claimed correctly. Missing positions count as wrong. Most of a batch
    is padding and positions without a label, which are easy to guess; the baseline of `share_right` allows for this."""
    listed = torch.tensor([int(part) for part in str(claim.value).split(",")][: len(wanted)])
    return share_right(claim.name, torch.nn.functional.pad(listed, (0, len(wanted) - len(listed)), value=-1), wanted)


# ---- all claims -----------------------------------------------------------------------------------------------------

_Rows = TypeVar("_Rows", StolenRows, StolenDifference)
_MAX_JUDGED = 200
"""The most messages whose rows are compared. For each of them the true rows of its prompt must be computed."""
_MAX_ROWS = 8
"""The most rows of one message that are compared. An adversary's error is alike in all rows of a message, so many rows
say little more than a few. Without this limit, the rows of a training step would outweigh those of all prompts."""


def judge(
    claims: Sequence[Claim], view: View, truth: Truth, sent: Sequence[Sequence[int]], trained: Sequence[Batch] = ()
) -> list[Finding]:
    """Judges what one adversary claimed about one view.

    Args:
        claims: what the adversary claimed.
        view: the view that the adversary attacked.
        truth: the victim's secrets.
        sent: for each prompt of the view, the tokens that went through the layers.
        trained: the batches of the view's training passes, in order.
    """
    known = _KnownRows(view, truth, sent, trained)
    facts = [claim for claim in claims if isinstance(claim, StolenFact)]
    return [
        *judge_deltas([claim for claim in claims if isinstance(claim, StolenDelta)], truth),
        *judge_tokens([claim for claim in claims if isinstance(claim, StolenTokens)], sent),
        *_judge_rows([claim for claim in claims if isinstance(claim, StolenRows)], known),
        *_judge_differences([claim for claim in claims if isinstance(claim, StolenDifference)], known),
        *_judge_facts(facts, truth, sent),
        *_judge_batch(facts, view, truth.public, trained),
    ]


# ---- rows -----------------------------------------------------------------------------------------------------------


class _KnownRows:
    """Computes the true rows of inference and of the first training pass, as the victim sends them without a mask."""

    def __init__(self, view: View, truth: Truth, sent: Sequence[Sequence[int]], trained: Sequence[Batch]) -> None:
        self._truth, self._sent, self._trained = truth, sent, trained
        self._places = places(view)
        self._step = _first_step(view)
        self._messages = {message.seq: message for message in view.select("product")}
        self._of_prompt: dict[int, dict[int, torch.Tensor]] = {}
        self._of_step: dict[int, torch.Tensor] = {}

    def of(self, seq: int) -> torch.Tensor | None:
        """Returns a message's true rows in the units of the request, float64. Returns None if the judge does not know
        them, as for gradients, and for later training steps, whose adapters are not kept."""
        message, place = self._messages.get(seq), self._places.get(seq)
        if message is None:
            return None
        if self._trained and self._step is not None and self._step.forward.get(message.group) == message:
            return self._in_step(message, self._trained[0])
        if place is None or place[0] >= len(self._sent):
            return None
        prompt, start = place
        if prompt not in self._of_prompt:
            self._of_prompt[prompt] = dict(self._truth.rows(self._sent[prompt]))
        rows = self._of_prompt[prompt].get(message.group)
        if rows is None or rows.shape[0] < start + message.num_rows:
            return None
        return self._as_sent(message, rows[start : start + message.num_rows])

    def _in_step(self, message: Message, batch: Batch) -> torch.Tensor | None:
        if not self._of_step:
            self._of_step.update(self._truth.fresh_rows(batch))
        rows = self._of_step.get(message.group)
        if rows is not None and rows.shape[0] != message.num_rows:
            rows = rows[batch.has_logits.flatten()]  # the output head receives these rows only
        return None if rows is None or rows.shape[0] != message.num_rows else self._as_sent(message, rows)

    def _as_sent(self, message: Message, rows: torch.Tensor) -> torch.Tensor:
        if message.arithmetic == "float":
            return rows
        norm = self._truth.manifest.groups[message.group].max_column_norm
        return coding.encode(rows.to(torch.float32), norm)[0].to(torch.float64)


def _judge_rows(claims: Sequence[StolenRows], known: _KnownRows) -> list[Finding]:
    pairs = []
    for claim in _some(claims):
        wanted = known.of(claim.seq)
        if wanted is not None and wanted.shape == claim.rows.shape:
            points = wanted.norm(dim=1) > 0  # the embedding of padding is zero in some models
            pairs.append((claim.rows[points], wanted[points]))
    return _cosine_finding("rows", pairs)


def _judge_differences(claims: Sequence[StolenDifference], known: _KnownRows) -> list[Finding]:
    pairs = []
    for claim in _some(claims):
        first, second = known.of(claim.seq), known.of(claim.other_seq)
        if first is None or second is None:
            continue
        count = min(first.shape[0], second.shape[0], claim.rows.shape[0])
        wanted = first[:count] - second[:count]
        moving = wanted.norm(dim=1) > 0  # equal rows have no difference to find
        if bool(moving.any()):
            pairs.append((claim.rows[:count][moving], wanted[moving]))
    return _cosine_finding("differences", pairs)


def _some(claims: Sequence[_Rows]) -> Sequence[_Rows]:
    if len(claims) <= _MAX_JUDGED:
        return claims
    drawn = torch.randperm(len(claims), generator=torch.Generator().manual_seed(0))[:_MAX_JUDGED]  # of all groups
    return [claims[number] for number in sorted(drawn.tolist())]


def _cosine_finding(module: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Finding]:
    """Computes the mean cosine between claimed and true rows; the list is empty if there are no rows to compare.

    The baseline compares each claim with the true rows of another message of the same width. So it is no win to claim
    only what all activations have in common.
    """
    pairs = [(got, wanted) for got, wanted in pairs if got.shape[0]]
    if not pairs:
        return []
    pairs = [(_thinned(got), _thinned(wanted)) for got, wanted in pairs]
    values = torch.cat([_row_cosines(got, wanted) for got, wanted in pairs])
    by_width: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for got, wanted in pairs:
        by_width.setdefault(got.shape[1], []).append((got, wanted))
    others = [torch.zeros(0, dtype=torch.float64)]
    for alike in by_width.values():
        for (got, _), (_, wanted) in itertools.pairwise(alike):
            count = min(got.shape[0], wanted.shape[0])
            others.append(_row_cosines(got[:count], wanted[:count]))
    shuffled = torch.cat(others)
    baseline = float(shuffled.mean()) if len(shuffled) else 0.0
    # the cosine of a random direction has variance 1/width; that of shuffled pairs may be larger
    spread = max(float(shuffled.std()) if len(shuffled) > 1 else 0.0, min(by_width) ** -0.5)
    half = 2.576 * spread / math.sqrt(len(values))
    interval = (baseline - half, baseline + half)
    value = float(values.mean())
    return [Finding(module, "row cosine", value, baseline, interval, verdict_on(value, interval, value > 0.99))]


def _thinned(rows: torch.Tensor) -> torch.Tensor:
    return rows[:: max(1, -(-rows.shape[0] // _MAX_ROWS))]


def _row_cosines(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(got, wanted, dim=1).nan_to_num()
