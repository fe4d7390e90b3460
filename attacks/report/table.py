"""Defines one line of the report's table, decides whether a value is better than guessing, and writes report.json and
report.md, whose table a tenant reads before choosing a mask.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attacks.controls import ControlResult

NO_CLAIM = "no claim"
"""The verdict on an adversary that claimed nothing. Such an adversary is neither right nor wrong, and its silence is no
evidence that nothing leaked."""
FAILED = "failed"
"""The metric, fact and verdict of an adversary that raised an exception."""
SHARE_TRIED = "share tried"
"""A metric: the share of all tokens that an adversary named, right or wrong."""
SHARE_CLAIMED = "share claimed"
"""A metric: the share of the layers of a kind for which a change was claimed, right or wrong. Only layers that the
victim changed count."""
KL, OVERLAP = "KL to the victim", "subspace overlap"
"""Metrics that are shown but that the verdict ignores, because other metrics of the same claim say more."""
_DRAWS = 400
_TAIL = 0.005


@dataclass(frozen=True)
class Finding:
    """Holds one line of the table.

    Attributes:
        module: what the line is about: a kind of layer, `tokens`, `rows` or the name of a fact.
        interval: the 99% interval of the baseline (what a guess would get).
        verdict: one of wins, wins where tried, above baseline, at baseline, not judged, failed, or no claim (`value` is
            then NaN); for a count, it says what was counted.
        spread: 99% interval of the value itself, by bootstrap; None if nothing was drawn from a population.
        said: the claim or the answer, in words, if it can be shown.
    """

    module: str
    metric: str
    value: float
    baseline: float
    interval: tuple[float, float]
    verdict: str
    spread: tuple[float, float] | None = None
    said: str = ""


def unclaimed(module: str, metric: str, baseline: float = 0.0) -> Finding:
    """Returns the line for something that an adversary could have claimed but did not."""
    return Finding(module, metric, math.nan, baseline, (baseline, baseline), NO_CLAIM)


def verdict_on(value: float, interval: tuple[float, float], wins: bool, larger_is_better: bool = True) -> str:
    """Returns the verdict for `Finding.verdict`. `wins` says whether the value is as good as an attacker needs. A value
    that is not finite is at baseline."""
    if not math.isfinite(value):
        return "at baseline"
    if wins:
        return "wins"
    beyond = value > interval[1] if larger_is_better else value < interval[0]
    return "above baseline" if beyond else "at baseline"


def guesses(draw: Callable[[torch.Generator], float], draws: int = _DRAWS) -> tuple[float, tuple[float, float]]:
    """Returns the mean and the 99% interval of a baseline, from the values of `draws` random guesses."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([draw(generator) for _ in range(draws)], dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist()
    return float(values.mean()), (low, high)


def share_right(module: str, got: torch.Tensor, wanted: torch.Tensor) -> Finding:
    """Returns a line with the share of positions at which the claimed id is right.

    The baseline is the claim's own list in random order. So it is no win to claim the same id everywhere, or only ids
    that are the same in every prompt.

    Args:
        got, wanted: int64, the same shape (num_ids,), at least one.
    """
    rate = float((got == wanted).float().mean())

    def shuffle(generator: torch.Generator) -> float:
        return float((got[torch.randperm(len(got), generator=generator)] == wanted).float().mean())

    baseline, interval = guesses(shuffle)
    wins = rate > max(0.9, interval[1])
    return Finding(module, "recovery rate", rate, baseline, interval, verdict_on(rate, interval, wins))


_LONGEST = 240
"""The most characters of a claim in words; report.json has the whole claim."""
LEGEND = (
    "- **wins**: what a thief needs: an error below 0.1, a cosine above 0.99, nine tenths of tokens or gain. **At "
    "baseline**: inside the 99% interval of guessing; a report has dozens of lines, and one leaves it now and then.",
    "- **stolen task gain**: share of what the victim's adapter gains on private questions that the stolen one has; "
    "**agreement of answers**: share of answer tokens that both would say; **KL to the victim**: nats per token.",
    "- **relative error** and **cosine with ΔW**: of the stolen weights of a kind of layer, medians and means over the "
    "layers that were claimed; **share claimed** says how many those are. **subspace overlap**: mean squared cosine of "
    "the principal angles between the claimed and the true change's input directions. **q·k**: query times key.",
    "- **recovery rate**: right among the tokens that were tried, and **share tried** of all. **certain claims** are "
    "never wrong by chance. **A + B**: A opened the mask, B used the rows. **claimed, not judged**: nobody knows.",
)
NOTE = (
    "“At baseline” says that this adversary, on this traffic, did no better than guessing. It is not evidence of "
    "security: what `lattice`, `pad` and `shares` protect rests on the assumptions in docs/threat-model.md."
)


@dataclass(frozen=True)
class Result:
    """Holds one finding about one mask. `tenant` names the tenant whose traffic was attacked; it is None if this is the
    victim that the command itself ran."""

    mask: str
    arithmetic: str
    adversary: str
    finding: Finding
    tenant: str | None = None


def write(
    folder: Path,
    results: Sequence[Result],
    controls: Sequence[ControlResult],
    notes: Sequence[str],
    verdict: Sequence[str] = (),
) -> tuple[Path, Path]:
    """Writes report.json and report.md to a folder, which is made if needed, and returns their paths in this order.

    Args:
        folder: the folder.
        results, controls, notes: what the report holds.
        verdict: lines with which report.md begins.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "results": [
            {
                "mask": one.mask,
                "arithmetic": one.arithmetic,
                "adversary": one.adversary,
                "module": one.finding.module,
                "metric": one.finding.metric,
                "value": _number(one.finding.value),
                "baseline": one.finding.baseline,
                "interval": list(one.finding.interval),
                "spread": None if one.finding.spread is None else list(one.finding.spread),
                "verdict": one.finding.verdict,
                **({"said": one.finding.said} if one.finding.said else {}),
                **({"tenant": one.tenant} if one.tenant is not None else {}),
            }
            for one in results
        ],
        "controls": [
            {
                "adversary": one.adversary,
                "setting": one.setting,
                "metric": one.metric,
                "value": _number(one.value),
                "needed": one.needed,
                "wins": one.wins,
            }
            for one in controls
        ],
        "notes": list(notes),
    }
    machine, human = folder / "report.json", folder / "report.md"
    machine.write_text(json.dumps(data, indent=1) + "\n")
    human.write_text("\n".join(["# Attack report", "", *bullets(verdict), *lines(results, controls, notes), ""]))
    return machine, human


def bullets(verdict: Sequence[str]) -> list[str]:
    """Returns the verdict as a list in Markdown with an empty line after it; nothing if there is none."""
    return [*(f"- {_plain(line)}" for line in verdict), ""] if verdict else []


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def _line(one: Result) -> str:
    found = one.finding
    value, baseline = "–", "–"
    if found.verdict != NO_CLAIM:
        value = f"{found.value:.3g}" + _between(found.spread)
    if found.verdict not in (NO_CLAIM, "not judged"):
        baseline = f"{found.baseline:.3g}" + _between(found.interval)
    cells = _whose(one), one.arithmetic, one.adversary, found.module, found.metric, value, baseline, found.verdict
    return f"| {' | '.join(map(_plain, cells))} |"


def _whose(one: Result) -> str:
    return one.mask if one.tenant is None else f"{one.mask} ({one.tenant})"


def _plain(text: str) -> str:
    """Escapes text for a cell or a line of Markdown, because text that was stolen or comes from a recording may hold
    anything."""
    return "".join(f"\\{char}" if char in "|`<" else char for char in " ".join(text.split()))


def _between(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.3g} to {interval[1]:.3g})"


def lines(results: Sequence[Result], controls: Sequence[ControlResult], notes: Sequence[str]) -> list[str]:
    """Returns the lines of the report in Markdown: results, controls and notes."""
    table = [
        *_summary(results),
        "",
        *LEGEND,
        "",
        "| mask | arithmetic | adversary | module | metric | value | baseline (99% interval) | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table += [_line(one) for one in results]
    checks = ["| control | setting | metric | value | needed | wins |", "|---|---|---|---|---|---|"]
    for control in controls:
        sign = "≤" if control.smaller_wins else "≥"
        checks.append(
            f"| {control.adversary} | {control.setting} | {control.metric} | {control.value:.3g} "
            f"| {sign} {control.needed:.3g} | {'yes' if control.wins else 'NO'} |"
        )
    said = [f"- {note}" for note in notes]
    words = [f"- {what} ({'; '.join(where)})" for what, where in _words(results).items()]
    told = ["", "What was said, in words:", "", *words] if words else []
    return [
        *table,
        *told,
        "",
        NOTE,
        "",
        "Positive controls: the same code where it should win.",
        "",
        *checks,
        "",
        *said,
    ]


def _summary(results: Sequence[Result]) -> list[str]:
    """Returns a line for each mask and arithmetic. It names the adversaries that won, and those that were above chance,
    and gives the number of the others."""
    verdicts: dict[str, dict[str, set[str]]] = {}
    for one in results:
        verdicts.setdefault(f"{_whose(one)}, {one.arithmetic}", {}).setdefault(one.adversary, set()).add(
            one.finding.verdict
        )
    found = []
    for mask, by_name in verdicts.items():
        won = [name for name, each in by_name.items() if any(one.startswith("wins") for one in each)]
        above = [name for name, each in by_name.items() if name not in won and "above baseline" in each]
        others = len(by_name) - len(won) - len(above)
        found.append(
            f"- **{_plain(mask)}**: won in some line by {', '.join(won) or 'nobody'}; above baseline in some line: "
            f"{', '.join(above) or 'nobody'}; {others} others."
        )
    return found


def _words(results: Sequence[Result]) -> dict[str, list[str]]:
    """Maps each claim, as text, to the masks under which it was made. Claims from metadata are the same under all
    masks."""
    found: dict[str, list[str]] = {}
    for one in results:
        if one.finding.said:
            what = f"{one.adversary}, {one.finding.module}: {_plain(_clipped(one.finding.said))}"
            found.setdefault(what, []).append(f"{_whose(one)}, {one.arithmetic}")
    return found


def _clipped(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
