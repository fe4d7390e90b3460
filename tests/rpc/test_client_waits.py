"""Tests threads that wait for replies on one connection: none hangs, whatever the order of replies, and whichever
thread is slow or gives up.

One of the waiting threads may read for all of them, so these tests disturb each thread in turn. The tests use only the
public `GrpcConnection`. The provider is a real gRPC server that sends what a test sets, when the test says so.
"""

from __future__ import annotations

import gc
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType as CodeFrame
from typing import Any

import grpc
import pytest
import torch

from provider.model.served_model import ServedModel
from tests.support.false_providers import GrpcStandIn, reply_to
from tests.support.ring_products import COLS, REPLY_COLS
from wire import frame
from wire.errors import DeadlineExceeded, Unavailable, VeilbaseError
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.limits import Limits
from wire.payload import RowsPayload
from wire.transport.connection import Pending
from wire.transport.grpc_connection import GrpcConnection

CALL = Call(0, Direction.FORWARD, Arithmetic.FLOAT)
TIMEOUT_S = 25.0
"""The seconds after which a thread counts as hanging. This is less than the default deadline of 30 s, which would free
the thread."""
HELD_S = 0.3
"""The longest time in seconds for which a slow thread is kept from running."""
SHORT_S = 0.5
NUM_THREADS = 3
LARGE_ROWS = 64
LARGE_BYTES = LARGE_ROWS * (COLS + REPLY_COLS) * 4
"""The bytes of a request and a reply of `LARGE_ROWS` rows, on which a deadline depends."""
MORE_THAN_FITS = 65_536
"""The number of rows that make 8 MiB. HTTP/2 sends only some 64 KiB before the peer reads."""


class Script(GrpcStandIn):
    """Plays a provider that replies when the test says so."""

    def __init__(self, served_model: ServedModel) -> None:
        manifest = served_model.manifest().model_copy(update={"limits": Limits()}).to_bytes()
        self.reads = threading.Event()
        self.reads.set()
        self._received: queue.SimpleQueue[Header] = queue.SimpleQueue()
        self._outgoing: list[queue.SimpleQueue[list[bytes] | None]] = []
        super().__init__(manifest)

    def stream(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        outgoing: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._outgoing.append(outgoing)
        context.add_callback(lambda: outgoing.put(None))
        threading.Thread(target=self._take, args=(messages,), daemon=True).start()
        yield frame.hello(FrameType.WELCOME)
        while (burst := outgoing.get()) is not None:
            yield from burst

    def _take(self, messages: Iterator[bytes]) -> None:
        try:
            for message in messages:
                header, _ = frame.parse(message)
                if header.kind is FrameType.REQUEST:
                    self._received.put(header)
                self.reads.wait()
        except grpc.RpcError:
            pass  # the stream has ended

    def requests(self, number: int) -> list[Header]:
        """Returns the next requests, in the order in which they were received."""
        return [self._received.get(timeout=TIMEOUT_S) for _ in range(number)]

    def answer(self, *requests: Header) -> None:
        """Replies to the requests on the latest stream, in this order and without a pause; see `expected`."""
        self._outgoing[-1].put([one for request in requests for one in _reply(request)])

    def stop(self, wait_s: float = TIMEOUT_S) -> None:
        self.reads.set()
        super().stop(wait_s)


def _reply(request: Header) -> list[bytes]:
    return list(frame.frames(reply_to(request), frame.tensor_bytes(expected(request.rows))))


def expected(num_rows: int) -> torch.Tensor:
    """Returns the reply that the script sends to a request. It depends on the request's rows, so that replies can be
    told apart."""
    return torch.full((num_rows, REPLY_COLS), float(num_rows))


@pytest.fixture
def script(tiny_served_model: ServedModel) -> Iterator[Script]:
    made = Script(tiny_served_model)
    yield made
    made.stop()


@pytest.fixture
def connection(script: Script) -> Iterator[GrpcConnection]:
    made = GrpcConnection(script.url)
    yield made
    made.close()


def submit(connection: GrpcConnection, num_rows: int) -> Pending:
    return connection.submit(CALL, RowsPayload(torch.zeros(num_rows, COLS)), REPLY_COLS)


def works(script: Script, connection: GrpcConnection) -> None:
    pending = submit(connection, 7)
    script.answer(*script.requests(1))
    assert torch.equal(pending.result(), expected(7))


def shorten(monkeypatch: pytest.MonkeyPatch, deadline_s: Callable[[int], float]) -> None:
    """Shortens the deadlines of requests in every module of the transport that uses them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("wire.transport") and hasattr(module, "deadline_s"):
            monkeypatch.setattr(module, "deadline_s", deadline_s)


class Waiter(threading.Thread):
    """Runs a thread that waits for one reply. While `held`, the thread does not continue, as if the machine had no time
    for it."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        super().__init__(daemon=True)
        self.held, self.released = threading.Event(), threading.Event()
        self.outcome: torch.Tensor | VeilbaseError | None = None
        self._work = work
        self.start()

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self.outcome = self._work()
        except VeilbaseError as exc:
            self.outcome = exc
        finally:
            sys.settrace(None)

    def _trace(self, code_frame: CodeFrame, event: str, _argument: object) -> Any:
        if not code_frame.f_code.co_filename.endswith("threading.py") and self.held.is_set():
            self.released.wait(HELD_S)  # not for ever, since it may hold a lock that the others need
            self.held.clear()
        return self._trace

    def wait_until_it_waits(self) -> None:
        """Waits until the thread's stack no longer changes. If the thread does not really wait yet, the test is easier
        than intended, but not wrong."""
        seen: list[object] = []
        give_up_at = time.monotonic() + TIMEOUT_S
        while len(seen) < 4 or len({*seen[-4:]}) > 1:
            assert time.monotonic() < give_up_at, "a thread was to wait for its reply"
            top = _frames().get(self.ident or 0)
            seen.append((id(top), top.f_lasti) if top is not None else None)
            threading.Event().wait(0.001)

    def expect_end(self) -> torch.Tensor | VeilbaseError:
        self.join(TIMEOUT_S)
        assert self.outcome is not None, "a thread waits for ever"
        return self.outcome


def _frames() -> dict[int, CodeFrame]:
    """Returns the frame that each thread runs. A garbage collection inside that call, which holds a lock of the
    interpreter, can free an object of grpc that waits for another thread, and then nothing goes on any more."""
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def start_waiters(connection: GrpcConnection, num_rows: list[int]) -> list[Waiter]:
    """Starts the threads one after the other, so that the first one reads for the others if any thread does."""
    pending = [submit(connection, number) for number in num_rows]
    waiters = []
    for one in pending:
        waiters.append(Waiter(one.result))
        waiters[-1].wait_until_it_waits()
    return waiters


# ---- every order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", range(NUM_THREADS))
def test_replies_in_every_order_reach_threads_of_which_one_is_slow(
    script: Script, connection: GrpcConnection, slow: int
) -> None:
    """The slow thread may have to read for the others after its own reply has arrived. Then another thread must read
    instead."""
    for order in itertools.permutations(range(NUM_THREADS)):
        sizes = [number + 1 for number in range(NUM_THREADS)]
        waiters = start_waiters(connection, sizes)
        requests = script.requests(NUM_THREADS)
        waiters[slow].held.set()
        script.answer(*[requests[index] for index in order])
        for index, waiter in enumerate(waiters):
            if index != slow:
                assert torch.equal(waiter.expect_end(), expected(sizes[index]))  # type: ignore[arg-type]
        waiters[slow].released.set()
        assert torch.equal(waiters[slow].expect_end(), expected(sizes[slow]))  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", range(NUM_THREADS))
def test_threads_that_come_late_are_served(script: Script, connection: GrpcConnection, slow: int) -> None:
    """Some replies have arrived before any thread waits, and some threads wait again and again while others do."""
    failures: list[BaseException] = []

    def work(size: int) -> None:
        try:
            for _ in range(20):
                assert torch.equal(submit(connection, size).result(), expected(size))
        except BaseException as exc:  # noqa: BLE001 - reported by the test
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(size,), daemon=True) for size in range(1, NUM_THREADS + 1)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        requests = script.requests(NUM_THREADS)
        script.answer(*requests[slow:], *requests[:slow])
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


# ---- whoever gives up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expiring", range(NUM_THREADS))
def test_a_thread_whose_deadline_passes_leaves_nobody_hanging(
    script: Script, connection: GrpcConnection, monkeypatch: pytest.MonkeyPatch, expiring: int
) -> None:
    """The first thread reads for the others if any does. It must neither continue to wait nor take the other threads'
    replies with it."""
    works(script, connection)
    sizes = [1 if index == expiring else LARGE_ROWS + index for index in range(NUM_THREADS)]
    with monkeypatch.context() as patched:
        shorten(patched, lambda num_bytes: SHORT_S if num_bytes < LARGE_BYTES else 30.0)
        waiters = start_waiters(connection, sizes)
    requests = script.requests(NUM_THREADS)
    assert isinstance(waiters[expiring].expect_end(), (DeadlineExceeded, Unavailable))
    script.answer(*[request for request in requests if request.rows != 1])
    for waiter, size in zip(waiters, sizes, strict=True):
        outcome = waiter.expect_end()  # the reply, or the one error of a stream that had to be ended
        assert isinstance(outcome, (DeadlineExceeded, Unavailable)) or torch.equal(outcome, expected(size))
    works(script, connection)


def test_all_threads_end_where_nothing_is_ever_answered(
    script: Script, connection: GrpcConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(script, connection)
    with monkeypatch.context() as patched:
        shorten(patched, lambda num_bytes: SHORT_S)
        waiters = start_waiters(connection, [1, 2, 3])
    for waiter in waiters:
        assert isinstance(waiter.expect_end(), (DeadlineExceeded, Unavailable))
    script.requests(3)
    works(script, connection)


def test_a_provider_that_stops_reading_keeps_nobody(
    script: Script, connection: GrpcConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the provider stops reading, the client cannot send even a CANCEL. Every waiting thread must still get an error
    at its deadline."""
    works(script, connection)
    script.reads.clear()
    shorten(monkeypatch, lambda num_bytes: SHORT_S)
    waiters = [Waiter(lambda size=size: submit(connection, size).result()) for size in (1, MORE_THAN_FITS, 2)]
    for waiter in waiters:
        assert isinstance(waiter.expect_end(), (DeadlineExceeded, Unavailable))


def test_close_frees_every_thread(script: Script, connection: GrpcConnection) -> None:
    waiters = start_waiters(connection, [1, 2, 3])
    connection.close()
    for waiter in waiters:
        assert isinstance(waiter.expect_end(), Unavailable)


def test_a_provider_that_goes_frees_every_thread(script: Script, connection: GrpcConnection) -> None:
    waiters = start_waiters(connection, [1, 2, 3])
    script.stop()
    for waiter in waiters:
        assert isinstance(waiter.expect_end(), VeilbaseError)
