"""Tests the latency and the throughput that tenants get under load, on the simulation's clock.

A product takes 0.3 ms plus 12 µs per row, which is about the time of a layer of SmolLM2 on one core
(docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest

from benchmarks.scheduling import Outcome, Replayer, forward_pass, simulate, training_step
from provider.schedule.fairness import Policy
from provider.schedule.ticket import RequestClass
from wire.frame import Arithmetic, Call, Direction, Purpose

pytestmark = pytest.mark.slow  # these tests compute for about a minute

DECODE, PREFILL, FINETUNE = RequestClass
GROUPS = range(16)
SECONDS = 5.0
TURN_S = 3.5e-3
"""The length of a turn, in seconds, without a latency target."""


def cost(call: Call, rows: int) -> float:
    return 3e-4 + 1.2e-5 * rows


def policy(name: str = "opportunistic", slo_s: float | None = None) -> Policy:
    return Policy(name, slo_s=slo_s, max_wait_s=60.0 if name == "lockstep" else 0.02)  # type: ignore[arg-type]


def run(
    replayers: list[Replayer], name: str = "opportunistic", slo_s: float | None = None, seconds: float = SECONDS
) -> Outcome:
    return simulate(policy(name, slo_s), replayers, cost, seconds)


def decoding(name: str = "decode", rows: int = 1, think_s: float = 1e-3) -> Replayer:
    return Replayer(name, forward_pass(GROUPS, rows), DECODE, think_s)


@functools.cache
def decoding_alone(seconds: float = SECONDS) -> Outcome:
    """Returns the results of decoding without other load, with which those under floods are compared."""
    return run([decoding()], slo_s=4e-4, seconds=seconds)


def thinking(seed: int, mean_s: float) -> list[float]:
    """Returns pauses, in seconds, that vary by a fifth around `mean_s` and are the same in each run."""
    return [mean_s * (1 + 0.2 * math.sin(12.9898 * (seed + step))) for step in range(97)]


# ---- batching: Symbiosis, table 5 (8 clients, batch sizes 2 to 256) --------------------------------------------------


def eight_clients(slower: float = 1.0) -> list[Replayer]:
    thoughts = (0.2e-3, 3e-3, 0.5e-3, 1.7e-3, 0.9e-3, 2.2e-3, 0.3e-3, 1.1e-3)
    sizes = [2**number for number in range(1, 9)]
    return [
        Replayer(f"t{size}", forward_pass(GROUPS, size), DECODE if size <= 16 else PREFILL, slower * think_s)
        for size, think_s in zip(sizes, thoughts, strict=True)
    ]


def test_opportunistic_batching_has_the_best_throughput_and_the_lowest_mean_latency() -> None:
    ours, none, lockstep = (run(eight_clients(), name) for name in ("opportunistic", "none", "lockstep"))
    assert ours.rows_per_s() > none.rows_per_s() > lockstep.rows_per_s()
    assert ours.mean_latency_s() < 0.8 * none.mean_latency_s()
    assert none.mean_latency_s() < lockstep.mean_latency_s()
    assert sum(ours.batch_requests) / len(ours.batch_requests) > 1.3
    assert set(none.batch_requests) == {1}
    assert sum(lockstep.batch_requests) / len(lockstep.batch_requests) > 7.9


@pytest.mark.parametrize("slower", [7.0, 19.0])
def test_opportunistic_batching_is_the_best_on_large_layers_too(slower: float) -> None:
    """Times are those of Llama-2-7B's layers on one core, where reading a weight takes as long as 22 rows.
    Opportunistic batching has more throughput and less latency than lockstep and than no batching."""

    def large(call: Call, rows: int) -> float:
        base_s, row_s = ((5e-3, 2.3e-4), (1.7e-3, 8e-5), (9e-3, 4.2e-4), (4.5e-3, 2.1e-4))[call.group % 4]
        return base_s + row_s * rows

    ours, none, lockstep = (
        simulate(policy(name), eight_clients(slower), large, 120.0, warm_up_s=30.0)
        for name in ("opportunistic", "none", "lockstep")
    )
    assert ours.rows_per_s() > max(none.rows_per_s(), lockstep.rows_per_s())
    assert ours.mean_latency_s() < 0.9 * min(none.mean_latency_s(), lockstep.mean_latency_s())


@pytest.mark.parametrize("starts", [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 2, 2, 2], [3, 3, 0, 1, 1]])
def test_lockstep_brings_tenants_that_began_at_different_layers_to_one(starts: list[int]) -> None:
    """After some time, all tenants share every product. This also holds if equally many tenants began at each of
    several layers, so that no layer has the most tenants."""
    clients = [
        Replayer(f"t{number}", forward_pass([*GROUPS[start:], *GROUPS[:start]], 4), DECODE)
        for number, start in enumerate(starts)
    ]
    found = simulate(policy("lockstep"), clients, cost, 2.0)
    assert found.batch_requests[-1] == len(starts)
    assert sum(one == len(starts) for one in found.batch_requests) > 0.9 * len(found.batch_requests)


def test_lockstep_makes_a_small_request_as_slow_as_a_large_one() -> None:  # Symbiosis, table 4
    small, large = decoding("small"), Replayer("large", forward_pass(GROUPS, 512), PREFILL, 1e-3)
    alone, together = run([small], "lockstep"), run([small, large], "lockstep")
    ours = run([small, large], slo_s=4e-4)
    assert together.mean_latency_s("small") > 10 * alone.mean_latency_s("small")
    assert ours.mean_latency_s("small") < 1.2 * alone.mean_latency_s("small")


# ---- one tenant's flood and another's decode -------------------------------------------------------------------------


@pytest.mark.parametrize("request_class", [PREFILL, FINETUNE])
@pytest.mark.parametrize(("rows", "in_flight", "seconds"), [(512, 64, 5.0), (65_536, 4, 5.0), (1, 120, 2.0)])
def test_a_flood_leaves_decode_within_a_fifth(
    request_class: RequestClass, rows: int, in_flight: int, seconds: float
) -> None:
    flood = Replayer("flood", [(Call(0, Direction.FORWARD, Arithmetic.RING), rows)], request_class, in_flight=in_flight)
    alone, beside = decoding_alone(seconds), run([decoding(), flood], slo_s=4e-4, seconds=seconds)
    assert beside.mean_latency_s("decode") <= 1.2 * alone.mean_latency_s("decode")
    assert beside.rows["decode"] >= 0.95 * alone.rows["decode"]
    assert beside.busy_s["flood"] >= 0.3 * seconds  # the flood gets the rest


@pytest.mark.parametrize(("rows", "in_flight"), [(16, 3), (8, 3), (1, 3), (16, 1)])
def test_a_flood_of_decode_requests_leaves_decode_within_a_fifth(rows: int, in_flight: int) -> None:
    """A flood that counts as decode, but never pauses, lengthens the latency of a tenant that pauses between requests
    by at most a fifth."""
    flood = Replayer("flood", [(Call(0, Direction.FORWARD, Arithmetic.RING), rows)], DECODE, in_flight=in_flight)
    alone, beside = decoding_alone(), run([decoding(), flood], slo_s=4e-4)
    assert beside.mean_latency_s("decode") <= 1.2 * alone.mean_latency_s("decode")
    assert beside.rows["decode"] >= 0.95 * alone.rows["decode"]
    assert beside.busy_s["flood"] >= 0.3 * SECONDS


def test_two_floods_of_decode_requests_share() -> None:
    floods = [
        Replayer(name, [(Call(index, Direction.FORWARD, Arithmetic.RING), 8)], DECODE, in_flight=3)
        for index, name in enumerate("ab")
    ]
    found = run(floods, slo_s=4e-4)
    assert found.rows["a"] == pytest.approx(found.rows["b"], rel=0.1)


def test_decode_that_thinks_unevenly_still_stays_within_a_fifth() -> None:
    thoughts = itertools.cycle(thinking(1, 1e-3))

    class Uneven(Replayer):
        @property
        def think_s(self) -> float:  # type: ignore[override]
            return next(thoughts)

        @think_s.setter
        def think_s(self, value: float) -> None:
            pass

    uneven = Uneven("decode", forward_pass(GROUPS, 1), DECODE)
    flood = Replayer("flood", training_step(GROUPS, 512), FINETUNE, in_flight=16)
    alone, beside = run([uneven], slo_s=4e-4), run([uneven, flood], slo_s=4e-4)
    assert beside.mean_latency_s("decode") <= 1.2 * alone.mean_latency_s("decode")
    assert beside.busy_s["flood"] >= 0.2 * SECONDS


@pytest.mark.parametrize("request_class", [PREFILL, FINETUNE])
@pytest.mark.parametrize("slope", [1.2e-5, 2e-4])
@pytest.mark.parametrize("slo_s", [None, 0.0004, 0.003, 0.012, 0.02, 0.05])
def test_no_flood_keeps_decode_out(request_class: RequestClass, slope: float, slo_s: float | None) -> None:
    """On fast and on slow machines, a decode request waits at most for the latency target. If products take longer than
    this, it waits at most for the product that has begun and for its own."""
    flood = Replayer("flood", [(Call(0, Direction.FORWARD, Arithmetic.RING), 4096)], request_class, in_flight=8)
    beside = simulate(policy(slo_s=slo_s), [decoding(), flood], lambda call, rows: 3e-4 + slope * rows, 3.0)
    least_s = 3e-4 + slope * 16
    assert beside.quantile_s(0.5, "decode") <= max(slo_s or 0.0105, 1.5 * least_s) + 1e-3
    assert beside.rows["decode"] >= 40
    assert beside.busy_s["flood"] >= 0.05 * 3.0


@pytest.mark.parametrize(("num_tenants", "slo_s"), [(1, 4e-4), (5, 2e-3), (20, 6e-3)])
def test_who_decodes_now_and_then_does_not_make_the_executor_idle(num_tenants: int, slo_s: float) -> None:
    tuning = Replayer("tune", training_step(GROUPS, 512), FINETUNE)
    seldom = [decoding(f"i{number}", 1, 0.9 + 0.01 * number) for number in range(num_tenants)]
    assert run([*seldom, tuning], slo_s=slo_s).rows["tune"] >= 0.75 * run([tuning], slo_s=slo_s).rows["tune"]


def test_a_product_longer_than_a_second_does_not_lock_decode_out() -> None:
    flood = Replayer("flood", [(Call(0, Direction.FORWARD, Arithmetic.RING), 4096)], PREFILL, in_flight=8)
    for slo_s in (None, 0.02):
        slow = simulate(policy(slo_s=slo_s), [decoding(), flood], lambda call, rows: 4e-4 * rows, 10.0)
        assert slow.rows["decode"] > 200


@pytest.mark.parametrize("num_floods", [1, 2, 4])
@pytest.mark.parametrize("rows", [512, 65_536])
def test_without_a_target_decode_waits_for_a_turn_of_everybody_else(rows: int, num_floods: int) -> None:
    floods = [
        Replayer(f"f{number}", [(Call(0, Direction.FORWARD, Arithmetic.RING), rows)], FINETUNE, in_flight=4)
        for number in range(num_floods)
    ]
    beside = run([decoding(), *floods])
    assert beside.quantile_s(0.99, "decode") <= 2 * num_floods * TURN_S
    assert beside.mean_latency_s("decode") <= 1.1 * num_floods * TURN_S
    assert beside.rows_per_s() > 0.83 * run(floods).rows_per_s()


def hints(name: str) -> Replayer:
    call = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)  # these requests share no product
    return Replayer(name, [(call, 1)], FINETUNE, in_flight=300)


def test_many_tiny_requests_buy_no_more_time_than_one_large_one() -> None:
    tuning = Replayer("tune", training_step(GROUPS, 512), FINETUNE, in_flight=4)
    shared = run([decoding(), hints("tiny"), tuning])
    assert shared.mean_latency_s("decode") <= 2.2 * TURN_S
    assert shared.busy_s["tiny"] == pytest.approx(shared.busy_s["tune"], rel=0.1)


def test_who_rides_in_the_turns_of_others_pays_for_it() -> None:
    decoders = [decoding(f"d{number}") for number in range(10)]
    everywhere = Replayer("flood", forward_pass(GROUPS, 256), FINETUNE, in_flight=64)
    beside = run([*decoders, everywhere])
    assert beside.mean_latency_s(*[one.tenant for one in decoders]) <= 2.2 * TURN_S


def test_decode_that_waits_is_not_forgotten() -> None:
    """With a very slow layer and sixteen floods, a round takes longer than the time for which the scheduler remembers a
    tenant. The decoding tenant still gets a turn in each round."""
    floods = [
        Replayer(f"f{number}", [(Call(0, Direction.FORWARD, Arithmetic.RING), 256)], FINETUNE, in_flight=8)
        for number in range(16)
    ]
    slow = simulate(policy(), [decoding(), *floods], lambda call, rows: 4.7e-3 * rows, 300.0)
    rows = [slow.rows[one.tenant] for one in floods]
    assert max(rows) <= 1.1 * min(rows)
    assert slow.quantile_s(0.99, "decode") <= 17 * 16 * 4.7e-3


@pytest.mark.parametrize("slope", [1.2e-5, 4e-4])
def test_credit_of_a_quiet_time_is_not_spent_on_those_who_come_back(slope: float) -> None:
    """While no tenant decodes, other tenants have long products. When a tenant decodes again after a pause, its first
    request waits for at most one of these."""
    floods = [
        Replayer(f"f{number}", [(Call(0, Direction.FORWARD, Arithmetic.RING), 65_536)], FINETUNE, in_flight=4)
        for number in range(4)
    ]
    back = Replayer("decode", [(Call(0, Direction.FORWARD, Arithmetic.RING), 1)], DECODE, think_s=1.3)
    beside = simulate(policy(), [back, *floods], lambda call, rows: 3e-4 + slope * rows, 20.0)
    assert beside.quantile_s(0.99, "decode") <= 1.1 * 4096 * slope + 2 * 4 * max(TURN_S, 16 * slope)


# ---- fine-tuning beside inference ------------------------------------------------------------------------------------


def test_fine_tuning_fills_what_inference_leaves() -> None:  # Symbiosis, figures 22 and 23
    inference = [decoding(f"i{number}", 1 + number % 4, (0.5 + 0.3 * number) * 1e-3) for number in range(8)]
    tuning = [Replayer(f"f{number}", training_step(GROUPS, 512), FINETUNE, 1e-3) for number in range(2)]
    eight, mixed = run(inference, slo_s=4e-4), run(inference[:6] + tuning, slo_s=4e-4)
    decode = [f"i{number}" for number in range(6)]
    assert mixed.rows_per_s() > 1.1 * eight.rows_per_s()
    assert mixed.mean_latency_s(*decode) <= 1.1 * eight.mean_latency_s()


@pytest.mark.parametrize("num_clients", [1, 2, 4])
def test_fine_tuning_keeps_its_share_while_the_target_is_met(num_clients: int) -> None:  # FlexLLM
    slo_s = 6e-3
    inference = [decoding(f"i{number}", 2, (2.0 + 0.7 * number) * 1e-3) for number in range(num_clients)]
    names = [one.tenant for one in inference]
    tuning = Replayer("tune", training_step(GROUPS, 2048), FINETUNE, in_flight=2)
    solo = run([tuning], slo_s=slo_s)
    beside = run([*inference, tuning], slo_s=slo_s)
    assert beside.quantile_s(0.99, *names) <= slo_s * (1 + 1e-9)
    busy = sum(beside.busy_s[name] for name in names) / SECONDS
    assert beside.rows_per_s("tune") >= 0.8 * solo.rows_per_s() * (1 - busy)


def test_temporal_sharing_misses_the_target() -> None:
    """Temporal sharing lets whole requests take turns, as in FlexLLM's comparison. Inference then misses the latency
    target that this scheduler meets, and gets less than a seventh of its rows."""
    inference = [decoding(f"i{number}", 2, (2.0 + 0.7 * number) * 1e-3) for number in range(4)]
    tuning = Replayer("tune", training_step(GROUPS, 2048), FINETUNE, in_flight=2)
    names = [one.tenant for one in inference]
    ours, turns = run([*inference, tuning], slo_s=6e-3), run([*inference, tuning], "none")
    assert turns.quantile_s(0.01, *names) > 6e-3 >= ours.quantile_s(0.99, *names) * (1 - 1e-9)
    assert ours.rows_per_s(*names) > 7 * turns.rows_per_s(*names)
    assert ours.rows_per_s("tune") > 0.8 * turns.rows_per_s("tune")


def test_fine_tuning_follows_a_load_that_comes_and_goes() -> None:
    slo_s = 6e-3
    inference = [
        Replayer(f"i{number}", forward_pass(GROUPS, 2), DECODE, 2e-3, sends=lambda now_s: int(now_s * 2) % 2 == 0)
        for number in range(3)
    ]
    tuning = Replayer("tune", training_step(GROUPS, 2048), FINETUNE, in_flight=2)
    solo, beside = run([tuning], slo_s=slo_s), run([*inference, tuning], slo_s=slo_s)
    assert beside.quantile_s(0.99, "i0", "i1", "i2") <= slo_s * (1 + 1e-9)
    busy = sum(beside.busy_s[one.tenant] for one in inference) / SECONDS
    assert beside.rows_per_s("tune") >= 0.8 * solo.rows_per_s() * (1 - busy)


def test_fine_tuning_is_never_starved() -> None:
    crowd = [decoding(f"i{number}", 8, 1e-4) for number in range(12)]  # this is more than the executor can do
    tuning = Replayer("tune", training_step(GROUPS, 512), FINETUNE)
    for slo_s in (None, 4e-4, 6e-3):
        assert run([*crowd, tuning], slo_s=slo_s).busy_s["tune"] >= 0.04 * SECONDS


def test_weights_divide_what_there_is() -> None:
    def weight_of(tenant: str) -> float:
        return 3.0 if tenant == "heavy" else 1.0

    load = [
        Replayer(name, [(Call(place, Direction.FORWARD, Arithmetic.RING), 256)], PREFILL, in_flight=8)
        for place, name in enumerate(("heavy", "light"))
    ]
    shared = simulate(policy(), load, cost, SECONDS, weight_of=weight_of)
    assert shared.rows["heavy"] / shared.rows["light"] == pytest.approx(3.0, rel=0.05)
