"""Makes tables and plots of the memory of fine-tuning steps, like FlexLLM's Figures 13 and 14, from measured peaks.

`python -m benchmarks.activations --results FILE` measures the peaks and writes the file that this program reads. The
first table and plot compare adapters, with rows of one length. The second table and plot compare lengths, with LoRA.

Source: FlexLLM (arXiv:2402.18789), Figures 13 and 14.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import pyplot

ROWS = {
    "local": "local transformers + PEFT", "remote": "remote, as transformers and PEFT have it",
    "chunked": "+ loss in chunks", "pruned": "+ pruned graph: `checkpointing=None`",
    "replies": "`checkpointing=\"replies\"`, all on disk", "windows": "`replies` with windows of 256 tokens",
}  # fmt: skip
"""The variants of benchmarks/activations.py that are shown, each with its label."""
TITLES = {"lora": "LoRA", "ia3": "IA3", "prefix": "prefix tuning"}

Peaks = dict[str, dict[str, float]]
"""The peaks in MB of the columns of a table: by column, then by variant."""


def columns(results: dict[str, Any], tokens: int) -> tuple[Peaks, Peaks]:
    """Returns the peaks by adapter for rows of `tokens` tokens, and the peaks with LoRA by the number of tokens."""
    by_method = {
        title: _peaks(results[method][str(tokens)])
        for method, title in TITLES.items()
        if str(tokens) in results.get(method, {})
    }
    lengths = sorted(results.get("lora", {}), key=int)
    return by_method, {f"1 × {int(length):,}": _peaks(results["lora"][length]) for length in lengths}


def _peaks(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {variant: one["peak_mb"] for variant, one in found.items()}


def table(peaks: Peaks) -> str:
    """Returns a table of peaks in MB, and of their shares of local transformers + PEFT."""
    lines = [f"| peak, MB | {' | '.join(peaks)} |", f"|---|{'---|' * len(peaks)}"]
    for variant, label in ROWS.items():
        lines.append(f"| {label} | {' | '.join(_cell(each, variant) for each in peaks.values())} |")
    return "\n".join(lines)


def _cell(found: dict[str, float], variant: str) -> str:
    if variant not in found:
        return "not measured"
    share = f" ({found[variant] / found['local']:.1%})" if variant != "local" and "local" in found else ""
    return f"{found[variant]:,.0f}{share}"


def plot(peaks: Peaks, file: Path) -> None:
    """Draws bars of peaks in GB, a group for each column, and writes the plot as an SVG file."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(7.2, 2.9), layout="constrained")
    width = 0.8 / len(ROWS)
    for number, (variant, label) in enumerate(ROWS.items()):
        places = [place + (number - (len(ROWS) - 1) / 2) * width for place in range(len(peaks))]
        heights = [found.get(variant, 0) / 1e3 for found in peaks.values()]
        axes.bar(places, heights, width, label=label.replace("`", ""))
    axes.set(ylabel="peak of activations, GB", yscale="log")
    axes.set_xticks(range(len(peaks)), list(peaks))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=6)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plots.close(figure)


def main() -> None:
    """Prints both tables; with `--plots` also writes both plots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activation_figures")
    parser.add_argument("results", type=Path, metavar="FILE.json")
    parser.add_argument("--tokens", type=int, default=1024, help="the length of the rows in the first table")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    for name, peaks in zip(
        ("memory_by_adapter", "memory_by_length"), columns(json.loads(given.results.read_text()), given.tokens),
        strict=True,
    ):  # fmt: skip
        print(f"{table(peaks)}\n")
        if given.plots is not None:
            plot(peaks, given.plots / f"{name}.svg")


if __name__ == "__main__":
    main()
