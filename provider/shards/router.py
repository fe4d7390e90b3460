"""Decides which shard holds which layer groups, and sends each request to the shard that holds its layer group.

`make_plan` gives each shard a run of neighbouring groups, so that the size of the largest shard is as small as
possible. `ShardedExecutor` combines the executors of all shards behind one interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from provider.engine.executor import Completed, Executor
from provider.engine.replica import Replica
from provider.engine.request import Outcome, Request
from provider.operations.metrics import Meter
from provider.schedule.scheduler import Scheduler
from wire.errors import ConfigurationError, VeilbaseError
from wire.frame import Call
from wire.manifest import GroupInfo
from wire.ring.seeded_rows import Rows


def make_plan(groups: Sequence[GroupInfo], num_shards: int) -> tuple[tuple[int, ...], ...]:
    """Splits the groups, in their order, into runs, so that the largest run is as small as possible. The size of a run
    is the number of its weights.

    Args:
        groups: the groups of the manifest.
        num_shards: the number of shards, at least 1.

    Returns:
        The ids of each shard's groups, in the order of shards; every shard has at least one group.

    Raises:
        ConfigurationError: there are more shards than groups.
    """
    if num_shards > len(groups):
        raise ConfigurationError(f"expected at most {len(groups)} shards, as many as layer groups, got {num_shards}")
    sizes = [group.in_features * group.out_features for group in groups]
    low, high = max(sizes), sum(sizes)
    while low < high:  # This finds the smallest bound for which `num_shards` runs suffice.
        bound = (low + high) // 2
        if len(_runs(sizes, bound)) <= num_shards:
            high = bound
        else:
            low = bound + 1
    runs = _runs(sizes, low)
    while len(runs) < num_shards:  # If fewer runs suffice, the largest run that can be split is split.
        widest = max((run for run in runs if len(run) > 1), key=lambda run: sum(sizes[one] for one in run))
        where = runs.index(widest)
        runs[where : where + 1] = [widest[: len(widest) // 2], widest[len(widest) // 2 :]]
    return tuple(tuple(groups[one].id for one in run) for run in runs)


def _runs(sizes: Sequence[int], bound: int) -> list[list[int]]:
    """Splits all indices into runs of neighbours; each run is as long as possible while its total size is at most the
    bound."""
    runs: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not runs or size > room:
            runs.append([])
            room = bound
        runs[-1].append(index)
        room -= size
    return runs


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

    def submit(self, request: Request) -> None:
        self._of_group[request.header.call.group].submit(request)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        return self._of_group[call.group].compute_here(tenant, call, rows)

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        return self._of_group[call.group].compute_row(tenant, call, row, reply)

    def cancel(self, request: Request) -> None:
        self._of_group[request.header.call.group].cancel(request)

    def is_idle(self) -> bool:
        """Returns True if, at all shards, no product is being computed and no request waits. The result may be out of
        date, since no lock is taken."""
        return not any(executor.is_busy for executor in self.executors)

    def look(self) -> None:
        for executor in self.executors:
            executor.look()

    def __len__(self) -> int:
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
