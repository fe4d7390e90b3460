"""Holds the provider's end of the shared tensor: a port that takes tenants' memory, and the `provider serve` command
with such a port. `benchmarks.shared_tensor` says what both ends guarantee."""

from __future__ import annotations

import contextlib
import logging
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

from benchmarks.shared_tensor import LISTENER_NAME, SharedTensor
from provider.shards import messages
from wire.errors import InvalidTensor, LimitExceeded, MalformedFrame, RemoteFault, VeilbaseError, code_of
from wire.frame import DTYPES, ITEM_BYTES, Direction, Header, Purpose
from wire.limits import MAX_DEADLINE_MS
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.busy_poll import MOST_S, SMALL_BYTES, BusyPoll
from wire.transport.ipc import handshake

if TYPE_CHECKING:
    from provider.net.service import ProviderService
    from provider.schedule.ticket import RequestClass

_LOGGER = logging.getLogger(__name__)


class SharedTensorPort:
    """Accepts tenants' shared memory at a Unix socket in the provider's folder, and computes the products that these
    tenants request. Each tenant has one thread."""

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
                if handshake.of_peer(plain).uid != handshake.own().uid:
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
        """Computes the product that a control message requests, and writes it into the shared memory. Returns the
        message for the tenant, and whether request and reply are small; if the request fails, returns a message with
        the error's code, and False."""
        header, num_bytes, _, seed = messages.read_request(parts)
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
            return messages.reply(header.request_id), is_small
        except VeilbaseError as exc:
            return messages.reply(header.request_id, code_of(exc)), False

    def _product(self, tenant: str, header: Header, rows: Rows, reply_cols: int) -> torch.Tensor:
        from provider.engine.request import Outcome, Request
        from provider.net.session import INLINE_PRODUCTS, INLINE_ROWS

        executor, call = self._service._executor, header.call
        outcome: Outcome | None = None
        is_small = header.rows <= INLINE_ROWS and header.rows * header.cols * reply_cols <= INLINE_PRODUCTS
        if is_small and call.direction is Direction.FORWARD:
            outcome = executor.compute_here(tenant, call, rows)
        if outcome is None:
            done, found = threading.Event(), list[Outcome]()

            def take(_request: Request, made: Outcome) -> None:
                found.append(made)
                done.set()

            expires_s = time.monotonic() + header.deadline_ms / 1000
            request = Request(tenant, header, reply_cols, _class_of(header), expires_s, take)
            request.complete(rows)
            executor.submit(request)
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
    from provider.schedule.ticket import class_of

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
        """Opens a `SharedTensorPort` in the folder of `--ipc`, beside the other ports."""

        def start(self, *given: object, **named: object) -> ProviderService:
            """Starts the service and all ports. Raises SystemExit if there is no `--ipc` folder."""
            service = super().start(*given, **named)  # type: ignore[arg-type]
            if self.ipc is None:
                raise SystemExit("a shared tensor needs --ipc DIR")
            self._sharing = SharedTensorPort(self.ipc.folder, service)
            return service

    module.Server = SharingServer  # type: ignore[misc]
    sys.argv[1:] = ["serve", *arguments]
    cli.main()
