"""Whether claims are right: metrics beside their random baselines, by someone who knows the victim's secrets.

Every metric has a baseline with a 99% interval, made by guessing at random what the adversary claims to know. A value
in the interval is "at baseline", which says that this adversary learned nothing that this metric shows, and no more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from attacks.adversaries.gradient_view import LABELS, TOKENS
from attacks.adversary import Claim, StolenDelta, StolenDifference, StolenFact, StolenRows, StolenTokens
from attacks.finding import Finding as Finding
from attacks.finding import guesses, verdict_on
from attacks.judge_adapters import judge_deltas
from attacks.judge_adapters import kind_of as kind_of
from attacks.passes import Pass, passes, places
from attacks.public_model import PublicModel
from attacks.truth import Batch, Truth
from attacks.view import Message, View
from wire import ring

_Rows = TypeVar("_Rows", StolenRows, StolenDifference)
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
        *judge_deltas([claim for claim in claims if isinstance(claim, StolenDelta)], truth),
        *_judge_tokens([claim for claim in claims if isinstance(claim, StolenTokens)], sent, truth.public),
        *_judge_rows([claim for claim in claims if isinstance(claim, StolenRows)], known),
        *_judge_differences([claim for claim in claims if isinstance(claim, StolenDifference)], known),
        *_judge_facts(facts, truth, sent),
        *_judge_batch(facts, view, truth.public, trained),
    ]


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _judge_tokens(claims: Sequence[StolenTokens], sent: Sequence[Sequence[int]], public: PublicModel) -> list[Finding]:
    pairs = [
        (got, wanted)  # a token that was not named is a wrong one
        for claim in claims
        if claim.prompt < len(sent)
        for got, wanted in itertools.zip_longest(
            claim.token_ids[: len(sent[claim.prompt])], sent[claim.prompt], fillvalue=-1
        )
    ]
    if not pairs:
        return []
    got, wanted = torch.tensor(pairs).T
    rate = float((got == wanted).float().mean())
    # guesses drawn from the true tokens themselves, as many as were compared
    everything = torch.tensor([token for ids in sent for token in ids])

    def guess(generator: torch.Generator) -> float:
        drawn, true = (everything[torch.randint(len(everything), (len(pairs),), generator=generator)] for _ in range(2))
        return float((drawn == true).float().mean())

    baseline, interval = guesses(guess)
    return [Finding("tokens", "recovery rate", rate, baseline, interval, verdict_on(rate, interval, rate > 0.9))]


# ---- rows -----------------------------------------------------------------------------------------------------------


class _KnownRows:
    """True rows of inference and of the first training pass, as the victim would send them without a mask."""

    def __init__(self, view: View, truth: Truth, sent: Sequence[Sequence[int]], trained: Sequence[Batch]) -> None:
        self._truth, self._sent, self._trained = truth, sent, trained
        self._places = places(view)
        self._step = _first_step(view)
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
    return [Finding(module, "row cosine", value, baseline, interval, verdict_on(value, interval, value > 0.99))]


def _thinned(rows: torch.Tensor) -> torch.Tensor:
    return rows[:: max(1, -(-rows.shape[0] // _MAX_ROWS))]


def _row_cosines(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(got, wanted, dim=1).nan_to_num()


# ---- facts ----------------------------------------------------------------------------------------------------------


def _judge_facts(claims: Sequence[StolenFact], truth: Truth, sent: Sequence[Sequence[int]]) -> list[Finding]:
    """Facts read from metadata; those that the judge has no truth for are left out."""
    config = next(iter(truth.adapted.peft_config.values()))
    changes_inputs = config.peft_type.value in ("IA3", "OFT", "BOFT")
    answers: dict[str, object] = {"PEFT kind": "changes inputs" if changes_inputs else "adds to outputs"}
    adapted = {layer for layer, delta in truth.deltas.items() if bool(delta.any())}
    for group in truth.manifest.groups:
        if any(name.partition("[")[0] in {layer.name for layer in group.layers} for name in adapted):
            answers["lowest adapted layer"] = group.layers[0].name
            break
    if sent:
        answers["prompt tokens"] = ",".join(str(len(ids)) for ids in sent)
    return [
        Finding(name, "right", right, 0.0, (0.0, 0.0), "wins" if right else "at baseline")
        for name, right in (
            (claim.name, float(claim.value == answers[claim.name])) for claim in claims if claim.name in answers
        )
    ]


# ---- batches --------------------------------------------------------------------------------------------------------


def _first_step(view: View) -> Pass | None:
    return next((one for one in passes(view) if one.is_training), None)


def _judge_batch(
    claims: Sequence[StolenFact], view: View, public: PublicModel, trained: Sequence[Batch]
) -> list[Finding]:
    """Tokens and labels of the first training pass, padding included, row after row as the provider was sent them."""
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
    """Share that is right. The baseline is the claim's own list in another order: a batch is mostly padding and places
    without a label, which one guess for all of them would name."""
    listed = torch.tensor([int(part) for part in str(claim.value).split(",")][: len(wanted)])
    got = torch.nn.functional.pad(listed, (0, len(wanted) - len(listed)), value=-1)
    rate = float((got == wanted).float().mean())

    def shuffle(generator: torch.Generator) -> float:
        return float((got[torch.randperm(len(got), generator=generator)] == wanted).float().mean())

    baseline, interval = guesses(shuffle)
    wins = rate > max(0.9, interval[1])
    return Finding(claim.name, "recovery rate", rate, baseline, interval, verdict_on(rate, interval, wins))
