"""Serves a model to this process, and computes its products in the processes of shards, for a tenant that has the
provider in its own process."""

from __future__ import annotations

import threading

import torch

from provider.engine.replica import ReplicaLost
from provider.model.served_model import ServedModel
from provider.model.weights import PreparedModel
from provider.shards.local import LocalShards
from wire.errors import RemoteFault, UnknownLayer
from wire.frame import Call, check_rows
from wire.ring.seeded_rows import Rows


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
