"""Where adapters live (network, disk, host memory, device) and how each row of a step gets its own."""

from tenant_sdk.serving.adapters.store import AdapterStore, StoreStatus
from tenant_sdk.serving.adapters.ticket import AdapterTicket

__all__ = ["AdapterStore", "AdapterTicket", "StoreStatus"]
