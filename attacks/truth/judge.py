"""Decides whether claims are right, by computing metrics and their random baselines from the victim's secrets.

Every metric has a baseline, which is the value of a guess. If guesses differ in value, the baseline has a 99% interval.
A value in the interval is "at baseline". This means only that, by this metric, the adversary did no better than
guessing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from attacks.report.finding import Finding as Finding
from attacks.report.finding import verdict_on
from attacks.seen.adversary import Claim, StolenDelta, StolenDifference, StolenFact, StolenRows, StolenTokens
from attacks.seen.forward_passes import places
from attacks.seen.view import Message, View
from attacks.truth.judge_adapters import judge_deltas
from attacks.truth.judge_adapters import kind_of as kind_of
from attacks.truth.judge_facts import first_step, judge_batch, judge_facts, judge_tokens
from attacks.truth.secrets import Batch, Truth
from wire.ring import coding

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
        *judge_facts(facts, truth, sent),
        *judge_batch(facts, view, truth.public, trained),
    ]


# ---- rows -----------------------------------------------------------------------------------------------------------


class _KnownRows:
    """Computes the true rows of inference and of the first training pass, as the victim sends them without a mask."""

    def __init__(self, view: View, truth: Truth, sent: Sequence[Sequence[int]], trained: Sequence[Batch]) -> None:
        self._truth, self._sent, self._trained = truth, sent, trained
        self._places = places(view)
        self._step = first_step(view)
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
