"""Makes threads take turns more often, so that they meet in every short stretch of code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Has the interpreter change to another thread that often; five milliseconds are usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
