"""Combines the executors of all shards behind one interface, and sends each request to the shard that holds its layer
group."""

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
    """Describes one shard: some layer groups, the replicas that hold them, and the shard's queue.

    Attributes:
        groups: the ids of the shard's groups.
        replicas: the replicas, each with the weights of all these groups.
        scheduler: a new scheduler, which only this shard uses.
    """

    groups: Sequence[int]
    replicas: Sequence[Replica]
    scheduler: Scheduler


class ShardedExecutor:
    """Passes each request to the executor of the shard that holds the request's layer group. A session uses this class
    like one `Executor` for all groups."""

    def __init__(
        self,
        shards: Sequence[Shard],
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Starts an executor for each shard. Every group must be in exactly one shard; for the other arguments see
        `Executor`."""
        self.executors = [Executor(one.replicas, one.scheduler, completed, meter, charge) for one in shards]
        pairs = zip(shards, self.executors, strict=True)
        of_group = {group: executor for shard, executor in pairs for group in shard.groups}
        self._of_group = [of_group[group] for group in range(len(of_group))]

    def submit(self, job: Job) -> None:
        """Queues a job at the shard that holds the job's layer group; see `Executor.submit`."""
        self._of_group[job.ticket.call.group].submit(job)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Computes a small product at the shard that holds the call's layer group; see `Executor.compute_here`."""
        return self._of_group[call.group].compute_here(tenant, call, rows)

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Computes the product of one row at the shard that holds the call's layer group; see
        `Executor.compute_row`."""
        return self._of_group[call.group].compute_row(tenant, call, row, reply)

    def cancel(self, job: Job) -> None:
        """Cancels a job at the shard that holds the job's layer group; see `Executor.cancel`."""
        self._of_group[job.ticket.call.group].cancel(job)

    def is_idle(self) -> bool:
        """Returns True if, at all shards, no product is being computed and no request waits. The result may be out of
        date, since no lock is taken."""
        return not any(executor.is_busy for executor in self.executors)

    def look(self) -> None:
        """Marks idle replicas of all shards as lost if they are no longer alive; see `Executor.look`."""
        for executor in self.executors:
            executor.look()

    def __len__(self) -> int:
        """Returns the number of requests in the queues of all shards."""
        return sum(map(len, self.executors))

    @property
    def num_replicas(self) -> list[tuple[int, int]]:
        """Returns two counts for each shard: replicas that can compute products, and replicas that there should be."""
        return [executor.num_replicas for executor in self.executors]

    def close(self) -> None:
        """Closes the executors of all shards."""
        for executor in self.executors:
            executor.begin_close()
        for executor in self.executors:
            executor.close()
