"""Starts and ends the processes of a provider's shards on this machine."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import zmq

from provider.model.weights import PreparedModel
from provider.shards.plan import make_plan
from provider.shards.process import ShardProcess
from provider.shards.started import StartedShards
from provider.shards.weight_file import write_weights


class LocalShards(StartedShards[ShardProcess]):
    """Holds the processes of a provider's shards on this machine, and the files of weights that the processes map."""

    @classmethod
    def start(
        cls,
        served: PreparedModel,
        num_shards: int,
        num_replicas: int,
        parent: Path | None = None,
        threads: int | None = None,
        device: str = "cpu",
    ) -> LocalShards:
        """Writes the weights to files, starts the processes, and waits until the processes have mapped the weights.

        Args:
            served: the model whose groups are split; the caller should drop its weights afterwards.
            num_shards: the number of shards, at least 1.
            num_replicas: the number of processes for each shard, at least 1.
            parent: the folder for the files, which are as large as the weights; None is the system's folder of
                temporary files.
            threads: the threads of each process; None divides the cores among the processes.
            device: what computes in each process; see `provider.device.choice.choose`.

        Raises:
            ConfigurationError: there are more shards than groups, the disk has no room, or a process did not start.
        """
        self = cls()
        try:
            plan = make_plan(served.manifest.groups, num_shards)
            self._start(served, plan, num_replicas, parent, threads, device)
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
        device: str,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ending.callback(context.destroy, 0)
        num_processes = len(plan) * num_replicas
        each = threads or max(1, len(os.sched_getaffinity(0)) // num_processes)
        shards: list[tuple[ShardProcess, ...]] = []
        for index, ids in enumerate(plan):
            replicas: list[ShardProcess] = []
            weights = write_weights([served.groups[one] for one in ids], parent)
            self._ending.callback(os.close, weights)
            infos = {one: served.manifest.groups[one] for one in ids}
            for number in range(num_replicas):
                place = device, index * num_replicas + number
                replica = ShardProcess(f"{index}-{number}", infos, weights, context, each, place)
                self._ending.callback(replica.close)
                replicas.append(replica)
            shards.append(tuple(replicas))
        for replica in itertools.chain(*shards):
            replica.wait_ready()
        self.plan, self.replicas = plan, tuple(shards)
