"""This module gives slots (numbered places on the device) to tickets. A ticket waits if no slot of its rank is free.

Guarantees: a ticket has one slot from the time that it is ready until it is released. Tickets that wait for a slot of
one rank get slots in the order in which they began to wait. Tickets whose adapter already has a slot overtake a waiting
ticket at most `MOST_PASSED` times. Only the loading thread may call `place` and `next_job`; any thread may call the
other methods.
"""

from __future__ import annotations

import threading
from collections import deque

from tenant_sdk.serving.adapters.device import DeviceTier
from tenant_sdk.serving.adapters.host import PackedAdapter
from tenant_sdk.serving.adapters.packed_modules import PackedModules
from tenant_sdk.serving.adapters.ticket import AdapterTicket, Job
from wire.errors import ConfigurationError

MOST_PASSED = 64
"""A request that waits for a slot is overtaken by at most this number of requests of the same rank whose adapter
already has a slot. Later requests wait behind the waiting request, so that a slot becomes free."""


class Placement:
    """Assigns the slots of a device tier, and keeps the queues of tickets that wait for a slot."""

    def __init__(self, device: DeviceTier) -> None:
        """Makes a placement in which no ticket waits.

        Args:
            device: the device tier whose slots are given out.
        """
        self._device = device
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Job]] = {rank: deque() for rank in device.numbers.ranks}

    @property
    def num_waiting(self) -> int:
        """Returns the number of tickets whose adapter is loaded and that have no slot yet."""
        with self._lock:
            return sum(not job.ticket.released for jobs in self._waiting.values() for job in jobs)

    def take(self, ticket: AdapterTicket, digest: str) -> bool:
        """Gives a ticket the slot of its adapter, if the adapter is on the device and the ticket may overtake those
        that wait for a slot of the same rank.

        Returns:
            Whether the ticket has the slot now. If not, callers must load the adapter and call `place`.
        """
        with self._lock:
            slot = self._device.acquire(digest)
            if slot is None:
                return False
            if not self._may_pass(self._device.numbers.place(slot)[0]):
                self._device.release(slot)
                return False
            self._hand_over(ticket, slot, digest)
            return True

    def place(self, job: Job, packed: PackedAdapter | PackedModules, first: bool = False) -> None:
        """Gives a ticket a slot that holds its adapter, or makes the ticket wait for a slot.

        Args:
            job: the job whose adapter was loaded.
            packed: the adapter.
            first: whether the ticket has already waited and is the next one of its rank.

        Raises:
            ConfigurationError: no rank of the device tier is large enough, or the adapter's modules cannot be used.
            InvalidTensor: one of the adapter's modules does not call its base layer once.
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
        """Ends a ticket's hold on its slot. Returns the slot's rank if other tickets wait for a slot of this rank."""
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
        """Returns the first job that waits for a slot of a rank, and removes the job from the rank's queue.

        Returns:
            None if no job waits, or if the first one cannot get a slot now.
        """
        with self._lock:
            waiting = self._waiting[rank]
            while waiting and waiting[0].ticket.released:
                waiting.popleft()
            if not waiting or not self._device.has_room(rank, waiting[0].digest):
                return None
            return waiting.popleft()

    def _slot_for(self, job: Job, digest: str, rank: int, first: bool) -> int | None:
        """Assigns and returns a slot that callers must fill; returns None if the ticket got a filled slot or has to
        wait. Callers must hold the lock."""
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
        """Returns whether a ticket whose adapter has a slot may overtake the first waiting ticket, and counts the
        attempt."""
        waiting = self._waiting[rank]
        if not waiting:
            return True
        waiting[0].ticket.passed += 1
        return waiting[0].ticket.passed <= MOST_PASSED

    def _hand_over(self, ticket: AdapterTicket, slot: int, digest: str) -> None:
        """Makes a slot that is held for a ticket the ticket's slot, or releases the slot if the ticket has been
        released. Callers must hold the lock."""
        if ticket.released:
            self._device.release(slot)
        else:
            ticket.placed = (slot, digest)
