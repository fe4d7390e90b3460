"""Starts `python -m attacks.growth`, which times lattice reduction at toy dimensions.

The program is in attacks/programs/growth.py.
"""

from __future__ import annotations

import sys

from attacks.programs.growth import main

if __name__ == "__main__":
    sys.exit(main())
