"""Tests the tenant's end of the stream against forks, proxies, restarts and providers that misbehave."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tests.support.false_providers import GrpcStandIn, reply_to
from tests.support.providers import serving
from tests.support.ring_products import COLS, REPLY_COLS
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import (
    ConfigurationError,
    DeadlineExceeded,
    LimitExceeded,
    MalformedFrame,
    RemoteFault,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
    WireCode,
)
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.limits import Limits
from wire.manifest import Manifest
from wire.payload import RowsPayload
from wire.transport import grpc_channel, multiplexer
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity

CALL = Call(0, Direction.FORWARD, Arithmetic.FLOAT)
Frames = Iterator[bytes]


def rows(num_rows: int = 2, fill: float = 1.0) -> torch.Tensor:
    return torch.full((num_rows, COLS), fill)


def answer(request: Header, fill: float = 0.5) -> bytes:
    (reply,) = frame.frames(reply_to(request), frame.tensor_bytes(torch.full((request.rows, REPLY_COLS), fill)))
    return reply


class FakeProvider(GrpcStandIn):
    """Plays a provider that replies to each request as a test sets."""

    def __init__(self, manifest: Manifest) -> None:
        self.script: Callable[[Header], list[bytes]] = lambda request: [answer(request)]
        self.greeting = frame.hello(FrameType.WELCOME)
        self.received: queue.SimpleQueue[Header] = queue.SimpleQueue()
        self.done = threading.Event()
        super().__init__(manifest.to_bytes())

    def stream(self, messages: Frames, context: Any) -> Frames:
        next(messages)
        yield self.greeting
        for message in messages:
            header, _ = frame.parse(message)
            self.received.put(header)
            if header.kind is FrameType.REQUEST:
                yield from self.script(header)

    def next_received(self) -> Header:
        return self.received.get(timeout=WAIT_S)

    def stop(self, wait_s: float = WAIT_S) -> None:
        self.done.set()
        super().stop(wait_s)


@pytest.fixture
def fake(chat_served_model: ServedModel) -> Iterator[FakeProvider]:
    made = FakeProvider(chat_served_model.manifest())
    yield made
    made.stop()


@pytest.fixture
def connection(fake: FakeProvider) -> Iterator[GrpcConnection]:
    made = GrpcConnection(fake.url)
    yield made
    made.close()


def works(connection: GrpcConnection) -> None:
    assert torch.equal(
        connection.submit(CALL, RowsPayload(rows()), REPLY_COLS).result(), torch.full((2, REPLY_COLS), 0.5)
    )


# ---- deadlines ------------------------------------------------------------------------------------------------------


def test_a_request_that_is_never_answered(
    fake: FakeProvider, connection: GrpcConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(connection)
    monkeypatch.setattr(multiplexer, "deadline_s", lambda num_bytes: 0.2)
    fake.script = lambda request: []
    pending = [connection.submit(CALL, RowsPayload(rows()), REPLY_COLS) for _ in range(2)]
    # first the one that does not read: its end must not depend on the other's
    for one in reversed(pending):
        with pytest.raises((DeadlineExceeded, Unavailable)) as failure:
            one.result()
        assert "\n" not in str(failure.value)
    with pytest.raises(DeadlineExceeded):
        pending[0].result()
    monkeypatch.undo()
    fake.script = lambda request: [answer(request)]
    works(connection)


def test_cancel_is_sent_for_what_expired(
    fake: FakeProvider, connection: GrpcConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(connection)  # so that the deadline is not over before the stream is open
    assert fake.next_received().request_id == 1
    monkeypatch.setattr(multiplexer, "deadline_s", lambda num_bytes: 0.2)
    fake.script = lambda request: []
    pending = connection.submit(CALL, RowsPayload(rows()), REPLY_COLS)
    assert fake.next_received().kind is FrameType.REQUEST
    cancel = fake.next_received()  # no thread waits for the reply, so only the watchdog ends it
    assert (cancel.kind, cancel.request_id) == (FrameType.CANCEL, 2)
    with pytest.raises(DeadlineExceeded, match="request 2"):
        pending.result()
    monkeypatch.undo()
    fake.script = lambda request: [answer(replace(request, request_id=2), 9.0), answer(request)]  # late, and ours
    works(connection)


def test_a_handshake_that_is_never_answered(
    fake: FakeProvider, connection: GrpcConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplexer, "HANDSHAKE_S", 0.3)
    connection.manifest()
    fake.greeting = Header(FrameType.REPLY, 77).pack()  # for an unknown id: skipped
    with pytest.raises(Unavailable, match="handshake"):
        connection.submit(CALL, RowsPayload(rows()), REPLY_COLS).result()
    monkeypatch.undo()
    fake.greeting = frame.hello(FrameType.WELCOME)
    works(connection)


# ---- replies that are none ------------------------------------------------------------------------------------------

HALF = REPLY_COLS * 4  # one of two rows
BAD_REPLIES: dict[str, tuple[type[VeilbaseError], Callable[[Header], list[bytes]]]] = {
    "empty": (MalformedFrame, lambda request: [b""]),
    "garbage": (MalformedFrame, lambda request: [b"\xa5" * 100]),
    "short header": (MalformedFrame, lambda request: [answer(request)[:40]]),
    "rows": (MalformedFrame, lambda request: [answer(replace(request, rows=3))]),
    "cols": (MalformedFrame, lambda request: [reply_to(request, cols=COLS, total_bytes=2 * COLS * 4).pack()]),
    "group": (MalformedFrame, lambda request: [answer(replace(request, call=replace(CALL, group=1)))]),
    "direction": (
        MalformedFrame,
        lambda request: [answer(replace(request, call=replace(CALL, direction=Direction.BACKWARD)))],
    ),
    "arithmetic": (
        MalformedFrame,
        lambda request: [answer(replace(request, call=replace(CALL, arithmetic=Arithmetic.RING)))],
    ),
    "terabytes": (MalformedFrame, lambda request: [reply_to(request, rows=1 << 30, total_bytes=1 << 40).pack()]),
    "no payload": (MalformedFrame, lambda request: [reply_to(request).pack()]),
    "second half first": (MalformedFrame, lambda request: [reply_to(request, offset=HALF).pack() + bytes(HALF)]),
    "first half twice": (MalformedFrame, lambda request: [reply_to(request).pack() + bytes(HALF)] * 2),
    "too much": (MalformedFrame, lambda request: [answer(request) + b"x"]),
    "a request": (MalformedFrame, lambda request: [replace(request, offset=0).pack()]),
    "stream error": (RemoteFault, lambda request: [Header(FrameType.ERROR, 0, code=WireCode.INTERNAL).pack()]),
    "unknown error": (RemoteFault, lambda request: [Header(FrameType.ERROR, request.request_id, code=999).pack()]),
    "other protocol": (VersionMismatch, lambda request: [Header(FrameType.WELCOME, code=9).pack()]),
}


@pytest.mark.parametrize("name", list(BAD_REPLIES))
def test_a_bad_reply_is_one_error(fake: FakeProvider, connection: GrpcConnection, name: str) -> None:
    kind, fake.script = BAD_REPLIES[name]
    with pytest.raises(kind) as failure:
        connection.submit(CALL, RowsPayload(rows()), REPLY_COLS).result()
    assert "\n" not in str(failure.value)
    fake.script = lambda request: [answer(request)]
    works(connection)


def test_a_bad_reply_ends_all_that_waits(fake: FakeProvider, connection: GrpcConnection) -> None:
    works(connection)
    fake.script = lambda request: [b"garbage"] if request.request_id == 4 else []
    pending = [connection.submit(CALL, RowsPayload(rows()), REPLY_COLS) for _ in range(3)]
    with ThreadPoolExecutor(3) as waiting:
        errors = [future.exception(WAIT_S) for future in [waiting.submit(one.result) for one in pending]]
    assert [type(error) for error in errors] == [MalformedFrame] * 3


def test_frames_for_unknown_requests_are_skipped(fake: FakeProvider, connection: GrpcConnection) -> None:
    fake.script = lambda request: [
        answer(replace(request, request_id=1 << 40), 9.0),
        Header(FrameType.ERROR, 1 << 41, code=WireCode.INTERNAL).pack(),
        answer(request),
        answer(request, 9.0),  # a second reply to the same request
    ]
    works(connection)
    works(connection)


def test_replies_in_any_order(fake: FakeProvider, connection: GrpcConnection) -> None:
    held: list[Header] = []

    def backwards(request: Header) -> list[bytes]:
        held.append(request)
        return [answer(one, float(one.request_id)) for one in reversed(held)] if len(held) == 8 else []

    fake.script = backwards
    pending = [connection.submit(CALL, RowsPayload(rows()), REPLY_COLS) for _ in range(8)]
    assert [float(one.result()[0, 0]) for one in pending] == [1, 2, 3, 4, 5, 6, 7, 8]


NUM_ROWS = 10
REPLY_BYTES = frame.HEADER_BYTES + NUM_ROWS * REPLY_COLS * frame.ITEM_BYTES
TWO_FIT = Limits(max_rows=64, max_tensor_bytes=8192, max_in_flight_bytes=8192)
"""Limits that allow two requests of NUM_ROWS and their replies: 2 × 10 × (32 + 64) × 4 = 7680 bytes."""


@pytest.fixture
def narrow(chat_served_model: ServedModel) -> Iterator[FakeProvider]:
    made = FakeProvider(chat_served_model.manifest().model_copy(update={"limits": TWO_FIT}))
    yield made
    made.stop()


def test_the_client_keeps_the_in_flight_limit(narrow: FakeProvider) -> None:
    """At most two requests fit at a time. A thread that submits more reads replies first, because no other thread reads
    them."""
    narrow.script = lambda request: [answer(request, float(request.request_id))]
    connection = GrpcConnection(narrow.url)
    with pytest.raises(LimitExceeded):
        connection.submit(CALL, RowsPayload(rows(3 * NUM_ROWS)), REPLY_COLS)
    pending: list[Any] = []
    before = connection.traffic.snapshot().bytes_down  # the manifest and WELCOME
    for number in range(8):
        pending.append(connection.submit(CALL, RowsPayload(rows(NUM_ROWS)), REPLY_COLS))
        num_read = (connection.traffic.snapshot().bytes_down - before) / REPLY_BYTES
        assert num_read >= number - 1, "three were in flight"
    assert [float(one.result()[0, 0]) for one in pending] == [1, 2, 3, 4, 5, 6, 7, 8]
    connection.close()


def test_a_sender_without_room_is_not_kept_for_ever(narrow: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexer, "deadline_s", lambda num_bytes: 0.2)
    narrow.script = lambda request: []
    connection = GrpcConnection(narrow.url)
    pending = [connection.submit(CALL, RowsPayload(rows(NUM_ROWS)), REPLY_COLS) for _ in range(2)]
    with pytest.raises((DeadlineExceeded, Unavailable)):
        connection.submit(
            CALL, RowsPayload(rows(NUM_ROWS)), REPLY_COLS
        ).result()  # room, once the first two have expired
    for one in pending:
        with pytest.raises((DeadlineExceeded, Unavailable)):
            one.result()
    connection.close()


# ---- real providers -------------------------------------------------------------------------------------------------


def test_the_same_client_works_after_a_restart(chat_served_model: ServedModel, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with serving(chat_served_model, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        enroll(state, "acme", tmp_path / "acme", url)
        client = TenantClient(url, identity=tmp_path / "acme", mask="off", arithmetic="float")
        model = client.load_model()
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            want = model(ids).logits
    with client:
        for _ in range(3):
            with pytest.raises(Unavailable), torch.no_grad():
                model(ids)
        with serving(chat_served_model, server.port, state), torch.no_grad():
            assert torch.equal(model(ids).logits, want)


def test_a_handshake_that_is_cut_refuses_nobody_who_was_accepted_before(
    chat_served_model: ServedModel, tmp_path: Path
) -> None:
    """A load balancer, or a provider that is starting, may close a connection in its handshake. For a new client that
    looks like a certificate that is refused; a client that was accepted before waits for the provider."""
    state = StateDir(tmp_path / "state")
    with serving(chat_served_model, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        enroll(state, "acme", tmp_path / "acme", url)
        client = TenantClient(url, identity=tmp_path / "acme", mask="off", arithmetic="float")
        client.reconnect()
    with client, socket.create_server(("127.0.0.1", server.port)) as listener:
        is_over = threading.Event()

        def answer_plainly() -> None:
            listener.settimeout(0.05)
            while not is_over.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as guest:
                    guest.recv(1 << 16)
                    guest.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")

        thread = threading.Thread(target=answer_plainly)
        thread.start()
        try:
            until(lambda: not is_reachable(client), "the end of the stream")
            with pytest.raises(Unauthenticated):
                TenantClient(url, identity=tmp_path / "acme", mask="off", arithmetic="float").connect()
        finally:
            is_over.set()
            thread.join(WAIT_S)


def is_reachable(client: TenantClient) -> bool:
    """Returns whether `reconnect` succeeds; only `Unavailable` may keep it from that."""
    try:
        client.reconnect()
    except Unavailable:
        return False
    return True


def test_reconnect_opens_a_stream_and_sends_no_request(fake: FakeProvider, connection: GrpcConnection) -> None:
    connection.reconnect()
    works(connection)
    fake.next_received()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: connection.reconnect(), range(4)))  # it is open: nothing happens
    fake.script = lambda request: [b"garbage"]  # ends the stream
    with pytest.raises(MalformedFrame):
        works(connection)
    fake.next_received()
    fake.script = lambda request: [answer(request)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: connection.reconnect(), range(4)))
    assert fake.received.empty(), "a request was sent"
    works(connection)
    fake.stop()
    until(lambda: is_lost(connection), "the end of the stream")
    connection.close()
    with pytest.raises(Unavailable, match="closed"):
        connection.reconnect()


def is_lost(connection: GrpcConnection) -> bool:
    """Returns whether `reconnect` fails."""
    try:
        connection.reconnect()
    except Unavailable:
        return True
    return False


def test_a_client_that_is_closed_does_not_reconnect(chat_folder: Path) -> None:
    client = TenantClient(f"inproc:{chat_folder}", mask="off", arithmetic="float", weights="native")
    client.reconnect()
    client.close()
    with pytest.raises(ConfigurationError, match="closed"):
        client.reconnect()


def test_other_weights_are_noticed_on_every_new_stream(fake: FakeProvider, connection: GrpcConnection) -> None:
    """Whenever a stream begins, the client reads the manifest again and refuses other weights before it sends a
    request. This includes the first stream, which may begin hours after the manifest was first read."""
    first, other = connection.manifest(), "0" * 64
    group = first.groups[0].model_copy(update={"digest": other})
    for _ in range(2):
        fake.manifest_bytes = first.model_copy(update={"groups": (group, *first.groups[1:])}).to_bytes()
        for _ in range(2):  # asking again does not help
            with pytest.raises(ConfigurationError, match="other weights") as failure:
                connection.submit(CALL, RowsPayload(rows()), REPLY_COLS)
            assert "\n" not in str(failure.value)
        assert fake.received.empty(), "a request was sent"
        fake.manifest_bytes = first.model_copy(update={"model_id": "a new name", "recording": True}).to_bytes()
        works(connection)
        fake.next_received()
        fake.script = lambda request: [b"garbage"]  # ends the stream
        with pytest.raises(MalformedFrame):
            works(connection)
        fake.next_received()
        fake.script = lambda request: [answer(request)]


def test_a_tenant_that_sends_garbage_does_not_disturb_another(chat_served_model: ServedModel, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with serving(chat_served_model, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        for name in ("honest", "other"):
            enroll(state, name, tmp_path / name, url)
        with TenantClient(url, identity=tmp_path / "honest", mask="off", arithmetic="float") as honest:
            want = honest.finetune(ROWS, lora(), tmp_path / "alone", **QUICK)
            ended = threading.Event()
            refused: list[WireCode] = []

            def disturb() -> None:
                identity = TlsIdentity.read(tmp_path / "other")
                channel = grpc_channel.open_channel(url, identity)
                method = channel.stream_stream(grpc_channel.STREAM_METHOD)
                while not ended.is_set() or not refused:
                    replies = method(iter([frame.hello(FrameType.HELLO), os.urandom(200)]), timeout=WAIT_S)
                    refused.extend(
                        WireCode(header.code)
                        for header in (frame.parse(message)[0] for message in replies)
                        if header.kind is FrameType.ERROR
                    )
                channel.close()

            other = threading.Thread(target=disturb)
            other.start()
            try:
                got = honest.finetune(ROWS, lora(), tmp_path / "disturbed", **QUICK)
            finally:
                ended.set()
                other.join(WAIT_S)
        assert not other.is_alive()
        assert set(refused) == {WireCode.MALFORMED}
        assert got.losses == want.losses
        assert got.bytes_up == want.bytes_up


FORKS = """
import os, sys, torch
from tenant_sdk import TenantClient
from wire.errors import ForkedConnection

torch.set_num_threads(1)
with TenantClient(sys.argv[1], mask="off", arithmetic="float") as client:
    model = client.load_model()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        want = model(ids).logits
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with torch.no_grad():
                model(ids)
        except ForkedConnection as exc:
            code = 0 if "fork" in str(exc) and "\\n" not in str(exc) else 2
        finally:
            client.close()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)
    print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_the_parent_goes_on(chat_served_model: ServedModel) -> None:
    """A forked child gets an error from its parent's connection, which still works for the parent. The environment
    names a proxy that does not respond, and connections to loopback must not use it."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= dict.fromkeys(
        ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1"
    )
    with serving(chat_served_model) as server:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, f"grpc://127.0.0.1:{server.port}"],
            capture_output=True, text=True, timeout=WAIT_S, env=environment,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n", done.stderr
