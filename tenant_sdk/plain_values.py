"""This module checks arguments that are a whole number, a time, a boolean or the folder of an adapter.

Importing this module is quick, so that the command line can check its options before it loads anything else."""

from __future__ import annotations

from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from runtime.command_line import nearest
from wire.errors import ConfigurationError

_MOST_S = 1e9
"""More seconds than any setting needs, and few enough for every clock."""
_MOST_COMPARED = 256
"""The most entries of a folder among which the nearest to a missing one is looked for."""


class WrongOption(ConfigurationError):
    """Says that an option's value cannot be used. `option` is the option's name, for which an interface with other
    names puts its own."""

    def __init__(self, text: str, option: str) -> None:
        """Makes the error with the message `text`."""
        super().__init__(text, option)
        self.option = option

    def __str__(self) -> str:
        return str(self.args[0])


def positive(name: str, value: Any) -> int:
    """Returns the value of a setting; raises ConfigurationError if the value is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise WrongOption(f"{name} must be a positive whole number, got {ascii(value)[:40]}", name)
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Returns the value of a setting in seconds; raises ConfigurationError if it is not a finite number from 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST_S:  # a NaN fails this too
        raise WrongOption(f"{name} must be a finite number of seconds from 0, got {ascii(value)[:40]}", name)
    return float(value)


def true_or_false(name: str, value: Any) -> bool:
    """Returns the value of a setting; raises ConfigurationError if the value is neither True nor False."""
    if not isinstance(value, bool):
        raise WrongOption(f"{name} is True or False, got {type(value).__name__}", name)
    return value


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
