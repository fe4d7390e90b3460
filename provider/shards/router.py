"""One executor for each shard behind one interface: a request goes where its layer group is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from provider.engine.executor import Executor
from provider.engine.job import Completed, Job, Outcome
from provider.engine.replica import Replica
from provider.operations.meter import Meter
from provider.schedule.scheduler import Scheduler
from wire.errors import VeilbaseError
from wire.frame import Call
from wire.ring.seeded_rows import Rows


@dataclass(frozen=True)
class Shard:
    """Some layer groups, the replicas that hold them, and the queue in front of them.

    Attributes:
        groups: the ids of the groups.
        replicas: each has the weights of all of them; there may be none yet.
        scheduler: a new scheduler, which belongs to this shard alone.
    """

    groups: Sequence[int]
    replicas: Sequence[Replica]
    scheduler: Scheduler


class ShardedExecutor:
    """Offers what a session needs of `Executor`, for all groups."""

    def __init__(
        self,
        shards: Sequence[Shard],
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Args: shards: every group is in exactly one of them; the rest: see `Executor`."""
        self.executors = [Executor(one.replicas, one.scheduler, completed, meter, charge) for one in shards]
        pairs = zip(shards, self.executors, strict=True)
        of_group = {group: executor for shard, executor in pairs for group in shard.groups}
        self._of_group = [of_group[group] for group in range(len(of_group))]

    def submit(self, job: Job) -> None:
        """Queues a job at its shard; see `Executor.submit`."""
        self._of_group[job.ticket.call.group].submit(job)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Makes a small product at its shard; see `Executor.compute_here`."""
        return self._of_group[call.group].compute_here(tenant, call, rows)

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Makes the product of one row at its shard; see `Executor.compute_row`."""
        return self._of_group[call.group].compute_row(tenant, call, row, reply)

    def cancel(self, job: Job) -> None:
        """Cancels a job at its shard; see `Executor.cancel`."""
        self._of_group[job.ticket.call.group].cancel(job)

    def is_idle(self) -> bool:
        """Tells whether nothing is being made or waits, at any shard; without a lock, so the answer may be late."""
        return not any(executor.is_busy for executor in self.executors)

    def look(self) -> None:
        """Looks for lost replicas; see `Executor.look`."""
        for executor in self.executors:
            executor.look()

    def __len__(self) -> int:
        """Returns how many requests wait, at any shard."""
        return sum(map(len, self.executors))

    @property
    def num_replicas(self) -> list[tuple[int, int]]:
        """Returns `Executor.num_replicas` for each shard."""
        return [executor.num_replicas for executor in self.executors]

    def close(self) -> None:
        """Ends all executors."""
        for executor in self.executors:
            executor.begin_close()
        for executor in self.executors:
            executor.close()
