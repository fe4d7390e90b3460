"""Starts `python -m attacks.game`, which tests whether two known inputs can be told apart behind a mask.

The program is in attacks/programs/game.py.
"""

from __future__ import annotations

import sys

from attacks.programs.game import main

if __name__ == "__main__":
    sys.exit(main())
