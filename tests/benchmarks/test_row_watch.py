"""Tests that the watch over masked rows knows what became of each row, and notices rows that are lost or sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.row_watch import WatchedRows
from noise.blocks.pool import MaskPool
from noise.masks.lattice import Lattice
from noise.scheme import GroupSpec
from provider.net.server import Server
from tenant_sdk import TenantClient
from tests.support.lattice import TOY_OPTIONS
from tests.support.providers import make_served_model, serving
from tests.support.tiny_models import make_chat_model
from wire.errors import Unavailable
from wire.frame import Direction
from wire.transport.grpc_connection import GrpcConnection

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> WatchedRows:
    """Watches the rows of a test; the functions that the watch replaces are put back afterwards."""
    monkeypatch.setattr(GrpcConnection, "submit", GrpcConnection.submit)
    monkeypatch.setattr(MaskPool, "__init__", MaskPool.__init__)
    return WatchedRows()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(make_served_model(make_chat_model(tmp_path / "model"), "int8")) as started:
        yield started


@pytest.fixture
def client(rows: WatchedRows, server: Server, tmp_path: Path) -> Iterator[TenantClient]:
    """Opens a session whose masks are made as they are needed, so that no thread makes rows while they are counted."""
    options = {**TOY_OPTIONS, "background": False}
    url = f"grpc://127.0.0.1:{server.port}"
    with TenantClient(url, mask_options=options, cache=tmp_path / "cache", progress=False) as opened:
        yield opened


def answer(client: TenantClient) -> None:
    client.generate("who is it?", max_new_tokens=4, eos_token_id=[])


def test_every_row_is_sent_or_ready(rows: WatchedRows, client: TenantClient) -> None:
    answer(client)
    balance = rows.balance()
    assert balance.sent > 50
    assert balance.ready > 0
    assert balance.made == balance.sent + balance.ready
    assert (balance.lost, balance.twice, balance.refused, balance.burnt) == (0, 0, 0, 0)


def test_rows_of_a_call_that_cannot_be_sent_are_refused_and_not_lost(
    rows: WatchedRows, client: TenantClient, server: Server
) -> None:
    answer(client)
    before = rows.balance()
    server.stop()
    with pytest.raises(Unavailable):
        answer(client)
    with pytest.raises(Unavailable):
        answer(client)  # There is no connection any more.
    balance = rows.balance()
    assert balance.refused > 0
    assert balance.made == balance.sent + balance.refused + balance.burnt + balance.ready
    assert balance.made - balance.ready > before.made - before.ready


def test_rows_that_are_masked_and_not_sent_are_lost(
    rows: WatchedRows, client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, lost = Lattice.mask, 0

    def masks_twice(scheme: Lattice, group: GroupSpec, direction: Direction, given: torch.Tensor) -> Any:
        nonlocal lost
        lost += len(given)
        mask(scheme, group, direction, given)
        return mask(scheme, group, direction, given)

    monkeypatch.setattr(Lattice, "mask", masks_twice)
    answer(client)
    assert rows.balance().lost == lost > 0


def test_rows_that_are_sent_again_are_noticed(
    rows: WatchedRows, client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, again = GrpcConnection.submit, 0

    def sends_twice(connection: Any, call: Any, payload: Any, reply_cols: int) -> Any:
        nonlocal again
        again += len(payload.rows(call)) if call.purpose.name != "HINT" else 0
        submit(connection, call, payload, reply_cols).result()
        return submit(connection, call, payload, reply_cols)

    monkeypatch.setattr(GrpcConnection, "submit", sends_twice)
    answer(client)
    assert rows.balance().twice == again > 0
    assert rows.balance().lost == -again
