"""This module checks that an adapter folder exists. Importing this module is quick, so that the command line can check
a path before it loads anything else."""

from __future__ import annotations

from pathlib import Path

from wire.errors import ConfigurationError


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
        raise ConfigurationError(f"there is no adapter folder {ascii(str(adapter))[1:-1][:300] or repr(adapter)}")
    return Path(adapter)
