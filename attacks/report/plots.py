"""Draws two plots of a report: one of the errors of stolen adapters, and one of the shares of tokens that were
recovered."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from attacks.report.finding import NO_CLAIM, SHARE_TRIED
from attacks.report.table import Result

_FLOOR, _CEILING = 1e-8, 1e2


def draw(folder: Path, results: Sequence[Result]) -> list[Path]:
    """Writes recovered_adapters.svg and recovered_prompts.svg, and returns their paths. A plot without values is left
    out. If matplotlib is not installed, nothing is written."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    results = [one for one in results if one.finding.verdict != NO_CLAIM]
    errors = [one for one in results if one.finding.metric == "relative error"]
    rates = [one for one in results if one.finding.metric in ("recovery rate", SHARE_TRIED)]
    drawn = []
    if errors:
        title = "Error of stolen ΔW (1 = guessing zero)"
        drawn.append(_bars(folder / "recovered_adapters.svg", errors, title, log=True))
    if rates:
        drawn.append(
            _bars(
                folder / "recovered_prompts.svg",
                rates,
                "Share of tokens recovered, of those that were tried",
                log=False,
            )
        )
    return drawn


def _bars(file: Path, results: Sequence[Result], title: str, log: bool) -> Path:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    labels = [f"{one.mask}, {one.arithmetic}\n{one.adversary}" for one in results]
    rows = list(dict.fromkeys(labels))
    modules = list(dict.fromkeys(map(_bar, results)))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.6 * len(rows)), layout="constrained")
    height = 0.8 / len(modules)
    for place, module in enumerate(modules):
        chosen = [(label, one) for label, one in zip(labels, results, strict=True) if _bar(one) == module]
        values = [min(max(one.finding.value, _FLOOR), _CEILING) if log else one.finding.value for _, one in chosen]
        places = [rows.index(label) + (place - (len(modules) - 1) / 2) * height for label, _ in chosen]
        axes.barh(places, values, height, label=module)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log" if log else "linear")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel(title)
    axes.legend(fontsize=7)
    figure.savefig(file)
    pyplot.close(figure)
    return file


def _bar(one: Result) -> str:
    """Returns the label of a bar. The share of tokens that were tried has a bar of its own, beside the share that was
    right."""
    return f"{one.finding.module}: {SHARE_TRIED}" if one.finding.metric == SHARE_TRIED else one.finding.module
