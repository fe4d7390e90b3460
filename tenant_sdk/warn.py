"""This module issues warnings that cannot end a run, since the provider would see that there was one. It also finds the
line of the user's program that a warning should name."""

from __future__ import annotations

import logging
import sys
import warnings


def users_line() -> int:
    """Returns the `stacklevel` with which a `warnings.warn` of the caller names the innermost line outside this
    package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level


def warn_and_go_on(text: str, category: type[Warning], stacklevel: int = 3) -> None:
    """Issues a warning; if the process turns warnings into errors, the text goes to the log instead.

    Args:
        text: the warning's text, which must not quote any row, prompt or answer.
        category: the class of the warning.
        stacklevel: the `stacklevel` of the call of `warnings.warn` in this function.
    """
    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    except category:
        logging.getLogger(__name__).warning(text)
