"""This module is for adapters that are trained as one kind and saved as another, as PSOFT is saved as plain LoRA."""

from __future__ import annotations

from typing import Any, Self


class SavedSettings:
    """Serves as a mixin for PEFT's classes of settings. A subclass overrides `to_dict`, from which PEFT writes an
    adapter's settings file, so that the file has the settings of the kind as which the adapter is saved."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Returns an object of this class that holds the settings of `config`."""
        made = cls.__new__(cls)
        made.__dict__.update(config.__dict__)
        return made
