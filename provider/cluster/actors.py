"""Places the actors of a provider's shards in a Ray cluster, and ends them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from provider.cluster.actor import Assignment, ShardActor
from provider.cluster.replica import ActorReplica
from provider.engine.replica import ReplicaLost
from provider.model.weights import PreparedModel
from provider.shards.plan import make_plan
from provider.shards.started import StartedShards
from wire.errors import ConfigurationError

_PLACE_S = 60.0
"""The longest time in seconds that the cluster may take to find room for all actors."""
_START_S = 900.0
"""The longest time in seconds that an actor may take to load the model and check its weights."""
_LOOK_S, _PAUSE_S = 5.0, 0.5
_CALLS_AT_ONCE = 2
"""The most calls that an actor runs at the same time: a product, and `ShardActor.wait_for_ever`."""


class ClusterShards(StartedShards[ActorReplica]):
    """Holds the actors of a provider's shards, and the connection to the cluster."""

    @classmethod
    def start(
        cls,
        served: PreparedModel,
        num_shards: int,
        num_replicas: int,
        source: tuple[str, str, str | None],
        threads: int | None = None,
        num_gpus: float = 0.0,
    ) -> ClusterShards:
        """Has Ray place and start an actor for each replica of each shard, and waits until all have their weights. The
        process must be connected (`provider.cluster.connection`); closing the instance ends the connection.

        Args:
            served: the model whose groups are split; the caller should drop its weights afterwards.
            num_shards, num_replicas: the numbers of shards, and of actors for each shard, at least 1.
            source: the settings `model`, `weights` and `base_layers`, by which each host loads the model itself.
            threads: the threads of each actor's arithmetic; None leaves the number to torch.
            num_gpus: the GPUs of each actor.

        Raises:
            ConfigurationError: there are more shards than groups, the cluster has no room for all actors, or an actor
                did not start.
        """
        self = cls()
        self._ending.callback(ray.shutdown)
        try:
            self._start(served, make_plan(served.manifest.groups, num_shards), num_replicas, source, threads, num_gpus)
        except BaseException:
            self.close()
            raise
        return self

    def _start(
        self,
        served: PreparedModel,
        plan: tuple[tuple[int, ...], ...],
        num_replicas: int,
        source: tuple[str, str, str | None],
        threads: int | None,
        num_gpus: float,
    ) -> None:
        sizes = [sum(served.groups[one].weight_bytes for one in ids) for ids in plan]
        _check_room(sizes, num_replicas, num_gpus)
        model, weights, base_layers = source
        if Path(model).expanduser().exists():
            model = str(Path(model).expanduser().resolve())  # An actor has another working folder.
        shards: list[tuple[ActorReplica, ...]] = []
        for index, ids in enumerate(plan):
            digests = {one: served.groups[one].fingerprint() for one in ids}
            assignment = Assignment(model, weights, base_layers, digests, threads)
            replicas = []
            room = _reserve(sizes[index], num_replicas, num_gpus)
            self._ending.callback(_give_back, room)
            for number in range(num_replicas):
                actor = ray.remote(ShardActor).options(
                    num_cpus=0,
                    num_gpus=num_gpus,
                    max_restarts=-1,
                    max_task_retries=0,  # The executor alone decides whether lost rows are computed again.
                    max_concurrency=_CALLS_AT_ONCE,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(room, number),
                ).remote(assignment)  # fmt: skip
                infos = {one: served.manifest.groups[one] for one in ids}
                replica = ActorReplica(f"{index}-{number}", infos, actor)
                self._ending.callback(replica.close)
                replicas.append(replica)
            shards.append(tuple(replicas))
        for replica in (one for shard in shards for one in shard):
            _wait_ready(replica)
        self.plan, self.replicas = plan, tuple(shards)


def _check_room(sizes: Sequence[int], num_replicas: int, num_gpus: float) -> None:
    """Raises ConfigurationError if the cluster is too small for all actors, even if nobody else uses it."""
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    num_actors = len(sizes) * num_replicas
    if there.get("GPU", 0.0) < num_gpus * num_actors or there.get("memory", 0.0) < sum(sizes) * num_replicas:
        raise _no_room(num_actors, max(sizes), num_gpus)


def _reserve(size: int, num_replicas: int, num_gpus: float) -> Any:
    """Reserves room for the actors of one shard: its weights' bytes of memory for each. The actors of a shard go to
    different hosts where there are enough, so that a lost host takes only one of them."""
    devices = {"GPU": num_gpus} if num_gpus else {}
    room = placement_group([{"memory": float(max(size, 1)), **devices}] * num_replicas, strategy="SPREAD")
    if not room.wait(_PLACE_S):
        _give_back(room)
        raise _no_room(num_replicas, size, num_gpus)
    return room


def _no_room(num_actors: int, size: int, num_gpus: float) -> ConfigurationError:
    each = f"{size / 1e6:.0f} MB" + (f" and {num_gpus:g} GPUs" if num_gpus else "")
    return ConfigurationError(
        f"the cluster has no room for {num_actors} actors of up to {each}: add hosts, or give fewer --shards, "
        "--replicas or --ray-gpus"
    )


def _give_back(room: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        remove_placement_group(room)


def _wait_ready(replica: ActorReplica) -> None:
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at:
        try:
            refusal = replica.refusal(_LOOK_S)
        except ReplicaLost:
            # It is still loading, or its host was lost and Ray starts it on another. An actor that has ended is lost at
            # once each time.
            time.sleep(_PAUSE_S)
            continue
        if refusal:
            raise ConfigurationError(f"shard {replica.name} was not started: {refusal}")
        return
    raise ConfigurationError(f"shard {replica.name} did not start within {_START_S:.0f} s: see Ray's logs on its host")
