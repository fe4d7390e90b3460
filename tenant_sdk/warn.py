"""Warnings that cannot end a run: an abort at a place that depends on a text would be visible."""

from __future__ import annotations

import logging
import warnings


def warn_and_go_on(text: str, category: type[Warning], stacklevel: int = 3) -> None:
    """Warns, also where warnings are errors: then the text goes to the log.

    Args:
        text: holds no contents.
        category: of the warning.
        stacklevel: as `warnings.warn` counts it from here.
    """
    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    except category:
        logging.getLogger(__name__).warning(text)
