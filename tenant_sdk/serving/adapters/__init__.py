"""This package keeps adapters on four tiers (network, disk, host memory, device) and applies to each row of a step the
row's own adapter. Importing it does not load torch, which comes with the first use of a name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenant_sdk.serving.adapters.loan import AdapterLoan
    from tenant_sdk.serving.adapters.store import AdapterStore, StoreStatus

__all__ = ["AdapterLoan", "AdapterStore", "StoreStatus"]


def __getattr__(name: str) -> Any:
    """Imports and returns an exported name, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tenant_sdk.serving.adapters.store"), name)
