"""Uses a shard on another host as a replica, over a stream that the other host has opened.

Guarantees: a reply is checked against its request before memory is allocated for it. If a shard disconnects, is revoked
or breaks the protocol, it counts as lost, and a product that waits for its reply raises `ReplicaLost` at once. If a
reply does not come within the time that a slow host would need, the shard counts as lost too. The products of a shard
are not checked here. The operator trusts the shard's host, which has a certificate of the provider's CA, and tenants
that verify replies notice a wrong product.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import torch

from provider.engine.products import check_cols, together
from provider.engine.replica import ReplicaLost, product_limit_s
from wire import frame
from wire.errors import MalformedFrame, VeilbaseError, error_from_code
from wire.frame import Assembler, Call, FrameType, Header
from wire.manifest import GroupInfo
from wire.ring.seeded_rows import Rows, count_rows

_ROAD_S, _ROAD_BYTES_PER_S = 3.0, 4e6
"""The time that is allowed for the network between the hosts: a fixed number of seconds, plus the bytes at this rate in
bytes per second. A slower host counts as lost, early enough for another replica to compute the product while the tenant
still waits."""
_LOGGER = logging.getLogger(__name__)


class JoinedShard:
    """Computes products on another host, as a `provider.engine.replica.Replica`. A lost shard does not come back; its
    host joins as a new replica."""

    can_share = can_return = False

    def __init__(self, name: str, groups: dict[int, GroupInfo], is_refused: Callable[[], bool]) -> None:
        """Prepares the provider's end of a connection to a shard, with no messages to send yet.

        Args:
            name: the shard's name for the log.
            groups: the groups that the shard holds, by id.
            is_refused: returns whether the shard's certificate was revoked; called before every product.
        """
        self.name, self._groups, self._is_refused = name, groups, is_refused
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # one product at a time
        self._expected: Header | None = None
        self._reply: Assembler | None = None
        self._outcome: torch.Tensor | VeilbaseError | None = None
        self._answered = threading.Event()
        self._is_lost = False

    # ---- a product ------------------------------------------------------------------------------------------------

    def row_product(self, call: Call) -> None:
        """Returns None, since another host computes the products; see `Replica.row_product`."""

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes several products at once on the other host; see `Replica.products`."""
        return together(self.product, call, parts)

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product on the other host; see `Replica.product`."""
        with self._lock:
            if not self.is_alive:
                self.close()
                raise ReplicaLost(began=False)
            info, num_rows = self._groups[call.group], count_rows(rows)
            cols = rows.shape[1] if isinstance(rows, torch.Tensor) else info.widths(call.direction)[0]
            reply_cols = check_cols(info, call, cols)
            payload, number = frame.rows_bytes(rows), next(self._numbers)
            size = num_rows * reply_cols * frame.ITEM_BYTES
            self._reply = self._outcome = None
            self._answered.clear()
            self._expected = Header(FrameType.REPLY, number, call, num_rows, reply_cols, 0, size)
            for message in frame.frames(
                Header(FrameType.REQUEST, number, call, num_rows, cols, 0, len(payload)), payload
            ):
                self._outgoing.put(bytes(message))
            road_s = _ROAD_S + (len(payload) + size) / _ROAD_BYTES_PER_S
            is_answered = self._answered.wait(road_s + product_limit_s(num_rows * cols * reply_cols))
            outcome, self._expected = self._outcome, None
            if isinstance(outcome, torch.Tensor):
                return outcome
            if outcome is None:
                if not is_answered:
                    _LOGGER.error("shard %s did not answer in time", self.name)
                self.close()
                raise ReplicaLost
            raise outcome

    # ---- its stream -----------------------------------------------------------------------------------------------

    def outgoing(self) -> Iterator[bytes]:
        """Yields the messages to send to the shard until the shard is lost; the RPC's thread reads this iterator."""
        while (message := self._outgoing.get()) is not None:
            yield message

    def read(self, messages: Iterator[bytes]) -> None:
        """Reads the shard's messages until the stream ends; callers run this in a separate thread."""
        try:
            for message in messages:
                self._take(*frame.parse(message))
        except (grpc.RpcError, VeilbaseError) as exc:
            if isinstance(exc, VeilbaseError):
                _LOGGER.error("shard %s broke the protocol: %s", self.name, type(exc).__name__)
        finally:
            self.close()

    def _take(self, header: Header, payload: memoryview) -> None:
        expected = self._expected
        if expected is None or header.request_id != expected.request_id:
            raise MalformedFrame("an answer to no request")
        if header.kind is FrameType.ERROR:
            self._settle(error_from_code(header.code, header.request_id))
        elif header.kind is not FrameType.REPLY:
            raise MalformedFrame("a frame that no shard sends")
        else:
            shape = (header.call, header.rows, header.cols, header.total_bytes)
            if shape != (expected.call, expected.rows, expected.cols, expected.total_bytes):
                raise MalformedFrame("a reply does not have the shape of its request")
            if self._reply is None:
                self._reply = Assembler(header)
            if self._reply.add(header, payload):
                self._settle(self._reply.tensor())

    def _settle(self, outcome: torch.Tensor | VeilbaseError) -> None:
        self._outcome = outcome
        self._answered.set()

    @property
    def is_alive(self) -> bool:
        """Returns whether the shard's stream is open and its certificate is not revoked."""
        return not (self._is_lost or self._is_refused())

    # ---- its end --------------------------------------------------------------------------------------------------

    def revive(self, is_over: threading.Event) -> bool:
        """Returns False: a lost shard is not revived, since its host joins again as a new replica."""
        return False

    def close(self) -> None:
        """Ends the stream and marks the shard as lost; a call of `product` that waits for a reply then raises
        ReplicaLost."""
        if not self._is_lost:
            self._is_lost = True
            self._answered.set()
            self._outgoing.put(None)
