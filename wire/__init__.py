"""This package defines what crosses the boundary between a tenant and a provider: frames, limits, arithmetic and
errors. It imports no sibling package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wire.ring.coding import encode

__all__ = ["encode"]


def __getattr__(name: str) -> Any:
    """Imports the one exported name, which needs torch, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("wire.ring.coding").encode
