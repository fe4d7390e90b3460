"""Starts `python -m attacks.weakenings`, which tests whether weakened lattice masks are noticed.

The program is in attacks/programs/weakenings.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attacks.report.exit_status import out_parser, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments, and then loads the program, which takes seconds, and runs it."""
    out_parser("weakenings").parse_args(arguments)
    return run_program("weakenings", arguments)


if __name__ == "__main__":
    sys.exit(main())
