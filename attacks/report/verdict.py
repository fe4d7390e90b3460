"""Decides whether a build fails. It fails if a mask became weaker, or if an adversary no longer wins where it should.

The findings about a private mask lie near their baselines. A report has dozens of values, so now and then one of them
is outside of its 99% interval by chance. For most metrics the alarm is therefore at `_SLACK` half-widths of the
interval, which is about 6.4 standard deviations, or at a distance of `_MOST_SLACK` if that is less. The masks `off` and
`gaussian-pool` are not private, and adversaries must break them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from attacks.report.table import FAILED, KL, NO_CLAIM, OVERLAP, SHARE_CLAIMED, SHARE_TRIED, Result
from attacks.victim.draws import Check, alarms
from attacks.victim.names import PRIVATE_MASKS

UNKNOWN = "unknown"
"""This name stands for a mask that is not known. Claims that are never wrong by chance then count, since the mask may
be a private one."""
METADATA = "traffic-shape"
"""The adversary whose facts no mask protects (docs/threat-model.md, "What every provider sees")."""
_COUNTS = ("claimed", SHARE_TRIED, SHARE_CLAIMED, KL, OVERLAP)
"""Metrics that the verdict ignores. Some only count how much was claimed, right or wrong. For the others, another line
about the same claim says more."""
_SLACK = 2.5
_LEAST_ERROR = 0.9
_MOST_SLACK = 0.3
_GAIN, _AGREEMENT = "stolen task gain", "agreement of answers"
"""A gain above chance raises an alarm only if the agreement is above chance, too, or if the gain is as large as an
attacker needs. A gain in loss alone is no leak. Random weights can make a tiny model less certain of wrong answers,
which lowers its loss by up to two thirds of what an IA3 victim gained. But then its answers agree less with the
victim's answers than those of the base model do."""
_MOST_WORTH = 0.1
"""The largest distance above the baseline (the base model's value) that is allowed under a private mask. It holds for
`_GAIN`, as a share of the victim's gain, and for `_AGREEMENT`, as a share of the answers."""
_ADAPTER = {
    ("adapter", "stolen task gain"): 0.9,
    ("o_proj", "relative error"): 1e-3,
    ("v_proj", "relative error"): 1e-3,
    ("down_proj", "relative error"): 1e-3,
}
_OPENED_ERROR = 0.05
"""The largest error of ΔW that counts as a win against `gaussian-pool` on a real model. The masks that the attack
removes are many times larger than the rows, so their rounding remains in the rows. (On SmolLM2 the error is 1e-3 to
9e-3, and the stolen adapter has all of the gain.)"""
_SHARE_CLAIMED = {("o_proj", SHARE_CLAIMED): 0.9, ("v_proj", SHARE_CLAIMED): 0.9}
"""The share of layers that must be claimed without a mask. It is needed because a median over the claimed layers says
nothing about the others."""
_TOKENS = {("tokens", "recovery rate"): 0.99, ("tokens", SHARE_TRIED): 0.99}
_BATCH = {("training tokens", "recovery rate"): 0.99}
_ROWS = {("rows", "row cosine"): 0.99}
_FALLS = {
    ("off", "float"): {
        "closed-form": _ADAPTER | _SHARE_CLAIMED,
        "layer-0 lookup": _TOKENS,
        "gradient-view": _BATCH,
    },
    ("off", "ring"): {"layer-0 lookup": _TOKENS, "gradient-view": _BATCH},
    ("gaussian-pool", "float"): {
        "known-mask + closed-form": _ADAPTER,
        "known-mask + layer-0 lookup": _TOKENS,
        "known-mask + gradient-view": _BATCH,
        "known-mask": _ROWS,
        "which-of-K": _ROWS,
    },
}
"""The values that an adversary must reach, by mask, arithmetic and adversary: an error of at most 1e-3 for ΔW of three
layers, and at least nine tenths of the gain and 99% of tokens. Labels are not required, because no provider receives
them if the output head stays with the tenant."""


def weakened(results: Sequence[Result]) -> list[str]:
    """Returns a line for each failure of an adversary, and for each finding that is better than chance allows under a
    private mask. Findings from metadata do not count. Under an unknown mask only certain claims do."""
    at_odds = _at_odds(results)
    return [
        f"{one.mask}: {one.adversary} reaches {one.finding.metric} {one.finding.value:.3g} on {one.finding.module}"
        for one in results
        if one.finding.metric == FAILED
        or (one.mask in (*PRIVATE_MASKS, UNKNOWN) and one.adversary != METADATA and _tells(one, at_odds))
    ]


def _at_odds(results: Sequence[Result]) -> set[tuple[str, str, str]]:
    """Returns which attacks stole an adapter whose answers agree with the victim's no more than by chance."""
    return {_attack(one)[:3] for one in results if one.finding.metric == _AGREEMENT and not _beats_chance(one)}


def _attack(one: Result) -> tuple[str, str, str, str | None]:
    return one.mask, one.arithmetic, one.adversary, one.tenant


def _tells(one: Result, at_odds: set[tuple[str, str, str]]) -> bool:
    """Returns whether a finding shows contents: it is better than chance allows, or, under an unknown mask, certain."""
    if one.mask == UNKNOWN and one.finding.metric != "certain claims":
        return False
    if one.finding.metric == _GAIN and one.finding.verdict != "wins" and _attack(one)[:3] in at_odds:
        return False
    return _beats_chance(one)


def in_three_lines(results: Sequence[Result], num_controls: int, num_lost: int, num_alarms: int) -> list[str]:
    """Returns a report's verdict: what attacks got under masks that are private, and under others, and whether the
    report can be relied on.

    Contents are all that a tenant hides: rows, tokens, the adapter. What `METADATA` finds is apart from them. An attack
    is one adversary, or one upon another's rows, on one mask and arithmetic. It got contents if a finding of it is
    beyond what chance allows, by the same rule as the alarms; without a known truth, only certain claims show that.

    Args:
        results: the report's findings.
        num_controls: how many positive controls ran.
        num_lost: how many of them did not win.
        num_alarms: the number of the report's alarms.
    """
    at_odds = _at_odds(results)
    ran, got, failed, judged = set(), set(), set(), set()
    for one in results:
        if one.adversary == METADATA:
            continue
        if one.finding.metric == FAILED:
            failed.add(_attack(one))
            continue
        ran.add(_attack(one))
        if _tells(one, at_odds):
            got.add(_attack(one))
        if one.finding.verdict not in ("not judged", NO_CLAIM):
            judged.add(_attack(one))
    silent = {_attack(one) for one in results if one.finding.verdict == NO_CLAIM}

    def counted(masks: Collection[str]) -> str:
        here = {attack for attack in ran - failed if attack[0] in masks}
        broken = sum(attack[0] in masks for attack in failed)
        said = f"contents: {len(here & got)} of {len(here)} attacks" if here else "contents: no attack ran"
        if unjudged := here - judged - silent - got:
            said += f" ({len(unjudged)} of them made claims that nobody here can judge)"
        return said + (f", and {broken} failed" if broken else "")

    masks = list(dict.fromkeys(one.mask for one in results))
    hiding = [mask for mask in masks if mask in (*PRIVATE_MASKS, UNKNOWN)]
    open_ones = [mask for mask in masks if mask not in hiding]
    first, second = (
        "no private mask was attacked: give --masks lattice",
        "no mask without privacy was attacked beside it",
    )
    if hiding:
        first = f"{', '.join(hiding)}: {counted(hiding)}; sizes and order show, as documented"
    if open_ones:
        second = f"{', '.join(open_ones)}, not private: {counted(open_ones)}"
    alarms = {0: "no alarm", 1: "1 alarm"}.get(num_alarms, f"{num_alarms} alarms")
    third = f"{alarms}; {num_controls - num_lost} of {num_controls} controls win where they should"
    return [first, second, third]


def drawn(label: str, checks: Sequence[Check]) -> list[str]:
    """Returns a line for each alarm about the random numbers in a victim's masks (attacks/victim/draws.py).
    Each line begins with `label`, the run's name."""
    return [f"{label}, from inside: {said}" for said in alarms(checks)]


def _beats_chance(one: Result) -> bool:
    found = one.finding
    if not math.isfinite(found.value) or found.metric in _COUNTS:
        return False
    if found.verdict.startswith("wins"):  # includes "wins where tried"
        return True
    if found.metric == "certain claims":
        return found.value > 0
    if found.metric in ("relative error", "largest error"):
        return found.value < _LEAST_ERROR
    if found.metric in (
        _GAIN,
        _AGREEMENT,
    ):  # compared with the base model; not by their own interval, which few questions widen
        return found.value > found.baseline + _MOST_WORTH
    half = (found.interval[1] - found.interval[0]) / 2
    distance = found.value - found.baseline
    if "cosine" in found.metric:  # the opposite of the truth tells the truth, too
        distance = abs(distance)
    return distance > min(_SLACK * half, _MOST_SLACK)


def standing(
    results: Sequence[Result],
    is_tiny: bool = True,
    kinds: Collection[str] = ("o_proj", "v_proj", "down_proj"),
    ran: Collection[str] | None = None,
) -> list[str]:
    """Returns a line for each value of `_FALLS` that an adversary did not reach against a mask that is not private.

    Args:
        results: the report's findings.
        is_tiny: whether the model is one of the tiny ones; see `_OPENED_ERROR`.
        kinds: the kinds of layers that the adapter changes; the other layers have nothing to steal.
        ran: names of the adversaries that were run; None for the whole catalogue.
    """
    lost = []
    for (mask, arithmetic), names in _FALLS.items():
        here = [one for one in results if (one.mask, one.arithmetic) == (mask, arithmetic)]
        for name, needed in names.items() if here else ():
            if ran is not None and not set(name.split(" + ")) <= set(ran):
                continue
            values = {
                (one.finding.module, one.finding.metric): one.finding.value for one in here if one.adversary == name
            }
            for (module, metric), bound in needed.items():
                if metric in ("relative error", SHARE_CLAIMED) and module not in kinds:
                    continue
                value = values.get((module, metric))
                if mask == "gaussian-pool" and metric == "relative error" and not is_tiny:
                    bound = _OPENED_ERROR
                reached = value is not None and (value <= bound if metric == "relative error" else value >= bound)
                if not reached:
                    said = "nothing" if value is None else f"{value:.3g}"
                    lost.append(f"{mask} ({arithmetic}): {name} reaches {said} for {metric} of {module}, not {bound}")
    return lost
