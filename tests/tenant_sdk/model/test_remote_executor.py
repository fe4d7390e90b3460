"""Tests what the executor sends if no mask can be had, and to how many columns it expands the seed of a hint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from noise.hints.store import HintStore
from noise.ledger.ledger import Ledger
from noise.masks.lattice import Lattice
from noise.masks.off import Off
from noise.verify import Verifier
from tenant_sdk.model.send import RemoteExecutor
from tests.support.lattice import DEFAULT, FORWARD, Answered, group_of, rows_of, weight_of
from wire.errors import Unavailable, VerificationFailed
from wire.frame import Arithmetic, Call, Purpose
from wire.limits import Limits
from wire.manifest import Manifest
from wire.payload import Payload, SeedPayload
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows
from wire.transport.connection import Traffic

WEIGHT = weight_of(40, 24)
HINT = Call(0, FORWARD, Arithmetic.RING, Purpose.HINT)


class Link:
    """Stands in for a connection. It notes what is sent, and can refuse hints."""

    def __init__(self) -> None:
        self.traffic, self.sent = Traffic(), list[Purpose]()
        self.refuses_hints = self.is_closed = False

    def manifest(self) -> Manifest:
        raise NotImplementedError

    def fetch(self, file_name: str) -> Iterator[bytes]:
        raise NotImplementedError

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Answered:
        if self.refuses_hints and call.purpose is Purpose.HINT:
            raise Unavailable("no hints now")
        self.sent.append(call.purpose)
        rows = payload.rows(call)
        return Answered(coding.product(rows.expand(payload.cols) if isinstance(rows, SeededRows) else rows, WEIGHT))

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_without_a_mask_are_not_sent(tmp_path: Path, num_rows: int) -> None:
    """If no mask can be had, nothing is sent. This matters most for a single row, since it is written into its message
    before it is masked."""
    link, group, rows = Link(), group_of(0, WEIGHT), rows_of(num_rows, 40)
    scheme = Lattice(DEFAULT, Ledger.open(tmp_path / "ledger", "tenant"), HintStore(None, 8), background=False)
    executor = RemoteExecutor([link], scheme, Limits())
    link.refuses_hints = True
    with pytest.raises(Unavailable):
        executor.run(group, FORWARD, rows)
    assert link.sent == []
    link.refuses_hints = False
    product = executor.run(group, FORWARD, rows)
    assert link.sent[-1] is Purpose.PRODUCT
    assert torch.allclose(product, rows @ (WEIGHT * group.alpha), rtol=1e-3, atol=1e-3)
    executor.close()


@pytest.mark.parametrize("cols", [1, 24, 39, 41])
def test_a_hint_of_another_width_than_the_trusted_weight_fails_its_check(cols: int) -> None:
    """The provider's manifest says to how many columns a seed is expanded. If this is not the width of the trusted
    weight, the hint's check fails and the connection is closed."""
    link, verifier = Link(), Verifier()
    verifier.add_group(0, WEIGHT)
    executor = RemoteExecutor([link], Off(Arithmetic.RING), Limits(), verifier)
    seeded = SeededRows(bytes(32), 0, 3)
    reply = coding.product(seeded.expand(40), WEIGHT)
    executor.check(HINT, SeedPayload(seeded, 40), reply)
    assert not link.is_closed
    with pytest.raises(VerificationFailed):
        executor.check(HINT, SeedPayload(seeded, cols), reply)
    assert link.is_closed


def test_rows_of_any_float_dtype_are_computed_in_float32() -> None:
    """Autocast would make masks and checks multiply in half precision."""
    executor, group = RemoteExecutor([Link()], Off(Arithmetic.RING), Limits()), group_of(0, WEIGHT)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rows = rows_of(3, 40).to(dtype)
        expected = executor.run(group, FORWARD, rows.float())
        with torch.autocast("cpu", torch.bfloat16):
            found = [
                executor.run(group, FORWARD, rows),
                executor.run_public(group, FORWARD, rows),
                *executor.run_together([(group, rows)]),
            ]
        assert all(torch.equal(one, expected) for one in found), dtype
    assert executor.run_together([]) == []


def test_a_large_call_is_split_by_each_limit() -> None:
    group, rows = group_of(0, WEIGHT), rows_of(100, 40)
    for limits, most in (
        (Limits(max_rows=40), 40),
        (Limits(max_tensor_bytes=4096), 25),  # the wider of request and reply has 160 bytes a row
        (Limits(max_in_flight_bytes=8192), 32),  # both together have 256
        (Limits(), 100),
    ):
        link = Link()
        product = RemoteExecutor([link], Off(Arithmetic.RING), limits).run(group, FORWARD, rows)
        assert torch.allclose(product, rows @ (WEIGHT * group.alpha), rtol=1e-2, atol=1e-2)
        assert len(link.sent) == -(-100 // most)
