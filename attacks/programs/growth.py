"""Runs `python -m attacks.growth`, which times lattice reduction at toy dimensions and extrapolates to the shipped
ones.

The program prints the measurements, the line through them, and the line's value at the dimensions of the shipped
parameter sets beside the published estimates. The line is an illustration and not an estimate, as
attacks/adversaries/lattice_reduction.py explains. A tenant makes masks of such small dimensions only if its flag for
toy parameters is set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from attacks.adversaries.lattice_reduction import BLOCK_SIZES, HARD_SIGMA, Growth, extrapolate, fit, measure_growth
from attacks.growth import SHIPPED_SIGMA, make_parser
from attacks.report.exit_status import exit_status
from attacks.report.stages import say
from noise.params import PARAMETERS

SERIES = ((SHIPPED_SIGMA, (32, 48, 64, 80, 96)), (HARD_SIGMA, (16, 28, 40, 52, 64)))
"""Each series is (σ of the error, dimensions). The first has the shipped error, with which LLL alone succeeds. The
second has an error that needs BKZ from dimension 64 or so on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the results. Returns 0, or 1 if no line can be drawn for some series, or 2 for a request that
    cannot be carried out."""
    options = make_parser().parse_args(arguments)
    series = SERIES if options.dimensions is None else ((options.sigma, tuple(options.dimensions)),)

    def work() -> int:
        measured = {sigma: measure_growth(dimensions, sigma, options.seed, say) for sigma, dimensions in series}
        print("\n".join(line for sigma, points in measured.items() for line in lines(sigma, points)))
        if options.out is not None:
            write(options.out, measured)
        return 0 if all(math.isfinite(fit(points)[0]) for points in measured.values()) else 1

    return exit_status("attacks.growth", options.out, work)


def lines(sigma: float, measured: Sequence[Growth]) -> list[str]:
    """Returns the report on one series as lines of Markdown."""
    table = [f"σ = {sigma:g}, q = 2^32, ternary secret", "", "| dimension | samples | seconds | found by |"]
    table.append("|---|---|---|---|")
    table += [f"| {one.dimension} | {one.num_samples} | {one.seconds:.3g} | {_found_by(one)} |" for one in measured]
    slope, intercept = fit(measured)
    if not math.isfinite(slope):
        told = "No line that rises: the secret has to be found at two dimensions, and later at the larger one."
        return [*table, "", told, ""]
    table += ["", f"The line: log2(seconds) = {slope:.3f} · dimension {intercept:+.1f}", ""]
    table += ["| set | dimension | σ | bits on the line | published estimate |", "|---|---|---|---|---|"]
    for name, (bits, published) in extrapolate(measured).items():
        chosen = PARAMETERS[name]
        table.append(f"| {name} | {chosen.dimension} | {chosen.sigma:g} | {bits:.0f} | {published} |")
    return [*table, "", "A line through toy points illustrates growth; it estimates nothing.", ""]


def _found_by(one: Growth) -> str:
    if one.block_size is None:
        return f"nothing up to block size {max(BLOCK_SIZES)}"
    return "LLL" if one.block_size == min(BLOCK_SIZES) else f"BKZ {one.block_size}"


def write(folder: Path, measured: dict[float, list[Growth]]) -> Path:
    """Writes growth.json: every measurement, and for each series the bits on its line beside the published bits."""
    folder.mkdir(parents=True, exist_ok=True)
    data = [
        {
            "sigma": sigma,
            "measured": [asdict(one) for one in points],
            "bits": {
                name: {"on_the_line": bits if math.isfinite(bits) else None, "published": published}
                for name, (bits, published) in extrapolate(points).items()
            },
        }
        for sigma, points in measured.items()
    ]
    file = folder / "growth.json"
    file.write_text(json.dumps({"series": data}, indent=1) + "\n")
    return file
