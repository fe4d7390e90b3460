"""Tests peers without certificates that connect again and again: tenants can still connect, stay connected and be
revoked."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import provider.net.server as server_module
from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_model import ServedModel
from provider.net.descriptors import Shares
from tests.support import waiting
from tests.support.providers import Provider
from tests.support.raw_peers import assert_ends, dial
from tests.support.repository import ROOT
from tests.support.ring_products import CALL, REPLY_COLS, assert_served, ring_rows
from tests.support.tiny_models import make_tiny
from tests.support.waiting import SLOW_TIMEOUT_S, WAIT_S, comes, until
from wire.errors import AccessError, Unauthenticated, Unavailable
from wire.payload import RowsPayload
from wire.transport import grpc_connection
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity

NUM_CLIENTS, NUM_FILES = 2000, 1024
NEWCOMER_S, REVOKED_S = 15.0, 1.0
"""The most seconds until a new tenant is served, and until a revocation takes effect. Of three times the shortest one
counts, since anything else that runs on the machine lengthens some of them, and a provider that is too slow all."""
NUM_TIMES = 3


def ask(connection: GrpcConnection) -> None:
    assert connection.submit(CALL, RowsPayload(ring_rows(3)), REPLY_COLS).result().shape == (3, REPLY_COLS)


def ask_on(connection: GrpcConnection) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while time.monotonic() < give_up_at:
        ask(connection)


# ---- a few, in this process -----------------------------------------------------------------------------------------


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> int:
    """Allows only a few connections. This fixture must come before `provider`."""
    monkeypatch.setattr(server_module, "shares", lambda *_, **__: Shares(4, 256))
    return 4


def test_connections_that_say_nothing_are_ended(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel
) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_MS", 200)
    provider = start(tiny_served_model)
    began = time.monotonic()
    assert_ends(dial(provider.server.port))
    assert time.monotonic() - began < 20  # gRPC's own time limit is two minutes


def test_a_connection_too_many_is_closed_at_once_and_a_tenant_takes_the_first_free_place(
    few_connections: int, monkeypatch: pytest.MonkeyPatch, start: Callable[[ServedModel], Provider],
    tiny_served_model: ServedModel,
) -> None:  # fmt: skip
    monkeypatch.setattr(server_module, "_HANDSHAKE_MS", 60_000)
    provider = start(tiny_served_model)
    silent = [dial(provider.server.port) for _ in range(few_connections)]
    assert_ends(dial(provider.server.port))
    monkeypatch.setattr(grpc_connection, "CROWDED_S", 0.1)
    with pytest.raises(Unavailable, match="as many as it takes") as caught:  # and not that the identity is wrong
        provider.connect().manifest()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(grpc_connection, "CROWDED_S", WAIT_S)
    for one in silent:
        one.close()
    assert_served(provider.connect(), provider.served_model)


def test_a_certificate_that_is_refused_is_not_tried_again(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StateDir(tmp_path / "other")
    enroll(other, "acme", tmp_path / "acme", provider.url)
    theirs = TlsIdentity.read(tmp_path / "acme")
    num_tries, fetch = [], GrpcConnection._try_to_fetch_manifest
    monkeypatch.setattr(GrpcConnection, "_try_to_fetch_manifest", lambda self: [num_tries.append(1), fetch(self)][1])
    connection = GrpcConnection(provider.url, TlsIdentity(provider.state.ca.pem, theirs.cert_pem, theirs.key_pem))
    with pytest.raises(Unauthenticated):
        connection.manifest()
    connection.close()
    assert len(num_tries) == 1


# ---- two thousand, at a provider with 1,024 files -------------------------------------------------------------------


class Limited:
    """Runs `provider serve` with at most `NUM_FILES` open files, also after the soft limit is raised."""

    def __init__(self, folder: Path) -> None:
        make_tiny("llama", folder / "model")
        command = [sys.executable, "-m", "provider", "serve", "--tls", "--threads", "1", "--port", "0"]
        command += ["--model", str(folder / "model"), "--state", str(folder / "state")]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES)),
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[1]
        self.state, self._folder = StateDir(folder / "state"), folder

    def connect(self, name: str) -> GrpcConnection:
        enroll(self.state, name, self._folder / name, self.url)
        return GrpcConnection(self.url, TlsIdentity.read(self._folder / name))

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Limited]:
    one = Limited(tmp_path)
    yield one
    one.process.terminate()
    one.process.wait(waiting.limit_s)


@contextlib.contextmanager
def flooded(*ports: int) -> Iterator[None]:
    script = str(ROOT / "tests" / "support" / "flood.py")
    floods = [
        subprocess.Popen([sys.executable, script, str(port), str(NUM_CLIENTS)], stdout=subprocess.PIPE, text=True)
        for port in ports
    ]
    try:
        for one in floods:
            assert one.stdout is not None
            assert one.stdout.readline() == "flooding\n"
        yield
    finally:
        for one in floods:
            one.kill()
            one.communicate()


@pytest.mark.slow
@pytest.mark.timeout(SLOW_TIMEOUT_S)
@pytest.mark.parametrize("where", ["grpc", "both"])
def test_a_flood_of_connections_shuts_nobody_out(limited: Limited, where: str) -> None:
    stays = limited.connect("stays")
    fired = {f"fired{number}": limited.connect(f"fired{number}") for number in range(NUM_TIMES)}
    tensor_port = stays.manifest().tensor_port
    for connection in (stays, *fired.values()):
        ask(connection)
    assert tensor_port is not None
    ports = [int(limited.url.rsplit(":", 1)[1])] + ([tensor_port] if where == "both" else [])
    with flooded(*ports):
        took_s = []
        for number in range(NUM_TIMES):
            newcomer = limited.connect(f"newcomer{number}")
            began = time.monotonic()
            ask(newcomer)
            took_s.append(time.monotonic() - began)
            newcomer.close()
            ask(stays)
        assert min(took_s) < NEWCOMER_S
        took_s = []
        for name, connection in fired.items():
            revoke(limited.state, name)
            began = time.monotonic()
            with pytest.raises(AccessError):
                ask_on(connection)
            took_s.append(time.monotonic() - began)
            ask(stays)
        assert min(took_s) < REVOKED_S
        assert limited.num_files() < NUM_FILES  # descriptors are left for the registry and the usage file
    ask(stays)
    for connection in (stays, *fired.values()):
        connection.close()
    lines = [line for line in limited.log.splitlines() if " INFO " not in line and "no tokenizer" not in line]
    refused = [line for line in lines if "refused: " in line]
    assert len(lines) - len(refused) == 1, lines
    assert len(refused) <= 10, lines  # whatever a flood does: a line of each reason in ten seconds
    assert f"at most {NUM_FILES} files can be open here" in lines[0]


@pytest.mark.slow
@pytest.mark.timeout(SLOW_TIMEOUT_S)
def test_an_idle_stream_is_ended_within_a_second_of_its_revocation(limited: Limited) -> None:
    idle = {f"idle{number}": limited.connect(f"idle{number}") for number in range(NUM_TIMES)}
    for connection in idle.values():
        ask(connection)
    took_s = []
    with flooded(int(limited.url.rsplit(":", 1)[1])):
        for name, connection in idle.items():
            stream = connection._stream
            assert stream is not None
            revoke(limited.state, name)
            began = time.monotonic()
            comes(stream._ended, "the stream's end")
            took_s.append(time.monotonic() - began)
    assert min(took_s) < REVOKED_S
    for connection in idle.values():
        connection.close()
    until(lambda: limited.num_files() < 100, "the flood's end")
