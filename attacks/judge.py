"""Whether claims are right: metrics beside their random baselines, by someone who knows the victim's secrets.

Every metric has a baseline with a 99% interval, made by guessing at random what the adversary claims to know. A value
in the interval is "at baseline", which says that this adversary learned nothing that this metric shows, and no more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from attacks.adversary import Claim, StolenDelta, StolenDifference, StolenFact, StolenRows, StolenTokens
from attacks.finding import Finding, verdict_of
from attacks.judge_facts import first_step, judge_batch, judge_facts, judge_tokens
from attacks.passes import places
from attacks.public_model import Block
from attacks.truth import Batch, Truth
from attacks.view import Message, View
from wire import ring

_Rows = TypeVar("_Rows", StolenRows, StolenDifference)
_SHRUNK = 0.99
"""A guess shrunk towards zero has an error a little below 1 without any knowledge."""
_MAX_JUDGED = 200
"""Messages of which rows are compared: each needs the true rows of its prompt."""
_MAX_ROWS = 8
"""Of one message: its rows share what an adversary got wrong, so that many of them say little more than a few, and a
training step's would outweigh all prompts'."""


def judge(
    claims: Sequence[Claim], view: View, truth: Truth, sent: Sequence[Sequence[int]], trained: Sequence[Batch] = ()
) -> list[Finding]:
    """Judges what one adversary claimed about one view.

    Args:
        sent: for each prompt of the view the tokens that went through the layers.
        trained: the batches of its training passes, in order.
    """
    known = _KnownRows(view, truth, sent, trained)
    facts = [claim for claim in claims if isinstance(claim, StolenFact)]
    return [
        *_judge_deltas([claim for claim in claims if isinstance(claim, StolenDelta)], truth),
        *judge_tokens([claim for claim in claims if isinstance(claim, StolenTokens)], sent),
        *_judge_rows([claim for claim in claims if isinstance(claim, StolenRows)], known),
        *_judge_differences([claim for claim in claims if isinstance(claim, StolenDifference)], known),
        *judge_facts(facts, truth, sent),
        *judge_batch(facts, view, truth.public, trained),
    ]


# ---- adapters -------------------------------------------------------------------------------------------------------


def _judge_deltas(claims: Sequence[StolenDelta], truth: Truth) -> list[Finding]:
    claimed = {claim.layer: claim.delta for claim in claims}
    errors: dict[str, list[float]] = {}
    cosines: dict[str, list[tuple[float, int]]] = {}
    for layer, delta in claimed.items():
        kind = kind_of(layer)
        wanted = _visible(layer, truth)
        if kind in ("q_proj", "k_proj") or not bool(wanted.any()):
            continue  # judged together: only their product is determined
        errors.setdefault(kind, []).append(_relative(delta, wanted))
        public = truth.public.layers()[layer].weight
        cosines.setdefault(kind, []).append((_cosine(_off(delta, public), _off(wanted, public)), wanted.numel()))
    for block in truth.public.blocks:
        if block.q.name in claimed and block.k.name in claimed:
            pair = _judge_scores(block, claimed, truth)
            if pair is not None:
                errors.setdefault("q·k", []).append(pair[0])
                cosines.setdefault("q·k", []).append(pair[1:])
    found = []
    for kind, values in errors.items():
        error = _median(values)
        found.append(
            Finding(
                kind, "relative error", error, 1.0, (1.0, 1.0), verdict_of(error, (_SHRUNK, 1.0), error < 0.1, False)
            )
        )
        size = min(numel for _, numel in cosines[kind])
        half = 2.576 / math.sqrt(size * len(values))
        value = sum(cosine for cosine, _ in cosines[kind]) / len(values)
        found.append(
            Finding(kind, "cosine with ΔW", value, 0.0, (-half, half), verdict_of(value, (-half, half), value > 0.99))
        )
    return found


def kind_of(layer: str) -> str:
    """Llama's name for what a layer does, whatever the model calls it."""
    module, _, part = layer.partition("[")
    if part:
        return {"q": "q_proj", "k": "k_proj", "v": "v_proj"}[part[0]]
    tail = module.rsplit(".", 1)[-1]
    if tail == "c_proj":
        return "o_proj" if ".attn." in module else "down_proj"
    return {"c_fc": "up_proj"}.get(tail, tail)


def _visible(layer: str, truth: Truth) -> torch.Tensor:
    """ΔW as far as anything that the model computes depends on it: a LayerNorm takes off what is alike in a row."""
    delta = truth.deltas[layer]
    lost = truth.public.style == "gpt2" and kind_of(layer) in ("o_proj", "down_proj")
    return delta - delta.mean(1, keepdim=True) if lost else delta


def _judge_scores(block: Block, claimed: dict[str, torch.Tensor], truth: Truth) -> tuple[float, float, int] | None:
    """Change of W_q W_kᵀ per head: relative error, cosine and numbers; None where the adapter changes neither."""
    public, errors, cosines = truth.public, [], []
    for head in range(public.num_heads):
        group = head // (public.num_heads // public.num_kv_heads)
        q = slice(head * public.head_dim, (head + 1) * public.head_dim)
        k = slice(group * public.head_dim, (group + 1) * public.head_dim)

        def scores(dq: torch.Tensor, dk: torch.Tensor, q: slice = q, k: slice = k) -> torch.Tensor:
            return (block.q.weight + dq)[:, q] @ (block.k.weight + dk)[:, k].T

        base = scores(torch.zeros_like(block.q.weight), torch.zeros_like(block.k.weight))
        wanted = _distinct(scores(truth.deltas[block.q.name], truth.deltas[block.k.name]) - base, block)
        if float(wanted.norm()) <= 1e-12 * float(base.norm()):
            return None
        got = _distinct(scores(claimed[block.q.name], claimed[block.k.name]) - base, block)
        errors.append(_relative(got, wanted))
        public_part = _distinct(base, block)
        cosines.append(_cosine(_off(got, public_part), _off(wanted, public_part)))
    return _median(errors), sum(cosines) / len(cosines), block.q.weight.shape[0] * public.head_dim


def _distinct(scores: torch.Tensor, block: Block) -> torch.Tensor:
    """The part that can tell two keys apart, which is all that a softmax shows: LayerNorm's rows differ off 1/γ."""
    if block.attention_norm.bias is None:
        return scores
    unseen = torch.nn.functional.normalize(1 / block.attention_norm.weight, dim=0)
    return scores - torch.outer(scores @ unseen, unseen)


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    value = float((got - wanted).norm() / wanted.norm())
    return value if math.isfinite(value) else math.inf


def _cosine(got: torch.Tensor, wanted: torch.Tensor) -> float:
    size = float(got.norm() * wanted.norm())
    value = float((got * wanted).sum()) / size if size > 0 else 0.0
    return value if math.isfinite(value) else 0.0


def _off(delta: torch.Tensor, public: torch.Tensor) -> torch.Tensor:
    """ΔW without its part along W: W is public, and IA3, OFT and BOFT change it by something much like −W."""
    return delta - public * ((delta * public).sum() / public.pow(2).sum())


def _median(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(0.5))  # `median` takes the lower of two


# ---- rows -----------------------------------------------------------------------------------------------------------


class _KnownRows:
    """True rows of inference and of the first training pass, as the victim would send them without a mask."""

    def __init__(self, view: View, truth: Truth, sent: Sequence[Sequence[int]], trained: Sequence[Batch]) -> None:
        self._truth, self._sent, self._trained = truth, sent, trained
        self._places = places(view)
        self._step = first_step(view)
        self._messages = {message.seq: message for message in view.select("product")}
        self._of_prompt: dict[int, dict[int, torch.Tensor]] = {}
        self._of_step: dict[int, torch.Tensor] = {}

    def of(self, seq: int) -> torch.Tensor | None:
        """None for gradients and for later training steps, whose adapters are not kept."""
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
            rows = rows[batch.has_logits.flatten()]  # the head's
        return None if rows is None or rows.shape[0] != message.num_rows else self._as_sent(message, rows)

    def _as_sent(self, message: Message, rows: torch.Tensor) -> torch.Tensor:
        if message.arithmetic == "float":
            return rows
        norm = self._truth.manifest.groups[message.group].max_column_norm
        return ring.encode(rows.to(torch.float32), norm)[0].to(torch.float64)


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
    drawn = torch.randperm(len(claims), generator=torch.Generator().manual_seed(0))[:_MAX_JUDGED]  # of every group
    return [claims[number] for number in sorted(drawn.tolist())]


def _cosine_finding(module: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Finding]:
    """Mean cosine of rows. The baseline pairs each claim with the truth of another message of the same width: what
    activations have in common is no secret."""
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
    # a random direction's cosine has variance 1/width; shuffled pairs may spread wider
    spread = max(float(shuffled.std()) if len(shuffled) > 1 else 0.0, min(by_width) ** -0.5)
    half = 2.576 * spread / math.sqrt(len(values))
    interval = (baseline - half, baseline + half)
    value = float(values.mean())
    return [Finding(module, "row cosine", value, baseline, interval, verdict_of(value, interval, value > 0.99))]


def _thinned(rows: torch.Tensor) -> torch.Tensor:
    return rows[:: max(1, -(-rows.shape[0] // _MAX_ROWS))]


def _row_cosines(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(got, wanted, dim=1).nan_to_num()
