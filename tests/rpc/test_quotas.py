"""Tests what one tenant may have in flight: refusals name a time, and the client retries after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.profile import make_scheduler
from provider.engine.replica import Here
from provider.model.served_model import ServedModel
from provider.net.admission import EVERYBODY, Admission
from provider.net.session import Session
from provider.operations.metrics import latency_name
from provider.operations.usage import CLASSES, UsageCounter
from provider.schedule.fairness import Policy
from provider.schedule.quota import TenantLimits
from provider.schedule.ticket import DECODE_IN_FLIGHT, RequestClass
from tests.support.providers import LIMITS, Provider
from tests.support.raw_peers import RawStream
from tests.support.ring_products import CALL, COLS, REPLY_COLS, ask, assert_served, ring_rows
from tests.support.waiting import until
from wire import frame
from wire.errors import LimitExceeded, NotPermitted, QuotaExceeded, RemoteFault, VeilbaseError, WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.limits import MAX_RETRY_S
from wire.payload import MessagePayload, Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import SeededRows
from wire.transport import retry
from wire.transport.multiplexer import Request
from wire.transport.retry import MAX_WAIT_S, with_jitter

StartWith = Callable[..., Provider]


def start_with(start: StartWith, served_model: ServedModel, name: str = "acme", **limits: object) -> Provider:
    return start(served_model, Admission({name: TenantLimits.model_validate(limits)}))


@pytest.fixture
def streams() -> Iterator[list[RawStream]]:
    opened: list[RawStream] = []
    yield opened
    for stream in opened:
        stream.close()


# ---- the provider ---------------------------------------------------------------------------------------------------


def test_a_refusal_says_when_to_come_again(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream]
) -> None:
    provider = start_with(start, tiny_served_model, rows_per_s=100)
    streams.append(stream := RawStream(provider, "acme"))
    stream.send(*stream.request(1, ring_rows(400)))  # uses 300 rows in advance, which are three seconds
    assert stream.receive().kind is FrameType.REPLY
    stream.send(*stream.request(2, ring_rows(50)))
    assert 2000 <= stream.expect_error(2, WireCode.QUOTA).deadline_ms <= 3500
    assert_served(provider.connect("another"), tiny_served_model)


def test_a_quota_is_one_for_all_streams_and_for_the_next_visit(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream]
) -> None:
    provider = start_with(start, tiny_served_model, rows_per_s=100)
    for number in (1, 2):
        streams.append(stream := RawStream(provider, "acme"))
        stream.send(*stream.request(1, ring_rows(3000)))
        if number == 1:
            assert stream.receive().kind is FrameType.REPLY
            stream.close()
        else:
            stream.expect_error(1, WireCode.QUOTA)


@pytest.mark.parametrize("limit", [{"max_rows_in_flight": 5000}, {"max_in_flight_bytes": "2MiB"}])
def test_what_is_in_flight_counts_over_all_streams(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream], limit: dict[str, object]
) -> None:
    provider = start_with(start, tiny_served_model, **limit)
    streams += [RawStream(provider, "acme") for _ in range(2)]
    half = ring_rows(4096)  # 0.5 MiB for the request, 1 MiB for the reply
    incomplete = streams[0].request(1, half)[0][: frame.HEADER_BYTES + 4]  # keeps its place until the rest is received
    streams[0].send(incomplete, *streams[0].request(2, ring_rows(1)))
    assert streams[0].receive().request_id == 2
    streams[1].send(*streams[1].request(1, half))
    assert 0 < streams[1].expect_error(1, WireCode.QUOTA).deadline_ms <= 1000
    streams[0].send(Header(FrameType.CANCEL, 1).pack(), *streams[0].request(3, ring_rows(1)))
    assert streams[0].receive().request_id == 3
    streams[1].send(*streams[1].request(2, half))
    assert streams[1].receive().request_id == 2


def test_bytes_a_second(start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream]) -> None:
    row_bytes = (COLS + REPLY_COLS) * 4
    provider = start_with(start, tiny_served_model, bytes_per_s=100 * row_bytes)
    streams.append(stream := RawStream(provider, "acme"))
    stream.send(*stream.request(1, ring_rows(400)))  # requests and replies count; 300 rows are used in advance
    assert stream.receive().kind is FrameType.REPLY
    stream.send(*stream.request(2, ring_rows(50)))
    assert 2000 <= stream.expect_error(2, WireCode.QUOTA).deadline_ms <= 3500


def test_requests_in_flight_are_bounded_however_small(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.net.session.MAX_REQUESTS", 5)
    provider = start_with(start, tiny_served_model)
    streams.append(stream := RawStream(provider, "acme"))
    for number in range(1, 7):
        stream.send(stream.request(number, ring_rows(1))[0][: frame.HEADER_BYTES + 4])
    assert 0 < stream.expect_error(6, WireCode.QUOTA).deadline_ms <= 1000
    stream.send(Header(FrameType.CANCEL, 1).pack(), *stream.request(7, ring_rows(1)))
    assert stream.receive().request_id == 7


def test_small_requests_of_many_streams_are_not_all_decode(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream]
) -> None:
    """Of one tenant's small requests, only a few at a time count as decode, on all streams together. Otherwise a tenant
    with eight streams would get eight times the share of another tenant that decodes."""
    admission = Admission()
    provider = start(tiny_served_model, admission)

    def count() -> dict[str, int]:
        histograms = provider.service.meter.snapshot()[1]
        return {one.name: sum(histograms[latency_name(one)].counts) for one in RequestClass}

    for _ in range(DECODE_IN_FLIGHT):
        streams.append(stream := RawStream(provider, "acme"))
        stream.send(stream.request(1, ring_rows(1))[0][: frame.HEADER_BYTES + 4])  # is in flight until it is whole
    streams.append(last := RawStream(provider, "acme"))
    until(lambda: admission.of("acme").num_decode == DECODE_IN_FLIGHT, "all that may count as decode")
    last.send(*last.request(1, ring_rows(1)))
    assert last.receive().kind is FrameType.REPLY
    assert count() == {"DECODE": 0, "PREFILL": 1, "FINETUNE": 0}
    assert_served(provider.connect("another"), tiny_served_model)
    assert count()["DECODE"] == 1
    for stream in streams:
        stream.close()
    until(lambda: admission.of("acme").num_decode == 0, "the end of what was in flight")


def test_gradients_on_one_stream_make_the_others_fine_tuning(start: StartWith, tiny_served_model: ServedModel) -> None:
    """If one stream of a tenant carries gradients, requests on its other streams also count as fine-tuning. Otherwise a
    tenant with two streams would go before a tenant with one."""
    provider = start_with(start, tiny_served_model)
    one, other = provider.connect(), provider.connect()
    ask(one, ring_rows(20, REPLY_COLS), Call(0, Direction.BACKWARD, Arithmetic.RING), COLS)
    ask(other, ring_rows(100))
    ask(provider.connect("another"), ring_rows(100))
    histograms = provider.service.meter.snapshot()[1]
    counts = {one.name: sum(histograms[latency_name(one)].counts) for one in RequestClass}
    assert counts == {"DECODE": 0, "PREFILL": 1, "FINETUNE": 2}


def test_a_tenant_that_disconnects_leaves_nothing_in_flight(start: StartWith, tiny_served_model: ServedModel) -> None:
    admission = Admission({"acme": TenantLimits(max_rows_in_flight=5000)})
    provider = start(tiny_served_model, admission)
    stream = RawStream(provider, "acme")
    stream.send(stream.request(1, ring_rows(4096))[0][: frame.HEADER_BYTES + 4])
    stream.send(*stream.request(2, ring_rows(1)))
    assert stream.receive().request_id == 2
    stream.close()

    until(lambda: admission.of("acme").in_flight() == (0, 0), "the end of what a tenant that went away had in flight")


@pytest.mark.parametrize(
    ("allowed", "num_rows", "direction"),
    [
        ("prefill", 1, Direction.FORWARD),
        ("decode", 100, Direction.FORWARD),
        ("decode,prefill", 1, Direction.BACKWARD),
    ],
)
def test_classes_that_the_operator_does_not_allow(
    start: StartWith, tiny_served_model: ServedModel, allowed: str, num_rows: int, direction: Direction
) -> None:
    provider = start_with(start, tiny_served_model, EVERYBODY, classes=allowed.split(","))
    connection = provider.connect()
    call = Call(0, direction, Arithmetic.RING)
    cols, reply_cols = (COLS, REPLY_COLS) if direction is Direction.FORWARD else (REPLY_COLS, COLS)
    with pytest.raises(NotPermitted, match="does not allow this identity this kind of work"):
        ask(connection, ring_rows(num_rows, cols), call, reply_cols)
    other = 100 if num_rows == 1 else 1  # the stream is still open
    if direction is Direction.FORWARD:
        assert ask(connection, ring_rows(other)).shape == (other, REPLY_COLS)


@pytest.mark.parametrize("allowed", ["decode", "prefill"])
def test_who_may_decode_or_prefill_may_fetch_the_hints_of_its_mask(
    start: StartWith, tiny_served_model: ServedModel, allowed: str
) -> None:
    """Tests that a tenant that may decode or prefill may also fetch hints. Without hints, the default mask could not be
    used."""
    provider = start_with(start, tiny_served_model, EVERYBODY, classes=[allowed])
    connection = provider.connect()
    hint = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
    for num_rows in (1, 200):
        seed = SeedPayload(SeededRows(bytes(32), 0, num_rows), COLS)
        assert connection.submit(hint, seed, REPLY_COLS).result().shape[0] == num_rows
    back = Call(0, Direction.BACKWARD, Arithmetic.RING, Purpose.HINT)
    with pytest.raises(NotPermitted):
        connection.submit(back, SeedPayload(SeededRows(bytes(32), 0, 1), REPLY_COLS), COLS).result()


def test_who_may_fine_tune_may_send_what_comes_before_a_gradient(
    start: StartWith, tiny_served_model: ServedModel
) -> None:
    provider = start_with(start, tiny_served_model, EVERYBODY, classes=["finetune"])
    connection = provider.connect()
    for num_rows in (1, 100):
        assert ask(connection, ring_rows(num_rows)).shape == (num_rows, REPLY_COLS)
    back = Call(0, Direction.BACKWARD, Arithmetic.RING)
    assert ask(connection, ring_rows(3, REPLY_COLS), back, COLS).shape == (3, COLS)


def test_a_few_rows_of_a_seed_are_decode(start: StartWith, tiny_served_model: ServedModel) -> None:
    """A request that sends a seed for a single row counts as decode. Otherwise one of the two providers of `shares`,
    which gets only seeds, would do its half of a decode step after all other work."""
    provider = start_with(start, tiny_served_model)
    connection = provider.connect()
    hint = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
    connection.submit(hint, SeedPayload(SeededRows(bytes(32), 0, 1), COLS), REPLY_COLS).result()
    connection.submit(hint, SeedPayload(SeededRows(bytes(32), 0, 17), COLS), REPLY_COLS).result()
    histograms = provider.service.meter.snapshot()[1]
    counts = {one.name: sum(histograms[latency_name(one)].counts) for one in RequestClass}
    assert counts == {"DECODE": 1, "PREFILL": 0, "FINETUNE": 1}


def test_all_tenants_share_the_memory(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream]
) -> None:
    """A tenant that holds as much memory as it may is refused more, and another tenant's request still finds room."""
    row_bytes = (COLS + REPLY_COLS) * 4
    provider = start(tiny_served_model, Admission(max_in_flight_bytes=100 * row_bytes))
    streams += [RawStream(provider, "hog"), RawStream(provider, "acme")]
    for number in range(1, 6):  # ten rows each, of which only the first bytes are sent
        streams[0].send(streams[0].request(number, ring_rows(10))[0][: frame.HEADER_BYTES + 4])
    streams[0].send(streams[0].request(6, ring_rows(10))[0][: frame.HEADER_BYTES + 4])
    assert 0 < streams[0].expect_error(6, WireCode.QUOTA).deadline_ms <= 1000
    streams[1].send(*streams[1].request(1, ring_rows(40)))
    assert streams[1].receive().request_id == 1


def test_each_tenant_is_told_its_own_limits(start: StartWith, tiny_served_model: ServedModel) -> None:
    provider = start_with(start, tiny_served_model, max_request_rows=100, max_in_flight_bytes="1MiB")
    connection = provider.connect()
    announced = connection.manifest().limits
    assert (announced.max_rows, announced.max_in_flight_bytes) == (100, 1 << 20)
    assert announced.max_tensor_bytes == LIMITS.max_tensor_bytes
    assert provider.connect("another").manifest().limits == LIMITS
    with pytest.raises(LimitExceeded):
        ask(connection, ring_rows(101))
    assert ask(connection, ring_rows(100)).shape == (100, REPLY_COLS)


def test_a_long_debt_is_paid_in_visits(
    start: StartWith, tiny_served_model: ServedModel, streams: list[RawStream]
) -> None:
    provider = start_with(start, tiny_served_model, rows_per_s=10)
    streams.append(stream := RawStream(provider, "acme"))
    stream.send(*stream.request(1, ring_rows(4096)))  # this is enough for seven minutes
    assert stream.receive().kind is FrameType.REPLY
    stream.send(*stream.request(2, ring_rows(1)))
    assert stream.expect_error(2, WireCode.QUOTA).deadline_ms == 1000 * MAX_RETRY_S


def test_a_message_that_comes_with_the_end_of_its_stream_holds_nothing(
    start: StartWith, tiny_served_model: ServedModel
) -> None:
    admission = Admission({"acme": TenantLimits(max_rows_in_flight=50)})
    executor = Executor(
        [Here(tiny_served_model.compute)], make_scheduler(tiny_served_model.served, Policy(), profiled=False)
    )
    usage = UsageCounter(CLASSES)
    ended: list[Session] = []

    def refusal() -> None:
        ended[0].close()  # ends the stream just before the request is admitted

    session = Session("acme", LIMITS, admission.of("acme"), usage, tiny_served_model.check, executor, refusal)
    ended.append(session)
    session.receive(frame.hello(FrameType.HELLO))
    header = Header(FrameType.REQUEST, 1, CALL, 40, COLS, 0, 40 * COLS * 4, 30_000)
    session.receive(next(iter(frame.frames(header, frame.tensor_bytes(ring_rows(40))))))
    assert admission.of("acme").in_flight() == (0, 0)
    assert session.is_idle
    executor.close()


# ---- the client -----------------------------------------------------------------------------------------------------


def test_the_client_waits_and_gets_every_answer(start: StartWith, tiny_served_model: ServedModel) -> None:
    provider = start_with(start, tiny_served_model, rows_per_s=400)
    connection = provider.connect()
    rows = [ring_rows(100) for _ in range(10)]  # 400 pass at once, 600 take a second and a half
    began = time.monotonic()
    pending = [connection.submit(CALL, RowsPayload(one), REPLY_COLS) for one in rows]
    for one, x in zip(pending, rows, strict=True):
        assert torch.equal(one.result(), tiny_served_model.compute(CALL, x))
    assert 1.4 <= time.monotonic() - began <= 15


def test_threads_of_one_tenant_share_its_quota(start: StartWith, tiny_served_model: ServedModel) -> None:
    provider = start_with(start, tiny_served_model, rows_per_s=500)
    connection = provider.connect()
    right: list[bool] = []

    def work() -> None:
        for _ in range(4):
            x = ring_rows(50)
            right.append(torch.equal(ask(connection, x), tiny_served_model.compute(CALL, x)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert right == [True] * 16


class Clock:
    """Replaces `time`. Sleeping takes no time."""

    def __init__(self) -> None:
        self.now_s, self.slept = 1000.0, []  # type: tuple[float, list[float]]

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retry, "time", made)
    return made


class Refusing:
    """Implements a `Multiplexer` that refuses the first few attempts, and keeps what was submitted."""

    def __init__(self, *errors: VeilbaseError, clock: Clock | None = None, takes_s: float = 0.0) -> None:
        self.errors, self.given = list(errors), []  # type: tuple[list[VeilbaseError], list[Any]]
        self.failure: VeilbaseError | None = None
        self._clock, self._takes_s = clock, takes_s

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Request:
        self.given.append((call, payload, reply_cols))
        return Request(self, len(self.given), call, payload, reply_cols, 0)  # type: ignore[arg-type]

    def wait_for(self, request: Request) -> None:
        if self._clock is not None:
            self._clock.now_s += self._takes_s
        request.settle(self.errors.pop(0) if self.errors else torch.ones(1))


def retried(stream: Refusing, rows: torch.Tensor) -> Request:
    return stream.submit(CALL, RowsPayload(rows), REPLY_COLS)


def test_what_is_sent_again_is_the_same_tensor_and_never_too_early(clock: Clock) -> None:
    stream, rows = Refusing(QuotaExceeded("no", 0.5), QuotaExceeded("no", 2.0)), ring_rows(3)
    assert torch.equal(retried(stream, rows).result(), torch.ones(1))
    assert len(stream.given) == 3
    assert all(given[1].rows(CALL) is rows for given in stream.given)
    assert [given for given in stream.given if given != stream.given[0]] == []
    assert 0.5 <= clock.slept[0] <= 0.625
    assert 2.0 <= clock.slept[1] <= 2.5


def test_a_reply_that_came_after_a_refusal_is_kept(clock: Clock) -> None:
    """Who asks for the reply once more gets it, and sends nothing."""
    stream = Refusing(QuotaExceeded("no", 0.5))
    request = retried(stream, ring_rows(3))
    assert torch.equal(request.result(), request.result())
    assert (len(stream.given), len(clock.slept)) == (2, 1)


def test_a_row_in_a_message_is_sent_again_as_it_was(start: StartWith, tiny_served_model: ServedModel) -> None:
    provider = start_with(start, tiny_served_model, rows_per_s=10)
    connection, rows = provider.connect(), ring_rows(1)
    payload = MessagePayload(COLS)
    payload.numbers[:] = rows.numpy().tobytes()
    expected = tiny_served_model.compute(CALL, rows)
    began = time.monotonic()
    for _ in range(15):  # 10 pass at once
        assert torch.equal(connection.submit(CALL, payload, REPLY_COLS).result(), expected)
        assert payload.numbers == rows.numpy().tobytes()
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize("retry_s", [0.0, MAX_RETRY_S + 0.001, 3600.0])
def test_a_refusal_without_a_time_or_with_a_long_one_is_final(clock: Clock, retry_s: float) -> None:
    stream = Refusing(QuotaExceeded("no", retry_s))
    with pytest.raises(QuotaExceeded):
        retried(stream, ring_rows(3)).result()
    assert clock.slept == []
    assert len(stream.given) == 1


def test_other_errors_are_never_sent_again(clock: Clock) -> None:
    stream = Refusing(RemoteFault("broken"))
    with pytest.raises(RemoteFault):
        retried(stream, ring_rows(3)).result()
    assert len(stream.given) == 1


@pytest.mark.parametrize("takes_s", [0.0, 29.9])
@pytest.mark.parametrize("retry_s", [0.000001, 1.0, MAX_RETRY_S])
def test_a_provider_cannot_hold_a_tenant_for_ever(clock: Clock, retry_s: float, takes_s: float) -> None:
    refusals = [QuotaExceeded("no", retry_s) for _ in range(100_000)]
    stream = Refusing(*refusals, clock=clock, takes_s=takes_s)
    began_s = clock.now_s
    with pytest.raises(QuotaExceeded):
        retried(stream, ring_rows(3)).result()
    assert MAX_WAIT_S - 1.25 * MAX_RETRY_S <= clock.now_s - began_s <= MAX_WAIT_S + 2 * 29.9
    assert len(clock.slept) <= 350


def test_a_stream_that_has_ended_is_not_waited_for(clock: Clock) -> None:
    stream = Refusing(QuotaExceeded("no", 50.0))
    stream.failure = QuotaExceeded("the stream is over")
    with pytest.raises(QuotaExceeded):
        retried(stream, ring_rows(3)).result()
    assert clock.slept == []


def test_jitter_spreads() -> None:
    drawn = [with_jitter(1.0) for _ in range(200)]
    assert min(drawn) >= 1.0
    assert max(drawn) <= 1.25
    assert max(drawn) - min(drawn) > 0.1
