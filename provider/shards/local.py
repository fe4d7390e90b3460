"""All shards of a provider on this machine: their plan, their weights, their processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import zmq

from provider.model.weights import PreparedModel
from provider.shards.plan import make_plan
from provider.shards.process import ShardProcess
from provider.shards.weight_file import write_weights


class LocalShards:
    """The processes and what they share; made by `start`."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._ending = ExitStack()
        self.plan: tuple[tuple[int, ...], ...] = ()
        """The ids of each shard's groups."""
        self.replicas: tuple[tuple[ShardProcess, ...], ...] = ()
        """Each shard's processes."""

    @classmethod
    def start(
        cls,
        served: PreparedModel,
        num_shards: int,
        num_replicas: int,
        parent: Path | None = None,
        threads: int | None = None,
        elsewhere: Collection[int] = (),
    ) -> LocalShards:
        """Writes the weights down, starts the processes and waits until they hold them.

        Args:
            served: the model whose groups are split; the caller drops their weights afterwards.
            num_shards, num_replicas: at least 1.
            parent: where a file as large as the weights can be; None is the system's folder for temporary files.
            threads: the threads of each process; None shares the cores out.
            elsewhere: shards that no process is started for, because other hosts hold them.

        Raises:
            ConfigurationError: there are more shards than groups, the disk has no room, or a process did not start.
        """
        self = cls()
        try:
            self._start(served, make_plan(served.manifest.groups, num_shards), num_replicas, parent, threads, elsewhere)
        except BaseException:
            self.close()
            raise
        return self

    def _start(
        self,
        served: PreparedModel,
        plan: tuple[tuple[int, ...], ...],
        num_replicas: int,
        parent: Path | None,
        threads: int | None,
        elsewhere: Collection[int],
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ending.callback(context.destroy, 0)
        num_processes = (len(plan) - len(elsewhere)) * num_replicas
        each = threads or max(1, len(os.sched_getaffinity(0)) // max(1, num_processes))
        shards: list[tuple[ShardProcess, ...]] = []
        for index, ids in enumerate(plan):
            replicas: list[ShardProcess] = []
            if index not in elsewhere:
                weights = write_weights([served.groups[one] for one in ids], parent)
                self._ending.callback(os.close, weights)
                infos = {one: served.manifest.groups[one] for one in ids}
                for number in range(num_replicas):
                    replica = ShardProcess(f"{index}-{number}", infos, weights, context, each)
                    self._ending.callback(replica.close)
                    replicas.append(replica)
            shards.append(tuple(replicas))
        for replica in itertools.chain(*shards):
            replica.wait_ready()
        self.plan, self.replicas = plan, tuple(shards)

    def close(self) -> None:
        """Ends every process, and waits until it has ended."""
        self._ending.close()
