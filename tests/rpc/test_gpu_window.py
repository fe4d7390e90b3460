"""Tests windows: memory of a GPU that tenant and provider share. The GPU is torch's `cpu` device, and its driver a
stand-in that is compiled against cuda.h."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from provider.device.on_device import OnDevice
from provider.engine.profile import make_scheduler
from provider.model.served_model import ServedModel
from provider.net.windows import LEAST_BYTES, Windows
from provider.schedule.fairness import Policy
from provider.shards.router import Shard
from tests.support.cuda import UNIT, StandIn, stand_in
from tests.support.providers import Provider, service_of
from tests.support.raw_peers import RawStream, SocketLink, connect_ipc, port_of
from tests.support.ring_products import CALL, COLS, REPLY_COLS, ask, ring_rows
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import ConfigurationError, QuotaExceeded, VeilbaseError, WireCode
from wire.frame import IN_WINDOW, Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.gpu_window.memory import Area, Driver
from wire.payload import RowsPayload
from wire.ring.seeded_rows import SeededRows
from wire.transport.ipc import window as window_module
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.connection import IpcConnection

CPU = torch.device("cpu")
CARRIED = "ipc and a window on the GPU"


@pytest.fixture(autouse=True)
def cuda() -> Iterator[StandIn]:
    """Provides the stand-in, and checks afterwards that no end has kept memory."""
    made = stand_in()
    yield made
    made.limit()
    until(lambda: gc.collect() is not None and made.mapped_bytes == 0, "the end of all windows")
    assert made.num_handles == 0


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small requests go through a window, too."""
    monkeypatch.setattr(window_module, "LEAST_BYTES", 1)


@pytest.fixture
def windows(cuda: StandIn) -> Iterator[Windows]:
    made = Windows(CPU, 4 * UNIT * 4, cuda.library)
    yield made
    made.drop()


@pytest.fixture
def provider(
    start: Callable[..., Provider], tiny_served_model: ServedModel, windows: Windows, cuda: StandIn
) -> Provider:
    return start(tiny_served_model, tensor_port=None, ipc=True, windows=windows)


def tenant_of(provider: Provider, cuda: StandIn, name: str = "acme", gpu: torch.device = CPU) -> IpcConnection:
    connection = IpcConnection(provider.ipc_url, provider.identity(name), gpu=gpu, driver=cuda.library)
    provider.connections.append(connection)
    return connection


def masked(rows: torch.Tensor) -> RowsPayload:
    return RowsPayload(rows, is_masked=True)


def product(connection: IpcConnection, rows: torch.Tensor) -> torch.Tensor:
    return connection.submit(CALL, masked(rows), REPLY_COLS).result()


# ---- the way it should be -------------------------------------------------------------------------------------------


def test_masked_rows_and_replies_cross_no_socket(provider: Provider, windows: Windows, cuda: StandIn) -> None:
    connection = tenant_of(provider, cuda)
    for num_rows in (1, 3, 700):
        rows = ring_rows(num_rows)
        before = connection.traffic.bytes_up, connection.traffic.bytes_down
        assert torch.equal(product(connection, rows), provider.served_model.compute(CALL, rows))
        up, down = (new - old for new, old in zip(
            (connection.traffic.bytes_up, connection.traffic.bytes_down), before, strict=True
        ))  # fmt: skip
        assert up >= rows.numel() * 4, "what is in a window counts as sent"
        assert down >= num_rows * REPLY_COLS * 4
    assert connection.carrier == CARRIED
    assert windows.taken_bytes > 0


def test_many_requests_share_a_window(provider: Provider, cuda: StandIn) -> None:
    """Requests of several threads are answered each with its own product, and all areas come back."""
    connection, failures = tenant_of(provider, cuda), []

    def work(seed: int) -> None:
        try:
            for step in range(12):
                rows = ring_rows(50 + 37 * step, seed=100 * seed + step)
                if not torch.equal(product(connection, rows), provider.served_model.compute(CALL, rows)):
                    raise AssertionError("another product")
        except BaseException as exc:  # noqa: BLE001 - a test's thread hands its failure over
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    window = connection.window
    assert window is not None
    assert window.free_bytes == window.num_bytes


def spied(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list that gets the payload of every REQUEST that a tenant's stream sends."""
    sent: list[bytes] = []
    send = window_module.ClearSocket.send

    def spy(self: window_module.ClearSocket, message: bytes | memoryview) -> None:
        if message[0] == FrameType.REQUEST:
            sent.append(bytes(message[frame.HEADER_BYTES :]))
        send(self, message)

    monkeypatch.setattr(window_module.ClearSocket, "send", spy)
    return sent


def test_only_masked_rows_of_products_go_into_a_window(
    provider: Provider, cuda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, rows = tenant_of(provider, cuda), ring_rows(9)
    product(connection, rows)
    window = connection.window
    assert window is not None
    sent, taken = spied(monkeypatch), []
    areas, take = window.areas, window.areas.take
    monkeypatch.setattr(areas, "take", lambda *sizes: taken.append(sizes) or take(*sizes))
    backward = Call(0, Direction.BACKWARD, Arithmetic.RING)
    effect = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.EFFECT)
    floats = torch.randn(9, COLS)
    connection.submit(CALL, RowsPayload(rows), REPLY_COLS).result()  # not masked
    connection.submit(effect, masked(rows), REPLY_COLS).result()
    connection.submit(Call(0, Direction.FORWARD, Arithmetic.FLOAT), masked(floats), REPLY_COLS).result()
    ask(connection, SeededRows(bytes(32), 0, 9), Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT))
    assert taken == []
    assert [len(payload) for payload in sent] == [9 * COLS * 4] * 3 + [48]
    connection.submit(backward, masked(ring_rows(9, REPLY_COLS)), COLS).result()
    assert len(taken) == 1
    assert len(sent[-1]) == 16


def test_small_requests_go_by_the_socket(provider: Provider, cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "LEAST_BYTES", 20 * (COLS + REPLY_COLS) * 4)
    connection = tenant_of(provider, cuda)
    connection.reconnect()
    sent = spied(monkeypatch)
    product(connection, ring_rows(19))
    product(connection, ring_rows(20))
    assert [len(payload) for payload in sent] == [19 * COLS * 4, 16]


def test_a_window_without_room_leaves_the_socket(
    provider: Provider, cuda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = tenant_of(provider, cuda)
    connection.reconnect()
    assert connection.window is not None
    everything = connection.window.areas.take(connection.window.num_bytes, 0)
    sent, rows = spied(monkeypatch), ring_rows(8)
    assert torch.equal(product(connection, rows), provider.served_model.compute(CALL, rows))
    assert len(sent[0]) == 8 * COLS * 4
    assert everything is not None
    connection.window.give_back(everything)
    product(connection, rows)
    assert len(sent[1]) == 16


def test_a_provider_that_computes_on_a_device(
    start: Callable[..., Provider], tiny_served_model: ServedModel, windows: Windows, cuda: StandIn
) -> None:
    """Requests in windows share products with requests that came by the socket."""
    served = tiny_served_model
    replica = OnDevice(list(served.served.groups), CPU)
    scheduler = make_scheduler(served.served, Policy(), profiled=False)
    shard = Shard(range(len(served.manifest().groups)), [replica], scheduler)
    provider = start(served, tensor_port=None, ipc=True, windows=windows, shards=[shard])
    near, far = tenant_of(provider, cuda), provider.connect("other")
    pending = []
    for step in range(20):
        rows = ring_rows(20 + step, seed=step)
        pending.append((near.submit(CALL, masked(rows), REPLY_COLS), rows))
        pending.append((far.submit(CALL, masked(rows), REPLY_COLS), rows))
    for request, rows in pending:
        assert torch.equal(request.result(), served.compute(CALL, rows))
    replica.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu(start: Callable[..., Provider], tiny_served_model: ServedModel) -> None:
    """Both ends are in this process, so this shows the driver's calls and copies, and not two processes."""
    served, gpu = tiny_served_model, torch.device("cuda", 0)
    replica = OnDevice(list(served.served.groups), gpu)
    shard = Shard(
        range(len(served.manifest().groups)), [replica], make_scheduler(served.served, Policy(), profiled=False)
    )
    provider = start(served, tensor_port=None, ipc=True, windows=Windows(gpu, 1 << 28), shards=[shard])
    connection = IpcConnection(provider.ipc_url, provider.identity(), gpu=gpu)
    provider.connections.append(connection)
    for num_rows in (1, 3, 700):
        rows = ring_rows(num_rows)
        assert torch.equal(product(connection, rows), served.compute(CALL, rows))
    assert connection.carrier == CARRIED
    replica.close()


# ---- no window ------------------------------------------------------------------------------------------------------


def test_a_provider_that_offers_none(
    start: Callable[..., Provider], tiny_served_model: ServedModel, cuda: StandIn
) -> None:
    provider = start(tiny_served_model, tensor_port=None, ipc=True)
    connection, rows = tenant_of(provider, cuda), ring_rows(5)
    assert torch.equal(product(connection, rows), provider.served_model.compute(CALL, rows))
    assert connection.carrier == "ipc"


def test_a_tenant_on_another_gpu_gets_none(provider: Provider, windows: Windows, cuda: StandIn) -> None:
    connection, rows = tenant_of(provider, cuda, gpu=torch.device("cpu", 1)), ring_rows(5)
    assert torch.equal(product(connection, rows), provider.served_model.compute(CALL, rows))
    assert (connection.carrier, windows.taken_bytes) == ("ipc", 0)


def test_a_tenant_without_the_driver_says_so_and_goes_on(
    provider: Provider, caplog: pytest.LogCaptureFixture, cuda: StandIn
) -> None:
    connection = IpcConnection(provider.ipc_url, provider.identity(), gpu=CPU, driver="no-such-library.so")
    provider.connections.append(connection)
    product(connection, ring_rows(5))
    assert connection.carrier == "ipc"
    assert [one.getMessage() for one in caplog.records if "no window" in one.getMessage()] != []


def test_a_device_without_memory_leaves_the_socket(provider: Provider, windows: Windows, cuda: StandIn) -> None:
    cuda.limit(0)
    connection = tenant_of(provider, cuda)
    product(connection, ring_rows(5))
    assert (connection.carrier, windows.taken_bytes) == ("ipc", 0)


def test_all_windows_stay_within_the_budget(provider: Provider, windows: Windows, cuda: StandIn) -> None:
    """One tenant gets half of it at most. What a stream had is the tenant's when it ends, unless others need it."""
    first, second = tenant_of(provider, cuda), tenant_of(provider, cuda)
    first.reconnect()
    second.reconnect()
    assert (first.carrier, second.carrier) == (CARRIED, "ipc")
    assert windows.taken_bytes == 2 * UNIT * 4
    other, third = tenant_of(provider, cuda, "other"), tenant_of(provider, cuda, "third")
    other.reconnect()
    third.reconnect()
    assert (other.carrier, third.carrier) == (CARRIED, "ipc")
    assert windows.taken_bytes == 4 * UNIT * 4
    first.close()
    until(lambda: windows.num_open == 1, "the end of the first window")
    again = tenant_of(provider, cuda)
    again.reconnect()
    assert (again.carrier, windows.taken_bytes) == (CARRIED, 4 * UNIT * 4)
    again.close()
    until(lambda: windows.num_open == 1, "the end of the window")
    third.close()
    late = tenant_of(provider, cuda, "third")
    late.reconnect()
    assert (late.carrier, windows.taken_bytes) == (CARRIED, 4 * UNIT * 4)


def test_a_tenant_that_keeps_descriptors_gets_no_more_memory(
    provider: Provider, windows: Windows, cuda: StandIn
) -> None:
    """Each stream gets the memory of the last one again, with zeros, so what a tenant keeps is in the budget."""
    kept: set[tuple[int, int]] = set()
    for turn in range(5):
        connection = connect_ipc(provider, "keeper")
        asked = Driver(0, cuda.library).uuid() + (64 << 20).to_bytes(8, "little")
        connection.send(Header(FrameType.WINDOW, total_bytes=len(asked)).pack() + asked)
        _, descriptor = connection.receive_with_descriptor(time.monotonic() + WAIT_S)
        assert descriptor is not None
        found = os.fstat(descriptor)
        kept.add((found.st_dev, found.st_ino))
        assert os.pread(descriptor, 8, 0) == bytes(8)
        os.pwrite(descriptor, b"leftover", 0)
        os.close(descriptor)
        connection.release()
        until(lambda: not windows.num_open, "the end of the stream")
        assert windows.taken_bytes == 2 * UNIT * 4, turn
    assert len(kept) == 1


def test_a_refused_tenant_asks_again_later(provider: Provider, windows: Windows, cuda: StandIn) -> None:
    """A provider that refuses for a while has not become one that knows no windows."""
    connection = tenant_of(provider, cuda)
    connection.manifest()
    service = service_of(provider)
    for _ in range(3):
        with contextlib.ExitStack() as full:
            until(lambda: not service.status().calls, "the end of earlier calls")
            for number in range(8):
                full.callback(connect_and_wait(provider, number).release)
            with pytest.raises(QuotaExceeded):
                connection.reconnect()
    until(lambda: not service.status().calls, "the end of all calls")
    connection.reconnect()
    assert connection.carrier == CARRIED


def connect_and_wait(provider: Provider, number: int) -> ClearSocket:
    """Opens a stream of the tenant `acme`, and waits until it is one of its calls."""
    connection = connect_ipc(provider, "acme")
    connection.send(frame.hello(FrameType.HELLO))
    until(lambda: len(service_of(provider).sessions) > number, "the stream")
    return connection


def test_a_device_that_cannot_share_memory_stops_the_start(cuda: StandIn) -> None:
    cuda.misses(103)
    with pytest.raises(ConfigurationError, match="cpu cannot share memory with tenants: leave --gpu-windows out"):
        Windows(CPU, 1 << 24, cuda.library)
    cuda.misses()
    with pytest.raises(ConfigurationError, match="cannot share memory"):
        Windows(CPU, 1 << 24, "no-such-library.so")


# ---- tenants that lie -----------------------------------------------------------------------------------------------


class RawWindow:
    """Holds a stream of raw messages with a window, whose memory the test writes itself."""

    def __init__(self, provider: Provider, cuda: StandIn, name: str = "raw") -> None:
        connection = connect_ipc(provider, name)
        made = window_module.ask(connection, Driver(0, cuda.library), CPU)
        assert made is not None
        self.window, self.connection, self._link = made, connection, SocketLink(connection)
        self._send(frame.hello(FrameType.HELLO))
        assert self.receive()[0].kind is FrameType.WELCOME

    def _send(self, message: bytes) -> None:
        self.connection.send(message)

    def request(self, payload: bytes, num_rows: int = 4, call: Call = CALL, number: int = 1, cols: int = COLS) -> None:
        header = Header(FrameType.REQUEST, number, call, num_rows, cols, 0, num_rows * cols * 4, 30_000, IN_WINDOW)
        self._send(header.pack() + payload)

    def receive(self) -> tuple[Header, memoryview]:
        return frame.parse(next(self._link))

    def expect_error(self, code: WireCode, number: int = 1) -> None:
        header, _ = self.receive()
        assert (header.kind, header.request_id, WireCode(header.code)) == (FrameType.ERROR, number, code)

    def expect_product(self, provider: Provider, number: int) -> None:
        """Checks that the stream still computes."""
        rows = ring_rows(4)
        self.window.memory.matrix(0, 4, COLS).copy_(rows)
        self.request(Area(0, 4096).pack(), number=number)
        header, payload = self.receive()
        assert (header.kind, header.code, len(payload)) == (FrameType.REPLY, IN_WINDOW, 0)
        found = self.window.memory.matrix(4096, 4, REPLY_COLS)
        assert torch.equal(found, provider.served_model.compute(CALL, rows))

    def close(self) -> None:
        self.connection.release()
        del self.window


@pytest.fixture
def raw(provider: Provider, cuda: StandIn) -> Iterator[RawWindow]:
    made = RawWindow(provider, cuda)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("rows_at", "reply_at"),
    [
        (2**64 - 256, 0), (0, 2**64 - 256), (2**63, 0), (1, 0), (0, 2), (2 * UNIT * 4, 0), (0, 2 * UNIT * 4),
        (2 * UNIT * 4 - 4, 0), (0, 2 * UNIT * 4 - 4 * REPLY_COLS * 4 + 4),
    ],
)  # fmt: skip
def test_places_beyond_the_window_fail_one_request(
    provider: Provider, raw: RawWindow, rows_at: int, reply_at: int
) -> None:
    raw.request(Area(rows_at, reply_at).pack())
    raw.expect_error(WireCode.INVALID_TENSOR)
    raw.expect_product(provider, number=2)


def test_the_last_bytes_of_a_window_can_be_used(provider: Provider, raw: RawWindow) -> None:
    end, rows = raw.window.num_bytes, ring_rows(4)
    raw.window.memory.matrix(end - rows.numel() * 4, 4, COLS).copy_(rows)
    raw.request(Area(end - rows.numel() * 4, 0).pack())
    assert raw.receive()[0].kind is FrameType.REPLY
    found = raw.window.memory.matrix(0, 4, REPLY_COLS)
    assert torch.equal(found, provider.served_model.compute(CALL, rows))


@pytest.mark.parametrize("size", [0, 15, 17, 512])
def test_a_payload_that_names_no_two_places(raw: RawWindow, size: int) -> None:
    raw.request(bytes(size))
    raw.expect_error(WireCode.MALFORMED)


@pytest.mark.parametrize(
    "call",
    [
        Call(0, Direction.FORWARD, Arithmetic.FLOAT),
        Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.EFFECT),
        Call(0, Direction.FORWARD, Arithmetic.FLOAT, Purpose.EFFECT),
    ],
)
def test_other_work_than_ring_products(provider: Provider, raw: RawWindow, call: Call) -> None:
    """Numbers that are checked, such as floats, could change after the check."""
    raw.request(Area(0, 4096).pack(), call=call)
    raw.expect_error(WireCode.INVALID_TENSOR)
    raw.expect_product(provider, number=2)


def test_a_window_that_was_not_given(provider: Provider) -> None:
    stream = RawStream(provider)
    (message,) = stream.request(1, ring_rows(4), code=IN_WINDOW)
    stream.send(message)
    stream.expect_error(0, WireCode.MALFORMED)
    stream.expect_end()


def test_more_chunks_after_a_window(provider: Provider, raw: RawWindow) -> None:
    """A request whose rows are in the window is complete, so a chunk that comes after its answer is ignored, as that of
    any other request that has ended."""
    service = service_of(provider)
    raw.request(Area(0, 4096).pack(), number=1)
    raw.receive()
    until(lambda: not service.status().num_requests, "the end of the request")
    header = Header(FrameType.REQUEST, 1, CALL, 4, COLS, 4, 4 * COLS * 4, 30_000)
    raw.connection.send(header.pack() + bytes(4))
    raw.expect_product(provider, number=2)


def test_limits_hold_for_windows(provider: Provider, raw: RawWindow) -> None:
    raw.request(Area(0, 0).pack(), num_rows=5000)
    raw.expect_error(WireCode.LIMIT)
    raw.request(Area(0, 0).pack(), cols=COLS + 1, number=2)
    raw.expect_error(WireCode.INVALID_TENSOR, number=2)
    raw.expect_product(provider, number=3)


@pytest.mark.parametrize("payload", [b"", bytes(23), bytes(25)])
def test_a_question_that_is_malformed_ends_the_connection(provider: Provider, payload: bytes) -> None:
    stream = RawStream(provider, greet=False)
    stream.send(Header(FrameType.WINDOW, total_bytes=len(payload)).pack() + payload)
    stream.expect_error(0, WireCode.MALFORMED)
    stream.close()
    until(lambda: not port_of(provider).status().num_connections, "the end of the connection")


@pytest.mark.parametrize("num_bytes", [0, 1, LEAST_BYTES - 1])
def test_a_tenant_that_takes_less_than_the_least_gets_none(
    provider: Provider, windows: Windows, cuda: StandIn, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_module, "WANTED_BYTES", num_bytes)
    connection = tenant_of(provider, cuda)
    product(connection, ring_rows(3))
    assert (connection.carrier, windows.taken_bytes) == ("ipc", 0)


def test_a_second_question_ends_the_stream(raw: RawWindow) -> None:
    raw.connection.send(Header(FrameType.WINDOW, total_bytes=24).pack() + bytes(24))
    raw.expect_error(WireCode.MALFORMED, number=0)


def test_other_connections_know_no_windows(
    start: Callable[..., Provider], tiny_served_model: ServedModel, windows: Windows
) -> None:
    provider = start(tiny_served_model, windows=windows)
    stream = RawStream(provider, greet=False)
    stream.send(Header(FrameType.WINDOW, total_bytes=24).pack() + bytes(24))
    stream.expect_error(0, WireCode.MALFORMED)
    stream.expect_end()


def test_a_tenant_that_leaves_in_mid_product(provider: Provider, windows: Windows, cuda: StandIn) -> None:
    """Products that still run read memory that is still mapped, and the budget comes back."""
    for turn in range(5):
        raw = RawWindow(provider, cuda, f"gone{turn}")
        for number in range(1, 9):
            raw.request(Area(0, 1 << 20).pack(), num_rows=2000, number=number)
        raw.close()
    until(lambda: windows.num_open == 0, "the end of all windows")
    late = RawWindow(provider, cuda, "late")
    late.expect_product(provider, number=1)
    late.close()


def test_a_revoked_tenant_is_not_given_a_window(provider: Provider, cuda: StandIn, windows: Windows) -> None:
    from provider.identity.registry import revoke

    connection = tenant_of(provider, cuda, "gone")
    connection.manifest()
    revoke(provider.state, "gone")
    with pytest.raises(VeilbaseError, match="revoked"):
        connection.reconnect()
    assert windows.taken_bytes == 0


def test_what_a_window_held_is_not_seen_by_the_next_tenant(provider: Provider, cuda: StandIn, windows: Windows) -> None:
    first = RawWindow(provider, cuda, "first")
    first.window.memory.matrix(0, 1, first.window.num_bytes // 4).fill_(7)
    first.close()
    until(lambda: windows.num_open == 0, "the end of the first window")
    for name in ("first", "second"):  # the same tenant gets the same memory
        later = RawWindow(provider, cuda, name)
        assert not later.window.memory.matrix(0, 1, later.window.num_bytes // 4).any()
        later.close()
        until(lambda: windows.num_open == 0, "the end of the window")


def test_the_commands_refuse_windows_without_their_conditions(tmp_path: Path) -> None:
    from provider.config import ProviderSettings

    def line(**given: object) -> str:
        with pytest.raises(ConfigurationError) as error:
            ProviderSettings(tls=True, **{"gpu_windows": "64MiB", **given}).check_conflicts()  # type: ignore[arg-type]
        return str(error.value)

    assert line(ipc=tmp_path, gpu_windows="7MiB") == "--gpu-windows is 0 or at least 8MiB, for one window a tenant"

    assert line() == "--gpu-windows is for tenants on this host: add --ipc"
    assert line(ipc=tmp_path, device="cpu") == "--gpu-windows needs a GPU that computes: expected --device auto or cuda"
    assert line(ipc=tmp_path, parallel="tensor").startswith("--gpu-windows needs a GPU")
    for other in ({"shards": 2}, {"replicas": 2}):
        assert line(ipc=tmp_path, **other).startswith("--gpu-windows needs a provider of one process")
    assert line(ipc=tmp_path, record=tmp_path).startswith("--record writes down what crosses the socket")
    ProviderSettings(tls=True, ipc=tmp_path, gpu_windows="64MiB").check_conflicts()  # type: ignore[arg-type]
