"""Carries one session's frames over one gRPC stream: a thread that reads, and the RPC's own thread, which sends.

A variant that worked in the server's event thread saved six changes of threads a call and, in paired runs, 2% of a
decode step. It was given up: that thread serves every tenant, and one tenant's flood of small requests kept another
waiting for seconds, where with threads of their own it is a fifth of one (docs/benchmarks.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from provider.session import Session


def carry(session: Session, messages: Iterator[bytes]) -> Iterator[bytes]:
    """What to send, until one side ends; runs in the RPC's thread.

    Args:
        session: new.
        messages: of the RPC.
    """
    wake = threading.Event()
    session.notify = wake.set
    threading.Thread(target=_read, args=(session, messages), name="veilbase-requests", daemon=True).start()
    try:
        while not session.is_over:
            wake.wait()
            wake.clear()
            while (message := session.next_frame()) is not None:
                yield message
    finally:
        session.stop_sending()


def _read(session: Session, messages: Iterator[bytes]) -> None:
    try:
        for message in messages:
            if not session.receive(message):
                return
        session.end_input()
    except grpc.RpcError:
        session.close()  # the tenant went away
