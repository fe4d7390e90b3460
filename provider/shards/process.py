"""The front's end of a shard's process on this machine: starts it, hands it rows, notices its end, starts it again."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import torch
import zmq

from provider.executor import check_cols
from provider.replica import ReplicaLost
from provider.shards import control
from provider.shards.shared_rows import SharedRows
from wire.errors import ConfigurationError, MalformedFrame, VeilbaseError, error_from_code
from wire.expand import Rows, SeededRows
from wire.frame import ITEM_BYTES, Call, Direction, FrameType, Header
from wire.manifest import GroupInfo

_START_S = 300.0
"""For a process to map its weights and check their digests."""
_PRODUCT_S = 300.0
"""For one product: the scheduler makes them small, so a process that takes longer hangs, and is ended."""
_FIRST_ROWS = 64
"""For which there is room before the first request."""
_MAX_STARTS, _STARTS_WITHIN_S = 5, 600.0
"""A process that has to be started so often in so long a time is given up: something ends it."""
_PAUSE_S = 0.5
_LOOK_MS = 200
"""How often whoever waits for it sees whether the provider stops."""
_LOGGER = logging.getLogger(__name__)


class ShardProcess:
    """A `provider.replica.Replica` in a process of its own."""

    def __init__(
        self,
        name: str,
        groups: dict[int, GroupInfo],
        weights: int,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        threads: int,
    ) -> None:
        """Starts it, without waiting for it; `wait_ready` does.

        Args:
            name: for the log, and of its socket.
            groups: whose weights it holds, by id.
            weights: descriptor of their file (`weight_file`), the caller's.
            folder: of this user alone, for the socket.
            context: of ZeroMQ.
            threads: of its arithmetic.
        """
        self.name, self._groups, self._weights, self._threads = name, groups, weights, threads
        self._address, self._context = f"ipc://{folder / name}", context
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        widest = max(max(info.in_features, info.out_features) for info in groups.values())
        self._requests = SharedRows.create(_FIRST_ROWS * widest * ITEM_BYTES)
        self._replies = SharedRows.create(_FIRST_ROWS * widest * ITEM_BYTES)
        self._starts: deque[float] = deque(maxlen=_MAX_STARTS)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    # ---- a product ------------------------------------------------------------------------------------------------

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """See `Replica.product`; the reply owns its memory."""
        with self._lock:
            if self._process is None:
                raise ReplicaLost
            try:
                return self._product(call, rows)
            except (zmq.ZMQError, MalformedFrame, ReplicaLost):
                self._end("was lost")
                raise ReplicaLost from None

    def _product(self, call: Call, rows: Rows) -> torch.Tensor:
        info = self._groups[call.group]
        is_hint = isinstance(rows, SeededRows)
        num_rows, cols = (rows.num_rows, 0) if isinstance(rows, SeededRows) else rows.shape
        if is_hint:
            cols = info.in_features if call.direction is Direction.FORWARD else info.out_features
        reply_cols = check_cols(info, call, cols)
        number = next(self._numbers)
        self._replies.hold(num_rows * reply_cols * ITEM_BYTES)
        seed = b""
        if isinstance(rows, SeededRows):
            seed = rows.pack()
        else:
            self._requests.hold(num_rows * cols * ITEM_BYTES)
            self._requests.view(num_rows, cols, rows.dtype).copy_(rows)
        header = Header(FrameType.REQUEST, number, call, num_rows, cols)
        parts = control.request(header, self._requests.num_bytes, self._replies.num_bytes, seed)
        self._socket.send_multipart(parts, zmq.DONTWAIT)  # or it would wait for ever where nobody is at the other end
        self._wait(_PRODUCT_S)
        answer = control.read_reply(self._socket.recv_multipart())
        if answer.request_id != number:
            raise MalformedFrame("an answer to another request")
        if answer.kind is FrameType.ERROR:
            raise error_from_code(answer.code, number)
        dtype = torch.int32 if isinstance(rows, SeededRows) else rows.dtype
        reply = self._replies.view(num_rows, reply_cols, dtype).clone()
        self._requests.give_back()
        self._replies.give_back()
        return reply

    def _wait(self, seconds: float) -> None:
        """Until a message is there; raises ReplicaLost where the process ends before, or does not answer."""
        give_up_at = time.monotonic() + seconds
        while not (ready := dict(self._poller.poll(_LOOK_MS))):
            if self._is_closed or time.monotonic() >= give_up_at:
                raise ReplicaLost
        if self._socket not in ready:
            raise ReplicaLost  # its end

    # ---- its life -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._starts.append(time.monotonic())
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._address)
        descriptors = (self._weights, self._requests.descriptor, self._replies.descriptor)
        command = [sys.executable, "-m", "provider.shards.worker", self._address, *map(str, descriptors)]
        self._process = subprocess.Popen(
            [*command, str(self._threads)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=descriptors
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._pidfd, zmq.POLLIN)

    def wait_ready(self) -> None:
        """Waits until it holds its weights.

        Raises:
            ConfigurationError: it ended before, and has said why on stderr.
        """
        with self._lock:
            try:
                self._wait(_START_S)
                if self._socket.recv_multipart() == control.READY:
                    return
            except (ReplicaLost, zmq.ZMQError):
                pass
            self._end("could not be started")
            raise ConfigurationError(f"shard {self.name} could not be started: see the lines above")

    def _end(self, what: str) -> None:
        """Ends what is left of the process; under the lock."""
        process, self._process = self._process, None
        if process is None:
            return
        self._poller.unregister(self._socket)
        self._socket.close()
        os.close(self._pidfd)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # what it ends at, by itself
        try:
            process.wait(timeout=5.0 if self._is_closed else 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not self._is_closed:
            _LOGGER.error("shard %s %s (exit status %d)", self.name, what, process.returncode)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def can_return(self) -> bool:
        """Whether it may be started once more."""
        is_often = len(self._starts) == _MAX_STARTS and time.monotonic() - self._starts[0] < _STARTS_WITHIN_S
        return not (self._is_closed or is_often)

    def revive(self, is_over: threading.Event) -> bool:
        """Starts it again, at most five times in ten minutes."""
        with self._lock:
            self._end("was lost")
        while self.can_return and not is_over.wait(_PAUSE_S):
            with self._lock:
                if self._is_closed:
                    return False
                self._start()
            try:
                self.wait_ready()
            except VeilbaseError:
                continue
            _LOGGER.warning("shard %s was started again", self.name)
            return True
        if not is_over.is_set():
            _LOGGER.error("shard %s is given up: it ended %d times", self.name, len(self._starts))
        return False

    def close(self) -> None:
        """Ends the process, and waits until it has."""
        was_closed, self._is_closed = self._is_closed, True  # before the lock: whoever holds it waits no longer
        with self._lock:
            if not was_closed:
                self._end("is ended")
                self._requests.close()
                self._replies.close()
