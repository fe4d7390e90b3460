"""report.json and report.md: the table that a tenant reads before choosing a mask."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attacks.controls.control import ControlResult
from attacks.finding import NO_CLAIM, Finding

_LONGEST = 240
"""Characters of a claim in words; report.json has the whole of it."""
NOTE = (
    "“At baseline” says that this adversary, on this traffic, did no better than guessing. It is not evidence of "
    "security: what `lattice`, `pad` and `shares` protect rests on the assumptions in docs/threat-model.md."
)


@dataclass(frozen=True)
class Result:
    """One finding about one mask."""

    mask: str
    arithmetic: str
    adversary: str
    finding: Finding


def write(
    folder: Path, results: Sequence[Result], controls: Sequence[ControlResult], notes: Sequence[str]
) -> tuple[Path, Path]:
    """Writes both files and returns their paths."""
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
    human.write_text("\n".join(["# Attack report", "", *lines(results, controls, notes), ""]))
    return machine, human


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def _line(one: Result) -> str:
    found = one.finding
    value, baseline = "–", "–"
    if found.verdict != NO_CLAIM:
        value = f"{found.value:.3g}" + _between(found.spread)
        baseline = f"{found.baseline:.3g}" + _between(found.interval)
    return (
        f"| {one.mask} | {one.arithmetic} | {one.adversary} | {found.module} | {found.metric} | {value} | {baseline} "
        f"| {found.verdict} |"
    )


def _between(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.3g} to {interval[1]:.3g})"


def lines(results: Sequence[Result], controls: Sequence[ControlResult], notes: Sequence[str]) -> list[str]:
    """The report as Markdown."""
    table = [
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


def _words(results: Sequence[Result]) -> dict[str, list[str]]:
    """What was said, and through which masks: metadata says the same through all of them."""
    found: dict[str, list[str]] = {}
    for one in results:
        if one.finding.said:
            what = f"{one.adversary}, {one.finding.module}: {_clipped(one.finding.said)}"
            found.setdefault(what, []).append(f"{one.mask}, {one.arithmetic}")
    return found


def _clipped(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
