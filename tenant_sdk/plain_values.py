"""This module checks settings that are a whole number or a boolean."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from wire.errors import ConfigurationError


def positive(name: str, value: Any) -> int:
    """Returns the value of a setting; raises ConfigurationError if the value is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigurationError(f"{name} must be a positive whole number, got {ascii(value)[:40]}")
    return int(value)


def true_or_false(name: str, value: Any) -> bool:
    """Returns the value of a setting; raises ConfigurationError if the value is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is True or False, got {type(value).__name__}")
    return value
