"""Starts `python -m attacks.extract_lora`, which runs adversaries on a tenant's recorded traffic and prints a table.

The command trains a victim and records its traffic, unless `--view` gives it a recording.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.stopping import at_once, told_when_stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; see attacks/report/command_line.py for the exit status."""
    program, does = "attacks.extract_lora", "Plays the provider and tries to steal the adapter."
    with told_when_stopped(program):
        with at_once(program):
            from attacks.report import command_line
        return command_line.main(program, does, None, arguments)


if __name__ == "__main__":
    sys.exit(main())
