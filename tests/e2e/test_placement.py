"""Tests a tenant that is in the provider's process, on its host, or connected by TCP (docs/placement.md), with and
without shards: products are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from tenant_sdk.embedded import connect_inproc
from tests.support.provider_command import Serving
from tests.support.tiny_models import make_tiny
from wire.frame import Arithmetic, Call, Direction
from wire.payload import RowsPayload
from wire.transport.connection import Connection
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity
from wire.transport.ipc.connection import IpcConnection

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placement") / "tiny"
    make_tiny("llama", folder)
    return folder


@pytest.fixture(params=[1, 2], ids=["plain", "2 shards"])
def root(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Runs a provider and enrolls a tenant. Yields a folder, which has the socket's folder `ipc` and the identity
    `acme` in it, and the provider's URL."""
    options = ["--tls", "--port", 0, "--model", model, "--state", tmp_path / "state", "--ipc", tmp_path / "ipc"]
    serving = Serving(*options, "--shards", request.param)
    try:
        enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", serving.url)
        yield tmp_path, serving.url
    finally:
        code, _, err = serving.stop()
    assert code == 0, err
    assert not (tmp_path / "ipc" / "veilbase.sock").exists()


def products(connection: Connection) -> list[torch.Tensor]:
    """Returns the product of every layer group with fixed rows, in both directions."""
    replies = []
    for group in connection.manifest().groups:
        for direction in Direction:
            cols, reply_cols = group.widths(direction)
            rows = torch.randint(-(2**31), 2**31, (3, cols), generator=torch.Generator().manual_seed(group.id))
            call = Call(group.id, direction, Arithmetic.RING)
            replies.append(connection.submit(call, RowsPayload(rows.to(torch.int32)), reply_cols).result())
    return replies


def test_every_place_gives_the_same_products(root: tuple[Path, str], model: Path) -> None:
    folder, url = root
    identity = TlsIdentity.read(folder / "acme")
    here = products(connect_inproc(f"inproc:{model}"))
    assert len(here) > 4
    for connection in (IpcConnection(f"ipc:{folder / 'ipc'}", identity), GrpcConnection(url, identity)):
        there = products(connection)
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
        connection.close()
