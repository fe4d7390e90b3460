"""`python -m attacks.extract_lora`: trains a victim, records its traffic, runs every adversary, prints the table.

Exit status: 0 when the report was written and every control wins, 1 when a control fails, 2 for what cannot be done.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attacks.catalogue import MODULES, adversaries, controls
from wire.errors import VeilbaseError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    try:
        if options.list:
            for one in adversaries():
                print(f"{one.name:22} {one.summary}")
            return 0
        return _run(options)
    except VeilbaseError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attacks.extract_lora", description=__doc__)
    parser.add_argument("--model", default="tiny-llama", help="tiny-llama, tiny-gpt2, or a Hugging Face folder")
    parser.add_argument("--masks", default="off,gaussian-pool,lattice", help="comma-separated")
    parser.add_argument("--adversaries", help="comma-separated names of --list; all by default")
    parser.add_argument("--adapter", type=Path, help="PEFT folder to attack in place of one that is trained")
    parser.add_argument("--view", type=Path, help="a recording of `provider serve --record` in place of a victim")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of report.json and report.md")
    parser.add_argument("--list", action="store_true", help="names the adversaries")
    return parser


def _run(options: argparse.Namespace) -> int:
    import torch

    from attacks import quick_model, report
    from attacks.evaluate import attack

    chosen = adversaries(options.adversaries)
    if options.model in quick_model.NAMES:
        torch.set_num_threads(1)  # small systems in batches: sharing them between threads took 70 times as long
    with tempfile.TemporaryDirectory() as scratch:
        cases, notes = _cases(options, Path(scratch))
        results = [result for case in cases for result in attack(case, chosen, options.out, _say)]
    _say(f"controls of all {len(MODULES)} adversaries")
    checks = [control() for control in controls()]
    files = report.write(options.out, results, checks, notes)
    print("\n".join(report.lines(results, checks, notes)))
    print(f"\nwritten: {', '.join(map(str, files))}")
    return 0 if all(check.wins for check in checks) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _cases(options: argparse.Namespace, scratch: Path) -> tuple[list[Any], list[str]]:
    """A case for each mask, and what the report must say about the traffic."""
    from attacks import harness, profiles
    from attacks.evaluate import Case
    from attacks.load import load_public
    from attacks.truth import Truth
    from attacks.view import open_view

    profile = profiles.choose(scratch, options.model, options.adapter)
    masks = profiles.runs(options.masks)
    seen = harness.record(scratch / "run", profile.model, profile.job, masks, profile.limit, profile.layers)
    view = open_view(seen)
    notes = [f"profile {profile.name}, model {view.manifest.model_id}, {len(view.messages)} messages recorded"]
    if view.is_truncated:
        notes.append("the recording ran into its size limit: later messages lack their tensors")
    model, public = load_public(profile.model, view.manifest)
    adapter = profile.job.adapter or profile.job.truth / "adapter"
    truth = Truth(model, public, view.manifest, adapter)
    cases = [
        Case(
            run.label, view.of_tenant(run.label).with_tensors(), public, truth,
            json.loads((profile.job.truth / f"{run.label}.json").read_text()), profile.job.rows,
        )
        for run in masks
    ]  # fmt: skip
    return cases, notes


if __name__ == "__main__":
    sys.exit(main())
