"""Makes threads switch more often, so that races in short stretches of code show."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Makes the interpreter switch threads after this many seconds inside the context. Python's default is five
    milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
