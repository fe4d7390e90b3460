"""One executor a shard behind one face: a request goes where its layer group is."""

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
    """Some layer groups, who holds them, and the queue in front of them.

    Attributes:
        groups: ids.
        replicas: each with the weights of all of them; there may be none yet.
        scheduler: new, and this shard's alone.
    """

    groups: Sequence[int]
    replicas: Sequence[Replica]
    scheduler: Scheduler


class ShardedExecutor:
    """What a session needs of `Executor`, for all groups."""

    def __init__(
        self,
        shards: Sequence[Shard],
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Args: shards: every group in exactly one of them; the rest as of `Executor`."""
        self.executors = [Executor(one.replicas, one.scheduler, completed, meter, charge) for one in shards]
        pairs = zip(shards, self.executors, strict=True)
        of_group = {group: executor for shard, executor in pairs for group in shard.groups}
        self._of_group = [of_group[group] for group in range(len(of_group))]

    def submit(self, job: Job) -> None:
        """See `Executor.submit`."""
        self._of_group[job.ticket.call.group].submit(job)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """See `Executor.compute_here`."""
        return self._of_group[call.group].compute_here(tenant, call, rows)

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """See `Executor.compute_row`."""
        return self._of_group[call.group].compute_row(tenant, call, row, reply)

    def cancel(self, job: Job) -> None:
        """See `Executor.cancel`."""
        self._of_group[job.ticket.call.group].cancel(job)

    def is_idle(self) -> bool:
        """Whether nothing is being made or waits, at any shard; without a lock, so it may be late."""
        return not any(executor.is_busy for executor in self.executors)

    def look(self) -> None:
        """See `Executor.look`."""
        for executor in self.executors:
            executor.look()

    def __len__(self) -> int:
        """Requests that wait, at any shard."""
        return sum(map(len, self.executors))

    @property
    def num_replicas(self) -> list[tuple[int, int]]:
        """Per shard, as `Executor.num_replicas`."""
        return [executor.num_replicas for executor in self.executors]

    def close(self) -> None:
        """Ends all of them."""
        for executor in self.executors:
            executor.begin_close()
        for executor in self.executors:
            executor.close()
