"""Where shards on other hosts come in: one RPC, from the first word to the replica behind the stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from provider.batch import Executor
from provider.shards.joined import JoinedShard
from provider.shards.messages import Assignment, Join, Ready, pack, unpack
from wire.errors import VeilbaseError, VersionMismatch
from wire.manifest import Manifest

_LOGGER = logging.getLogger(__name__)


class ShardDoor:
    """Lets shards in, one thread each."""

    def __init__(self, manifest: Manifest, plan: Sequence[Sequence[int]], executors: Sequence[Executor]) -> None:
        """Args: manifest: with the digests; plan: groups of each shard; executors: of each shard."""
        self._manifest, self._plan, self._executors = manifest, plan, executors

    def serve(
        self, name: str, messages: Iterator[bytes], context: Any, is_refused: Callable[[], bool]
    ) -> Iterator[bytes]:
        """What to send to a shard whose certificate has been accepted; ends the RPC where it does not fit.

        Args:
            name: of its certificate.
            messages, context: of the RPC.
            is_refused: whether its certificate was revoked meanwhile.
        """
        try:
            shard = unpack(Join, next(messages)).shard
            if shard >= len(self._plan):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such shard")
            groups = {one: self._manifest.groups[one] for one in self._plan[shard]}
            digests = {one: info.digest for one, info in groups.items()}
            yield pack(Assignment(model_id=self._manifest.model_id, weights=self._manifest.weights, digests=digests))
            held = unpack(Ready, next(messages)).digests
        except (StopIteration, grpc.RpcError):
            return
        except VersionMismatch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another protocol version")
        except VeilbaseError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a shard's message")
        if held != digests:
            _LOGGER.error("shard %d of %s holds other weights, and is refused", shard, name)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "other weights")
        replica = JoinedShard(f"{shard} of {name}", groups, is_refused)
        if not context.add_callback(replica.close):
            return
        threading.Thread(target=replica.read, args=(messages,), name="veilbase-shard", daemon=True).start()
        self._executors[shard].add(replica)
        _LOGGER.info("shard %d was joined by %s", shard, name)
        try:
            yield from replica.outgoing()
        finally:
            self._executors[shard].note_lost(replica)
            _LOGGER.warning("shard %d was left by %s", shard, name)
