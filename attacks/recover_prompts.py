"""Starts `python -m attacks.recover_prompts`, which runs attacks.extract_lora with the adversaries that read
prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attacks.report import command_line

ADVERSARIES = "layer-0 lookup,deep-state inversion,gradient-view,known-mask,lattice-reduction,no-error"
"""The adversaries that claim tokens, and those that unmask rows for these adversaries."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; see attacks/report/command_line.py for the exit status."""
    does = "Plays the provider and tries to read prompts."
    return command_line.main("attacks.recover_prompts", does, ADVERSARIES, arguments)


if __name__ == "__main__":
    sys.exit(main())
