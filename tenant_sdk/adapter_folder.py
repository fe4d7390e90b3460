"""This module checks that an adapter folder exists. Importing this module is quick, so that the command line can check
a path before it loads anything else."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from runtime.command_line import nearest
from wire.errors import ConfigurationError

_MOST_COMPARED = 256
"""The most entries of a folder among which the nearest to a missing one is looked for."""


def adapter_folder(adapter: str | Path) -> Path:
    """Returns the path of an adapter folder, whose contents are not checked.

    Raises:
        ConfigurationError: there is no such folder, or `adapter` is no path.
    """
    if not isinstance(adapter, str | Path):
        raise ConfigurationError(f"an adapter is the path of a folder, got {type(adapter).__name__}")
    try:
        is_there = adapter != "" and Path(adapter).is_dir()
    except (OSError, ValueError):  # such as a name that is too long for a path
        is_there = False
    if not is_there:
        shown = ascii(str(adapter))[1:-1][:300] or repr(adapter)
        raise ConfigurationError(f"there is no adapter folder {shown}{_nearest_beside(str(adapter))}")
    return Path(adapter)


def _nearest_beside(adapter: str) -> str:
    """Returns the end of an error's text that names the adapter folder beside a missing one that was probably meant; an
    empty text if there is none, or the folder has very many entries."""
    path = Path(adapter)
    try:
        entries = list(islice(path.parent.iterdir(), _MOST_COMPARED + 1)) if path.name and "\0" not in adapter else []
        found = [each.name for each in entries if each.name.isprintable() and (each / "adapter_config.json").is_file()]
    except OSError:
        return ""
    meant = nearest(path.name, found) if len(entries) <= _MOST_COMPARED else None
    return "" if meant is None else f": did you mean {ascii(str(path.with_name(meant)))[1:-1][:300]}?"
