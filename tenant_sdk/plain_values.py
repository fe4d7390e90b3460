"""This module checks settings that are a whole number, a time or a boolean."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from wire.errors import ConfigurationError

_MOST_S = 1e9
"""More seconds than any setting needs, and few enough for every clock."""


def positive(name: str, value: Any) -> int:
    """Returns the value of a setting; raises ConfigurationError if the value is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigurationError(f"{name} must be a positive whole number, got {ascii(value)[:40]}")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Returns the value of a setting in seconds; raises ConfigurationError if it is not a finite number from 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST_S:  # a NaN fails this too
        raise ConfigurationError(f"{name} must be a finite number of seconds from 0, got {ascii(value)[:40]}")
    return float(value)


def true_or_false(name: str, value: Any) -> bool:
    """Returns the value of a setting; raises ConfigurationError if the value is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is True or False, got {type(value).__name__}")
    return value
