"""Starts `python -m attacks.overflow`, which plays a provider that makes the tenant's numbers overflow.

The program is in attacks/programs/overflow.py.
"""

from __future__ import annotations

import sys

from attacks.programs.overflow import main

if __name__ == "__main__":
    sys.exit(main())
