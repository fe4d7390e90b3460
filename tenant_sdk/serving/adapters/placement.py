"""Gives tickets their slots, and keeps those waiting whose rank has no slot left.

Guarantees: a ticket has one slot from when it is ready until it is released; those that wait for a slot of one rank get
one in their order, and requests whose adapter is there already pass them a bounded number of times. `place` and
`next_job` are for one thread, which loads; the rest may be called from any.
"""

from __future__ import annotations

import threading
from collections import deque

from tenant_sdk.serving.adapters.device import DeviceTier
from tenant_sdk.serving.adapters.host import PackedAdapter
from tenant_sdk.serving.adapters.ticket import AdapterTicket, Job
from wire.errors import ConfigurationError

MOST_PASSED = 64
"""So many requests whose adapter has a slot may pass one that waits for a slot of that rank. Later ones queue behind
it, so that a slot comes free."""


class Placement:
    """The slots of a device tier, and who waits for them."""

    def __init__(self, device: DeviceTier) -> None:
        """Args: device: the slots."""
        self._device = device
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Job]] = {rank: deque() for rank in device.numbers.ranks}

    @property
    def num_waiting(self) -> int:
        """The tickets whose adapter is loaded and that have no slot yet."""
        with self._lock:
            return sum(not job.ticket.released for jobs in self._waiting.values() for job in jobs)

    def take(self, ticket: AdapterTicket, digest: str) -> bool:
        """Gives a ticket the slot of an adapter that is on the device; returns False where it has to be loaded."""
        with self._lock:
            slot = self._device.acquire(digest)
            if slot is None:
                return False
            if not self._may_pass(self._device.numbers.place(slot)[0]):
                self._device.release(slot)
                return False
            self._hand_over(ticket, slot, digest)
            return True

    def place(self, job: Job, packed: PackedAdapter, first: bool = False) -> None:
        """Gives a ticket a slot with its adapter in it, or lets it wait for one.

        Args:
            job: whose adapter was loaded.
            packed: the adapter.
            first: whether the ticket has waited already and is the next of its rank.

        Raises:
            ConfigurationError: no rank of the device tier is large enough.
            RuntimeError: the device has too little memory.
        """
        rank = self._device.numbers.rank_for(packed.rank)
        if rank is None:
            raise ConfigurationError(
                f"the adapter {job.origin.name} has the rank {packed.rank}: the device tier takes ranks up to "
                f"{self._device.numbers.ranks[-1]}"
            )
        with self._lock:
            slot = self._slot_for(job, packed.digest, rank, first)
            if slot is None:
                return
        self._device.fill(slot, packed)
        with self._lock:
            self._hand_over(job.ticket, slot, packed.digest)

    def release(self, ticket: AdapterTicket) -> int | None:
        """Lets go of a ticket's slot; returns the rank of it where others wait for one."""
        with self._lock:
            if ticket.released:
                return None
            ticket.released = True
            if ticket.placed is None:
                return None
            self._device.release(ticket.placed[0])
            rank, _ = self._device.numbers.place(ticket.placed[0])
            return rank if self._waiting[rank] else None

    def next_job(self, rank: int) -> Job | None:
        """Takes the first of those that wait for a slot of a rank, if it can have one now."""
        with self._lock:
            waiting = self._waiting[rank]
            while waiting and waiting[0].ticket.released:
                waiting.popleft()
            if not waiting or not self._device.has_room(rank, waiting[0].digest):
                return None
            return waiting.popleft()

    def _slot_for(self, job: Job, digest: str, rank: int, first: bool) -> int | None:
        """Assigns a slot that is to be filled; None where the ticket has one now, or waits. Needs the lock."""
        waiting, ticket = self._waiting[rank], job.ticket
        if first or self._may_pass(rank):
            slot = self._device.acquire(digest)
            if slot is not None:
                self._hand_over(ticket, slot, digest)
                return None
        if first or not waiting:
            slot = self._device.assign(digest, rank)
            if slot is not None:
                return slot
        again = Job(ticket, job.origin, digest)
        if first:
            waiting.appendleft(again)
        else:
            waiting.append(again)
        return None

    def _may_pass(self, rank: int) -> bool:
        """Whether one whose adapter has a slot may go before those that wait; it then counts as having passed."""
        waiting = self._waiting[rank]
        if not waiting:
            return True
        waiting[0].ticket.passed += 1
        return waiting[0].ticket.passed <= MOST_PASSED

    def _hand_over(self, ticket: AdapterTicket, slot: int, digest: str) -> None:
        """Gives a ticket a slot that is held for it; one that was released meanwhile gives it back. Needs the lock."""
        if ticket.released:
            self._device.release(slot)
        else:
            ticket.placed = (slot, digest)
