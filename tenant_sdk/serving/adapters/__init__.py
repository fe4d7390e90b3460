"""This package keeps adapters on four tiers (network, disk, host memory, device) and applies to each row of a step the
row's own adapter."""

from tenant_sdk.serving.adapters.loan import AdapterLoan
from tenant_sdk.serving.adapters.store import AdapterStore, StoreStatus

__all__ = ["AdapterLoan", "AdapterStore", "StoreStatus"]
