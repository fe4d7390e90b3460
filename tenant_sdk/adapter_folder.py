"""This module checks that an adapter folder exists. Importing this module is quick, so that the command line can check
a path before it loads anything else."""

from __future__ import annotations

from pathlib import Path

from wire.errors import ConfigurationError


def adapter_folder(adapter: str | Path) -> Path:
    """Returns the path of an adapter folder, whose contents are not checked.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not Path(adapter).is_dir():
        raise ConfigurationError(f"there is no adapter folder {adapter}")
    return Path(adapter)
