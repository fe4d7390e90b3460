"""Whether lists of tokens and facts of metadata are right; the other half of attacks/judge.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attacks.adversaries.gradient_view import LABELS, TOKENS
from attacks.adversary import StolenFact, StolenTokens
from attacks.finding import SHARE_TRIED, Finding, share_right
from attacks.passes import Pass, passes
from attacks.public_model import PublicModel
from attacks.truth import Batch, Truth
from attacks.view import View

_WHOLE = 0.9
"""Share of all tokens below which a win is one over the tokens that were tried, and no more."""


def judge_tokens(claims: Sequence[StolenTokens], sent: Sequence[Sequence[int]]) -> list[Finding]:
    """Rate of right tokens among those that were tried, and how many of all tokens of the view that is.

    A full win needs both: whoever tries a few easy tokens reads these, and not the prompts.
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


def judge_facts(claims: Sequence[StolenFact], truth: Truth, sent: Sequence[Sequence[int]]) -> list[Finding]:
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


def first_step(view: View) -> Pass | None:
    """The first training pass."""
    return next((one for one in passes(view) if one.is_training), None)


def judge_batch(
    claims: Sequence[StolenFact], view: View, public: PublicModel, trained: Sequence[Batch]
) -> list[Finding]:
    """Tokens and labels of the first training pass, padding included, row after row as the provider was sent them."""
    step = first_step(view)
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
    """Share that is right of a whole batch, which is mostly padding and places without a label; what is missing is
    wrong."""
    listed = torch.tensor([int(part) for part in str(claim.value).split(",")][: len(wanted)])
    return share_right(claim.name, torch.nn.functional.pad(listed, (0, len(wanted) - len(listed)), value=-1), wanted)
