"""Serves the RPC by which other hosts join as shards: checks a host's messages and weights, and then uses the host as a
replica."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from provider.engine.executor import Executor
from provider.model.served_model import ServedModel
from provider.shards.joined import JoinedShard
from provider.shards.messages import JOINED, Assignment, Join, Ready, pack, unpack
from wire.errors import VeilbaseError, VersionMismatch

_JOIN_S, _LOAD_S = 20.0, 1800.0
"""The longest time in seconds until a host's first message, and from then until the host has loaded its model."""
_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class _Visit:
    """Describes a host that is joining; while it joins, the host occupies a thread."""

    context: Any
    is_refused: Callable[[], bool]
    give_up_at: float


class ShardListener:
    """Admits other hosts as replicas of shards; each host's RPC runs in a separate thread."""

    def __init__(self, model: ServedModel, plan: Sequence[Sequence[int]], executors: Sequence[Executor]) -> None:
        """Keeps the model, for the fingerprints of its weights; and keeps each shard's group ids and executor."""
        self._model, self._plan, self._executors = model, plan, executors
        self._visits: set[_Visit] = set()
        self._lock = threading.Lock()

    def serve(
        self, name: str, messages: Iterator[bytes], context: Any, is_refused: Callable[[], bool]
    ) -> Iterator[bytes]:
        """Yields the messages to a joining host whose certificate was accepted; ends the RPC if the host's messages,
        shard number or weights are wrong.

        Args:
            name: the name in the host's certificate.
            messages, context: the messages that the RPC receives, and the RPC's gRPC context.
            is_refused: returns whether the host's certificate has been revoked since the RPC began.
        """
        visit = _Visit(context, is_refused, time.monotonic() + _JOIN_S)
        with self._lock:
            self._visits.add(visit)
        try:
            shard = unpack(Join, next(messages)).shard
            if shard >= len(self._plan):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such shard")
            wanted = self._assignment(shard)
            visit.give_up_at = time.monotonic() + _LOAD_S
            yield pack(wanted)
            held = unpack(Ready, next(messages)).digests
        except (StopIteration, grpc.RpcError):
            return
        except VersionMismatch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another protocol version")
        except VeilbaseError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a shard's message")
        finally:
            with self._lock:
                self._visits.discard(visit)
        if held != wanted.digests:
            _LOGGER.error("shard %d of %s holds other weights, and is refused", shard, name)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "other weights")
        yield JOINED
        groups = {one: self._model.manifest().groups[one] for one in self._plan[shard]}
        replica = JoinedShard(f"{shard} of {name}", groups, is_refused)
        if not context.add_callback(replica.close):
            return
        threading.Thread(target=replica.read, args=(messages,), name="veilbase-shard", daemon=True).start()
        self._executors[shard].join(replica)
        _LOGGER.info("shard %d was joined by %s", shard, name)
        try:
            yield from replica.outgoing()
        finally:
            self._executors[shard].note_lost(replica)
            _LOGGER.warning("shard %d was left by %s", shard, name)

    def _assignment(self, shard: int) -> Assignment:
        manifest = self._model.manifest()
        digests = {one: self._model.fingerprints[one] for one in self._plan[shard]}
        return Assignment(model_id=manifest.model_id, weights=manifest.weights, digests=digests)

    @property
    def num_joining(self) -> int:
        """Returns how many hosts are joining; each of these hosts occupies a thread, and gets no rows yet."""
        with self._lock:
            return len(self._visits)

    def sweep(self, now: float) -> None:
        """Ends the RPC of each joining host that takes too long or has a revoked certificate."""
        with self._lock:
            visits = list(self._visits)
        for visit in visits:
            if now >= visit.give_up_at or visit.is_refused():
                visit.context.cancel()
