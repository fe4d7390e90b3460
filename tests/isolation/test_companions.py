"""Tests that a request's result, errors, usage counts and next steps do not depend on the requests that share a batch
with it."""

from __future__ import annotations

import pytest
import torch

from provider.model.served_model import ServedModel
from provider.schedule.ticket import RequestClass
from tests.support.executors import FLOAT, RING, Gate
from tests.support.ring_products import CALL, COLS, ring_rows
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault
from wire.frame import Call, Direction
from wire.ring.seeded_rows import Rows


def test_companions_change_no_bit(gate: Gate, served_model: ServedModel) -> None:
    given = [ring_rows(count, seed=count) for count in (1, 7, 300, 2, 64)]
    kinds = [
        RequestClass.DECODE,
        RequestClass.PREFILL,
        RequestClass.FINETUNE,
        RequestClass.DECODE,
        RequestClass.PREFILL,
    ]
    answers = [
        gate.submit(rows, tenant=f"t{number}", kind=kind)
        for number, (rows, kind) in enumerate(zip(given, kinds, strict=True))
    ]
    gate.open()
    for rows, answer in zip(given, answers, strict=True):
        reply = answer.get()
        assert isinstance(reply, torch.Tensor)
        assert torch.equal(reply, served_model.compute(CALL, rows))
    shared = [count for call, count in gate.batches if call == CALL]
    shares = gate.meter.snapshot()[1]["batch_requests"]
    assert shares.sum > sum(shares.counts)  # at least one product was made for several requests
    assert sum(shared) == sum(rows.shape[0] for rows in given)


def test_one_tenants_nan_is_its_own_fault(gate: Gate, served_model: ServedModel) -> None:
    call = Call(0, Direction.FORWARD, FLOAT)
    good, bad = torch.ones(3, COLS), torch.full((2, COLS), float("nan"))
    answers = [gate.submit(rows, call, name) for rows, name in ((good, "a"), (bad, "b"), (good, "c"))]
    gate.open()
    outcomes = [answer.get() for answer in answers]
    assert isinstance(outcomes[1], InvalidTensor)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, torch.Tensor)
        assert torch.allclose(outcome, served_model.compute(call, good), rtol=1e-5, atol=1e-6)


def test_a_product_that_fails_is_tried_for_each_alone(served_model: ServedModel) -> None:
    class Fragile(Gate):
        def product(self, call: Call, rows: Rows) -> torch.Tensor:
            reply = super().product(call, rows)
            if isinstance(rows, torch.Tensor) and bool((rows == 7).any()):
                raise RemoteFault("the provider failed while computing")
            return reply

    gate = Fragile(served_model)
    answers = [gate.submit(torch.full((2, COLS), value, dtype=torch.int32), tenant=str(value)) for value in (1, 7, 2)]
    gate.open()
    outcomes = [answer.get() for answer in answers]
    gate.executor.close()
    assert [isinstance(outcome, RemoteFault) for outcome in outcomes] == [False, True, False]


def test_what_is_shared_is_charged_by_rows_and_what_was_not_computed_is_not(served_model: ServedModel) -> None:
    charged: dict[str, float] = {}
    made = Gate(
        served_model, charge=lambda tenant, seconds: charged.__setitem__(tenant, charged.get(tenant, 0.0) + seconds)
    )
    answers = [made.submit(ring_rows(rows), tenant=name) for name, rows in (("large", 300), ("small", 100))]
    gone = made.submit(ring_rows(500), tenant="gone")
    late = made.submit(ring_rows(500), tenant="late", seconds=-1.0)
    made.executor.cancel(gone.request)
    made.open()
    for answer in answers:
        answer.get()
    assert isinstance(late.get(), DeadlineExceeded)
    made.executor.close()
    assert charged["large"] / charged["small"] == pytest.approx(3.0)
    assert "gone" not in charged
    assert "late" not in charged


def test_who_shared_a_product_at_one_layer_goes_on_alone(gate: Gate) -> None:
    rows = {name: ring_rows(40, seed=number) for number, name in enumerate("ab")}
    answers = [gate.submit(one, tenant=name) for name, one in rows.items()]
    gate.open()
    for answer in answers:
        assert isinstance(answer.get(), torch.Tensor)
    following = Call(2, Direction.FORWARD, RING)
    assert isinstance(gate.submit(rows["a"], following, "a").get(), torch.Tensor)
    assert [count for call, count in gate.batches if call == CALL] == [80]
    assert [count for call, count in gate.batches if call == following] == [40]
