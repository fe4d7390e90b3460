"""Carries one session's frames over one gRPC stream.

`Direct` takes messages and sends frames in the thread in which the gRPC server handles events: a small request is read,
computed and answered without a change of threads, of which grpc's public interface needs about nine a call
(docs/benchmarks.md, decode). It stands on names that grpc does not promise to keep, so `attach` falls back to `Plain`,
which uses nothing private. Either way nothing here waits for a tenant while it holds up another: a send is started and
its end is an event.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from provider.session import Session

try:
    from grpc import _server
    from grpc._cython import cygrpc
except ImportError:  # pragma: no cover - a grpc that is built in another way
    _server = cygrpc = None

_RECEIVE, _SEND = "veilbase receive", "veilbase send"
_LOGGER = logging.getLogger(__name__)


class Carrier(Protocol):
    """Moves a session's messages until one side ends."""

    def carry(self) -> Iterator[bytes]:
        """Runs in the RPC's own thread; what it yields, grpc sends."""
        ...


def attach(session: Session, messages: Iterator[bytes], context: Any) -> Carrier:
    """The best carrier that this grpc allows."""
    try:
        return Direct(session, context)
    except (AttributeError, TypeError):  # grpc has changed inside
        return Plain(session, messages)


class Plain:
    """On grpc's public interface: a thread that reads, and the RPC's thread, which sends."""

    def __init__(self, session: Session, messages: Iterator[bytes]) -> None:
        """Args: messages: of the RPC."""
        self._session, self._messages = session, messages
        self._wake = threading.Event()
        session.notify = self._wake.set

    def carry(self) -> Iterator[bytes]:
        """See `Carrier.carry`."""
        threading.Thread(target=self._read, name="veilbase-requests", daemon=True).start()
        while not self._session.is_over:
            self._wake.wait()
            self._wake.clear()
            while (message := self._session.next_frame()) is not None:
                yield message

    def _read(self) -> None:
        try:
            for message in self._messages:
                if not self._session.receive(message):
                    return
            self._session.end_input()
        except grpc.RpcError:
            self._session.close()  # the tenant went away


class Direct:
    """On the server's own events: `receive` and `next_frame` run where grpc reports that an operation has ended.

    The RPC's thread starts what others have made ready (a worker's reply), so that the worker need not encrypt it.
    """

    def __init__(self, session: Session, context: Any) -> None:
        """Args: context: of the RPC.

        Raises:
            AttributeError, TypeError: this grpc has other internals.
        """
        self._session, self._context = session, context
        self._state: Any = context._state
        self._start_batch: Any = context._rpc_event.call.start_server_batch
        self._finish: Any = _server._possibly_finish_call
        self._is_active: Any = _server._is_rpc_state_active
        for part in (self._state.due.add, self._state.condition.acquire, cygrpc.ReceiveMessageOperation, self._finish):
            if not callable(part):
                raise TypeError("this grpc has other internals")
        self._sending = threading.Lock()
        self._is_sending = False  # under `_sending`
        self._wake = threading.Event()
        self._event_thread = 0
        session.notify = self._notify

    def carry(self) -> Iterator[bytes]:
        """See `Carrier.carry`; yields nothing, since it sends by itself."""
        self._context.send_initial_metadata(())
        self._receive()
        while not self._is_done():
            self._wake.wait()
            self._wake.clear()
            self._send()
        yield from ()

    def _is_done(self) -> bool:
        with self._sending:
            return (self._session.is_over and not self._is_sending) or not self._context.is_active()

    def _notify(self) -> None:
        if threading.get_ident() != self._event_thread:  # there, whoever handles the event looks for frames itself
            self._wake.set()

    def _start(self, operation: Any, token: str, tag: Any) -> bool:
        with self._state.condition:
            if not self._is_active(self._state):
                return False
            self._start_batch((operation,), tag)
            self._state.due.add(token)
            return True

    def _ended(self, token: str) -> Any:
        """What the server wants to hear of an operation's end."""
        with self._state.condition:
            return self._finish(self._state, token)

    # ---- in the server's event thread: nothing may escape from here, or the thread that serves everybody ends --------

    def _receive(self) -> None:
        if not self._start(cygrpc.ReceiveMessageOperation(0), _RECEIVE, self._received):
            self._wake.set()

    def _received(self, event: Any) -> Any:
        outcome = self._ended(_RECEIVE)  # first: the next operation goes by the same token
        try:
            self._event_thread = threading.get_ident()
            message = event.batch_operations[0].message()
            if message is None:
                self._session.end_input()
                self._wake.set()
                return outcome
            takes_more = self._session.receive(message)
            self._send()
            if takes_more:
                self._receive()
        except Exception as exc:  # noqa: BLE001
            self._fail(exc)
        finally:
            self._event_thread = 0
        return outcome

    def _send(self) -> None:
        with self._sending:
            while not self._is_sending:
                message = self._session.next_frame()
                if message is None:
                    break
                self._is_sending = self._start(cygrpc.SendMessageOperation(message, 0), _SEND, self._sent)
                if not self._is_sending:
                    break
        if self._session.is_over:
            self._wake.set()

    def _sent(self, _event: Any) -> Any:
        outcome = self._ended(_SEND)
        try:
            with self._sending:
                self._is_sending = False
            self._send()
        except Exception as exc:  # noqa: BLE001
            self._fail(exc)
        return outcome

    def _fail(self, exc: Exception) -> None:
        _LOGGER.error("a stream of %s failed: %s", self._session.tenant, type(exc).__name__)
        self._session.close()
        self._wake.set()
