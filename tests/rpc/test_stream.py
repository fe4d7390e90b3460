"""Tests the tensor stream over real mTLS with valid requests and with every kind of invalid one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from provider.model.served_model import ServedModel
from provider.net.admission import MAX_CALLS_PER_TENANT
from tests.support.providers import LIMITS, Provider, session_of
from tests.support.raw_peers import WRONG_GREETINGS, RawStream
from tests.support.ring_products import CALL, COLS, REPLY_COLS, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S
from wire import frame
from wire.errors import (
    DeadlineExceeded,
    InvalidTensor,
    LimitExceeded,
    QuotaExceeded,
    RemoteFault,
    UnknownLayer,
    VeilbaseError,
    WireCode,
)
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.limits import CHUNK_BYTES, MAX_FRAME_BYTES
from wire.payload import RowsPayload
from wire.transport import grpc_channel


@pytest.fixture
def raw(provider: Provider) -> Iterator[RawStream]:
    stream = RawStream(provider)
    yield stream
    stream.close()


# ---- good requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 4096])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_replies_are_the_cores_own(
    provider: Provider, num_rows: int, direction: Direction, arithmetic: Arithmetic
) -> None:
    connection = provider.connect()
    call = Call(0, direction, arithmetic)
    cols, reply_cols = (COLS, REPLY_COLS) if direction is Direction.FORWARD else (REPLY_COLS, COLS)
    rows = ring_rows(num_rows, cols) if arithmetic is Arithmetic.RING else torch.randn(num_rows, cols)
    assert torch.equal(ask(connection, rows, call, reply_cols), provider.served_model.compute(call, rows))


def test_many_requests_in_flight(provider: Provider) -> None:
    connection = provider.connect()
    groups = provider.served_model.manifest().groups
    asked = [(Call(group.id, Direction.FORWARD, Arithmetic.RING), group) for group in groups for _ in range(20)]
    rows = [ring_rows(index % 40, group.in_features) for index, (_, group) in enumerate(asked)]
    pending = [
        connection.submit(call, RowsPayload(x), group.out_features)
        for (call, group), x in zip(asked, rows, strict=True)
    ]
    for (call, _), x, one in zip(asked, rows, pending, strict=True):
        assert torch.equal(one.result(), provider.served_model.compute(call, x))


def test_tenants_and_threads_do_not_mix(provider: Provider) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            connection = provider.connect(name)
            for _ in range(20):
                assert_served(connection, provider.served_model)
        except Exception as exc:  # noqa: BLE001 - reported by the test
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(f"tenant{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_manifest_and_bundle(provider: Provider) -> None:
    connection = provider.connect()
    mine = {"tensor_port": provider.server.tensor_port}
    assert connection.manifest() == provider.served_model.manifest().model_copy(update=mine)
    for file in connection.manifest().bundle:
        assert b"".join(connection.fetch(file.name)) == b"".join(provider.served_model.read_file(file.name))


@pytest.mark.parametrize("name", [b"../config.json", b"/etc/passwd", b"", b"\xff\x00", b"model.bin"])
def test_no_file_outside_the_bundle(provider: Provider, name: bytes) -> None:
    channel = grpc_channel.open_channel(provider.url, provider.identity())
    with channel, pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream(grpc_channel.BUNDLE_METHOD)(name, timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_half_closed_stream_gets_its_answers(provider: Provider, raw: RawStream) -> None:
    rows = ring_rows(100)
    raw.send(*raw.request(1, rows), *raw.request(2, rows)[:1])
    raw.send(raw.request(3, ring_rows(LIMITS.max_rows * 2))[0])  # refused, since it has too many rows
    raw.half_close()
    seen = {header.request_id: header.kind for header in (raw.receive() for _ in range(3))}
    assert seen == {1: FrameType.REPLY, 2: FrameType.REPLY, 3: FrameType.ERROR}
    raw.expect_end()


def test_small_and_large_requests_alternate(provider: Provider) -> None:
    """Small requests are computed by the receiving thread, and large ones by a worker thread. In every mix of both,
    each reply belongs to its request."""
    connection = provider.connect()
    for num_rows in (1, 1, 100, 1, 4096, 4096, 1, 1, 0, 9, 8):
        rows = ring_rows(num_rows)
        assert torch.equal(ask(connection, rows), provider.served_model.compute(CALL, rows))
    mixed = [ring_rows(num_rows) for num_rows in (1, 100, 2, 300, 3, 1, 1, 700)]
    pending = [connection.submit(CALL, RowsPayload(rows), REPLY_COLS) for rows in mixed]
    for one, rows in zip(pending, mixed, strict=True):
        assert torch.equal(one.result(), provider.served_model.compute(CALL, rows))


def test_a_stream_of_small_requests_still_ends_well(
    start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel
) -> None:
    provider = start(tiny_served_model)
    stream = RawStream(provider)
    for number in (1, 2, 3):
        stream.send(*stream.request(number, ring_rows(1)))
        assert stream.receive().request_id == number
    connection = provider.connect()
    assert_served(connection, tiny_served_model)
    assert_served(connection, tiny_served_model)
    stream.half_close()
    stream.expect_end()
    provider.server.stop()
    with pytest.raises(VeilbaseError):
        ask(connection, ring_rows(1))
    stream.close()


def test_garbage_after_small_requests(provider: Provider, raw: RawStream) -> None:
    for number in (1, 2):
        raw.send(*raw.request(number, ring_rows(1)))
        assert raw.receive().request_id == number
    raw.send(b"garbage")
    raw.expect_error(0, WireCode.MALFORMED)
    raw.expect_end()


# ---- bad requests: the request fails, the stream goes on ------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "changes", "code"),
    [
        (Call(10_000, Direction.FORWARD, Arithmetic.RING), {}, WireCode.UNKNOWN_LAYER),
        (Call(0, Direction.FORWARD, Arithmetic.RING, frame.Purpose.HINT), {}, WireCode.INVALID_TENSOR),
        (Call(0, Direction.BACKWARD, Arithmetic.RING), {}, WireCode.INVALID_TENSOR),
        (CALL, {"cols": 31}, WireCode.INVALID_TENSOR),
        (CALL, {"rows": 4}, WireCode.INVALID_TENSOR),
        (CALL, {"total_bytes": 1000}, WireCode.INVALID_TENSOR),
        (CALL, {"rows": 4097, "total_bytes": 4097 * 128}, WireCode.LIMIT),
        (CALL, {"rows": 2**32 - 1, "total_bytes": 2**39}, WireCode.LIMIT),
        (CALL, {"deadline_ms": 0}, WireCode.DEADLINE),
    ],
)
def test_a_bad_request_fails_alone(raw: RawStream, call: Call, changes: dict[str, int], code: WireCode) -> None:
    raw.send(*raw.request(1, ring_rows(5), call, **changes))
    raw.expect_error(1, code)
    raw.send(*raw.request(2, ring_rows(5)))
    assert raw.receive().request_id == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_non_finite_rows_are_refused(provider: Provider, value: float, num_rows: int) -> None:
    connection = provider.connect()
    rows = torch.zeros(num_rows, COLS)
    rows[-1, -1] = value
    with pytest.raises(InvalidTensor):
        ask(connection, rows, Call(0, Direction.FORWARD, Arithmetic.FLOAT))
    assert_served(connection, provider.served_model)


@pytest.mark.parametrize(
    ("call", "rows", "error"),
    [
        (Call(10_000, Direction.FORWARD, Arithmetic.RING), ring_rows(1), UnknownLayer),
        (CALL, ring_rows(1, 31), InvalidTensor),
        (CALL, ring_rows(4097), LimitExceeded),
    ],
)
def test_the_client_raises_the_same_errors(
    provider: Provider, call: Call, rows: torch.Tensor, error: type[VeilbaseError]
) -> None:
    connection = provider.connect()
    with pytest.raises(error):
        ask(connection, rows, call)
    assert_served(connection, provider.served_model)


def test_chunks_of_a_refused_request_are_skipped(raw: RawStream) -> None:
    wide = Call(0, Direction.BACKWARD, Arithmetic.RING)
    chunks = raw.request(1, ring_rows(2 * 8192, REPLY_COLS), wide)
    assert len(chunks) == 4
    raw.send(*chunks)
    raw.expect_error(1, WireCode.LIMIT)
    raw.send(*raw.request(2, ring_rows(5)))
    assert raw.receive().request_id == 2


def test_over_quota_is_refused_before_it_is_allocated(raw: RawStream) -> None:
    rows = ring_rows(4096)  # 0.5 MiB for the request, 1 MiB for the reply
    first = raw.request(1, rows, deadline_ms=30_000)[0]
    incomplete = first[: frame.HEADER_BYTES + 4]  # keeps its place until the rest is received
    raw.send(incomplete, raw.request(2, rows)[0][: frame.HEADER_BYTES + 4])
    raw.send(*raw.request(3, rows))
    raw.expect_error(3, WireCode.QUOTA)
    raw.send(Header(FrameType.CANCEL, 1).pack())
    raw.send(*raw.request(4, rows))
    assert raw.receive().request_id == 4


def test_a_cancelled_request_is_not_answered(raw: RawStream) -> None:
    rows = ring_rows(4096, REPLY_COLS)
    chunks = raw.request(1, rows, Call(0, Direction.BACKWARD, Arithmetic.RING))
    raw.send(chunks[0][:2000], Header(FrameType.CANCEL, 1).pack(), Header(FrameType.CANCEL, 999).pack())
    raw.send(Header(FrameType.REQUEST, 1, CALL, 1, COLS, 4, 128).pack())  # a leftover chunk
    raw.send(*raw.request(2, ring_rows(5)))
    assert raw.receive().request_id == 2


def test_an_expired_request_is_dropped(raw: RawStream) -> None:
    raw.send(raw.request(1, ring_rows(5), deadline_ms=1)[0][: frame.HEADER_BYTES + 4])
    raw.expect_error(1, WireCode.DEADLINE)  # the periodic sweep sends this at the latest
    raw.send(*raw.request(2, ring_rows(5)))
    assert raw.receive().request_id == 2


def test_an_inner_failure_is_a_number(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = provider.connect()
    assert_served(connection, provider.served_model)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("secret 123.456")

    for num_rows in (1, 2, 50):
        with monkeypatch.context() as patched:
            patched.setattr("provider.model.served_model.products.compute", broken)
            patched.setattr("wire.ring.kernels.OneRow.multiply", broken)
            with pytest.raises(RemoteFault):
                ask(connection, ring_rows(num_rows))
        assert_served(connection, provider.served_model)
    assert "123.456" not in caplog.text


# ---- bad frames: the stream ends, nobody else notices ---------------------------------------------------------------


def garbage(raw: RawStream) -> dict[str, list[bytes]]:
    good = raw.request(1, ring_rows(5))[0]
    return {
        "empty": [b""],
        "short": [b"x" * 47],
        "random": [bytes(range(256))],
        "truncated header": [good[:20]],
        "unknown type": [b"\x63" + good[1:]],
        "unknown arithmetic": [good[:2] + b"\x09" + good[3:]],
        "payload too long": [good + b"\0" * 4],
        "second hello": [frame.hello(FrameType.HELLO)],
        "reply from a tenant": [Header(FrameType.REPLY, 1, CALL).pack()],
        "request id 0": raw.request(0, ring_rows(5)),
        "no first chunk": [Header(FrameType.REQUEST, 9, CALL, 5, COLS, 4, 640, 1000).pack() + b"\0" * 8],
        "gap": [good[:100], Header(FrameType.REQUEST, 1, CALL, 5, COLS, 60, 640, 1000).pack() + b"\0" * 4],
        "same id twice": [good[:100], good[:100]],
    }


@pytest.mark.parametrize(
    "kind",
    [
        "empty", "short", "random", "truncated header", "unknown type", "unknown arithmetic", "payload too long",
        "second hello", "reply from a tenant", "request id 0", "no first chunk", "gap", "same id twice",
    ],
)  # fmt: skip
def test_a_frame_that_cannot_be_read_ends_its_stream_only(provider: Provider, raw: RawStream, kind: str) -> None:
    other = provider.connect("other")
    assert_served(other, provider.served_model)
    session = session_of(provider, "other")
    raw.send(*garbage(raw)[kind])
    raw.expect_error(0, WireCode.MALFORMED)
    raw.expect_end()
    assert_served(other, provider.served_model)
    assert [one for one in provider.service.sessions if one.tenant == "other"] == [session]  # it came only once


@pytest.mark.parametrize(("first", "code"), WRONG_GREETINGS)
def test_a_wrong_handshake(provider: Provider, first: bytes, code: WireCode) -> None:
    stream = RawStream(provider, greet=False)
    stream.send(first)
    stream.expect_error(0, code)
    stream.expect_end()
    stream.close()


def test_an_oversized_message_is_refused_by_grpc(provider: Provider) -> None:
    other = provider.connect("other")
    assert_served(other, provider.served_model)
    identity = provider.identity("raw")
    credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.secure_channel(f"127.0.0.1:{provider.server.port}", credentials, unlimited) as channel:
        call = channel.stream_stream(grpc_channel.STREAM_METHOD)(iter([b"\0" * (MAX_FRAME_BYTES + 1)]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_served(other, provider.served_model)


def test_a_tenant_that_goes_away_leaves_nothing(provider: Provider) -> None:
    stream = RawStream(provider)
    stream.send(stream.request(1, ring_rows(4096))[0][: CHUNK_BYTES // 4])
    stream.send(*stream.request(2, ring_rows(1)))
    assert stream.receive().request_id == 2
    (session,) = provider.service.sessions
    ended = threading.Event()
    session.close, close = lambda: (close(), ended.set()), session.close  # type: ignore[method-assign]
    stream.close()
    assert ended.wait(WAIT_S)
    status = session.status()
    assert (status.num_requests, status.held_bytes) == (0, 0)


def test_streams_of_one_tenant_are_bounded(provider: Provider) -> None:
    streams = [RawStream(provider, "greedy") for _ in range(MAX_CALLS_PER_TENANT)]
    one_more = RawStream(provider, "greedy", greet=False)
    one_more.expect_error(0, WireCode.QUOTA)
    one_more.expect_end()
    with pytest.raises(QuotaExceeded):
        provider.connect("greedy").manifest()
    assert_served(provider.connect("modest"), provider.served_model)
    streams.pop().close()
    RawStream(provider, "greedy").close()
    for stream in [*streams, one_more]:
        stream.close()


def test_streams_by_grpc_of_one_tenant_are_bounded(
    start: Callable[..., Provider], tiny_served_model: ServedModel
) -> None:
    provider = start(tiny_served_model, tensor_port=None)
    streams = [RawStream(provider, "greedy") for _ in range(MAX_CALLS_PER_TENANT)]
    one_more = RawStream(provider, "greedy", greet=False)
    with pytest.raises(grpc.RpcError) as caught:
        one_more.expect_end()
    # A refusal is a status and not a frame, since a tenant that does not read a frame could hold a thread.
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(QuotaExceeded):
        provider.connect("greedy").manifest()
    assert_served(provider.connect("modest"), provider.served_model)
    for stream in [*streams, one_more]:
        stream.close()


def test_a_provider_that_stops_says_so(
    start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel
) -> None:
    provider = start(tiny_served_model)
    stream = RawStream(provider)
    provider.server.stop()
    stream.expect_error(0, WireCode.UNAVAILABLE)
    stream.close()


def test_a_request_over_the_stream_limit_never_leaves(provider: Provider) -> None:
    connection = provider.connect()
    with pytest.raises(LimitExceeded):
        ask(connection, ring_rows(4096 * 8))
    assert_served(connection, provider.served_model)


def test_pending_requests_fail_when_the_provider_goes(
    start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = start(tiny_served_model)
    connection = provider.connect()
    begun, release = threading.Event(), threading.Event()

    def slow(*_: object) -> torch.Tensor:
        begun.set()
        release.wait(WAIT_S)
        return torch.zeros(50, REPLY_COLS, dtype=torch.int32)

    assert_served(connection, tiny_served_model)
    monkeypatch.setattr("provider.model.served_model.products.compute", slow)
    pending = connection.submit(CALL, RowsPayload(ring_rows(50)), REPLY_COLS)
    assert begun.wait(WAIT_S)
    stopping = threading.Thread(target=provider.server.stop)
    stopping.start()
    with pytest.raises(VeilbaseError) as caught:
        pending.result()
    assert not isinstance(caught.value, DeadlineExceeded)
    release.set()
    stopping.join(WAIT_S)
