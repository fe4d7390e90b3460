"""Clears caches, so that modules compute again what they normally compute once per process."""

from __future__ import annotations

from types import ModuleType


def forget(*modules: ModuleType) -> None:
    """Clears the caches of all functions of these modules, so that their next calls compute new results."""
    for module in modules:
        for each in vars(module).values():
            if hasattr(each, "cache_clear") and each.__module__ == module.__name__:
                each.cache_clear()
