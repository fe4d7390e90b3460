"""Carries requests as the paper does on one host: ZeroMQ carries small control messages, and the rows of a request and
of its reply are in one tensor that both processes map. It is for comparison with `ipc:` only.

Each tenant has one shared tensor of (rows × the wider of input and output) four-byte numbers, which is allocated before
the first request and enlarged on demand. So one request of a tenant is under way at a time: `submit` first waits for
the reply to the last one. Manifest and bundle come by the provider's socket (`wire.transport.ipc.connection`).

    python -m benchmarks.shared_tensor serve OPTIONS...     `provider serve OPTIONS...`, which needs --ipc DIR
    use()                                                   lets `TenantClient("ipc:DIR", ...)` use the shared tensor

Guarantees: a payload is copied into shared memory when its mask has been added, so plain rows are never there (without
a mask, the provider may read them anyway). A reply is copied out before it is checked, since the provider may change it
later. The memory is a file that nobody can shrink (F_SEAL_SHRINK), since reading a page that was cut off would kill
this process; the provider checks this seal and the file's size before it maps the file. Only processes of one user
may connect.

Not guaranteed: that the tenant is enrolled. There are no certificates on this way, no quotas, no deadlines but the
tenant's own, and no retries.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import zmq

from provider.shards import control
from wire.errors import (
    DeadlineExceeded,
    InvalidTensor,
    LimitExceeded,
    MalformedFrame,
    RemoteFault,
    Unavailable,
    VeilbaseError,
    WrongPeer,
    code_of,
    error_from_code,
)
from wire.frame import DTYPES, ITEM_BYTES, Call, Direction, FrameType, Header, Purpose
from wire.limits import MAX_DEADLINE_MS, deadline_s
from wire.payload import Payload
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.busy_poll import MOST_S, SMALL_BYTES, BusyPoll, tenants_most_s
from wire.transport.connection import Pending
from wire.transport.ipc import connection as ipc
from wire.transport.ipc import credentials
from wire.transport.ipc.folder import check_folder

if TYPE_CHECKING:
    from provider.net.service import ProviderService
    from provider.schedule.request_class import RequestClass

LISTENER_NAME = "shared-tensor.sock"
"""The socket's name in the provider's folder at which a tenant hands over its memory."""
FIRST_ROWS = 512
"""The number of rows for which a shared tensor has room at the start: two sequences of 256 tokens."""
_CARRIER = "shared tensor"
_MOST_BYTES = 1 << 30
_ADDRESS_BYTES = 256
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LOGGER = logging.getLogger(__name__)


class SharedTensor:
    """Maps the memory that a tenant and the provider share. The two take turns: whoever got the last message may use
    the memory. A peer that does not keep to this changes numbers, and nothing else."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the memory's descriptor, and maps nothing yet.

        Raises:
            OSError: the descriptor is of no memory that can be sealed.
            MalformedFrame: the memory could be cut off while it is being read.
        """
        self.descriptor, self.num_bytes = descriptor, 0
        self._map: mmap.mmap | None = None
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise MalformedFrame("expected shared memory that nobody can shrink")

    @classmethod
    def create(cls, num_bytes: int) -> SharedTensor:
        """Allocates memory, which can grow but never shrink."""
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
        """Maps `num_bytes` bytes, to which the peer says that the memory has grown.

        Raises:
            MalformedFrame: the memory is smaller than that, or too large.
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
    """Stands for the request that was sent last, or for one whose reply was copied out."""

    def __init__(self, owner: SharedTensorConnection, number: int, call: Call, shape: tuple[int, int]) -> None:
        self.number, self.call, self.shape = number, call, shape
        self.give_up_at_s = 0.0
        self.outcome: torch.Tensor | VeilbaseError | None = None
        self._owner = owner

    def result(self) -> torch.Tensor:
        """Returns the reply, or raises this request's one error."""
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
        """Returns "shared tensor" once there is one."""
        return None if self._channel is None else _CARRIER

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Sends one request, when the reply to the one before has come; see `Connection.submit`."""
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
    """Holds what is open at the tenant's end: the memory, ZeroMQ's socket, and the connection that ends with it."""

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
            if credentials.of_peer(self._plain).uid != owner:
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
        """Copies a payload into the memory, and tells the provider."""
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
        self._socket.send_multipart(control.request(header, memory.num_bytes, memory.num_bytes, seed), zmq.DONTWAIT)
        self._asked = asked

    def settle(self) -> None:
        """Waits for the reply to the request that was sent last, and copies the reply out of the memory."""
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
        return control.read_reply(self._socket.recv_multipart())

    def close(self) -> None:
        """Ends the channel; a request that waits fails."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.outcome = Unavailable("the connection was closed")
        self._plain.close()
        self._socket.close(0)
        self._context.term()
        self._memory.close()


def use() -> None:
    """Lets every `ipc:DIR` of this process, which has not connected yet, send its requests through shared memory."""
    ipc.IpcConnection = SharedTensorConnection  # type: ignore[misc]


# ---- the provider's end ---------------------------------------------------------------------------------------------


class SharedTensorPort:
    """Takes tenants' memory at a socket in the provider's folder; each tenant has one thread."""

    def __init__(self, folder: Path, service: ProviderService, busy_poll_s: float = MOST_S) -> None:
        """Listens, and starts the thread that accepts tenants.

        Args:
            folder: the folder that `provider serve --ipc` has checked.
            service: the service whose executor computes.
            busy_poll_s: longest busy polling in seconds; see `wire.transport.busy_poll`.
        """
        self._folder, self._service, self._busy_poll_s = folder, service, busy_poll_s
        self._context = zmq.Context()
        path = folder / LISTENER_NAME
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name="shared-tensor", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._meet, args=(plain,), name="shared-tensor", daemon=True).start()

    def _meet(self, plain: socket.socket) -> None:
        with plain:
            try:
                if credentials.of_peer(plain).uid != credentials.own().uid:
                    return
                _, descriptors, _, _ = socket.recv_fds(plain, 16, 1)
                with self._memory_of(descriptors) as memory:
                    self._serve(plain, memory)
            except (OSError, VeilbaseError, zmq.ZMQError) as exc:
                _LOGGER.warning("a shared tensor was given up: %s", type(exc).__name__)

    @contextlib.contextmanager
    def _memory_of(self, descriptors: list[int]) -> Iterator[SharedTensor]:
        try:
            if len(descriptors) != 1:
                raise MalformedFrame("expected one descriptor")
            yield SharedTensor(descriptors[0])
        finally:
            for one in descriptors:
                os.close(one)

    def _serve(self, plain: socket.socket, memory: SharedTensor) -> None:
        name = f"shared-{secrets.token_hex(4)}"
        address = f"ipc://{self._folder / name}"
        with self._context.socket(zmq.PAIR) as control_socket:
            control_socket.setsockopt(zmq.LINGER, 0)
            control_socket.bind(address)
            plain.sendall(address.encode("ascii"))
            poller, busy_poll = zmq.Poller(), BusyPoll(self._busy_poll_s)
            poller.register(control_socket, zmq.POLLIN)
            poller.register(plain, zmq.POLLIN)  # Nothing more comes here, so it is readable when the tenant has gone.
            is_small = False
            while True:
                busy_poll.look(lambda: control_socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, is_small)
                ready = dict(poller.poll())
                busy_poll.woke()
                if control_socket not in ready:
                    return
                answer, is_small = self._answer(name, memory, control_socket.recv_multipart())
                control_socket.send_multipart(answer)

    def _answer(self, tenant: str, memory: SharedTensor, parts: list[bytes]) -> tuple[list[bytes], bool]:
        """Returns the answer to a control message, and whether request and reply are small."""
        header, num_bytes, _, seed = control.read_request(parts)
        try:
            memory.follow(num_bytes)
            call, model = header.call, self._service._model
            reply_cols = model.check(call, header.cols)
            if header.rows > model.manifest().limits.max_rows:
                raise LimitExceeded("too many rows")
            reply = memory.view(header.rows, reply_cols, DTYPES[call.arithmetic])
            rows: Rows = memory.view(header.rows, header.cols, DTYPES[call.arithmetic])
            if call.purpose is Purpose.HINT:
                rows = SeededRows.unpack(seed)
                if rows.num_rows != header.rows:
                    raise InvalidTensor("the seed is of another number of rows")
            reply.copy_(self._product(tenant, header, rows, reply_cols))
            is_small = header.rows * max(header.cols, reply_cols) * ITEM_BYTES <= SMALL_BYTES
            return control.reply(header.request_id), is_small
        except VeilbaseError as exc:
            return control.reply(header.request_id, code_of(exc)), False

    def _product(self, tenant: str, header: Header, rows: Rows, reply_cols: int) -> torch.Tensor:
        from provider.engine.job import Job, Outcome
        from provider.net.session import INLINE_PRODUCTS, INLINE_ROWS

        executor, call = self._service._executor, header.call
        outcome: Outcome | None = None
        is_small = header.rows <= INLINE_ROWS and header.rows * header.cols * reply_cols <= INLINE_PRODUCTS
        if is_small and call.direction is Direction.FORWARD:
            outcome = executor.compute_here(tenant, call, rows)
        if outcome is None:
            done, found = threading.Event(), list[Outcome]()

            def take(made: Outcome) -> None:
                found.append(made)
                done.set()

            expires_at = time.monotonic() + header.deadline_ms / 1000
            executor.submit(Job(call, rows, tenant, _class_of(header), expires_at, take, reply_cols))
            if not done.wait(MAX_DEADLINE_MS / 1000):
                raise RemoteFault("the provider failed while computing")
            outcome = found[0]
        if isinstance(outcome, VeilbaseError):
            raise outcome
        return outcome

    def stop(self) -> None:
        """Stops accepting tenants. Those that are served go on until the process ends."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        (self._folder / LISTENER_NAME).unlink(missing_ok=True)


def _class_of(header: Header) -> RequestClass:
    from provider.schedule.request_class import class_of

    return class_of(header.call, header.rows, 0, is_training=False)


def serve(arguments: list[str]) -> None:
    """Runs `provider serve` with these options, and a `SharedTensorPort` beside its other ports."""
    from provider.serve import refuse_tls_1_2
    from wire.transport.event_engine import prefer_waiting_in_place

    prefer_waiting_in_place()  # both must come before anything imports grpc
    refuse_tls_1_2()
    from provider import cli
    from provider.net import server as module

    class SharingServer(module.Server):
        """Has a shared tensor's port in the folder of `--ipc` too."""

        def start(self, *given: object, **named: object) -> ProviderService:
            """Starts the service and all ports."""
            service = super().start(*given, **named)  # type: ignore[arg-type]
            if self.ipc is None:
                raise SystemExit("a shared tensor needs --ipc DIR")
            self._sharing = SharedTensorPort(self.ipc.folder, service)
            return service

    module.Server = SharingServer  # type: ignore[misc]
    sys.argv[1:] = ["serve", *arguments]
    cli.main()


if __name__ == "__main__":
    if sys.argv[1:2] != ["serve"]:
        raise SystemExit("usage: python -m benchmarks.shared_tensor serve OPTIONS of `provider serve`, with --ipc DIR")
    serve(sys.argv[2:])
