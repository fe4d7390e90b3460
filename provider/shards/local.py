"""Starts the processes that compute the products of a provider's shards on this machine, and ends them.

`LocalShards` holds these processes. `ShardedModel` uses them for a tenant that has the provider in its own process: it
serves the model to this process, and has each product computed by the process of the shard that holds the layer group.
`StartedShards` is the base class of whatever holds the replicas of shards from their start to their end, wherever they
compute; provider/cluster/actors.py uses it for the actors of a Ray cluster.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

import torch
import zmq

from provider.engine.replica import Replica, ReplicaLost
from provider.model.served_model import ServedModel
from provider.model.weights import PreparedModel
from provider.shards.messages import write_weights
from provider.shards.process import ShardProcess
from provider.shards.router import make_plan
from wire.errors import RemoteFault, UnknownLayer
from wire.frame import Call, check_rows
from wire.ring.seeded_rows import Rows

AnyReplica = TypeVar("AnyReplica", bound=Replica)


class StartedShards(Generic[AnyReplica]):
    """Holds the replicas of all shards. Subclasses have a class method `start`."""

    def __init__(self) -> None:
        """Makes an instance without replicas."""
        self._ending = ExitStack()
        self.plan: tuple[tuple[int, ...], ...] = ()
        """For each shard, in order of their numbers, the ids of the shard's layer groups."""
        self.replicas: tuple[tuple[AnyReplica, ...], ...] = ()
        """For each shard, in order of their numbers, the shard's replicas that were started."""

    def close(self) -> None:
        self._ending.close()


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


class ShardedModel(ServedModel):
    """Computes each product in the process that holds the call's layer group. It is safe under threads; each process
    computes one product at a time."""

    def __init__(self, served: PreparedModel, num_shards: int) -> None:
        """Starts the processes, and lets this process's own copy of the weights go.

        Raises:
            ConfigurationError: there are more shards than groups, the weights cannot be written to disk, or a process
                did not start.
        """
        super().__init__(served)
        self._shards = LocalShards.start(served, num_shards, 1)
        self._reviving = threading.Lock()
        pairs = zip(self._shards.plan, self._shards.replicas, strict=True)
        self._process_of = {group: replicas[0] for groups, replicas in pairs for group in groups}
        self.let_weights_go()

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product; see `ServedModel.compute`. If the process was lost, it is started again and gets the
        same rows once more.

        Raises:
            UnknownLayer, InvalidTensor: the request is not valid.
            RemoteFault: the product failed, or the process was lost twice or can no longer be started.
        """
        check_rows(call, rows)
        process = self._process_of.get(call.group)
        if process is None:
            raise UnknownLayer(f"expected a group below {len(self._process_of)}, got {call.group}")
        for _ in range(2):
            try:
                return process.product(call, rows)
            except ReplicaLost:
                # Of several threads that lose a process at the same time, one starts it again.
                with self._reviving:
                    if not process.is_alive and not process.revive(threading.Event()):
                        break
        raise RemoteFault("the process of a shard was lost: connect again")

    def close(self) -> None:
        """Ends the processes of the shards."""
        super().close()
        self._shards.close()
