"""Runs the parts of the benchmark, saves each part's results as a JSON file, and prints them as tables.

The command is `python -m benchmarks.placement [--only PART ...] [--transport T] [--out DIR] [--scratch DIR]`. A part
whose file is in `--out` is not run again unless `--again` is given, so that an interrupted run can go on. The model is
made once in `--scratch`, and is removed at the end unless `--keep` is given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.placement import parts, plots, report
from benchmarks.placement.model import SHAPES, make_model
from benchmarks.placement.sides import TRANSPORTS, Site, machine


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement")
    parser.add_argument("--only", nargs="+", choices=parts.PARTS, default=list(parts.PARTS), metavar="PART")
    parser.add_argument("--model", choices=SHAPES, default="1b", help="`tiny` tries the benchmark out")
    parser.add_argument("--transport", choices=TRANSPORTS, default="ipc", help="for figure10, table2 and figure18")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each client")
    parser.add_argument("--out", type=Path, default=Path("placement-results"), help="folder for JSON files and plots")
    parser.add_argument("--scratch", type=Path, help="folder for the model and hints, 8 GB; by default a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the model in --scratch for the next command")
    parser.add_argument("--again", action="store_true", help="run parts again that have results")
    parser.add_argument("--tables", action="store_true", help="run nothing; print tables and plot what --out has")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.tables:
        run(given)
    found = report.read(given.out)
    report.show(found)
    plots.draw(found, given.out)


def run(given: argparse.Namespace) -> None:
    """Runs the chosen parts, and saves their results. Parts that have results are run only with `--again`."""
    scratch = given.scratch or Path(tempfile.mkdtemp(prefix="veilbase-placement-"))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        for name in given.only:
            file = given.out / f"{name}.json"
            if file.exists() and not given.again:
                print(f"{name}: {file} has results already (--again runs it again)")
                continue
            model = make_model(given.model, scratch / "model" / given.model)
            work = Path(tempfile.mkdtemp(dir=scratch))
            began = time.monotonic()
            try:
                rows = parts.PARTS[name](Site(model, work, given.transport, given.steps))
            finally:
                shutil.rmtree(work)
            known = {"part": name, "model": given.model, "transport": given.transport, "steps": given.steps,
                     "date": datetime.date.today().isoformat(), "took_s": round(time.monotonic() - began),
                     **machine()}  # fmt: skip
            file.write_text(json.dumps(known | {"rows": rows}, indent=1) + "\n")
    finally:
        if not given.keep:
            shutil.rmtree(scratch / "model", ignore_errors=True)
        if given.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
