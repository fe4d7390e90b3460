"""Starts `python -m attacks.overflow`, which plays a provider that makes the tenant's numbers overflow.

The program is in attacks/programs/overflow.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attacks.report.exit_status import out_parser, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments, and then loads the program, which takes seconds, and runs it."""
    out_parser("overflow").parse_args(arguments)
    return run_program("overflow", arguments)


if __name__ == "__main__":
    sys.exit(main())
