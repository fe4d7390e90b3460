"""Tests deficit round robin alone: which tenant has the next turn, what it costs to join another tenant's product, and
how long a turn is."""

from __future__ import annotations

import pytest

from provider.schedule.fairness import TenantRing
from provider.schedule.ticket import RequestClass, Ticket
from wire.frame import Arithmetic, Call, Direction

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
QUANTUM = 10.0


class Ring:
    """Runs deficit round robin over requests that are never split. A request costs its tenant as much as it has
    rows."""

    def __init__(self, **weights: float) -> None:
        self.ring = TenantRing(lambda num_equal: QUANTUM, lambda tenant: weights.get(tenant, 1.0))
        self.waiting: dict[str, list[Ticket]] = {}

    def add(self, tenant: str, rows: int) -> None:
        one = Ticket(tenant, CALL, rows, RequestClass.PREFILL, 0.0)
        self.waiting.setdefault(tenant, []).append(one)
        self.ring.add(one)

    def take(self, ticket: Ticket) -> str:
        self.ring.charge(ticket, ticket.num_rows)
        self.ring.remove(ticket)
        self.waiting[ticket.tenant].remove(ticket)
        return ticket.tenant

    def turn(self) -> str:
        return self.take(self.ring.turn(lambda ticket: ticket.num_rows))

    def ride(self, tenant: str) -> None:
        self.take(self.waiting[tenant][0])


def test_who_rides_has_had_its_turn_and_no_more_than_that() -> None:
    """A tenant that joins another's product before its own turn has used up its turn of this round. The next round is
    as usual."""
    ring = Ring()
    for _ in range(3):
        for name in "abc":
            ring.add(name, 8)
        assert ring.turn() == "a"
        ring.ride("c")
        ring.add("c", 8)  # it has used its turn of this round
        assert ring.turn() == "b"
        ring.add("a", 8)
        ring.add("b", 8)
        assert [ring.turn() for _ in range(3)] == ["c", "a", "b"]


def test_many_rides_in_one_round_are_paid_for() -> None:
    """Over many rounds, a tenant that joins every product of two others gets no more than each of these: one quantum
    per round."""
    ring = Ring()
    served = dict.fromkeys("abr", 0)
    for name in "abr":
        ring.add(name, 10)
    for _ in range(300):
        tenant = ring.turn()
        served[tenant] += 10
        ring.add(tenant, 10)
        if tenant != "r" and ring.ring.may_join("r"):
            ring.ride("r")
            served["r"] += 10
            ring.add("r", 10)
    assert served["r"] == pytest.approx(served["a"], rel=0.05)
    assert served["a"] == pytest.approx(served["b"], rel=0.05)


def test_a_debt_is_bounded() -> None:
    """A tenant whose large request joined another's product owes a few turns for it, not all of its rows."""
    ring = Ring()
    for name, rows in (("a", 10_000), ("b", 10)):
        ring.add(name, rows)
    ring.ride("a")
    ring.add("a", 10)
    turns = []
    while "a" not in turns and len(turns) < 100:
        turns.append(ring.turn())
        ring.add(turns[-1], 10)
    assert 2 < len(turns) <= 10


def test_a_small_ride_does_not_cost_a_turn() -> None:
    """A tenant that joins every turn of another tenant with a single row keeps the rest of its own turn."""
    ring = Ring()
    heads = []
    for _ in range(500):
        ring.add("v", 1)
    for name in "ab":
        ring.add(name, 10)
    for _ in range(60):
        heads.append(ring.turn())
        if heads[-1] != "v":
            ring.add(heads[-1], 10)
        if heads[-1] == "a":
            ring.ride("v")
    assert heads.count("v") >= 3 * heads.count("a")


@pytest.mark.parametrize("weight", [0.01, 1.0, 100.0])
def test_a_turn_costs_what_it_takes_whatever_the_weight(weight: float) -> None:
    ring = Ring(a=weight, b=2 * weight)
    served = dict.fromkeys("ab", 0)
    for name in "ab":
        for _ in range(2):
            ring.add(name, 7)
    for _ in range(3000):
        tenant = ring.turn()
        served[tenant] += 7
        ring.add(tenant, 7)
    assert served["b"] / served["a"] == pytest.approx(2.0, rel=0.02)


def test_a_turn_knows_how_many_wait_with_one_request_each() -> None:
    seen: list[int] = []

    def quantum_of(num_equal: int) -> float:
        seen.append(num_equal)
        return QUANTUM

    ring = TenantRing(quantum_of, lambda tenant: 1.0)
    tickets = [Ticket(name, CALL, 1, RequestClass.PREFILL, 0.0) for name in "abca"]
    for one in tickets[:3]:
        ring.add(one)
    assert (ring.quantum, seen.pop()) == (QUANTUM, 3)
    ring.add(tickets[3])
    assert (ring.quantum, seen.pop()) == (QUANTUM, 1)  # a tenant has sent several at a time
    ring.remove(tickets[0])
    assert (ring.quantum, seen.pop()) == (QUANTUM, 3)
    ring.remove(tickets[1])
    assert (ring.quantum, seen.pop()) == (QUANTUM, 2)


def test_nobody_changes_a_turn_in_the_middle_of_a_round() -> None:
    """If a tenant sends a second request, turns become short. If the tenant cancels that request, turns become long
    again. Both take effect for all tenants from the next round on."""
    ring = TenantRing(lambda num_equal: 30.0 if num_equal > 1 else 3.0, lambda tenant: 1.0)
    tickets = [Ticket(name, CALL, 30, RequestClass.PREFILL, 0.0) for name in "abca"]
    for one in tickets:
        ring.add(one)
    assert ring.quantum == 3.0
    first = ring.turn(lambda ticket: 3.0)
    ring.charge(first, 3.0)
    ring.remove(tickets[3])
    assert ring.quantum == 3.0
    for _ in range(2):
        ring.charge(ring.turn(lambda ticket: 3.0), 3.0)
    ring.turn(lambda ticket: 3.0)
    assert ring.quantum == 30.0
