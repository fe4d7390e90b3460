"""Tests a tenant that sends requests and never reads: how much of the provider it can occupy, and how the provider ends
it.

The tenant's HTTP/2 window is the smallest possible, so that a reply of 1 MiB blocks the provider's sending thread for
good.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch

import provider.net.service as service_module
import provider.net.session as session_module
from provider.identity.registry import revoke
from provider.model.served_model import ServedModel
from provider.net.admission import MAX_CALLS_PER_TENANT
from provider.net.session import Session
from tests.support.providers import Provider, service_of, session_of
from tests.support.raw_peers import RawStream
from tests.support.ring_products import CALL, COLS, assert_served
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import WireCode
from wire.frame import Call, FrameType, Header
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS
from wire.transport.grpc_channel import STREAM_METHOD

DEAF = "deaf"
SMALLEST_WINDOW = [
    ("grpc.http2.lookahead_bytes", 5),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
LARGE_ROWS, SMALL_ROWS = 4096, 8
"""Numbers of rows: a reply of 1 MiB, which the worker computes, and one of 2 KiB, which the receiving thread
computes."""
NUM_REQUESTS = 12
FIRST = 3
"""The id of the first request that a stuck session has not received."""


class Deaf:
    """Plays a client that sends anything and reads nothing."""

    def __init__(self, provider: Provider) -> None:
        identity = provider.identity(DEAF)
        credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
        self._channel = grpc.secure_channel(f"127.0.0.1:{provider.server.port}", credentials, SMALLEST_WINDOW)
        self._streams: list[tuple[Any, queue.SimpleQueue[bytes | None]]] = []

    def open(self) -> Any:
        """Opens another stream, which later calls of `send` use."""
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = self._channel.stream_stream(STREAM_METHOD)
        call = method(iter(outgoing.get, None), timeout=10 * WAIT_S)  # the test must not wait for the stream's own end
        self._streams.append((call, outgoing))
        self.send(frame.hello(FrameType.HELLO))
        return call

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self._streams[-1][1].put(message)

    def ask(self, request_id: int, num_rows: int, deadline_ms: int = 30_000) -> None:
        size = num_rows * COLS * 4
        header = Header(FrameType.REQUEST, request_id, CALL, num_rows, COLS, 0, size, deadline_ms)
        self.send(*frame.frames(header, memoryview(bytes(size))))

    def begin(self, request_id: int, deadline_ms: int = MAX_DEADLINE_MS) -> None:
        """Sends the beginning of a request that is never completed. It keeps its place, and the provider's reader waits
        for the rest."""
        size = SMALL_ROWS * COLS * 4
        self.send(Header(FrameType.REQUEST, request_id, CALL, SMALL_ROWS, COLS, 0, size, deadline_ms).pack() + bytes(4))

    def cancel(self, request_id: int) -> None:
        self.send(Header(FrameType.CANCEL, request_id).pack())

    def close(self) -> None:
        for call, outgoing in self._streams:
            outgoing.put(None)
            call.cancel()
        self._channel.close()


@dataclass
class Replies:
    """Keeps track of the memory of every reply, to see when it is freed."""

    memory: list[weakref.ref[Any]] = field(default_factory=list)

    def num_alive(self) -> int:
        return sum(one() is not None for one in self.memory)


@pytest.fixture
def replies(tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> Replies:
    """Provides the tracker of replies. This fixture must come before `provider`, which uses the function `product` as
    it is when it starts."""
    made = Replies()
    product = tiny_served_model.compute

    def watched(call: Call, rows: torch.Tensor) -> torch.Tensor:
        # The storage of `from_numpy` refers to the array, and nothing else does, not even a view without the tensor.
        array = product(call, rows).numpy().copy()
        made.memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    monkeypatch.setattr(tiny_served_model, "compute", watched)
    return made


@pytest.fixture
def deaf(provider: Provider) -> Iterator[Deaf]:
    made = Deaf(provider)
    yield made
    made.close()


def stuck_session(provider: Provider, deaf: Deaf, replies: Replies) -> Session:
    """Makes a session whose sending thread is blocked by the reply to request 2, and whose request 1 was begun."""
    assert frame.parse(next(deaf.open()))[0].kind is FrameType.WELCOME  # after this, the client reads nothing
    deaf.begin(1)
    deaf.ask(2, LARGE_ROWS)
    session, usage = session_of(provider, DEAF), service_of(provider).usage.of(DEAF)
    until(lambda: sum(usage.total().rows.values()) == LARGE_ROWS, "reply 2 is made into a frame")
    until(lambda: session.status().num_requests == 1, "the only chunk of reply 2 is on its way")
    until(lambda: replies.num_alive() == 0, "the frame that is sent is a copy")
    return session


def ask_unread(session: Session, deaf: Deaf, request_id: int, num_rows: int) -> None:
    """Sends a request whose reply waits behind the one that blocks the sending thread."""
    before = session.status().num_waiting
    deaf.ask(request_id, num_rows)
    until(lambda: session.status().num_waiting == before + 1, f"reply {request_id} waits to be sent")


# ---- threads --------------------------------------------------------------------------------------------------------


def test_streams_above_the_limit_hold_no_thread(
    start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_THREADS", 2 * MAX_CALLS_PER_TENANT)
    running = start(tiny_served_model)
    service, deaf = service_of(running), Deaf(running)
    for _ in range(MAX_CALLS_PER_TENANT):
        deaf.open()
    until(lambda: service.status().num_streams == MAX_CALLS_PER_TENANT, "all the streams that it may have")
    for _ in range(2 * MAX_CALLS_PER_TENANT):
        refused = deaf.open()
        until(lambda call=refused: not call.is_active(), "a refusal")
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # no message is sent, since none would be read
        assert refused.details() == "too many calls at once"  # ours, not gRPC's for all threads busy
    assert service.status().calls == {DEAF: MAX_CALLS_PER_TENANT}
    assert_served(running.connect("modest"), tiny_served_model)
    deaf.close()
    until(lambda: DEAF not in service.status().calls, "its calls are over")
    assert not [one for one in service.sessions if one.tenant == DEAF]


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [LARGE_ROWS, SMALL_ROWS])
@pytest.mark.parametrize("way", ["cancelled", "expired"])
def test_replies_that_nobody_wants_any_more_are_freed(
    replies: Replies, provider: Provider, deaf: Deaf, num_rows: int, way: str
) -> None:
    session = stuck_session(provider, deaf, replies)
    for number in range(FIRST, FIRST + NUM_REQUESTS):
        ask_unread(session, deaf, number, num_rows)
        assert replies.num_alive() == 1  # only this reply; the one that is being sent is a frame by now
        if way == "cancelled":
            deaf.cancel(number)
        else:
            session.sweep(time.monotonic() + 1800)  # after its own deadline, and before that of the unfinished request
        until(lambda: replies.num_alive() == 0, f"the end of reply {number}")
    assert len(replies.memory) == 1 + NUM_REQUESTS
    deaf.cancel(1)
    until(lambda: session.status().held_bytes == 0, "nothing is held")
    status = session.status()
    assert status.num_requests == 0
    assert status.num_waiting <= 2 * NUM_REQUESTS  # what is left there has no size
    assert session in service_of(provider).sessions
    assert_served(provider.connect("modest"), provider.served_model)


def test_a_reply_that_is_half_sent_is_freed_with_its_stream(replies: Replies, provider: Provider) -> None:
    stream = RawStream(provider)
    widest = max(provider.served_model.manifest().groups, key=lambda group: group.out_features)
    rows = torch.zeros(LARGE_ROWS, widest.in_features, dtype=torch.int32)
    stream.send(*stream.request(1, rows, replace(CALL, group=widest.id)))
    first = stream.receive()
    assert first.kind is FrameType.REPLY
    assert first.total_bytes > CHUNK_BYTES  # the second chunk is never read
    stream.close()
    until(lambda: not service_of(provider).status().calls, "its thread is free")
    until(lambda: replies.num_alive() == 0, "the end of the reply")
    assert len(replies.memory) == 1


# ---- the thread that looks after every stream -----------------------------------------------------------------------


def fails(session: Session, _deaf: Deaf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a sweep raise an unexpected error."""
    failed = threading.Event()

    def broken(now: float) -> None:
        failed.set()
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(session, "sweep", broken)
    assert failed.wait(WAIT_S)


FEW = 8
LAST = FIRST + FEW + 1


@pytest.fixture
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limit on waiting replies. This fixture must come before streams, which read the limit when they
    begin."""
    monkeypatch.setattr(session_module, "MAX_REQUESTS", FEW)


def fill(session: Session, deaf: Deaf) -> None:
    """Sends as many requests with unread replies as are allowed. The next request is the `LAST`."""
    for number in range(FIRST, LAST):
        ask_unread(session, deaf, number, SMALL_ROWS)
        deaf.cancel(number)
    until(lambda: session.status().num_requests == 1, "all but the first are cancelled")
    assert session.status().num_waiting == FEW + 1


def gives_up(session: Session, deaf: Deaf, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a sweep find an expired request when there is no room for its error."""
    fill(session, deaf)
    deaf.begin(LAST, deadline_ms=1)
    until(lambda: session.status().is_closed, "the session gives up")


def idle_stream(provider: Provider) -> RawStream:
    """Makes a stream that waits for a message, so that only the sweep, in another thread, can end it."""
    stream = RawStream(provider, "idle")
    for number in (1, 2):
        stream.send(*stream.request(number, torch.zeros(1, COLS, dtype=torch.int32)))
        assert stream.receive().request_id == number
    return stream


@pytest.mark.parametrize("trouble", [fails, gives_up])
def test_the_sweep_goes_on_after_one_stream_made_trouble(
    replies: Replies,
    quick_sweeps: None,
    few_answers: None,
    provider: Provider,
    deaf: Deaf,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Session, Deaf, pytest.MonkeyPatch], None],
) -> None:
    idle = idle_stream(provider)
    trouble(stuck_session(provider, deaf, replies), deaf, monkeypatch)
    revoke(provider.state, "idle")
    last = idle.receive()
    assert (last.kind, last.request_id, last.code) == (FrameType.ERROR, 0, WireCode.NOT_PERMITTED)
    until(lambda: not idle.call.is_active(), "the end of the idle stream")
    idle.close()


@pytest.mark.parametrize("last", ["an answer", "an error"])
def test_a_stream_with_too_many_unread_answers_is_dropped(
    replies: Replies, few_answers: None, provider: Provider, deaf: Deaf, last: str
) -> None:
    session = stuck_session(provider, deaf, replies)
    fill(session, deaf)
    if last == "an answer":
        deaf.ask(LAST, SMALL_ROWS)
    else:
        deaf.begin(LAST, deadline_ms=0)
    until(lambda: not service_of(provider).status().calls, "its thread is free")
    assert session not in service_of(provider).sessions
    assert session.status().held_bytes == 0
    until(lambda: replies.num_alive() == 0, "the end of its replies")


def test_a_revoked_tenant_that_never_reads_is_dropped(
    replies: Replies, quick_sweeps: None, provider: Provider, deaf: Deaf
) -> None:
    service, session = service_of(provider), stuck_session(provider, deaf, replies)
    ask_unread(session, deaf, FIRST, LARGE_ROWS)
    assert replies.num_alive() == 1
    revoke(provider.state, DEAF)
    until(lambda: session not in service.sessions, "the end of the session")
    until(lambda: not service.status().calls, "its thread is free")
    assert session.status().held_bytes == 0
    until(lambda: replies.num_alive() == 0, "the end of its replies")
    assert_served(provider.connect("modest"), provider.served_model)
