"""Runs a shard's process on this machine: starts the process, sends it rows, and starts it again if it has ended.

The provider's process, which runs this code, is called the front.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
import zmq

from provider.engine.products import check_cols, together
from provider.engine.replica import RETRY_S, ReplicaLost, product_limit_s
from provider.operations.logs import configured
from provider.shards import messages
from provider.shards.messages import SharedRows
from wire.errors import ConfigurationError, MalformedFrame, RemoteFault, VeilbaseError, error_from_code
from wire.frame import ITEM_BYTES, Call, FrameType, Header
from wire.manifest import GroupInfo
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

_START_S = 300.0
"""The longest time in seconds that a process may take to map its weights and check their digests."""
_FIRST_ROWS = 64
"""The number of rows for which the shared memory has room at the start."""
_MAX_RESTARTS, _RESTARTS_WITHIN_S = 5, 600.0
"""A process is started again at most `_MAX_RESTARTS` times within `_RESTARTS_WITHIN_S` seconds, and is then given
up."""
_MAX_FAULTS = 3
"""The number of consecutive products that fail although their requests are valid, after which the process is ended and
started again. The process may then be out of memory."""
_PAUSE_S = 0.5
_LOOK_MS = 200
"""The interval in milliseconds at which a thread that waits for the process checks whether the provider is stopping."""
_LOGGER = logging.getLogger(__name__)


class ShardProcess:
    """Computes products in another process, as a `provider.engine.replica.Replica`."""

    can_share = False

    def __init__(
        self,
        name: str,
        groups: dict[int, GroupInfo],
        weights: int,
        context: zmq.Context[zmq.Socket[bytes]],
        threads: int,
        device: tuple[str, int] = ("cpu", 0),
    ) -> None:
        """Starts the process; callers must then wait for it with `wait_ready`.

        Args:
            name: the name of the shard and the replica, for the log.
            groups: the groups whose weights the process holds, by id.
            weights: the descriptor of the file with the weights (`weight_file`); the caller closes it.
            context: the ZeroMQ context.
            threads: the number of threads for the process's products.
            device: the arguments of `provider.device.choice.choose`, which the process calls.

        Raises:
            ConfigurationError: the process cannot be started.
        """
        self.name, self._groups, self._weights, self._threads = name, groups, weights, threads
        self._device = device
        self._context = context
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        widest = max(max(info.in_features, info.out_features) for info in groups.values())
        try:
            self._requests = SharedRows.create(_FIRST_ROWS * widest * ITEM_BYTES)
            self._replies = SharedRows.create(_FIRST_ROWS * widest * ITEM_BYTES)
        except OSError as exc:
            raise ConfigurationError(f"no memory for shard {name} to share: {exc.strerror}") from exc
        self._restarts: deque[float] = deque(maxlen=_MAX_RESTARTS)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_faults = 0
        self._is_closed = self._is_restarting = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Returns the process's id, or None while no process runs."""
        process = self._process
        return None if process is None else process.pid

    # ---- a product ------------------------------------------------------------------------------------------------

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product in the process; see `Replica.product`. The reply is not in shared memory."""
        with self._lock:
            if not self.is_alive:
                self._end("was lost")
                raise ReplicaLost(began=False)
            try:
                reply = self._product(call, rows)
            except RemoteFault:  # `from None`, here and below: a cause's text may quote rows.
                self._num_faults += 1
                if self._num_faults < _MAX_FAULTS:
                    raise
                self._end(f"failed {_MAX_FAULTS} times")
                raise ReplicaLost from None
            except (zmq.ZMQError, MalformedFrame, ReplicaLost):
                self._end("was lost")
                raise ReplicaLost from None
            # Only the type is logged, since the text may quote rows.
            except (OSError, RuntimeError, ValueError, MemoryError) as exc:
                _LOGGER.error("rows could not be given to shard %s: %s", self.name, type(exc).__name__)
                raise RemoteFault("the provider failed while computing") from None
            finally:
                self._requests.give_back()
                self._replies.give_back()
            self._num_faults = 0
            return reply

    def row_product(self, call: Call) -> None:
        """Returns None, since another process computes the products; see `Replica.row_product`."""

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return together(self.product, call, parts)

    def _product(self, call: Call, rows: Rows) -> torch.Tensor:
        info = self._groups[call.group]
        seed = rows.pack() if isinstance(rows, SeededRows) else b""
        num_rows = count_rows(rows)
        cols = rows.shape[1] if isinstance(rows, torch.Tensor) else info.widths(call.direction)[0]
        reply_cols = check_cols(info, call, cols)
        self._replies.hold(num_rows * reply_cols * ITEM_BYTES)
        if isinstance(rows, torch.Tensor):
            self._requests.hold(num_rows * cols * ITEM_BYTES)
            self._requests.view(num_rows, cols, rows.dtype).copy_(rows)
        number = next(self._numbers)
        header = Header(FrameType.REQUEST, number, call, num_rows, cols)
        parts = messages.request(header, self._requests.num_bytes, self._replies.num_bytes, seed)
        # With DONTWAIT, this does not wait for ever if there is no process at the other end.
        self._socket.send_multipart(parts, zmq.DONTWAIT)
        self._wait(product_limit_s(num_rows * cols * reply_cols))
        answer = messages.read_reply(self._socket.recv_multipart())
        if answer.request_id != number:
            raise MalformedFrame("an answer to another request")
        if answer.kind is FrameType.ERROR:
            raise error_from_code(answer.code, number, int(1000 * RETRY_S))
        dtype = torch.int32 if isinstance(rows, SeededRows) else rows.dtype
        return self._replies.view(num_rows, reply_cols, dtype).clone()

    def _wait(self, seconds: float) -> None:
        """Waits for a message; raises ReplicaLost if the process ends, or sends nothing within `seconds`."""
        give_up_at = time.monotonic() + seconds
        while not (ready := dict(self._poller.poll(_LOOK_MS))):
            if self._is_closed or time.monotonic() >= give_up_at:
                raise ReplicaLost
        if self._socket not in ready:
            raise ReplicaLost  # The process has ended.

    # ---- starting and ending the process --------------------------------------------------------------------------

    def _start(self) -> None:
        """Creates a folder and a socket, and starts a process that uses both; if a step fails, undoes the earlier
        steps."""
        with contextlib.ExitStack() as undoing:
            try:
                # The folder has mode 0700. It is not in the state directory, whose path may be too long for a socket.
                folder = tempfile.mkdtemp(prefix="veilbase-", dir=_short_folder())
                undoing.callback(shutil.rmtree, folder, ignore_errors=True)
                socket = self._context.socket(zmq.PAIR)
                undoing.callback(socket.close, 0)
                socket.bind(f"ipc://{folder}/s")
                descriptors = (self._weights, self._requests.descriptor, self._replies.descriptor)
                command = [sys.executable, "-m", "provider.shards.worker", f"ipc://{folder}/s", configured()]
                command += [self._device[0], str(self._device[1])]
                process = subprocess.Popen(
                    [*command, *map(str, descriptors), str(self._threads)],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=descriptors,
                )  # fmt: skip
                undoing.callback(_kill, process)
                self._pidfd = os.pidfd_open(process.pid)
            except (OSError, zmq.ZMQError) as exc:
                raise ConfigurationError(f"shard {self.name} cannot be started: {exc.strerror or 'no socket'}") from exc
            self._socket, self._process, self._folder = socket, process, folder
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._pidfd, zmq.POLLIN)
            undoing.pop_all()

    def wait_ready(self) -> None:
        """Waits until the process has mapped its weights.

        Raises:
            ConfigurationError: the process did not become ready; if it ended with an error message, the message is on
                stderr.
        """
        with self._lock:
            try:
                self._wait(_START_S)
                if self._socket.recv_multipart() == messages.READY:
                    # The process is connected, so the socket's file is removed. A front that is killed would leave the
                    # file behind.
                    shutil.rmtree(self._folder, ignore_errors=True)
                    return
            except (ReplicaLost, zmq.ZMQError):
                pass
            self._end("could not be started")
            raise ConfigurationError(f"shard {self.name} could not be started: see the lines above")

    def _end(self, what: str) -> None:
        """Ends the process and removes its socket and folder; callers must hold `_lock`."""
        process, self._process = self._process, None
        if process is None:
            return
        self._socket.close(0)
        os.close(self._pidfd)
        shutil.rmtree(self._folder, ignore_errors=True)
        status = process.poll()
        _kill(process, grace_s=5.0 if self._is_closed else 0.0)
        if not self._is_closed:
            end = "(it was ended)" if status is None else f"(exit status {status})"
            _LOGGER.error("shard %s %s %s", self.name, what, end)

    @property
    def is_alive(self) -> bool:
        """Returns whether the process is running."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def can_return(self) -> bool:
        """Returns whether the process is being started again, or may still be started again."""
        return not self._is_closed and (self._is_restarting or not self._restarted_often())

    def _restarted_often(self) -> bool:
        return len(self._restarts) == _MAX_RESTARTS and time.monotonic() - self._restarts[0] < _RESTARTS_WITHIN_S

    def revive(self, is_over: threading.Event) -> bool:
        """Starts the process again, at most five times in ten minutes; see `Replica.revive`."""
        with self._lock:
            self._end("was lost")
        self._is_restarting = True
        try:
            while not self._is_closed and not self._restarted_often() and not is_over.wait(_PAUSE_S):
                self._restarts.append(time.monotonic())
                if self._is_started():
                    self._num_faults = 0
                    _LOGGER.warning("shard %s was started again", self.name)
                    return True
        finally:
            self._is_restarting = False
        if not self._is_closed and not is_over.is_set():
            _LOGGER.error(
                "shard %s is given up, since it was started again %d times: start the provider again",
                self.name,
                len(self._restarts),
            )
        return False

    def _is_started(self) -> bool:
        try:
            with self._lock:
                if self._is_closed:
                    return False
                self._start()
            self.wait_ready()
        except VeilbaseError as exc:
            _LOGGER.error("%s", exc)
            return False
        return True

    def close(self) -> None:
        """Ends the process, and waits until it has ended."""
        # This is set before the lock is taken, so that a thread which waits under the lock stops waiting.
        was_closed, self._is_closed = self._is_closed, True
        with self._lock:
            if not was_closed:
                self._end("is ended")
                self._requests.close()
                self._replies.close()


def _short_folder() -> str | None:
    """Returns a folder with a short path in which to create sockets, since a socket's path has at most 107 characters.
    Returns None if the system's folder of temporary files is short enough."""
    return None if len(tempfile.gettempdir()) < 80 else "/tmp"  # noqa: S108 - mkdtemp's folder is this user's alone


def _kill(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """Closes the process's standard input, which tells the process to end; kills the process if it is still running
    after `grace_s` seconds."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
