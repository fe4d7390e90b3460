"""Starts `python -m attacks.game`; the program is in attacks/programs/game.py."""

from __future__ import annotations

import sys

from attacks.programs.game import main

if __name__ == "__main__":
    sys.exit(main())
