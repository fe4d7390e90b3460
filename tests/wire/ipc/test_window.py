"""Tests the tenant's end of a window against providers that lie: in the answer to its question, and in replies."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.cuda import UNIT, stand_in
from tests.support.threads import in_child
from tests.support.waiting import WAIT_S, end
from wire import frame
from wire.errors import (
    DeadlineExceeded,
    ForkedConnection,
    MalformedFrame,
    QuotaExceeded,
    TransportError,
    Unavailable,
    WireCode,
)
from wire.frame import IN_WINDOW, Arithmetic, Call, Direction, FrameType, Header
from wire.gpu_window.memory import ALIGNMENT, Area, Driver, SharedMemory, allocate
from wire.limits import Limits
from wire.payload import RowsPayload
from wire.transport.connection import Traffic
from wire.transport.ipc import window as window_module
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.window import Asked, TenantWindow, answer, ask, asked_window
from wire.transport.multiplexer import Multiplexer, Request
from wire.transport.tls import TensorStream

CPU = torch.device("cpu")
CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
LIMITS = Limits(max_rows=4096, max_tensor_bytes=2 << 20, max_in_flight_bytes=3 << 20)
SIZE = struct.Struct("<Q")
COLS, REPLY_COLS = 8, 16


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small requests go through a window, too."""
    monkeypatch.setattr(window_module, "LEAST_BYTES", 1)


@pytest.fixture
def driver() -> Driver:
    return Driver(0, stand_in().library)


class Provider:
    """Plays a provider at the other end of a socket: it answers the question as the test says."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.near, self.far = ClearSocket(near, b""), ClearSocket(far, b"")
        far.settimeout(WAIT_S)
        self.plain = far
        self.asked: Asked | None = None

    def answers(self, send: Callable[[], None]) -> threading.Thread:
        """Waits for the question in a thread, and then calls `send`."""

        def work() -> None:
            self.asked = asked_window(self.far.peek(time.monotonic() + WAIT_S))
            self.far.next_message()
            send()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self.near.release()
        self.far.release()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


@pytest.fixture
def memory(driver: Driver) -> Iterator[tuple[SharedMemory, int]]:
    made, descriptor = allocate(driver, CPU, UNIT)
    yield made, descriptor
    os.close(descriptor)


def framed(header: Header, payload: bytes = b"") -> bytes:
    message = header.pack() + payload
    return struct.pack("<I", len(message)) + message


def window_frame(size: int) -> bytes:
    return framed(Header(FrameType.WINDOW, total_bytes=8), SIZE.pack(size))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- the question ---------------------------------------------------------------------------------------------------


def test_the_question_names_the_gpu_and_the_answer_is_mapped(
    provider: Provider, driver: Driver, memory: tuple[SharedMemory, int]
) -> None:
    before = open_descriptors()
    thread = provider.answers(lambda: answer(provider.far, memory[0].size, memory[1]))
    window = ask(provider.near, driver, CPU)
    end(thread)
    assert window is not None
    assert provider.asked == Asked(driver.uuid(), window_module.WANTED_BYTES)
    memory[0].matrix(0, 1, 1).fill_(41)
    assert window.memory.matrix(0, 1, 1).item() == 41
    assert open_descriptors() == before


@pytest.mark.parametrize("size", [0, UNIT // 2, 2 * UNIT, window_module.WANTED_BYTES])
def test_a_size_that_is_not_the_memorys_gives_no_window(
    provider: Provider, driver: Driver, memory: tuple[SharedMemory, int], size: int
) -> None:
    before = open_descriptors()
    thread = provider.answers(lambda: answer(provider.far, size, memory[1]))
    assert ask(provider.near, driver, CPU) is None
    end(thread)
    assert open_descriptors() == before


def test_a_descriptor_of_something_else_gives_no_window(provider: Provider, driver: Driver) -> None:
    """The driver maps no file, whatever the provider says that it is."""
    before = open_descriptors()
    with open(os.devnull, "rb") as file:
        thread = provider.answers(lambda: answer(provider.far, UNIT, file.fileno()))
        assert ask(provider.near, driver, CPU) is None
        end(thread)
    assert open_descriptors() == before


def sent_with(provider: Provider, data: bytes, *descriptors: int) -> Callable[[], None]:
    return lambda: socket.send_fds(provider.plain, [data], list(descriptors)) and None


@pytest.mark.parametrize(
    "data",
    [
        window_frame(window_module.WANTED_BYTES + 1),
        window_frame(2**64 - 1),
        framed(Header(FrameType.WINDOW, total_bytes=7), bytes(7)),
        framed(Header(FrameType.WINDOW, total_bytes=9), bytes(9)),
        framed(Header(FrameType.WELCOME, total_bytes=4), b"VEIL"),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 4097) + bytes(4097),
        struct.pack("<I", 0xFFFF_FFFE),
        bytes(5000),
    ],
)
def test_an_answer_that_is_none(
    provider: Provider, driver: Driver, memory: tuple[SharedMemory, int], data: bytes
) -> None:
    before = open_descriptors()
    thread = provider.answers(sent_with(provider, data, memory[1]))
    with pytest.raises(MalformedFrame):
        ask(provider.near, driver, CPU)
    end(thread)
    assert open_descriptors() == before, "what came with it is closed"


@pytest.mark.parametrize("data", [struct.pack("<I", 0xFFFF_FFFF), window_frame(UNIT)[:-1], b"ab"])
def test_an_answer_that_ends_early(
    provider: Provider, driver: Driver, memory: tuple[SharedMemory, int], data: bytes
) -> None:
    before = open_descriptors()

    def send_and_leave() -> None:
        socket.send_fds(provider.plain, [data], [memory[1]])
        provider.plain.shutdown(socket.SHUT_WR)

    thread = provider.answers(send_and_leave)
    with pytest.raises(Unavailable, match="broke"):
        ask(provider.near, driver, CPU)
    end(thread)
    assert open_descriptors() == before


def test_what_follows_the_answer_is_left_for_the_stream(
    provider: Provider, driver: Driver, memory: tuple[SharedMemory, int]
) -> None:
    following = framed(Header(FrameType.ERROR, code=WireCode.UNAVAILABLE))
    thread = provider.answers(sent_with(provider, window_frame(memory[0].size) + following, memory[1]))
    assert ask(provider.near, driver, CPU) is not None
    end(thread)
    header, _ = frame.parse(provider.near.peek(time.monotonic() + WAIT_S))
    assert header.kind is FrameType.ERROR


def test_more_descriptors_than_one(provider: Provider, driver: Driver, memory: tuple[SharedMemory, int]) -> None:
    before = open_descriptors()
    thread = provider.answers(sent_with(provider, window_frame(memory[0].size), *[memory[1]] * 100))
    with pytest.raises(MalformedFrame):
        ask(provider.near, driver, CPU)
    end(thread)
    assert open_descriptors() == before


@pytest.mark.parametrize(("code", "kind"), [(WireCode.MALFORMED, MalformedFrame), (WireCode.QUOTA, QuotaExceeded)])
def test_a_refusal_is_raised(provider: Provider, driver: Driver, code: WireCode, kind: type[Exception]) -> None:
    """A provider that refuses says so, and in the same moment that it says no more."""
    ending = struct.pack("<I", 0xFFFF_FFFF)
    thread = provider.answers(sent_with(provider, framed(Header(FrameType.ERROR, code=code)) + ending))
    with pytest.raises(kind):
        ask(provider.near, driver, CPU)
    end(thread)


def test_a_provider_that_leaves_or_is_silent(
    provider: Provider, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_module, "ANSWER_S", 0.05)
    with pytest.raises(Unavailable, match="did not answer in time"):
        ask(provider.near, driver, CPU)
    provider.far.release()
    with pytest.raises(Unavailable, match="broke"):
        ask(provider.near, driver, CPU)


def test_a_forked_child_takes_no_descriptor(provider: Provider) -> None:
    def in_the_child() -> str:
        with pytest.raises(ForkedConnection):
            provider.near.receive_with_descriptor(time.monotonic() + 1)
        with pytest.raises(ForkedConnection):
            provider.near.send_with_descriptor(b"x", 0)
        return "refused"

    assert in_child(in_the_child) == "refused"


# ---- replies --------------------------------------------------------------------------------------------------------


class Stream:
    """Holds a tenant's stream with a window, and the provider's end of both."""

    def __init__(self, driver: Driver) -> None:
        self.provider = Provider()
        self.memory, descriptor = allocate(driver, CPU, UNIT)
        thread = self.provider.answers(lambda: answer(self.provider.far, self.memory.size, descriptor))
        window = ask(self.provider.near, driver, CPU)
        end(thread)
        os.close(descriptor)
        assert window is not None
        self.window: TenantWindow = window
        self.traffic = Traffic()
        tensors = TensorStream(self.provider.near)
        self.tenant = Multiplexer(tensors, LIMITS, self.traffic, window)
        assert self.hear()[0].kind is FrameType.HELLO
        self.provider.far.send(frame.hello(FrameType.WELCOME))
        self.tenant.wait_welcome()

    def hear(self) -> tuple[Header, memoryview]:
        """Returns the tenant's next frame."""
        message = self.provider.far.peek(time.monotonic() + WAIT_S)
        self.provider.far.next_message()
        return frame.parse(message)

    def ask(self, num_rows: int = 5) -> tuple[Request, Header, Area]:
        """Sends a request through the window; returns it and what the provider got."""
        request = self.tenant.submit(CALL, RowsPayload(self.rows(num_rows), is_masked=True), REPLY_COLS)
        header, payload = self.hear()
        assert header.code == IN_WINDOW
        return request, header, Area.unpack(payload)

    @staticmethod
    def rows(num_rows: int) -> torch.Tensor:
        return torch.arange(num_rows * COLS, dtype=torch.int32).view(num_rows, COLS)

    def say(
        self, header: Header, kind: FrameType = FrameType.REPLY, code: int = IN_WINDOW, payload: bytes = b""
    ) -> None:
        """Answers a request."""
        size = 0 if kind is FrameType.ERROR else header.rows * REPLY_COLS * 4
        call = CALL if kind is FrameType.REPLY else frame.Header(kind).call
        shape = (header.rows, REPLY_COLS) if kind is FrameType.REPLY else (0, 0)
        self.provider.far.send(Header(kind, header.request_id, call, *shape, 0, size, 0, code).pack() + payload)

    def close(self) -> None:
        self.tenant.close()
        self.provider.close()


@pytest.fixture
def stream(driver: Driver) -> Iterator[Stream]:
    made = Stream(driver)
    yield made
    made.close()


def test_rows_lie_in_the_window_and_the_reply_is_a_copy(stream: Stream) -> None:
    """A provider that changes the window after its reply changes no number of the tenant's."""
    request, header, area = stream.ask()
    assert torch.equal(stream.memory.matrix(area.rows_at, 5, COLS), stream.rows(5))
    place = stream.memory.matrix(area.reply_at, 5, REPLY_COLS)
    place.fill_(3)
    stream.say(header)
    reply = request.result()
    place.fill_(4)
    assert reply.tolist() == [[3] * REPLY_COLS] * 5
    assert stream.window.free_bytes == stream.window.num_bytes


def test_a_retry_sends_the_tenants_own_rows(stream: Stream) -> None:
    """What a provider has written over the rows is not sent again: rows are always copied from the tenant's memory."""
    payload = RowsPayload(stream.rows(5), is_masked=True)
    for _ in range(2):
        request = stream.tenant.submit(CALL, payload, REPLY_COLS)
        header, place = stream.hear()
        rows = stream.memory.matrix(Area.unpack(place).rows_at, 5, COLS)
        assert torch.equal(rows, stream.rows(5))
        rows.fill_(-1)
        stream.say(header, FrameType.ERROR, WireCode.QUOTA)
        with pytest.raises(QuotaExceeded):
            request.result()
    assert stream.window.free_bytes == stream.window.num_bytes


def test_a_reply_by_the_socket_to_a_request_in_the_window(stream: Stream) -> None:
    request, header, _ = stream.ask()
    stream.say(header, code=0, payload=bytes(5 * REPLY_COLS * 4))
    with pytest.raises(MalformedFrame, match="not where its request was"):
        request.result()


def test_a_reply_in_the_window_to_a_request_by_the_socket(stream: Stream) -> None:
    request = stream.tenant.submit(CALL, RowsPayload(stream.rows(5)), REPLY_COLS)
    header, payload = stream.hear()
    assert len(payload) == 5 * COLS * 4
    stream.say(header)
    with pytest.raises(MalformedFrame, match="not where its request was"):
        request.result()


@pytest.mark.parametrize(("payload", "offset"), [(b"x" * 4, 0), (b"", 4)])
def test_a_reply_in_the_window_with_a_payload(stream: Stream, payload: bytes, offset: int) -> None:
    request, header, _ = stream.ask()
    size = 5 * REPLY_COLS * 4
    shape = Header(FrameType.REPLY, header.request_id, CALL, 5, REPLY_COLS, offset, size, 0, IN_WINDOW)
    stream.provider.far.send(shape.pack() + payload)
    with pytest.raises(MalformedFrame, match="came with a payload"):
        request.result()


def test_a_reader_that_is_interrupted_leaves_no_other_waiting(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads the reply to another's request, and a signal comes while it copies the reply."""
    request, header, _ = stream.ask()
    stream.say(header)
    monkeypatch.setattr(stream.window, "reply", raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        request.result()
    with pytest.raises(Unavailable, match="interrupted"):
        request.result()


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_a_lost_gpu_leaves_the_socket(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RuntimeError("CUDA error: number 12345")
    monkeypatch.setattr(stream.window.memory, "write", raiser(lost))
    for _ in range(2):
        stream.tenant.submit(CALL, RowsPayload(stream.rows(5), is_masked=True), REPLY_COLS)
        header, payload = stream.hear()
        assert (header.code, len(payload)) == (0, 5 * COLS * 4)
        monkeypatch.undo()
        monkeypatch.setattr(window_module, "LEAST_BYTES", 1)
    assert stream.window.is_lost


def test_a_gpu_that_is_lost_before_a_reply_is_read(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    request, header, _ = stream.ask()
    monkeypatch.setattr(stream.window.memory, "read", raiser(RuntimeError("CUDA error: number 12345")))
    stream.say(header)
    with pytest.raises(TransportError, match=r"could not be read from the window: RuntimeError$"):
        request.result()
    assert stream.window.is_lost


def test_a_reply_of_another_shape(stream: Stream) -> None:
    request, header, _ = stream.ask()
    header.rows += 1
    stream.say(header)
    with pytest.raises(MalformedFrame, match="shape of its request"):
        request.result()


def test_a_reply_that_comes_twice_frees_its_area_once(stream: Stream) -> None:
    first, header, area = stream.ask()
    other, second, _ = stream.ask()
    stream.say(header)
    stream.say(header)
    stream.say(second)
    first.result()
    other.result()
    assert stream.window.free_bytes == stream.window.num_bytes
    assert stream.ask()[2].rows_at == area.rows_at


def test_an_area_is_not_used_again_after_a_passed_deadline(stream: Stream) -> None:
    """The provider may still write a reply there that it had begun, over another request's rows."""
    request, header, area = stream.ask()
    stream.say(header, FrameType.ERROR, WireCode.DEADLINE)
    with pytest.raises(DeadlineExceeded):
        request.result()
    assert stream.window.free_bytes == stream.window.num_bytes - 3 * ALIGNMENT
    assert stream.ask()[2].rows_at != area.rows_at


def test_an_area_is_not_used_again_after_the_tenants_own_deadline(stream: Stream) -> None:
    request, header, _ = stream.ask()
    request.expires_at = 0.0
    with pytest.raises(DeadlineExceeded):
        request.result()
    cancel, _ = stream.hear()
    assert (cancel.kind, cancel.request_id) == (FrameType.CANCEL, header.request_id)
    assert stream.window.free_bytes < stream.window.num_bytes


def test_a_window_is_let_go_with_its_stream(stream: Stream) -> None:
    before = stand_in().mapped_bytes
    request, _, _ = stream.ask()
    del stream.window
    stream.tenant.close()
    with pytest.raises(Unavailable):
        request.result()
    assert stand_in().mapped_bytes == before - UNIT
