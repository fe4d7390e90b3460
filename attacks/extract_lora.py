"""`python -m attacks.extract_lora`: trains a victim, records its traffic, runs every adversary, prints the table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attacks import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see attacks/cli.py for the exit status."""
    return cli.main("attacks.extract_lora", "Plays the provider and tries to steal the adapter.", None, arguments)


if __name__ == "__main__":
    sys.exit(main())
