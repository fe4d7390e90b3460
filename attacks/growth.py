"""Starts `python -m attacks.growth`, which times lattice reduction at toy dimensions.

The program is in attacks/programs/growth.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attacks.report.exit_status import docstring_of, run_program

SHIPPED_SIGMA = 3.2


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program's options."""
    parser = argparse.ArgumentParser(prog="python -m attacks.growth", description=docstring_of("growth"))
    parser.add_argument("--dimensions", type=_dimensions, help="comma-separated, in place of both series")
    parser.add_argument("--sigma", type=_sigma, default=SHIPPED_SIGMA, help="error, with --dimensions")
    parser.add_argument("--seed", type=int, default=0, help="of the instances")
    parser.add_argument("--out", type=Path, help="folder of growth.json")
    return parser


def _dimensions(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not all(4 <= dimension <= 160 for dimension in found):
        raise argparse.ArgumentTypeError("expected dimensions from 4 to 160: larger ones take hours")
    return found


def _sigma(text: str) -> float:
    found = float(text)
    if not 0.5 <= found <= 2**28:
        raise argparse.ArgumentTypeError("expected an error from 0.5 to 2^28")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments, and then loads the program, which takes seconds, and runs it."""
    make_parser().parse_args(arguments)
    return run_program("growth", arguments)


if __name__ == "__main__":
    sys.exit(main())
