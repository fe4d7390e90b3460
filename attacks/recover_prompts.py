"""Starts `python -m attacks.recover_prompts`, which is attacks.extract_lora with other default adversaries: those that
read prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.stopping import at_once, told_when_stopped

ADVERSARIES = "layer-0 lookup,deep-state inversion,gradient-view,known-mask,lattice-reduction,no-error"
"""The names of the adversaries that run by default. The first three claim tokens; the others unmask rows, on which the
first three then run again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; see attacks/report/command_line.py for the exit status."""
    program, does = "attacks.recover_prompts", "Plays the provider and tries to read prompts."
    with told_when_stopped(program):
        with at_once(program):
            from attacks.report import command_line
        return command_line.main(program, does, ADVERSARIES, arguments)


if __name__ == "__main__":
    sys.exit(main())
