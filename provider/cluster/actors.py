"""Places the actors of a provider's shards in a Ray cluster, uses each of them as a replica, and ends them.

`ClusterShards` has Ray place and start an actor for each replica of each shard. `ActorReplica` computes products in one
actor. As with all replicas, the products are not checked here: a cluster is one trust domain (docs/ray.md), and tenants
that verify replies notice a wrong product.

Guarantees: an actor that ends, hangs or answers what was not asked counts as lost, and a product that waits for it
raises `ReplicaLost`. Ray never sends a call a second time: whether a lost product is computed again is decided by the
executor, which counts the losses of each batch. Replies are copied out of the cluster's object store before anyone uses
them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from provider.cluster.actor import Assignment, ShardActor
from provider.engine.products import check_cols, together
from provider.engine.replica import ReplicaLost, product_limit_s
from provider.model.weights import PreparedModel
from provider.shards.local import StartedShards
from provider.shards.router import make_plan
from wire.errors import ConfigurationError, RemoteFault, error_from_code
from wire.frame import DTYPES, ITEM_BYTES, Call, FrameType, Header
from wire.manifest import GroupInfo
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

_ROAD_S, _ROAD_BYTES_PER_S = 3.0, 4e6
"""The time that is allowed for the network between hosts and for the object stores: a fixed number of seconds, plus the
bytes at this rate in bytes per second. A slower host counts as lost, early enough for another replica to compute the
product while the tenant still waits."""
_REPLICA_LOOK_S, _REPLICA_PAUSE_S = 2.0, 0.5
MOST_DEATHS = 3
"""The answers in a row by which Ray says that it will not start an actor again, after which that is believed: a single
one may be about a host that was drained."""
_LOGGER = logging.getLogger(__name__)


class ActorReplica:
    """Computes products in an actor, as a `provider.engine.replica.Replica`."""

    can_share = False

    def __init__(self, name: str, groups: dict[int, GroupInfo], actor: Any) -> None:
        """Keeps the handle of an actor that Ray has been asked to start.

        Args:
            name: the names of the shard and the replica, for the log.
            groups: the groups that the actor holds, by id.
            actor: the handle of a `provider.cluster.actor.ShardActor`.
        """
        self.name, self._groups, self._actor = name, groups, actor
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # one product at a time
        self._is_closed = self._is_given_up = False
        self._num_deaths = 0
        self._end: Future[None] | None = None
        """The future of a call that ends when the actor's process ends; None while no process is known."""

    # ---- a product ------------------------------------------------------------------------------------------------

    def row_product(self, call: Call) -> None:
        """Returns None, since another process computes the products; see `Replica.row_product`."""

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return together(self.product, call, parts)

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product in the actor; see `Replica.product`."""
        info, num_rows = self._groups[call.group], count_rows(rows)
        cols = rows.shape[1] if isinstance(rows, torch.Tensor) else info.widths(call.direction)[0]
        reply_cols = check_cols(info, call, cols)
        number = next(self._numbers)
        header = Header(FrameType.REQUEST, number, call, num_rows, cols).pack()
        payload = rows.pack() if isinstance(rows, SeededRows) else rows.detach().contiguous().numpy().tobytes()
        size = num_rows * (cols + reply_cols) * ITEM_BYTES
        limit_s = _ROAD_S + size / _ROAD_BYTES_PER_S + product_limit_s(num_rows * cols * reply_cols)
        with self._lock:
            if not self.is_alive:
                raise ReplicaLost(began=False)
            answer = self._ask(header, payload, limit_s)
        if isinstance(answer, int):
            raise error_from_code(answer, number)
        if not isinstance(answer, bytes) or len(answer) != num_rows * reply_cols * ITEM_BYTES:
            self._lose("answered what was not asked")
            raise ReplicaLost
        # A copy: a view would hold the object in the store, which is small.
        return torch.frombuffer(bytearray(answer), dtype=DTYPES[call.arithmetic]).view(num_rows, reply_cols)

    def _ask(self, header: bytes, payload: Any, limit_s: float) -> Any:
        """Calls the actor and waits; callers must hold `_lock`. `from None`: a cause's text may quote rows."""
        try:
            return ray.get(self._actor.product.remote(header, payload), timeout=limit_s)
        except GetTimeoutError:
            # Ray does not notice a process that is stopped or hangs, so the process is killed, and Ray starts another.
            self._lose("did not answer in time")
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actor, no_restart=False)
            raise ReplicaLost from None
        except RayTaskError:
            raise RemoteFault("the provider failed while computing") from None
        except (RayError, OSError, ValueError) as exc:
            self._lose(f"was lost ({type(exc).__name__})")
            raise ReplicaLost from None

    def _lose(self, what: str) -> None:
        if self._end is not None and not self._is_closed:
            _LOGGER.error("shard %s %s", self.name, what)
        self._end = None

    # ---- starting and ending ------------------------------------------------------------------------------------

    def refusal(self, seconds: float) -> str:
        """Waits until the actor has loaded its weights.

        Args:
            seconds: the longest wait.

        Returns:
            Why the actor computes nothing, in one line; an empty text if it computes.

        Raises:
            ReplicaLost: the actor has ended, or is not there in this time.
        """
        try:
            refusal: str = ray.get(self._actor.refusal.remote(), timeout=seconds)
            self._num_deaths = 0
            if not refusal:
                self._end = self._actor.wait_for_ever.remote().future()
        except ActorDiedError:  # Ray does not start an actor again whose first start failed.
            self._num_deaths += 1
            if self._num_deaths >= MOST_DEATHS:
                return "Ray has ended it for good: see Ray's logs on the cluster's hosts"
            raise ReplicaLost(began=False) from None
        except RayError:  # `from None`: the error's text has the remote process's environment.
            raise ReplicaLost(began=False) from None
        return refusal

    @property
    def is_alive(self) -> bool:
        """Returns whether the actor's process was running a moment ago."""
        end = self._end
        return end is not None and not self._is_closed and not end.done()

    @property
    def can_return(self) -> bool:
        return not self._is_closed and not self._is_given_up

    def revive(self, is_over: threading.Event) -> bool:
        """Waits until Ray has started the actor again; see `Replica.revive`."""
        self._lose("was lost")
        while self.can_return and not is_over.wait(_REPLICA_PAUSE_S):
            try:
                refusal = self.refusal(_REPLICA_LOOK_S)
            except ReplicaLost:
                continue
            if refusal:
                self._is_given_up = True
                _LOGGER.error("shard %s is given up: %s", self.name, refusal)
                return False
            _LOGGER.warning("shard %s was started again", self.name)
            return True
        return False

    def close(self) -> None:
        """Ends the actor."""
        was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actor)


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
