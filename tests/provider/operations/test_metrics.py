"""Tests metrics as Prometheus reads them, on a port and on a socket, and health, status and log lines."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import stat
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.exposition import generate_latest
from rich.console import Console

from provider.operations import monitor as monitor_module
from provider.operations.logs import JsonFormatter, TextFormatter
from provider.operations.metrics import MAX_TENANTS, OTHER, Histogram, Meter, ProviderCollector, registry
from provider.operations.monitor import SERVICE_NAME, SOCKET_NAME, Monitor, read_metrics
from provider.operations.status import check, look, parse, render, show
from provider.operations.usage import UsageBook
from provider.schedule.ticket import Piece, RequestClass, Ticket
from tests.support.waiting import WAIT_S, end, until
from wire.errors import ConfigurationError, WireCode
from wire.frame import Arithmetic, Call, Direction

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


def busy() -> tuple[Meter, UsageBook]:
    meter, usage = Meter(), UsageBook()
    tickets = [
        Ticket("acme", CALL, 4, RequestClass.DECODE, 10.0),
        Ticket("globex", CALL, 300, RequestClass.PREFILL, 9.98),
    ]
    meter.batch([Piece(tickets[0], 0, 4), Piece(tickets[1], 0, 200)], 10.0002, 0.003)
    meter.batch([Piece(tickets[1], 200, 100)], 10.01, 0.002)
    meter.inline(7, 0.0004)
    usage.of("acme").answered(RequestClass.DECODE, CALL, 4, 64, 128)
    usage.of("globex").answered(RequestClass.PREFILL, CALL, 300, 4800, 9600)
    usage.of("globex").failed(WireCode.QUOTA)
    usage.of("acme").computed(0.25)
    return meter, usage


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    meter, usage = busy()
    opened = Monitor(registry(ProviderCollector(meter, usage, lambda: 3, lambda: 2, lambda: [(1, 1)])))
    yield opened
    opened.close()


def test_every_number_is_where_it_belongs() -> None:
    meter, usage = busy()
    text = generate_latest(registry(ProviderCollector(meter, usage, lambda: 3, lambda: 2, lambda: [(1, 1)]))).decode()
    seen = parse(text, 0.0)
    assert seen.get("veilbase_queue_depth") == 3
    assert seen.get("veilbase_streams") == 2
    assert seen.get("veilbase_inline_requests_total") == 1
    assert seen.get("veilbase_batch_rows_count") == 2
    assert seen.get("veilbase_batch_rows_sum") == 304
    assert seen.get("veilbase_batch_rows_bucket", le="128.0") == 1
    assert seen.get("veilbase_batch_requests_sum") == 3
    assert seen.get("veilbase_execution_seconds_sum") == pytest.approx(0.005)
    assert seen.get("veilbase_wait_seconds_count", kind="prefill") == 1  # a request in two pieces counts as one wait
    assert seen.get("veilbase_wait_seconds_sum", kind="prefill") == pytest.approx(0.0202)
    assert seen.get("veilbase_wait_seconds_bucket", kind="decode", le="0.00025") == 1
    assert seen.get("veilbase_group_requests_total", group="0") == 2
    assert seen.get("veilbase_group_wait_seconds_total", group="0") == pytest.approx(0.0204)
    assert seen.get("veilbase_group_requests_total", group="7") == 1
    assert seen.get("veilbase_group_wait_seconds_total", group="7") == 0
    assert seen.get("veilbase_latency_seconds_count", kind="decode") == 2
    assert seen.get("veilbase_latency_seconds_sum", kind="decode") == pytest.approx(0.0002 + 0.003 + 0.0004)
    assert seen.get("veilbase_latency_seconds_sum", kind="prefill") == pytest.approx(0.032)
    assert seen.get("veilbase_rows_total", tenant="globex", kind="prefill") == 300
    assert seen.get("veilbase_bytes_total", tenant="acme", direction="down") == 128
    assert seen.get("veilbase_compute_seconds_total", tenant="acme") == 0.25
    assert seen.get("veilbase_errors_total", tenant="globex", code="QUOTA") == 1


def test_connections_with_a_stream_and_without() -> None:
    collector = ProviderCollector(
        Meter(), UsageBook(), lambda: 0, lambda: 2, lambda: [(1, 1)], num_connections=lambda: (2, 5)
    )
    seen = parse(generate_latest(registry(collector)).decode(), 0.0)
    assert seen.by_label("veilbase_connections", "state") == {"stream": 2, "guest": 5}


def test_tenants_are_bounded_and_none_is_lost() -> None:
    usage = UsageBook()
    for number in range(3 * MAX_TENANTS):
        usage.of(f"t{number}").answered(RequestClass.DECODE, CALL, number + 1, 1, 1)
    text = generate_latest(registry(ProviderCollector(Meter(), usage, lambda: 0, lambda: 0, lambda: [(1, 1)]))).decode()
    rows = parse(text, 0.0).by_tenant("veilbase_rows_total")
    assert len(rows) == MAX_TENANTS + 1
    assert sum(rows.values()) == sum(range(1, 3 * MAX_TENANTS + 1))
    assert rows[OTHER] == sum(range(1, 2 * MAX_TENANTS + 1))


def test_the_sum_of_the_others_never_falls() -> None:
    usage = UsageBook()
    metrics = registry(ProviderCollector(Meter(), usage, lambda: 0, lambda: 0, lambda: [(1, 1)]))
    for number in range(2 * MAX_TENANTS):
        usage.of(f"t{number}").answered(RequestClass.DECODE, CALL, number + 1, 1, 1)
    before = parse(generate_latest(metrics).decode(), 0.0).by_tenant("veilbase_rows_total")
    usage.of("t0").answered(RequestClass.DECODE, CALL, 100_000, 1, 1)  # has now more rows than all named tenants
    after = parse(generate_latest(metrics).decode(), 0.0).by_tenant("veilbase_rows_total")
    assert before.keys() == after.keys()
    assert after[OTHER] == before[OTHER] + 100_000


def test_a_histogram_counts_a_value_at_its_bound_below_it() -> None:
    one = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        one.add(value)
    assert one.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]


def test_metrics_on_a_loopback_port(monitor: Monitor) -> None:
    port = monitor.serve_metrics(0)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
        assert reply.status == 200
        assert b"veilbase_queue_depth 3.0" in reply.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        opener.open(f"http://127.0.0.1:{port}/other", timeout=WAIT_S)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        opener.open(request, timeout=WAIT_S)
    with pytest.raises(ConfigurationError, match="in use"):
        monitor.serve_metrics(port)


def test_a_socket_for_status(monitor: Monitor, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no provider is running"):
        read_metrics(tmp_path)
    with socket.socket(socket.AF_UNIX) as left:  # this socket is left from a killed provider
        left.bind(str(tmp_path / SOCKET_NAME))
    assert monitor.serve_socket(tmp_path)
    assert stat.S_ISSOCK((tmp_path / SOCKET_NAME).stat().st_mode)
    assert look(tmp_path).get("veilbase_streams") == 2
    monitor.close()
    assert not (tmp_path / SOCKET_NAME).exists()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.0 500 Oops\r\n\r\nnonsense", "status 500"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nhalf", "does not answer"),
        (b"220 mail\r\n", "does not answer"),
    ],
)
def test_an_answer_that_is_not_the_metrics_is_not_shown_as_such(answer: bytes, text: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()

        def reply() -> None:
            with listener.accept()[0] as guest:
                guest.recv(1 << 16)
                guest.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ConfigurationError, match=text) as caught:
            read_metrics(tmp_path)
        end(thread)
    assert "\n" not in str(caught.value)


def test_folders_that_cannot_have_a_socket(monitor: Monitor, tmp_path: Path) -> None:
    assert not monitor.serve_socket(tmp_path / ("long" * 40))
    (tmp_path / SOCKET_NAME).mkdir()
    assert not monitor.serve_socket(tmp_path)
    assert (tmp_path / SOCKET_NAME).is_dir()


def test_the_next_provider_takes_the_socket_when_the_last_one_ends(
    monitor: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "_TAKE_AGAIN_S", 0.05)
    meter, usage = busy()
    following = Monitor(registry(ProviderCollector(meter, usage, lambda: 0, lambda: 7, lambda: [(1, 1)])))
    assert monitor.serve_socket(tmp_path)
    assert following.serve_socket(tmp_path)
    assert look(tmp_path).get("veilbase_streams") == 2
    monitor.close()

    def is_taken() -> bool:
        with contextlib.suppress(ConfigurationError):
            return look(tmp_path).get("veilbase_streams") == 7
        return False

    until(is_taken, "the next provider at the socket")
    (tmp_path / SOCKET_NAME).unlink()
    (tmp_path / SOCKET_NAME).write_text("somebody else's")
    following.close()
    assert (tmp_path / SOCKET_NAME).read_text() == "somebody else's"


def test_a_client_that_hangs_up_leaves_no_trace(monitor: Monitor, capfd: pytest.CaptureFixture[str]) -> None:
    port = monitor.serve_metrics(0)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # makes the close a reset
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    time.sleep(0.3)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("left_s", "line"),
    [(0.0, "the copy of the registry is too old"), (90.0, "counts for another 90 s"), (None, None)],
)
def test_status_tells_how_long_a_copy_of_the_registry_counts(
    tmp_path: Path, left_s: float | None, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    collector = ProviderCollector(
        Meter(), UsageBook(), lambda: 0, lambda: 0, lambda: [(1, 1)], registry_seconds_left=lambda: left_s
    )
    watched = Monitor(registry(collector))
    watched.serve_socket(tmp_path)
    try:
        check(tmp_path)
        show(tmp_path, None)
    finally:
        watched.close()
    out = " ".join(capsys.readouterr().out.split())
    assert (line in out) if line else ("registry" not in out)


@pytest.mark.parametrize("num_given_up", [0, 1])
def test_a_check_fails_where_a_shard_will_not_come_back(tmp_path: Path, num_given_up: int) -> None:
    collector = ProviderCollector(Meter(), UsageBook(), lambda: 0, lambda: 0, lambda: [(1, 1)], lambda: num_given_up)
    watched = Monitor(registry(collector))
    watched.serve_socket(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match="given up") if num_given_up else contextlib.nullcontext():
            check(tmp_path)
    finally:
        watched.close()


def test_health_follows_the_provider(monitor: Monitor) -> None:
    port = monitor.serve_health(0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            asked = health_pb2.HealthCheckRequest(service=name)
            assert stub.Check(asked, timeout=WAIT_S).status == health_pb2.HealthCheckResponse.SERVING
        monitor.not_serving()
        assert stub.Check(asked, timeout=WAIT_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(ConfigurationError, match="in use"):
        monitor.serve_health(port)


def test_the_table_of_status() -> None:
    meter, usage = busy()
    text = generate_latest(registry(ProviderCollector(meter, usage, lambda: 3, lambda: 2, lambda: [(1, 1)]))).decode()
    before = parse(text, 100.0)
    usage.of("acme").answered(RequestClass.DECODE, CALL, 40, 1_000_000, 2_000_000)
    collector = ProviderCollector(meter, usage, lambda: 0, lambda: 2, lambda: [(1, 1)])
    now = parse(generate_latest(registry(collector)).decode(), 102.0)
    out = io.StringIO()
    Console(file=out, width=140).print(render(now, before, 60.0), render(before, None, 10.0))
    shown = out.getvalue()
    acme = [line for line in shown.splitlines() if "acme" in line]
    assert "20.0" in acme[0]  # 40 rows in two seconds
    assert "0.50" in acme[0]
    assert "0.4" in acme[1]  # four rows in ten seconds since the start
    assert "3 requests wait" in shown
    assert "replicas" not in shown  # there is one process, and it runs

    collector = ProviderCollector(meter, usage, lambda: 0, lambda: 2, lambda: [(2, 2), (1, 2)])
    out = io.StringIO()
    Console(file=out, width=140).print(render(parse(generate_latest(registry(collector)).decode(), 103.0), None, 60.0))
    assert "replicas of shard 0: 2, 1: 1 (1 lost)" in out.getvalue()


def test_log_lines_name_tenant_stream_and_request() -> None:
    record = logging.LogRecord("provider.net.session", logging.ERROR, "x.py", 1, "a request %s", ("failed",), None)
    record.__dict__.update({"tenant": "acme", "stream": "0a1b", "request": 7, "rows": "never shown"})
    assert TextFormatter().format(record).endswith("a request failed tenant=acme stream=0a1b request=7")
    written = json.loads(JsonFormatter().format(record))
    assert {"tenant": "acme", "stream": "0a1b", "request": 7, "message": "a request failed"}.items() <= written.items()
    assert "never shown" not in str(written)
    try:
        raise ValueError("inside")
    except ValueError:
        record.exc_info = __import__("sys").exc_info()
    assert "\n" not in JsonFormatter().format(record)
