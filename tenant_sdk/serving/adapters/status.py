"""This module holds the numbers by which a store of adapters describes itself, for operators and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreStatus:
    """Holds the numbers of adapters on each tier of a store, and how often adapters were moved between tiers.

    Attributes:
        device_adapters, device_held: the number of adapters in slots, and of those that requests hold.
        device_slots: the number of slots of each rank.
        device_reusable: the number of slots of all ranks that the next adapter may get, since they are empty or no
            request holds their adapter. Together with `device_held` they are all slots.
        device_loads: how often an adapter was copied into a slot.
        host_adapters, host_bytes, host_budget_bytes: the number of adapters in host memory, the bytes that they take,
            and the most bytes that they may take.
        disk_adapters: the number of the folder's subfolders.
        disk_reads: how often an adapter was read from disk into host memory.
        network_adapters: the number of the catalogue's entries.
        waiting: the number of tickets whose adapter is loaded and that wait for a slot.
    """

    device_adapters: int
    device_held: int
    device_slots: int
    device_reusable: int
    device_loads: int
    host_adapters: int
    host_bytes: int
    host_budget_bytes: int
    disk_adapters: int
    disk_reads: int
    network_adapters: int
    waiting: int
