"""Makes modules compute again what they compute once for a process."""

from __future__ import annotations

from types import ModuleType


def forget(*modules: ModuleType) -> None:
    """Empties every cache of functions of these modules, so that the next call finds things as they are then."""
    for module in modules:
        for each in vars(module).values():
            if hasattr(each, "cache_clear") and each.__module__ == module.__name__:
                each.cache_clear()
