"""This module issues warnings that cannot end a run. If a warning could, the provider would see that there was one."""

from __future__ import annotations

import logging
import warnings


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
