"""Carries one session's frames over one gRPC stream, in the RPC's own thread.

`Direct` starts the call's operations itself; the server's event thread, which serves every tenant, only leaves what
came in the stream's inbox. grpc's public interface takes a second thread for what is sent, and every event wakes both
(docs/benchmarks.md, decode). `Direct` stands on names that grpc does not promise to keep, so `attach` falls back to
`Plain`, which uses nothing private.

Nothing but that is done in the event thread: when small requests were computed there, one tenant's flood of them kept
another waiting for seconds. While a small product is made in the stream's own thread, the same stream's other replies
wait: a millisecond here, and until the replica is given up where it is elsewhere and hangs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from provider.session import Session

try:
    from grpc import _server
    from grpc._cython import cygrpc
except ImportError:  # pragma: no cover - a grpc that is built in another way
    _server = cygrpc = None

_TESTED = "1.85."
"""Versions of grpc in which `Direct` was tried; in another, what it gets wrong could end the thread that serves all."""
_RECEIVE, _SEND = "veilbase receive", "veilbase send"
_WAKE = object()


class Carrier(Protocol):
    """Moves a session's messages until one side ends."""

    def carry(self) -> Iterator[bytes]:
        """Runs in the RPC's own thread; what it yields, grpc sends."""
        ...


def attach(session: Session, messages: Iterator[bytes], context: Any) -> Carrier:
    """The best carrier that this grpc allows.

    Args:
        session: new.
        messages, context: of the RPC.
    """
    if grpc.__version__.startswith(_TESTED):
        try:
            return Direct(session, context)
        except (AttributeError, TypeError):  # built in another way
            pass
    return Plain(session, messages)


class Plain:
    """On grpc's public interface: a thread that reads, and the RPC's own, which sends."""

    def __init__(self, session: Session, messages: Iterator[bytes]) -> None:
        """Args: messages: of the RPC."""
        self._session, self._messages = session, messages
        self._wake = threading.Event()
        session.notify = self._wake.set

    def carry(self) -> Iterator[bytes]:
        """See `Carrier.carry`."""
        threading.Thread(target=self._read, name="veilbase-requests", daemon=True).start()
        try:
            while not self._session.is_over:
                self._wake.wait()
                self._wake.clear()
                while (message := self._session.next_frame()) is not None:
                    yield message
        finally:
            self._session.stop_sending()

    def _read(self) -> None:
        try:
            for message in self._messages:
                if not self._session.receive(message):
                    return
            self._session.end_input()
        except grpc.RpcError:
            self._session.close()  # the tenant went away


class Direct:
    """On the call's own operations: at most one that receives and one that sends are under way."""

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
        for part in (
            self._state.due.add, self._state.condition.acquire, self._start_batch, self._finish, self._is_active,
            cygrpc.SendMessageOperation, cygrpc.ReceiveMessageOperation,
        ):  # fmt: skip
            if not callable(part):
                raise TypeError("this grpc has other internals")
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Messages, None after the last one, and `_WAKE` where there may be something to send."""
        self._is_sending = False
        self._thread = 0
        session.notify = self._notify

    def _notify(self) -> None:
        if threading.get_ident() != self._thread:  # which looks for frames after each message by itself
            self._inbox.put(_WAKE)

    def carry(self) -> Iterator[bytes]:
        """See `Carrier.carry`; yields nothing, since it sends by itself."""
        self._thread = threading.get_ident()
        try:
            self._context.send_initial_metadata(())
            is_open = self._receive()
            while is_open and (self._is_sending or not self._session.is_over):
                is_open = self._handle(self._inbox.get()) and self._send()
        finally:
            self._session.stop_sending()
            self._session.notify = lambda: None  # or the two would hold each other, and what a call holds
        yield from ()

    def _handle(self, item: Any) -> bool:
        """Takes what was in the inbox. False where the call is over, as in the other two."""
        if item is None:
            if not self._context.is_active():
                self._session.close()  # the tenant went away
                return False
            self._session.end_input()
        elif item is not _WAKE and self._session.receive(item):
            return self._receive()
        return True

    def _receive(self) -> bool:
        return self._start(cygrpc.ReceiveMessageOperation(0), _RECEIVE, self._received)

    def _send(self) -> bool:
        if self._is_sending:
            return True  # `_sent` will say when there is room
        message = self._session.next_frame()
        if message is None:
            return True
        self._is_sending = True
        return self._start(cygrpc.SendMessageOperation(message, 0), _SEND, self._sent)

    def _start(self, operation: Any, token: str, tag: Callable[[Any], Any]) -> bool:
        with self._state.condition:
            if not self._is_active(self._state):
                return False
            self._start_batch((operation,), tag)
            self._state.due.add(token)
            return True

    # ---- in the server's event thread, which serves everybody -------------------------------------------------------

    def _received(self, event: Any) -> Any:
        outcome = self._ended(_RECEIVE)
        self._inbox.put(event.batch_operations[0].message())
        return outcome

    def _sent(self, event: Any) -> Any:
        outcome = self._ended(_SEND)
        self._is_sending = False
        if self._session.has_frames:  # what came in between was left, since one was under way
            self._inbox.put(_WAKE)
        return outcome

    def _ended(self, token: str) -> Any:
        """What the server wants to hear of an operation's end."""
        with self._state.condition:
            return self._finish(self._state, token)
