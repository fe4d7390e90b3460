"""`python -m attacks.recover_prompts`: the same victim and the same report, for adversaries that read prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attacks import cli

ADVERSARIES = "layer-0 lookup,deep-state inversion,gradient-view,known-mask,lattice-reduction,no-error"
"""Those that name tokens, and those that open a mask for them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see attacks/cli.py for the exit status."""
    return cli.main("attacks.recover_prompts", "Plays the provider and tries to read prompts.", ADVERSARIES, arguments)


if __name__ == "__main__":
    sys.exit(main())
