"""Draws the results of the parts as one SVG file of Figures 10 to 12 and one of the other figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import pyplot
from benchmarks.placement.report import Found, pairs

Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


def draw(found: Found, folder: Path) -> None:
    """Writes scaling.svg and places.svg to a folder, as far as there are results for them."""
    if plain := pairs(found, "off"):
        _scaling(plain, pairs(found, "lattice"), folder / "scaling.svg")
    if "figure13" in found or "figure18" in found:
        _bars(found, folder / "places.svg")


def _scaling(plain: Pairs, masked: Pairs, file: Path) -> None:
    plots = pyplot()
    figure, axes = plots.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    titles = ("Figure 10: memory, GB", "Figure 11: seconds of a step", "Figure 12: tokens/s of all")
    values = (
        lambda row: (row["clients_mb"] + row["provider_mb"]) / 1000,
        lambda row: row["step_s"],
        lambda row: row["tokens_per_s"],
    )
    for axis, title, value in zip(axes, titles, values, strict=True):
        numbers = [ours["clients"] for ours, _ in plain]
        axis.plot(numbers, [value(local) for _, local in plain], "s--", color="0.5", label="local processes")
        axis.plot(numbers, [value(ours) for ours, _ in plain], "o-", label="provider and clients, mask off")
        if masked:
            few = [ours["clients"] for ours, _ in masked]
            axis.plot(few, [value(ours) for ours, _ in masked], "^-", label="lattice")
        axis.set(title=title, xlabel="fine-tuning clients", ylim=(0, None), xticks=numbers)
    axes[0].plot(numbers, [ours["provider_mb"] / 1000 for ours, _ in plain], ":", label="of it the provider")
    axes[0].legend(frameon=False)
    _save(figure, plots, file)


def _bars(found: Found, file: Path) -> None:
    plots = pyplot()
    figure, (places, slow) = plots.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    if "figure13" in found:
        rows = [row for row in found["figure13"]["rows"] if row["clients"] == 1]
        labels = [f"{row['place']}, shards: {row['shards']}" if "place" in row else "local" for row in rows]
        places.barh(labels, [row["step_s"] for row in rows])
        places.set(title="Figures 13 to 17: seconds of a step, one client")
    if "figure18" in found:
        rows = found["figure18"]["rows"]
        labels = [f"{'client' if row['side'] == 'provider' else 'local'}, loop on: {row['slow']}" for row in rows]
        slow.barh(labels, [row["step_s"] for row in rows])
        slow.set(title="Figure 18: seconds of a step beside a busy loop")
    _save(figure, plots, file)


def _save(figure: Any, plots: Any, file: Path) -> None:
    figure.savefig(file, format="svg", metadata={"Date": None})
    plots.close(figure)
