"""Carries requests as the Symbiosis paper does on one host: ZeroMQ carries small control messages, and the rows of a
request and of its reply are in one tensor that both processes map. This carrier is for comparison with `ipc:` only.

Each tenant has one shared tensor of (rows × the wider of input and output) four-byte numbers, which is allocated before
the first request and enlarged on demand. So a tenant has one request under way at a time: `submit` first waits for the
reply to the previous request. Manifest and bundle come by the provider's socket (`wire.transport.ipc.connection`).

    python -m benchmarks.shared_tensor serve OPTIONS...     `provider serve OPTIONS...`, which needs --ipc DIR
    use()                                                   makes `TenantClient("ipc:DIR", ...)` use the shared tensor
    reach("shared:DIR")                                     calls `use` and returns "ipc:DIR"; returns other URLs as is

Guarantees: a payload is copied into shared memory after its mask has been added, so plain rows are never there (without
a mask, the provider may read them anyway). A reply is copied out before it is checked, since the provider may change
the shared memory later. The memory is a file that nobody can shrink (F_SEAL_SHRINK), since reading a page that was cut
off would kill the process that reads. The provider checks this seal and the file's size before it maps the file. Only
processes of one user may connect.

Not guaranteed: that the tenant is enrolled. This carrier has no certificates, no quotas, no deadlines except the
tenant's own, and no retries.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import socket
import sys
import time
from pathlib import Path

import torch
import zmq

from provider.shards import messages
from tenant_sdk import session
from wire.errors import (
    DeadlineExceeded,
    LimitExceeded,
    MalformedFrame,
    Unavailable,
    VeilbaseError,
    WrongPeer,
    error_from_code,
)
from wire.frame import DTYPES, ITEM_BYTES, Call, FrameType, Header
from wire.limits import MAX_DEADLINE_MS, deadline_s
from wire.payload import Payload
from wire.ring.seeded_rows import SeededRows
from wire.transport.busy_poll import SMALL_BYTES, BusyPoll, tenants_most_s
from wire.transport.connection import Pending
from wire.transport.ipc import connection as ipc
from wire.transport.ipc import handshake
from wire.transport.ipc.folder import SCHEME as IPC_SCHEME
from wire.transport.ipc.folder import check_folder

SCHEME = "shared:"
LISTENER_NAME = "shared-tensor.sock"
"""The name of the socket, in the provider's folder, over which a tenant hands over its memory."""
FIRST_ROWS = 512
"""The number of rows for which a shared tensor has room at the start: two sequences of 256 tokens."""
_CARRIER = "shared tensor"
_MOST_BYTES = 1 << 30
_ADDRESS_BYTES = 256
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SharedTensor:
    """Maps the memory that a tenant and the provider share. The two processes take turns: the process that received the
    last message may use the memory. A process that writes out of turn can only change numbers of rows or replies."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the memory's descriptor, and maps nothing yet.

        Raises:
            OSError: the descriptor is not of memory that can be sealed.
            MalformedFrame: the memory lacks the seals that keep others from shrinking it.
        """
        self.descriptor, self.num_bytes = descriptor, 0
        self._map: mmap.mmap | None = None
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise MalformedFrame("expected shared memory that nobody can shrink")

    @classmethod
    def create(cls, num_bytes: int) -> SharedTensor:
        """Allocates at least `num_bytes` of shared memory, which can grow but never shrink, and maps it."""
        descriptor = os.memfd_create("veilbase-tensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        made = cls(descriptor)
        made.grow(num_bytes)
        return made

    def grow(self, num_bytes: int) -> None:
        """Enlarges the memory to at least `num_bytes`."""
        if num_bytes > self.num_bytes:
            os.ftruncate(self.descriptor, num_bytes)
            self.follow(num_bytes)

    def follow(self, num_bytes: int) -> None:
        """Maps the memory with its new size of `num_bytes`; does nothing if this size is mapped already.

        Raises:
            MalformedFrame: the memory is smaller than `num_bytes`, or `num_bytes` is 0, negative or above the limit.
        """
        if num_bytes == self.num_bytes:
            return
        if not 0 < num_bytes <= min(_MOST_BYTES, os.fstat(self.descriptor).st_size):
            raise MalformedFrame("the shared memory does not have the size that was announced")
        self._map, self.num_bytes = mmap.mmap(self.descriptor, num_bytes), num_bytes

    def view(self, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the beginning of the memory as a tensor, shape (num_rows, cols).

        Raises:
            MalformedFrame: the memory is too small.
        """
        if num_rows * cols * ITEM_BYTES > self.num_bytes or self._map is None:
            raise MalformedFrame("the rows do not fit into the shared memory")
        if not num_rows * cols:
            return torch.empty(num_rows, cols, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=num_rows * cols).view(num_rows, cols)

    def close(self) -> None:
        """Unmaps the memory, once no view of it is left, and closes the descriptor."""
        self._map = None
        os.close(self.descriptor)


# ---- the tenant's end -----------------------------------------------------------------------------------------------


class _Asked:
    """Holds one request: its deadline while it is under way, and then its reply or error."""

    def __init__(self, owner: SharedTensorConnection, number: int, call: Call, shape: tuple[int, int]) -> None:
        self.number, self.call, self.shape = number, call, shape
        self.give_up_at_s = 0.0
        self.outcome: torch.Tensor | VeilbaseError | None = None
        self._owner = owner

    def result(self) -> torch.Tensor:
        """Waits for the reply if necessary, and returns it.

        Raises:
            VeilbaseError: the request failed.
        """
        if self.outcome is None:
            self._owner.settle(self)
        if isinstance(self.outcome, torch.Tensor):
            return self.outcome
        raise self.outcome or Unavailable("the connection was closed")


class SharedTensorConnection(ipc.IpcConnection):
    """Implements `Connection`; requests go through shared memory, all else by the provider's socket."""

    _channel: _Channel | None = None

    @property
    def carrier(self) -> str | None:
        """Returns "shared tensor" once the first request has set up the shared memory, None before."""
        return None if self._channel is None else _CARRIER

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Waits for the reply to the previous request, and then sends this request; see `Connection.submit`."""
        self._check_usable()
        payload.check(call)
        manifest = self.manifest()
        with self._lock:
            if self._channel is None:
                widest = max(max(group.in_features, group.out_features) for group in manifest.groups)
                owner = check_folder(self._folder, self._peer_uid)
                self._channel = _Channel(self._folder, owner, FIRST_ROWS * widest * ITEM_BYTES)
            channel = self._channel
            channel.settle()
            asked = _Asked(self, channel.next_number(), call, (payload.num_rows, reply_cols))
            channel.send(asked, payload)
            self.traffic.add(payload.num_bytes, payload.num_rows * reply_cols * ITEM_BYTES, 1)
        return asked

    def settle(self, asked: _Asked) -> None:
        """Waits for the reply to the request that was sent last, if that is `asked`."""
        with self._lock:
            if asked.outcome is None and self._channel is not None:
                self._channel.settle()

    def close(self) -> None:
        """Ends the connection."""
        super().close()
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()


class _Channel:
    """Holds the shared memory, the ZeroMQ socket, and the plain Unix socket over which the memory was handed over. They
    are open as long as the tenant's connection."""

    def __init__(self, folder: Path, owner: int, num_bytes: int) -> None:
        self._memory = SharedTensor.create(num_bytes)
        self._numbers = itertools.count(1)
        self._asked: _Asked | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._busy_poll = BusyPoll(tenants_most_s())
        try:
            self._plain.connect(str(folder / LISTENER_NAME))
            if handshake.of_peer(self._plain).uid != owner:
                raise WrongPeer("the shared tensor's listener is another user's")
            socket.send_fds(self._plain, [b"tensor"], [self._memory.descriptor])
            self._socket.connect(self._plain.recv(_ADDRESS_BYTES).decode("ascii"))
        except OSError as exc:
            self.close()
            raise Unavailable(f"no provider shares memory in {folder}: {exc.strerror}") from exc

    def next_number(self) -> int:
        """Returns the number of the next request."""
        return next(self._numbers)

    def send(self, asked: _Asked, payload: Payload) -> None:
        """Copies a payload's rows into the memory, and sends the provider a control message. A seed is not copied,
        since it is in the message itself.

        Raises:
            LimitExceeded: the rows or the reply would need more than `_MOST_BYTES`.
        """
        rows, (num_rows, reply_cols) = payload.rows(asked.call), asked.shape
        memory, cols = self._memory, payload.cols
        if num_rows * max(cols, reply_cols) * ITEM_BYTES > _MOST_BYTES:
            raise LimitExceeded(f"a request of {num_rows} rows is above what this way takes")
        memory.grow(num_rows * max(cols, reply_cols) * ITEM_BYTES)
        seed = b""
        if isinstance(rows, SeededRows):
            seed = rows.pack()
        else:
            memory.view(num_rows, cols, rows.dtype).copy_(rows)
        seconds = deadline_s(num_rows * (cols + reply_cols) * ITEM_BYTES)
        asked.give_up_at_s = time.monotonic() + seconds
        header = Header(
            FrameType.REQUEST, asked.number, asked.call, num_rows, cols,
            deadline_ms=min(MAX_DEADLINE_MS, int(1000 * seconds)),
        )  # fmt: skip
        self._socket.send_multipart(messages.request(header, memory.num_bytes, memory.num_bytes, seed), zmq.DONTWAIT)
        self._asked = asked

    def settle(self) -> None:
        """Waits for the reply to the request that was sent last, and copies the reply out of the memory into the
        request's `outcome`. If the request failed, the error becomes the outcome; it is not raised."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        try:
            answer = self._answer(asked)
            if answer.request_id != asked.number:
                raise MalformedFrame("an answer to another request")
            if answer.kind is FrameType.ERROR:
                raise error_from_code(answer.code, asked.number)
            asked.outcome = self._memory.view(*asked.shape, DTYPES[asked.call.arithmetic]).clone()
        except VeilbaseError as exc:
            asked.outcome = exc

    def _answer(self, asked: _Asked) -> Header:
        is_small = asked.shape[0] * asked.shape[1] * ITEM_BYTES <= SMALL_BYTES
        self._busy_poll.look(lambda: self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, is_small)
        if not self._socket.poll(int(1000 * max(0.0, asked.give_up_at_s - time.monotonic()))):
            raise DeadlineExceeded("no answer in time")
        self._busy_poll.woke()
        return messages.read_reply(self._socket.recv_multipart())

    def close(self) -> None:
        """Closes the sockets and the memory; a request that still waits for its reply fails with `Unavailable`."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.outcome = Unavailable("the connection was closed")
        self._plain.close()
        self._socket.close(0)
        self._context.term()
        self._memory.close()


def use() -> None:
    """Makes every connection to an `ipc:DIR` that this process opens from now on send its requests through shared
    memory."""
    session.IpcConnection = SharedTensorConnection  # type: ignore[misc]


def reach(url: str) -> str:
    """Returns the URL to give to a `TenantClient` in this process. For `shared:DIR` this is `ipc:DIR`, after a call of
    `use`; any other URL is returned as it is."""
    if not url.startswith(SCHEME):
        return url
    use()
    return IPC_SCHEME + url.removeprefix(SCHEME)


if __name__ == "__main__":
    if sys.argv[1:2] != ["serve"]:
        raise SystemExit("usage: python -m benchmarks.shared_tensor serve OPTIONS of `provider serve`, with --ipc DIR")
    from benchmarks.shared_tensor_port import serve

    serve(sys.argv[2:])
