"""Compares the time of an echo on a Unix socket with that on the tensor port, without requests or products.

The tensor port uses TLS on TCP; on the Unix socket, nothing is encrypted after the handshake. A separate process echoes
every message, with the loop in which the provider serves a connection (`provider.net.carrier`). Both ends poll before
they sleep, as in normal use. The two kinds of socket take turns in every round, so that changes of the machine's speed
affect both alike. A small message has the size of one row of a decode step; a large one is a tensor in chunks.

The small echo is also measured on a bare Unix socket: two loops of Python that poll, receive and send, and do nothing
else. So its time is a lower bound for any transport in Python on a Unix socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wire.frame import HEADER_BYTES, FrameType, Header
from wire.limits import CHUNK_BYTES
from wire.transport.busy_poll import MOST_S, BusyPoll

if TYPE_CHECKING:
    from wire.transport.message_socket import MessageSocket

SMALL_BYTES = HEADER_BYTES + 4 * 576
"""The size of the small message, 2.3 KB: a header and a row of SmolLM2's width."""
NUM_CHUNKS = 4
"""The number of chunks, of 1 MiB each, in the large message."""
BARS = {"2.3 KB": 0.4, "4 MB": 0.5}
"""The targets, by size of message: an echo on the Unix socket may take at most this share of the time that an echo on
the tensor port takes in the same round."""
CALLS = {"2.3 KB": 400, "4 MB": 12}
_BARE_NAME = "bare.sock"


def serve(state: str, folder: str) -> None:
    """Echoes on one connection of each kind (TLS on TCP, ipc, and a bare Unix socket) until standard input ends; prints
    `ready` and the TCP port."""
    from provider.identity.authority import StateDir, issue_server_certificate
    from wire.transport.ipc.folder import SOCKET_NAME
    from wire.transport.ipc.handshake import provider_handshake
    from wire.transport.tls import IPC_ALPN, handshake, server_context

    key, chain, ca = issue_server_certificate(StateDir(Path(state)), "127.0.0.1")
    tcp = socket.create_server(("127.0.0.1", 0))
    here, bare = (_listen(Path(folder) / name) for name in (SOCKET_NAME, _BARE_NAME))
    ipc_context, tls_context = server_context(ca, chain, key, IPC_ALPN), server_context(ca, chain, key)

    def accept() -> None:
        plain, _ = here.accept()
        _echo(provider_handshake(plain, ipc_context))

    def accept_tcp() -> None:
        plain, _ = tcp.accept()
        _echo(handshake(plain, tls_context))

    def accept_bare() -> None:
        plain, _ = bare.accept()
        buffer = bytearray(SMALL_BYTES)
        while _bare_receive(plain, buffer):
            plain.sendall(buffer)

    for work in (accept, accept_tcp, accept_bare):
        threading.Thread(target=work, daemon=True).start()
    print(f"ready {tcp.getsockname()[1]}", flush=True)
    sys.stdin.read()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _bare_receive(plain: socket.socket, buffer: bytearray) -> int:
    """Polls until bytes have come, then waits for a whole small message and writes it to `buffer`. Returns the number
    of bytes, or 0 if the other end has closed the connection."""
    poll = select.poll()
    poll.register(plain, select.POLLIN)
    while not poll.poll(0):
        os.sched_yield()
    return plain.recv_into(buffer, 0, socket.MSG_WAITALL)


class _Echo:
    """Stands in for a provider's session: sends every received message back."""

    def __init__(self) -> None:
        self._waiting: deque[bytes | memoryview] = deque()
        self.notify: Callable[[], None] = lambda: None
        self.is_over = False

    def receive(self, message: bytes | memoryview) -> bool:
        self._waiting.append(message)
        return True

    def next_frame(self) -> bytes | memoryview | None:
        return self._waiting.popleft() if self._waiting else None

    def end_input(self) -> None:
        self.is_over = True

    def end(self, _code: object = None) -> None:
        self.is_over = True

    close = stop_sending = end


def _echo(connection: MessageSocket) -> None:
    from provider.net.carrier import carry

    session: Any = _Echo()
    carry(session, connection, BusyPoll())


def _round_trip(connection: MessageSocket, messages: list[bytes]) -> float:
    """Sends messages, and returns the seconds until all of them have come back."""
    began, left = time.perf_counter(), len(messages)
    for message in messages:
        connection.send(message)
    while left:
        while left and connection.next_message() is not None:
            left -= 1
        if left:
            connection.wait()
    return time.perf_counter() - began


def _bare_round_trip(plain: socket.socket, message: bytes) -> float:
    began, buffer = time.perf_counter(), bytearray(SMALL_BYTES)
    plain.sendall(message)
    _bare_receive(plain, buffer)
    return time.perf_counter() - began


def run(repeats: int = 7) -> dict[str, dict[str, float]]:
    """Returns, for each size of message, the median microseconds of an echo on the tensor port ("tensor port") and on
    the Unix socket ("ipc"), and the median over the rounds of "ipc" divided by "tensor port" ("ratio"). For the small
    message, "bare" is the median of an echo on a bare socket."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        tcp, here, bare = _connect(Path(scratch), stack)
        header = Header(FrameType.REPLY).pack()
        large = [header + bytes(CHUNK_BYTES)] * NUM_CHUNKS
        messages = {"2.3 KB": [header + bytes(SMALL_BYTES - HEADER_BYTES)], "4 MB": large}
        found = {}
        for size, parts in messages.items():
            rounds = []
            for repeat in range(repeats + 1):
                each = [
                    statistics.median(_round_trip(one, parts) for _ in range(CALLS[size])) * 1e6 for one in (tcp, here)
                ]
                if len(parts) == 1:
                    each.append(statistics.median(_bare_round_trip(bare, parts[0]) for _ in range(CALLS[size])) * 1e6)
                if repeat:  # the first round warms up
                    rounds.append(each)
            found[size] = {
                "tensor port": statistics.median(pair[0] for pair in rounds),
                "ipc": statistics.median(pair[1] for pair in rounds),
                "ratio": statistics.median(pair[1] / pair[0] for pair in rounds),
            }
            if len(parts) == 1:
                found[size]["bare"] = statistics.median(pair[2] for pair in rounds)
        return found


def _connect(root: Path, stack: contextlib.ExitStack) -> tuple[MessageSocket, MessageSocket, socket.socket]:
    from provider.identity.authority import StateDir
    from provider.identity.registry import enroll
    from wire.transport.identity import load_identity
    from wire.transport.ipc.folder import SOCKET_NAME
    from wire.transport.ipc.handshake import tenant_handshake
    from wire.transport.tls import IPC_ALPN, client_context, handshake

    enroll(StateDir(root / "state"), "bench", root / "bench", "grpcs://127.0.0.1:1")
    identity = load_identity(root / "bench")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ipc_echo", str(root / "state"), str(root)]
    child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(lambda: child.stdin and child.stdin.close())
    port = int((child.stdout.readline() if child.stdout else "").split()[1])
    given = (identity.ca_pem, identity.cert_pem, identity.key_pem)
    tcp = handshake(socket.create_connection(("127.0.0.1", port)), client_context(*given), "127.0.0.1", MOST_S)
    stack.callback(tcp.release)
    plain = socket.socket(socket.AF_UNIX)
    plain.connect(str(root / SOCKET_NAME))
    here = tenant_handshake(plain, client_context(*given, IPC_ALPN), MOST_S)
    stack.callback(here.release)
    bare = stack.enter_context(socket.socket(socket.AF_UNIX))
    bare.connect(str(root / _BARE_NAME))
    return tcp, here, bare


def report(found: dict[str, dict[str, float]], tell: Callable[[str], None] = print) -> None:
    """Prints the results as a table."""
    tell("| echo of | tensor port, µs | ipc, µs | ratio, median of pairs | bar |\n|---|---|---|---|---|")
    for size, one in found.items():
        bar, is_met = BARS[size], one["ratio"] <= BARS[size]
        tell(
            f"| {size} | {one['tensor port']:.0f} | {one['ipc']:.0f} | {one['ratio']:.2f} | "
            f"{bar}: {'met' if is_met else '**missed**'} |"
        )
    for size, one in found.items():
        if "bare" in one:
            tell(f"\nA bare socket, {size}: {one['bare']:.1f} µs")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(*sys.argv[1:])
    else:
        report(run())
