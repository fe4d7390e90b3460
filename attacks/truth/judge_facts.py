"""Decides whether claimed tokens, and facts from metadata, are right. attacks/truth/judge.py judges the other
claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from attacks.adversaries.gradient_view import LABELS, TOKENS
from attacks.adversaries.traffic_shape import BOFT, IA3, KIND, KIND_IF_FINETUNE, KINDS, LORA, LOWEST, MEMBERS, OFT
from attacks.report.finding import SHARE_TRIED, Finding, share_right
from attacks.seen.adversary import StolenFact, StolenTokens
from attacks.seen.forward_passes import ForwardPass, forward_passes
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from attacks.truth.secrets import Batch, Truth

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


def judge_facts(claims: Sequence[StolenFact], truth: Truth, sent: Sequence[Sequence[int]]) -> list[Finding]:
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


def first_step(view: View) -> ForwardPass | None:
    """Returns the first forward pass of training in the view; None if there is none."""
    return next((one for one in forward_passes(view) if one.is_training), None)


def judge_batch(
    claims: Sequence[StolenFact], view: View, public: PublicModel, trained: Sequence[Batch]
) -> list[Finding]:
    """Judges tokens and labels of the first training pass, padding included, row by row as the provider received them.
    The list is empty if there was no training."""
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
    """Computes the share of a whole batch that is claimed correctly. Missing positions count as wrong. Most of a batch
    is padding and positions without a label, which are easy to guess; the baseline of `share_right` allows for this."""
    listed = torch.tensor([int(part) for part in str(claim.value).split(",")][: len(wanted)])
    return share_right(claim.name, torch.nn.functional.pad(listed, (0, len(wanted) - len(listed)), value=-1), wanted)
