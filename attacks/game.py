"""Starts `python -m attacks.game`, which tests whether two known inputs can be told apart behind a mask.

The program is in attacks/programs/game.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attacks.report.exit_status import run_program

MASKS = ("lattice", "pad", "shares", "off")
"""The masks of ring arithmetic, on which the game is played."""
FULL_RUNS, QUICK_RUNS = 8000, 600


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program's options."""
    parser = argparse.ArgumentParser(prog="python -m attacks.game", description="A distinguisher game.")
    parser.add_argument("--mask", default="lattice", help=", ".join(MASKS))
    parser.add_argument("--secret", default="prompt", help="what the coin chooses: prompt or adapter")
    parser.add_argument("--runs", type=int, help=f"{FULL_RUNS} by default")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RUNS} runs")
    parser.add_argument("--out", type=Path, help="folder of game.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments, and then loads the program, which takes seconds, and runs it."""
    make_parser().parse_args(arguments)
    return run_program("game", arguments)


if __name__ == "__main__":
    sys.exit(main())
