"""Carries the frames of one session over one gRPC stream, for tenants that cannot reach the tensor port.

It uses grpc's public interface only. One thread receives messages, and the RPC's own thread sends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from provider.net.session import Session


def carry_rpc(session: Session, messages: Iterator[bytes]) -> Iterator[bytes]:
    """Hands received messages to a session, and yields the session's frames, until one side ends.

    Args:
        session: a new session.
        messages: the RPC's received messages, which a new thread reads.

    Yields:
        The frames to send.
    """
    wake = threading.Event()
    session.notify = wake.set
    threading.Thread(target=_read, args=(session, messages), name="veilbase-requests", daemon=True).start()
    try:
        while not session.is_over:
            wake.wait()
            wake.clear()
            while (message := session.next_frame()) is not None:
                yield bytes(message)
    finally:
        session.stop_sending()


def _read(session: Session, messages: Iterator[bytes]) -> None:
    try:
        for message in messages:
            if not session.receive(message):
                return
        session.end_input()
    except grpc.RpcError:
        session.close()  # The tenant has disconnected.
