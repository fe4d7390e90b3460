"""Starts `python -m attacks.weakenings`, which tests whether weakened lattice masks are noticed.

The program is in attacks/programs/weakenings.py.
"""

from __future__ import annotations

import sys

from attacks.programs.weakenings import main

if __name__ == "__main__":
    sys.exit(main())
