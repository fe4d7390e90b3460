"""Warnings that cannot end a run: an end at a place that depends on a text would be visible."""

from __future__ import annotations

import logging
import warnings


def warn_and_go_on(text: str, category: type[Warning], stacklevel: int = 3) -> None:
    """Warns; where warnings are turned into errors, the text goes to the log instead.

    Args:
        text: the warning's text, without contents.
        category: the class of the warning.
        stacklevel: the frame that is blamed, counted as `warnings.warn` does from here.
    """
    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    except category:
        logging.getLogger(__name__).warning(text)
