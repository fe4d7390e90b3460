"""This module writes log lines to the standard error output."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes each line to what `sys.stderr` is at that moment. The standard library's handler keeps the stream that it
    was made with, and prints a traceback for every line once that one is closed or has been replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
