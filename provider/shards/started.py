"""Holds the replicas of a provider's shards from their start to their end, wherever they compute."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Generic, TypeVar

from provider.engine.replica import Replica

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
        """Ends all replicas, and waits until they have ended."""
        self._ending.close()
