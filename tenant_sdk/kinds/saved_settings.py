"""This module is for adapters whose file is of another kind than the adapter that was trained."""

from __future__ import annotations

from typing import Any, Self


class SavedSettings:
    """Makes a class of PEFT's settings whose `to_dict`, from which PEFT writes a file, may tell other settings."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Returns the same settings in this class."""
        made = cls.__new__(cls)
        made.__dict__.update(config.__dict__)
        return made
