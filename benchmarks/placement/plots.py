"""Draws the results of the parts: one SVG file has Figures 10 to 12, and the other has Figures 13 to 18."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import pyplot
from benchmarks.placement.report import Found, pairs
from benchmarks.placement.worker import NUM_TOKENS

Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


def draw(found: Found, folder: Path) -> None:
    """Writes scaling.svg and places.svg to a folder, as far as there are results for them."""
    if plain := pairs(found, "off"):
        _scaling(plain, pairs(found, "lattice"), folder / "scaling.svg")
    if "figure13" in found or "figure18" in found:
        _bars(found, folder / "places.svg")


def _scaling(plain: Pairs, masked: Pairs, file: Path) -> None:
    plots = pyplot()
    figure, axes = plots.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
    titles = ("Figure 10: memory, GB", "Figure 11: seconds a step", "Figure 12: tokens/s", "tokens per processor s")
    values = (
        lambda row: (row["clients_mb"] + row["provider_mb"]) / 1000,
        lambda row: row["step_s"],
        lambda row: row["tokens_per_s"],
        lambda row: NUM_TOKENS / (row["clients_cpu_s"] + row["provider_cpu_s"]),
    )
    numbers = [ours["clients"] for ours, _ in plain]
    for axis, title, value in zip(axes, titles, values, strict=True):
        axis.plot(numbers, [value(local) for _, local in plain], "s--", color="0.5", label="local processes")
        axis.plot(numbers, [value(ours) for ours, _ in plain], "o-", label="provider and clients, mask off")
        if masked:
            few = [ours["clients"] for ours, _ in masked]
            axis.plot(few, [value(ours) for ours, _ in masked], "^-", label="the same, lattice")
        axis.set(title=title, xlabel="fine-tuning clients", xticks=numbers)
    axes[0].plot(
        numbers, [ours["provider_mb"] / 1000 for ours, _ in plain], ":", color="C0", label="the provider alone"
    )
    for axis in axes:
        axis.set_ylim(0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    _save(figure, plots, file)


def _bars(found: Found, file: Path) -> None:
    plots = pyplot()
    figure, (places, slow) = plots.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    if "figure13" in found:
        rows = [row for row in found["figure13"]["rows"] if row["clients"] == 1]
        labels = [f"{row['place']}, shards: {row['shards']}" if "place" in row else "local" for row in rows]
        places.barh(labels, [row["step_s"] for row in rows])
        places.set_title("Figures 13 to 17: seconds a step, one client", loc="left")
    if "figure18" in found:
        rows = found["figure18"]["rows"]
        labels = [f"{'client' if row['side'] == 'provider' else 'local'}, loop on: {row['slow']}" for row in rows]
        slow.barh(labels, [row["step_s"] for row in rows])
        slow.set_title("Figure 18: seconds a step beside a busy loop", loc="left")
    for axis in (places, slow):
        axis.invert_yaxis()
    _save(figure, plots, file)


def _save(figure: Any, plots: Any, file: Path) -> None:
    figure.savefig(file, format="svg", metadata={"Date": None})
    plots.close(figure)
