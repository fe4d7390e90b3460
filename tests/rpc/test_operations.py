"""Tests what an operator does with a running provider: drains it, renews its certificate, shows its status, and reads
usage counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from provider.config import load_settings
from provider.engine import profile
from provider.model.served_model import ServedModel
from provider.model.weights import PreparedModel
from provider.net import server as server_module
from provider.net import service as service_module
from provider.net.server import Server
from provider.operations.status import look
from provider.operations.usage import FILE_NAME, UsageBook, read_usage
from provider.schedule.fairness import Policy
from provider.schedule.scheduler import Scheduler
from provider.serve import serve
from provider.shards.router import Shard
from tests.support import waiting
from tests.support.commands import (
    Serving,
    one_line_error,
    run,
)
from tests.support.providers import Provider
from tests.support.raw_peers import RawStream
from tests.support.ring_products import CALL, COLS, REPLY_COLS, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S, end, until
from wire.errors import InvalidTensor, RemoteFault, Unavailable, WireCode
from wire.frame import FrameType, Header, Purpose
from wire.payload import RowsPayload, SeedPayload
from wire.ring.seeded_rows import SeededRows
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity

# ---- drain ----------------------------------------------------------------------------------------------------------


class Held:
    """Holds products back until the test releases them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        compute = service_module.ServedModel.compute

        def held(served_model: ServedModel, call: object, rows: object) -> torch.Tensor:
            self.begun.set()
            assert self.free.wait(WAIT_S)
            return compute(served_model, call, rows)  # type: ignore[arg-type]

        monkeypatch.setattr(ServedModel, "compute", held)


def test_a_drain_answers_what_is_in_flight_and_refuses_what_is_new(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    provider = start(tiny_served_model)
    stream, other = RawStream(provider), RawStream(provider)
    stream.send(*stream.request(1, ring_rows(100)))
    assert held.begun.wait(WAIT_S)
    stream.send(*stream.request(2, ring_rows(200)))  # sent later, since it might join the first product otherwise
    until(lambda: provider.service.queue_depth >= 1, "the second request in the queue")
    give_up_at = time.monotonic() + WAIT_S
    stopping = threading.Thread(target=provider.server.stop, args=(WAIT_S,))
    stopping.start()
    number, code = 0, None
    while code is None and time.monotonic() < give_up_at:  # until the drain has begun, requests are admitted
        number += 1
        other.send(*other.request(number, ring_rows(100), deadline_ms=1))
        code = other.receive().code
        code = None if WireCode(code) is WireCode.DEADLINE else code
    assert code == WireCode.UNAVAILABLE
    with pytest.raises(Unavailable):
        provider.connect("new").manifest()
    assert stopping.is_alive()
    held.free.set()
    assert sorted((header.kind, header.request_id) for header in (stream.receive(), stream.receive())) == [
        (FrameType.REPLY, 1),
        (FrameType.REPLY, 2),
    ]
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    stream.expect_error(0, WireCode.UNAVAILABLE)
    for one in (stream, other):
        one.close()


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
def test_what_nobody_wants_any_more_leaves_the_queue(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    held = Held(monkeypatch)
    provider = start(tiny_served_model)
    stream, other = RawStream(provider), RawStream(provider, "other")
    stream.send(*stream.request(1, ring_rows(100)))
    assert held.begun.wait(WAIT_S)

    def wait_for(depth: int) -> None:
        until(lambda: provider.service.queue_depth == depth, f"{depth} requests in the queue")

    other.send(*other.request(1, ring_rows(200)), *other.request(2, ring_rows(300)))
    wait_for(2)
    if how == "cancelled":
        other.send(Header(FrameType.CANCEL, 1).pack())
        wait_for(1)
        held.free.set()
        assert other.receive().request_id == 2
    else:
        other.close()
        wait_for(0)
        held.free.set()
    assert stream.receive().request_id == 1
    for one in (stream, other):
        one.close()
    assert provider.service.meter.snapshot()[1]["batch_rows"].sum == (400 if how == "cancelled" else 100)


def test_a_drain_ends_when_its_time_is_over(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    held = Held(monkeypatch)
    provider = start(tiny_served_model)
    stream = RawStream(provider)
    stream.send(*stream.request(1, ring_rows(100)))
    assert held.begun.wait(WAIT_S)

    def let_go() -> None:
        """Releases the products after the drain is over. Held products do not lengthen the drain."""
        until(lambda: "not answered within" in caplog.text, "the end of the drain")
        held.free.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    provider.server.stop(0.3)
    end(letting_go)
    stream.expect_error(0, WireCode.UNAVAILABLE)
    assert "not answered within" in caplog.text
    stream.close()


def test_what_the_operator_set_reaches_the_scheduler(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings go from a file to the policy and the weights of the running scheduler."""
    (tmp_path / "provider.yaml").write_text(
        "slo_ms: 7\nmax_wait_ms: 3\nbatching: opportunistic\ntenant_limits: {local: {weight: 5}}\n"
    )
    asked: list[tuple[Policy, Callable[[str], float]]] = []
    make_scheduler = profile.make_scheduler

    def asked_for(
        served: PreparedModel, policy: Policy, profiled: bool, weight_of: Callable[[str], float], **others: Any
    ) -> Scheduler:
        asked.append((policy, weight_of))
        schedulers.append(make_scheduler(served, policy, profiled, weight_of, **others))
        return schedulers[-1]

    class Started(Exception):
        """Is raised when the server has started, since the test needs no more."""

    def start(server: Server, served_model: ServedModel, shards: Sequence[Shard], *others: object) -> None:
        assert [one.scheduler for one in shards] == schedulers
        raise Started

    schedulers: list[Scheduler] = []
    monkeypatch.setattr(profile, "make_scheduler", asked_for)
    monkeypatch.setattr(Server, "start", start)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.raises(Started):
            serve(load_settings({"port": 0, "model": str(model)}, tmp_path / "provider.yaml"))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    ((policy, weight_of),) = asked
    assert (policy.slo_s, policy.max_wait_s) == (0.007, 0.003)
    assert (weight_of("local"), weight_of("other")) == (5.0, 1.0)


# ---- accounts and log ------------------------------------------------------------------------------------------------


def test_usage_counts_what_was_answered(provider: Provider) -> None:
    usage = provider.service.usage
    connection = provider.connect()
    ask(connection, ring_rows(3))
    ask(connection, ring_rows(100))
    with pytest.raises(InvalidTensor):
        ask(connection, ring_rows(1, COLS - 1))
    connection.close()
    total = usage.of("acme").total()
    assert (total.requests["decode"], total.requests["prefill"]) == (1, 1)
    assert (total.rows["decode"], total.rows["prefill"]) == (3, 100)
    assert (total.bytes_up, total.bytes_down) == (103 * COLS * 4, 103 * REPLY_COLS * 4)
    assert 0 < total.seconds < 60
    assert total.errors == {"INVALID_TENSOR": 1}


def test_the_log_names_a_request_that_failed_inside(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> torch.Tensor:
        raise RuntimeError("a secret value")

    monkeypatch.setattr("provider.model.served_model.products.compute", broken)
    stream = RawStream(provider, "acme")
    stream.send(*stream.request(17, ring_rows(100)))
    stream.expect_error(17, WireCode.INTERNAL)
    (named,) = [record for record in caplog.records if getattr(record, "request", None) == 17]
    assert (named.tenant, len(named.stream)) == ("acme", 8)  # type: ignore[attr-defined]
    assert "a secret value" not in caplog.text
    stream.close()
    with pytest.raises(RemoteFault, match="its log names this request"):
        ask(provider.connect(), ring_rows(100))


# ---- certificates ----------------------------------------------------------------------------------------------------


def served_certificate(port: int, folder: Path) -> x509.Certificate:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with (
        socket.create_connection(("127.0.0.1", port), WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        der = secured.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der)


@pytest.fixture(params=["grpc", "tensor port"])
def port(request: pytest.FixtureRequest, provider: Provider) -> int:
    """Yields each of a provider's ports."""
    provider.identity("acme")
    found = provider.server.port if request.param == "grpc" else provider.server.tensor_port
    assert found is not None
    return found


def test_the_certificate_is_renewed_when_asked_and_when_it_is_old(
    provider: Provider, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = provider.folder / "acme"
    before = provider.connect()
    assert_served(before, provider.served_model)
    first = served_certificate(port, folder)
    assert served_certificate(port, folder) == first
    provider.server.renew_certificate()
    second = served_certificate(port, folder)
    assert second.serial_number != first.serial_number
    assert served_certificate(port, folder) == second
    monkeypatch.setattr(server_module, "_RENEW_S", 0.0)
    assert served_certificate(port, folder) != second
    assert_served(before, provider.served_model)  # an open connection is still served
    assert_served(provider.connect(), provider.served_model)


def test_one_renewal_reaches_both_ports(provider: Provider) -> None:
    provider.identity("acme")
    folder, ports = provider.folder / "acme", (provider.server.port, provider.server.tensor_port)
    provider.server.renew_certificate()
    numbers = {served_certificate(port, folder).serial_number for port in (*ports, *ports) if port is not None}
    assert len(numbers) == 1


def test_a_certificate_that_cannot_be_made_leaves_the_old_one(
    provider: Provider, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = served_certificate(port, provider.folder / "acme")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server_module, "issue_server_certificate", full)
    provider.server.renew_certificate()
    assert served_certificate(port, provider.folder / "acme") == first
    assert_served(provider.connect(), provider.served_model)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_provider_that_is_looked_at(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    options = (
        "--tls", "--model", model, "--port", 0, "--state", state,
        "--metrics-port", 0, "--health-port", 0, "--log-format", "json",
    )  # fmt: skip
    with Serving(*options) as serving:
        assert run("enroll", "acme", "--out", tmp_path / "acme", "--state", state).returncode == 0
        connection = GrpcConnection(serving.url, TlsIdentity.read(tmp_path / "acme"))
        for _ in range(3):
            connection.submit(CALL, RowsPayload(torch.ones(20, 32, dtype=torch.int32)), 64).result()

        assert run("status", "--check", "--state", state).stdout == ""
        shown = run("status", "--state", state).stdout
        assert "1 streams" in shown
        assert look(state).by_label("veilbase_connections", "state") == {"stream": 1, "guest": 0}
        assert "acme" in shown
        watching = subprocess.Popen(
            [sys.executable, "-m", "provider", "status", "--watch", "0.2", "--state", str(state)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "140"},
        )  # fmt: skip
        assert watching.stdout is not None
        while "acme" not in watching.stdout.readline():
            assert watching.poll() is None
        watching.kill()
        watching.communicate()

        port = int(serving.url.rsplit(":", 1)[1])
        first = served_certificate(port, tmp_path / "acme")
        serving.process.send_signal(signal.SIGHUP)
        give_up_at = time.monotonic() + waiting.limit_s
        while served_certificate(port, tmp_path / "acme") == first:
            assert time.monotonic() < give_up_at
        serving.process.send_signal(signal.SIGTERM)
        out, err = serving.process.communicate(timeout=waiting.limit_s)
        assert (serving.process.returncode, out) == (0, "")
    connection.close()
    lines = [json.loads(line) for line in err.splitlines()]
    messages = [line["message"] for line in lines]
    assert any(message.startswith("SIGHUP") for message in messages)
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert any(message.startswith("metrics at http://127.0.0.1:") for message in messages)

    total = json.loads(run("usage", "--json", "--state", state).stdout)["acme"]
    assert total["rows"]["prefill"] == 60
    assert total == read_usage(state / FILE_NAME)["acme"].model_dump()
    assert "no provider is running" in one_line_error(run("status", "--state", state))
    assert run("status", "--check", "--state", state).returncode == 1


@pytest.mark.slow
def test_metrics_and_health_ports_of_the_command(model: Path, tmp_path: Path) -> None:
    serving = Serving(
        "--model", model, "--port", 0, "--state", tmp_path, "--metrics-port", 0, "--health-port", 0,
        "--log-format", "json",
    )  # fmt: skip
    try:
        assert serving.process.stderr is not None
        ports = {}
        while len(ports) < 2:
            message = json.loads(serving.process.stderr.readline())["message"]
            for name in ("metrics", "health"):
                if message.startswith(f"{name} at "):
                    ports[name] = int(message.rsplit(":", 1)[1].partition("/")[0])
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=WAIT_S) as reply:
            assert b"veilbase_streams 0.0" in reply.read()
        with grpc.insecure_channel(f"127.0.0.1:{ports['health']}", [("grpc.enable_http_proxy", 0)]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        assert serving.stop()[0] == 0


@pytest.mark.slow
def test_sigterm_answers_what_is_in_flight(model: Path, tmp_path: Path) -> None:
    """After SIGTERM, the provider replies to all requests that it has received, and refuses new ones. The requests are
    for hints, which are small to send but take long to compute."""
    call, seeded = replace(CALL, purpose=Purpose.HINT), SeededRows(bytes(32), 0, 50_000)
    with (
        Serving("--model", model, "--port", 0, "--state", tmp_path, "--drain-s", 60) as serving,
        contextlib.closing(GrpcConnection(serving.url)) as connection,
    ):
        pending = [connection.submit(call, SeedPayload(seeded, 32), 64) for _ in range(12)]
        first = pending[0].result()
        serving.process.send_signal(signal.SIGTERM)
        assert all(torch.equal(one.result(), first) for one in pending[1:])
        serving.process.communicate(timeout=waiting.limit_s)
        assert serving.process.returncode == 0
        with pytest.raises(Unavailable):
            connection.submit(call, SeedPayload(seeded, 32), 64).result()


@pytest.mark.slow
def test_an_account_that_cannot_be_read_stops_the_start(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert run("enroll", "acme", "--out", tmp_path / "acme", "--state", state).returncode == 0
    (state / FILE_NAME).write_text("{")
    line = one_line_error(run("serve", "--tls", "--model", model, "--port", 0, "--state", state))
    assert "usage.json" in line
    assert "usage.json" in one_line_error(run("usage", "--state", state))


def test_an_account_of_nothing(tmp_path: Path) -> None:
    assert UsageBook(tmp_path / FILE_NAME).totals() == {}
    assert run("enroll", "acme", "--out", tmp_path / "acme", "--state", tmp_path / "state").returncode == 0
    assert json.loads(run("usage", "--json", "--state", tmp_path / "state").stdout) == {}
    for nobody in (tmp_path, tmp_path / "nowhere"):
        assert "found no provider at" in one_line_error(run("usage", "--state", nobody))
