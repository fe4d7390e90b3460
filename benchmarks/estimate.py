"""Checks the bits of security in noise/params.py with lattice-estimator: `make estimate ESTIMATOR=DIR`.

DIR is a checkout of https://github.com/malb/lattice-estimator at one fixed commit. For each row of parameters, the
lowest cost of three attacks in the MATZOV cost model is compared with the row's `bits`; they may differ by one bit. The
cost of the uSVP attack in the core-SVP cost model is printed too, but not compared. The estimator needs Sage, which is
installed from wheels (about 4 GB) into an environment of its own. The rest of this repository imports neither the
estimator nor Sage.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noise.params import MODULUS_BITS, PARAMETERS, REFUSED, LatticeParameters

ROOT = Path(__file__).parents[1]
COMMIT = "27a581bb8e9d49f5e9e2db315bd48ac769d5f5f5"
"""The commit of lattice-estimator. Its versions differ by a few bits, so that a figure can only be checked at the same
commit."""
SAGE = "passagemath-standard==10.8.13"
ATTACKS = {"uSVP": "primal_usvp", "BDD": "primal_bdd", "dual-hybrid": "dual_hybrid"}
TOLERANCE_BITS = 1.0
ROWS = (*PARAMETERS.values(), REFUSED)


class _Refused(Exception):
    """Says that no estimate can be made, or that an estimate differs from the published bits. The text is one line for
    the user."""


def _checked_checkout(given: str) -> Path:
    """Returns the estimator's folder, which must be the root of a checkout at COMMIT without changes to tracked files.

    Raises:
        Refused: the folder is anything else.
    """
    if not given:
        raise _Refused(f"name a checkout of lattice-estimator at {COMMIT[:7]}: make estimate ESTIMATOR=DIR")
    folder = Path(given).resolve()
    if not folder.is_dir() or _git(folder, "rev-parse", "--show-toplevel") != str(folder):
        raise _Refused(f"expected the root of a git checkout of lattice-estimator, got {given}")
    head = _git(folder, "rev-parse", "HEAD")
    if head != COMMIT:
        at = head[:7] or "no commit"
        raise _Refused(f"{given} is at {at}, expected {COMMIT[:7]}: git -C {given} checkout {COMMIT}")
    if _git(folder, "status", "--porcelain", "--untracked-files=no"):
        raise _Refused(f"{given} has changes of its own: git -C {given} stash")
    return folder


def _git(folder: Path, *words: str) -> str:
    """Returns git's output, or an empty text if git fails; raises Refused if git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as exc:
        raise _Refused("git is needed, to see which commit the estimator is at") from exc
    return done.stdout.strip() if done.returncode == 0 else ""


def _sage_python(folder: Path) -> Path:
    """Returns the Python of the environment with Sage in `folder`; makes the environment if the folder does not exist.

    Raises:
        Refused: the folder exists and has no Sage, or the wheels cannot be installed.
    """
    python = folder / "bin" / "python"
    if not folder.exists():
        print(f"installing {SAGE} into {folder}, once", flush=True)
        venv.create(folder, with_pip=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", SAGE], check=False)
        if done.returncode != 0:
            shutil.rmtree(folder)
            raise _Refused(f"pip could not install {SAGE}: name an environment that has Sage, SAGE=FOLDER")
    if (
        not python.exists()
        or subprocess.run([python, "-c", "import sage.all"], capture_output=True, check=False).returncode
    ):
        raise _Refused(f"{folder} has no Sage: delete it to have it made anew, or name another, SAGE=FOLDER")
    return python


def costs(estimator: Any, row: LatticeParameters, samples: Any) -> dict[str, float]:
    """Returns the cost of each attack in bits, by attack; `core-SVP` is the cost of uSVP in the core-SVP model.

    Args:
        estimator: the module `estimator` of lattice-estimator.
        row: the parameters that are attacked.
        samples: the number of LWE samples that the attacker has.
    """
    lwe = estimator.LWE
    problem = lwe.Parameters(
        n=row.dimension, q=2**MODULUS_BITS, Xs=estimator.ND.UniformMod(3), Xe=estimator.ND.DiscreteGaussian(row.sigma),
        m=samples,
    )  # fmt: skip
    matzov, core = estimator.RC.MATZOV, estimator.RC.ADPS16
    found = {
        shown: math.log2(float(getattr(lwe, name)(problem, red_cost_model=matzov)["rop"]))
        for shown, name in ATTACKS.items()
    }
    return found | {"core-SVP": math.log2(float(lwe.primal_usvp(problem, red_cost_model=core)["rop"]))}


def difference(row: LatticeParameters, found: Mapping[str, float]) -> str | None:
    """Returns a message if a row's bits differ from the estimator's by more than TOLERANCE_BITS, otherwise None."""
    least = min(found[shown] for shown in ATTACKS)
    if abs(least - row.bits) <= TOLERANCE_BITS:
        return None
    return f"{row.name}: {least:.1f} bits, noise/params.py says {row.bits}"


def estimate(folder: Path) -> None:
    """Estimates every row and prints a table; this function runs in Sage's environment.

    Raises:
        Refused: the bits of at least one row differ from the estimate.
    """
    sys.path.insert(0, str(folder))
    import estimator
    from sage.all import oo

    print(f"| set | dimension | σ | {' | '.join(ATTACKS)} | noise/params.py | core-SVP, uSVP |")
    print("|---" * (len(ATTACKS) + 5) + "|", flush=True)
    differences = []
    for row in ROWS:
        found = costs(estimator, row, oo)
        shown = " | ".join(f"{found[attack]:.1f}" for attack in ATTACKS)
        core = found["core-SVP"]
        print(f"| {row.name} | {row.dimension} | {row.sigma:g} | {shown} | {row.bits} | {core:.1f} |", flush=True)
        differences.append(difference(row, found))
    said = "; ".join(each for each in differences if each is not None)
    if said:
        raise _Refused(f"more than {TOLERANCE_BITS:g} bit apart: {said}")
    print(f"all within {TOLERANCE_BITS:g} bit of noise/params.py")


def _in_sage(python: Path, folder: Path) -> int:
    """Runs `estimate` in Sage's environment, without compiled files in the checkout, and returns its exit status."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "benchmarks.estimate", "--in-sage", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and returns the exit status: 0 if all rows agree, otherwise 1."""
    parser = argparse.ArgumentParser(prog="estimate", description="Estimates the sets of noise/params.py again.")
    parser.add_argument("estimator", nargs="?", default="", help="checkout of lattice-estimator")
    parser.add_argument(
        "--sage", type=Path, default=Path(".sage"), help="environment with Sage, made where there is none"
    )
    parser.add_argument("--in-sage", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.in_sage:
            estimate(Path(given.estimator))
            return 0
        folder = _checked_checkout(given.estimator)
        return _in_sage(_sage_python(given.sage.absolute()), folder)
    except _Refused as exc:
        print(f"estimate: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
