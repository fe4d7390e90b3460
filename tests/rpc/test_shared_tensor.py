"""Tests the shared tensor, with which the benchmarks compare the socket of one host: products, memory that grows, and
peers that change what they share."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.shared_tensor import FIRST_ROWS, LISTENER_NAME, SharedTensor, SharedTensorConnection
from benchmarks.shared_tensor_port import SharedTensorPort
from provider.model.served_model import ServedModel
from tenant_sdk import session
from tests.support.providers import Provider
from tests.support.raw_peers import assert_ends
from tests.support.ring_products import CALL, REPLY_COLS, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError, MalformedFrame, Unavailable, UnknownLayer
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import RowsPayload
from wire.ring.seeded_rows import SeededRows

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@pytest.fixture
def provider(start: Callable[..., Provider], tiny_served_model: ServedModel) -> Iterator[Provider]:
    running = start(tiny_served_model, tensor_port=None, ipc=True)
    assert running.server.ipc is not None
    port = SharedTensorPort(running.server.ipc.folder, running.service)
    yield running
    port.stop()


@pytest.fixture
def connection(provider: Provider) -> Iterator[SharedTensorConnection]:
    made = SharedTensorConnection(provider.ipc_url, provider.identity())
    yield made
    made.close()


def memory_of(connection: SharedTensorConnection) -> SharedTensor:
    assert connection._channel is not None
    return connection._channel._memory


def test_products_come_through_shared_memory(connection: SharedTensorConnection, provider: Provider) -> None:
    assert_served(connection, provider.served_model)
    assert connection.carrier == "shared tensor"
    assert connection.traffic.calls == 1
    row = ring_rows(1)
    assert torch.equal(ask(connection, row), provider.served_model.compute(CALL, row))
    hint = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
    seeded = SeededRows(bytes(32), 3, 5)
    assert torch.equal(ask(connection, seeded, hint), provider.served_model.compute(hint, seeded))


def test_a_reply_stays_as_it_came(connection: SharedTensorConnection, provider: Provider) -> None:
    """What the peer writes to the shared memory after its answer changes no reply that was given out."""
    rows = ring_rows(3)
    reply = ask(connection, rows)
    memory_of(connection).view(3, REPLY_COLS, torch.int32).zero_()
    assert torch.equal(reply, provider.served_model.compute(CALL, rows))


def test_the_next_request_waits_until_the_last_reply_was_copied(
    connection: SharedTensorConnection, provider: Provider
) -> None:
    several = [ring_rows(count) for count in (2, 7, 1)]
    pending = [connection.submit(CALL, RowsPayload(rows), REPLY_COLS) for rows in several]
    for rows, one in zip(several[::-1], pending[::-1], strict=True):
        assert torch.equal(one.result(), provider.served_model.compute(CALL, rows))


def test_the_memory_grows_on_demand_and_cannot_shrink(connection: SharedTensorConnection, provider: Provider) -> None:
    assert_served(connection, provider.served_model)
    memory = memory_of(connection)
    before = memory.num_bytes
    rows = ring_rows(4 * FIRST_ROWS)
    assert torch.equal(ask(connection, rows), provider.served_model.compute(CALL, rows))
    assert memory.num_bytes >= len(rows) * REPLY_COLS * 4 > before
    assert fcntl.fcntl(memory.descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, before)


def test_a_request_that_fails_is_one_error_and_the_next_is_served(
    connection: SharedTensorConnection, provider: Provider
) -> None:
    with pytest.raises(UnknownLayer):
        ask(connection, ring_rows(2), Call(999, Direction.FORWARD, Arithmetic.RING))
    assert_served(connection, provider.served_model)


def test_use_replaces_the_connection_of_ipc_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "IpcConnection", session.IpcConnection)  # restored after the test
    from benchmarks import shared_tensor

    shared_tensor.use()
    assert session.IpcConnection is SharedTensorConnection


def test_a_folder_without_a_shared_tensor_is_one_error(
    start: Callable[..., Provider], tiny_served_model: ServedModel
) -> None:
    running = start(tiny_served_model, tensor_port=None, ipc=True)
    made = SharedTensorConnection(running.ipc_url, running.identity())
    with pytest.raises(Unavailable, match="shares memory"):
        ask(made, ring_rows(1))
    made.close()
    named = SharedTensorConnection(running.ipc_url, running.identity(), peer_uid=os.geteuid() + 1)
    with pytest.raises(ConfigurationError):
        ask(named, ring_rows(1))


# ---- memory that a peer could take away ------------------------------------------------------------------------------


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_memory_that_could_be_cut_off_is_refused(seals: int) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(MalformedFrame, match="nobody can shrink"):
        SharedTensor(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("announced", [4097, 1 << 31, -1])
def test_memory_of_another_size_than_announced_is_not_mapped(announced: int) -> None:
    mine = SharedTensor.create(4096)
    theirs = SharedTensor(os.dup(mine.descriptor))
    with pytest.raises(MalformedFrame, match="announced"):
        theirs.follow(announced)
    theirs.follow(4096)
    with pytest.raises(MalformedFrame, match="do not fit"):
        theirs.view(1, 1025, torch.int32)
    mine.close()
    theirs.close()


@pytest.mark.parametrize("given", ["nothing", "a pipe", "unsealed"])
def test_a_peer_that_hands_over_no_such_memory_is_left(provider: Provider, given: str) -> None:
    """The provider ends the connection, serves others, and keeps none of the descriptors."""
    assert provider.server.ipc is not None
    plain = socket.socket(socket.AF_UNIX)
    plain.settimeout(WAIT_S)
    plain.connect(str(provider.server.ipc.folder / LISTENER_NAME))
    reader, writer = os.pipe()
    unsealed = os.memfd_create("test")
    socket.send_fds(plain, [b"tensor"], {"nothing": [], "a pipe": [reader], "unsealed": [unsealed]}[given])
    assert_ends(plain)
    os.close(reader)
    with pytest.raises(BrokenPipeError):  # nobody else holds the reading end
        os.write(writer, b"x")
    for one in (writer, unsealed):
        os.close(one)
    made = SharedTensorConnection(provider.ipc_url, provider.identity())
    assert_served(made, provider.served_model)
    made.close()
