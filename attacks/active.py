"""Starts `python -m attacks.active`, which plays a provider that replies wrongly on purpose.

The program is in attacks/programs/active.py.
"""

from __future__ import annotations

import sys

from attacks.programs.active import main

if __name__ == "__main__":
    sys.exit(main())
