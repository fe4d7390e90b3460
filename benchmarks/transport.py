"""Compares calls to a provider by each carrier with a raw-bytes gRPC echo over the same mutual TLS.

The carriers are the tensor port, gRPC, and a Unix socket (ipc). The echo is the simplest server of grpc's public Python
API: one thread sends back each message. To measure the goodput of large calls, the provider's product is replaced by
the identity, so that only transport is compared. Large calls are measured with IN_FLIGHT tensors in flight on each
side. They are also measured with one tensor in flight, which shows the fixed cost of a call.

`python -m benchmarks.transport ipc` measures the carriers alone: it compares the time of an echo on a Unix socket with
that on the tensor port, without requests or products. The tensor port uses TLS on TCP; on the Unix socket, nothing is
encrypted after the handshake. A separate process echoes every message, with the loop in which the provider serves a
connection (`provider.net.carrier`). Both ends poll before they sleep, as in normal use. The two kinds of socket take
turns in every round, so that changes of the machine's speed affect both alike. A small message has the size of one row
of a decode step; a large one is a tensor in chunks.

The small echo is also measured on a bare Unix socket: two loops of Python that poll, receive and send, and do nothing
else. So its time is a lower bound for any transport in Python on a Unix socket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wire.frame import HEADER_BYTES, Arithmetic, Call, Direction, FrameType, Header
from wire.limits import CHUNK_BYTES
from wire.payload import RowsPayload
from wire.transport.busy_poll import MOST_S, BusyPoll

if TYPE_CHECKING:
    from wire.transport.connection import Connection
    from wire.transport.identity import TlsIdentity
    from wire.transport.message_socket import MessageSocket
    from wire.transport.stream_connection import StreamConnection


SMALL_BYTES = HEADER_BYTES + 4 * 576
"""The size of the small message, 2.3 KB: a header and a row of SmolLM2's width."""
NUM_CHUNKS = 4
"""The number of chunks, of 1 MiB each, in the large message."""
BARS = {"2.3 KB": 0.4, "4 MB": 0.5}
"""The targets, by size of message: an echo on the Unix socket may take at most this share of the time that an echo on
the tensor port takes in the same round."""
CALLS = {"2.3 KB": 400, "4 MB": 12}
_BARE_NAME = "bare.sock"


def _serve_sockets(state: str, folder: str) -> None:
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
        _echo_socket(provider_handshake(plain, ipc_context))

    def accept_tcp() -> None:
        plain, _ = tcp.accept()
        _echo_socket(handshake(plain, tls_context))

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


class _EchoSession:
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


def _echo_socket(connection: MessageSocket) -> None:
    from provider.net.carrier import carry

    session: Any = _EchoSession()
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


def _run_sockets(repeats: int = 7) -> dict[str, dict[str, float]]:
    """Returns, for each size of message, the median microseconds of an echo on the tensor port ("tensor port") and on
    the Unix socket ("ipc"), and the median over the rounds of "ipc" divided by "tensor port" ("ratio"). For the small
    message, "bare" is the median of an echo on a bare socket."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        tcp, here, bare = _connect_sockets(Path(scratch), stack)
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


def _connect_sockets(root: Path, stack: contextlib.ExitStack) -> tuple[MessageSocket, MessageSocket, socket.socket]:
    from provider.identity.authority import StateDir
    from provider.identity.registry import enroll
    from wire.transport.identity import load_identity
    from wire.transport.ipc.folder import SOCKET_NAME
    from wire.transport.ipc.handshake import tenant_handshake
    from wire.transport.tls import IPC_ALPN, client_context, handshake

    enroll(StateDir(root / "state"), "bench", root / "bench", "grpcs://127.0.0.1:1")
    identity = load_identity(root / "bench")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transport", "sockets", str(root / "state"), str(root)]
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


def _report_sockets(found: dict[str, dict[str, float]], tell: Callable[[str], None] = print) -> None:
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


SIZES_MIB = (1, 2, 4, 8)
FEATURES = 576
IN_FLIGHT = 4
CARRIERS = ("", ", by gRPC", ", by ipc")
"""The endings of the names in `KINDS`, which say by which carrier a tenant reaches the provider. The empty ending is
the tensor port."""
KINDS = tuple(f"{what}{carrier}" for what in ("real", "identity") for carrier in CARRIERS)
"""The kinds of provider: `real` computes products, `identity` returns the rows."""
ECHO_METHOD = "/veilbase.benchmark/Echo"


def _serve_echo(state: str) -> None:
    """Runs the gRPC echo, with the provider's own server options and certificates, until standard input ends."""
    import grpc

    from provider.identity.authority import StateDir, issue_server_certificate
    from provider.net.server import server_options

    def echo(messages: Any, context: Any) -> Any:
        yield from messages

    key, chain, ca = issue_server_certificate(StateDir(Path(state)), "127.0.0.1")
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server = grpc.server(ThreadPoolExecutor(4), options=server_options())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("veilbase.benchmark", handlers),))
    credentials = grpc.ssl_server_credentials([(key, chain)], root_certificates=ca, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    print(f"ready grpcs://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(0).wait()


def _serve_provider(state: str, folder: str, kind: str) -> None:
    """Runs a provider of one layer group, 576 to 576 features, until standard input ends.

    Args:
        state: the folder of the provider's state.
        folder: the folder of the model.
        kind: one of `KINDS`.
    """
    import torch

    from provider.identity.authority import StateDir
    from provider.model.load import load, resolve
    from provider.model.served_model import ServedModel
    from provider.model.weights import serve_model
    from provider.net.server import Server

    class IdentityModel(ServedModel):
        """Serves the identity: it returns the received rows in place of a product."""

        def compute(self, call: Any, rows: torch.Tensor) -> torch.Tensor:
            return rows

        def compute_together(self, call: Any, parts: Any) -> list[torch.Tensor]:
            return list(parts)

    served = serve_model(load(resolve(folder)), "int8", "*o_proj")
    ipc = Path(tempfile.mkdtemp(dir=Path(state).parent)) if kind.endswith("by ipc") else None
    server = Server("127.0.0.1", 0, StateDir(Path(state)), tensor_port=None if kind.endswith("by gRPC") else 0, ipc=ipc)
    server.start(IdentityModel(served) if kind.startswith("identity") else ServedModel(served))
    url = f"grpcs://127.0.0.1:{server.port}" if ipc is None else f"ipc:{ipc}"
    print(f"ready {url}", flush=True)
    sys.stdin.read()
    server.stop()


def make_model(folder: Path) -> None:
    """Saves a Llama model with one random layer of SmolLM2's width."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=FEATURES, intermediate_size=64, num_hidden_layers=1, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class _Child:
    """Starts a server process, which ends when its input is closed."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transport", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = (self.process.stdout.readline() if self.process.stdout else "").split()[1]

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=30)


def _median_us(call: Callable[[], Any], count: int) -> float:
    """Returns the median time of a call, in microseconds, over `count` calls."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


class _Echo:
    """Sends and receives messages on one stream of `_serve_echo`."""

    def __init__(self, url: str, identity: TlsIdentity) -> None:
        from wire.transport.grpc_channel import open_channel

        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(url, identity)
        self._stream = self._channel.stream_stream(ECHO_METHOD)(iter(self._outgoing.get, None))

    def small(self) -> None:
        """Sends the bytes of one row with its header, and receives them."""
        self._outgoing.put(b"x" * (HEADER_BYTES + 4 * FEATURES))
        next(self._stream)

    def send(self, size_mib: int) -> None:
        """Sends `size_mib` MiB in chunks, as a tensor is sent."""
        for _ in range(size_mib):
            self._outgoing.put(b"x" * (HEADER_BYTES + CHUNK_BYTES))

    def receive(self, size_mib: int) -> None:
        """Receives the chunks that `send` has sent."""
        for _ in range(size_mib):
            next(self._stream)

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()


def _seconds_of(send: Callable[[], Any], receive: Callable[[Any], Any], count: int, in_flight: int) -> float:
    """Returns the mean seconds of a tensor's round trip, with `in_flight` tensors in flight at a time.

    Args:
        send: a function that sends one tensor and returns a handle.
        receive: a function that waits for the tensor of a handle.
        count: the number of tensors.
        in_flight: the number of tensors that are sent before the first is received.
    """
    began, waiting = time.perf_counter(), [send() for _ in range(in_flight)]
    for left in range(count, 0, -1):
        receive(waiting.pop(0))
        if left > in_flight:
            waiting.append(send())
    return (time.perf_counter() - began) / count


def run(repeats: int = 7) -> dict[str, Any]:
    """Returns the medians, over the rounds, of several figures, by the figure's name.

    `small_us` and `above_echo_us` hold, by kind of provider, the microseconds of a small call and its excess over the
    echo; `small_us` also has those of the echo itself, as `echo`. The other figures are of large calls, by (size in
    MiB, number in flight). `share` and `share by gRPC` are the goodput on the tensor port and by gRPC, divided by the
    echo's. `mb_per_s` is the goodput on the tensor port, in MB/s. `ipc` are the times of calls by
    ipc, divided by the times on the tensor port.
    """
    from wire.transport.event_engine import prefer_waiting_in_place

    prefer_waiting_in_place()  # must come before anything imports grpc; the servers inherit this
    from provider.identity.authority import StateDir
    from provider.identity.registry import enroll
    from wire.transport.identity import load_identity

    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        root = Path(scratch)
        make_model(root / "model")
        enroll(StateDir(root / "state"), "bench", root / "bench", "grpcs://127.0.0.1:1")
        identity = load_identity(root / "bench")

        def start(*arguments: str) -> str:
            return stack.enter_context(contextlib.closing(_Child(*arguments))).url

        echo_url = start("echo", str(root / "state"))
        urls = {name: start("provider", str(root / "state"), str(root / "model"), name) for name in KINDS}
        connections = {
            name: stack.enter_context(contextlib.closing(_connect(url, identity))) for name, url in urls.items()
        }
        echo = stack.enter_context(contextlib.closing(_Echo(echo_url, identity)))
        found = _compare(echo, connections, repeats)
        check_carriers({name: connection.carrier for name, connection in connections.items()})
        return found


def _connect(url: str, identity: TlsIdentity) -> StreamConnection:
    from wire.transport.grpc_connection import GrpcConnection
    from wire.transport.ipc.connection import IpcConnection
    from wire.transport.ipc.folder import SCHEME

    return (IpcConnection if url.startswith(SCHEME) else GrpcConnection)(url, identity)


def check_carriers(carriers: Mapping[str, str | None]) -> None:
    """Checks that the stream of each kind in `KINDS` was carried as the kind's name says.

    Raises:
        RuntimeError: another carrier was measured; for example, gRPC replaces a tensor port that cannot be reached.
    """
    for name, carrier in carriers.items():
        expected = name.rpartition("by ")[2] if ", by " in name else "tensor port"
        if carrier is None or carrier.split(" ")[:2] != expected.split(" "):
            raise RuntimeError(f"the figures of {name!r} are of a stream that was carried by {carrier}")


def _compare(echo: _Echo, connections: Mapping[str, Connection], repeats: int) -> dict[str, Any]:
    import torch

    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    row = RowsPayload(torch.ones(1, FEATURES, dtype=torch.int32))
    rows = {
        size: RowsPayload(torch.zeros((size << 20) // (4 * FEATURES), FEATURES, dtype=torch.int32))
        for size in SIZES_MIB
    }
    small: dict[str, list[float]] = {name: [] for name in ("echo", *KINDS)}
    large: dict[tuple[int, int], list[Any]] = {(size, n): [] for size in SIZES_MIB for n in (1, IN_FLIGHT)}
    for repeat in range(repeats + 1):
        times = {"echo": _median_us(echo.small, 300)}
        for name, connection in connections.items():
            times[name] = _median_us(lambda c=connection: c.submit(call, row, FEATURES).result(), 300)
        shares = {}
        for size, in_flight in large:
            count = max(16, 64 // size)
            echo_s = _seconds_of(lambda s=size: echo.send(s), lambda _, s=size: echo.receive(s), count, in_flight)
            ours_s, by_grpc_s, by_ipc_s = (
                _seconds_of(
                    lambda s=size, c=connections[f"identity{carrier}"]: c.submit(call, rows[s], FEATURES),
                    lambda sent: sent.result(),
                    count,
                    in_flight,
                )
                for carrier in CARRIERS
            )
            rate = (size << 20) / ours_s / 1e6
            shares[size, in_flight] = (echo_s / ours_s, rate, echo_s / by_grpc_s, by_ipc_s / ours_s)
        if repeat:  # the first round warms up
            for name, value in times.items():
                small[name].append(value)
            for key, pair in shares.items():
                large[key].append(pair)
    above = {name: statistics.median(a - b for a, b in zip(small[name], small["echo"], strict=True)) for name in KINDS}
    return {
        "small_us": {name: statistics.median(values) for name, values in small.items()},
        "above_echo_us": above,
        "share": {key: statistics.median(pair[0] for pair in pairs) for key, pairs in large.items()},
        "share by gRPC": {key: statistics.median(pair[2] for pair in pairs) for key, pairs in large.items()},
        "ipc": {key: statistics.median(pair[3] for pair in pairs) for key, pairs in large.items()},
        "mb_per_s": {key: statistics.median(pair[1] for pair in pairs) for key, pairs in large.items()},
    }


def main() -> None:
    """Runs the benchmark and prints its results as tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport")
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    result = run(repeats)
    print("| one row, 576 → 576 | µs | above the echo, median of pairs |\n|---|---|---|")
    for name, value in result["small_us"].items():
        above = result["above_echo_us"].get(name)
        print(f"| {name} | {value:.0f} | {'' if above is None else f'{above:.0f}'} |")
    print(
        "\n| tensors each way, MiB | in flight | MB/s each way | share of the echo | by gRPC | by ipc, × the time |"
        "\n|---|---|---|---|---|---|"
    )
    for key, share in result["share"].items():
        rate, by_grpc = result["mb_per_s"][key], result["share by gRPC"][key]
        print(f"| {key[0]} | {key[1]} | {rate:.0f} | {share:.2f} | {by_grpc:.2f} | {result['ipc'][key]:.2f} |")
    print()
    _report_sockets(_run_sockets(repeats))


if __name__ == "__main__":
    if sys.argv[1:2] == ["echo"]:
        _serve_echo(sys.argv[2])
    elif sys.argv[1:2] == ["provider"]:
        _serve_provider(*sys.argv[2:])
    elif sys.argv[1:2] == ["sockets"]:
        _serve_sockets(*sys.argv[2:])
    elif sys.argv[1:2] == ["ipc"]:
        argparse.ArgumentParser("python -m benchmarks.transport ipc", description=_run_sockets.__doc__).parse_args(
            sys.argv[2:]
        )
        _report_sockets(_run_sockets())
    else:
        main()
