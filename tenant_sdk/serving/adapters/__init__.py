"""This package keeps adapters on four tiers (network, disk, host memory, device) and applies to each row of a step the
row's own adapter."""

from tenant_sdk.serving.adapters.store import AdapterStore, StoreStatus
from tenant_sdk.serving.adapters.ticket import AdapterTicket

__all__ = ["AdapterStore", "AdapterTicket", "StoreStatus"]
