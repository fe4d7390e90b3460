"""Draws two plots of a report: how much of the adapter was stolen, and how much of the tokens was recovered.

Each plot has a panel for each mask and arithmetic, in which every attack has a bar for what it got: nothing is an empty
bar, and a theft is a full one, in red.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.report.table import NO_CLAIM, SHARE_TRIED, Result
from attacks.report.verdict import UNKNOWN
from attacks.victim.names import PRIVATE_MASKS

ERROR, RATE = "relative error", "recovery rate"
"""The metrics of the two plots."""
_COLOURS = {"theft": "#c0282d", "above chance": "#e6a23c", "no better than guessing": "#8a8f98"}
_BAR_INCHES, _PANEL_INCHES = 0.2, 0.75


@dataclass(frozen=True)
class _Bar:
    """Holds one bar.

    Attributes:
        label: the attack, and what it is about.
        length: the share that was stolen, from 0 to 1.
        said: the text beside the bar.
        kind: a key of _COLOURS.
    """

    label: str
    length: float
    said: str
    kind: str


def draw(folder: Path, results: Sequence[Result]) -> list[Path]:
    """Writes recovered_adapters.svg and recovered_prompts.svg, and returns their paths. A plot without any claim is
    left out. If matplotlib is not installed, nothing is written."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    drawn = []
    for name, metric, title in (
        ("recovered_adapters.svg", ERROR, "Share of the adapter (ΔW) that was stolen: 1 − relative error"),
        ("recovered_prompts.svg", RATE, "Share of the tokens that were read"),
    ):
        if any(one.finding.metric == metric and one.finding.verdict != NO_CLAIM for one in results):
            drawn.append(_draw(folder / name, panels(results, metric), title))
    return drawn


def panels(results: Sequence[Result], metric: str) -> dict[str, list[_Bar]]:
    """Returns the bars of a plot by the title of their panel: one panel for each mask and arithmetic of the report.

    A panel has every attack that has a value of the metric under some mask. Where such an attack claimed nothing, its
    bar is empty and says so.

    Args:
        results: the report's findings.
        metric: ERROR or RATE.
    """
    claimed = [one for one in results if one.finding.metric == metric and one.finding.verdict != NO_CLAIM]
    attacks = list(dict.fromkeys(one.adversary for one in claimed))
    found: dict[str, list[_Bar]] = {}
    for one in results:
        found.setdefault(_title(one), [])
    for title, bars in found.items():
        here = [one for one in results if _title(one) == title]
        for attack in attacks:
            lines = [one for one in here if one.adversary == attack]
            values = [one for one in lines if one in claimed]
            if values:
                bars += (_bar(one, lines) for one in values)
            elif lines:
                bars.append(_Bar(attack, 0.0, "claims nothing", "no better than guessing"))
        if not bars:
            bars.append(_Bar("all attacks", 0.0, "claim nothing", "no better than guessing"))
    return found


def _title(one: Result) -> str:
    privacy = "private" if one.mask in PRIVATE_MASKS else "" if one.mask == UNKNOWN else "not private"
    of = "" if one.tenant is None else f"tenant {one.tenant}"
    return ", ".join(part for part in (one.mask, one.arithmetic, privacy, of) if part)


def _bar(one: Result, lines: Iterable[Result]) -> _Bar:
    """Returns the bar of a finding. A recovery rate counts for the tokens that were tried, so it is multiplied by their
    share: what was right among two tokens is not a prompt."""
    found, label = one.finding, f"{one.adversary}: {one.finding.module}"
    kind = "no better than guessing"
    if found.verdict.startswith("wins"):
        kind = "theft"
    elif found.verdict == "above baseline":
        kind = "above chance"
    if found.metric == ERROR:
        return _Bar(label, _share(1 - found.value), f"error {found.value:.2g}", kind)
    tried = [
        each.finding.value
        for each in lines
        if each.finding.metric == SHARE_TRIED and each.finding.module == found.module
    ]
    if not tried or tried[0] == 1.0:
        return _Bar(label, _share(found.value), f"{found.value:.0%}", kind)
    return _Bar(label, _share(found.value * tried[0]), f"{found.value:.0%} of the {tried[0]:.0%} that were tried", kind)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _draw(file: Path, bars_of: dict[str, list[_Bar]], title: str) -> Path:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [_PANEL_INCHES + _BAR_INCHES * len(bars) for bars in bars_of.values()]
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(9, 1.0 + sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    figure.suptitle(title)
    for axis, (name, bars) in zip(axes[:, 0], bars_of.items(), strict=True):
        _draw_panel(axis, name, bars)
    legend = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8)
    figure.savefig(file)
    pyplot.close(figure)
    return file


def _draw_panel(axis: Any, name: str, bars: Sequence[_Bar]) -> None:
    places = range(len(bars))
    axis.barh(places, [bar.length for bar in bars], 0.8, color=[_COLOURS[bar.kind] for bar in bars])
    for place, bar in enumerate(bars):
        axis.text(bar.length + 0.01, place, bar.said, va="center", fontsize=6)
    axis.set_yticks(places, [bar.label for bar in bars], fontsize=7)
    axis.set_xlim(0, 1.4)  # room for the text beside a full bar
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.axvline(1.0, color="grey", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_title(name, loc="left", fontsize=9)
