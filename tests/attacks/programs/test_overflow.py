"""Tests where an overflow ends a run. A tenant that stops at once tells the provider about its data; the shipped tenant
continues to the planned end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from attacks.programs import overflow
from attacks.programs.overflow import DATA, FAULTS, NEW_TOKENS, NUM_LAYERS, OVERFLOW, Fault, Outcome, Site
from wire.frame import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SHALLOW = 3
"""The number of layers of a model for faults that need no depth. A fault after 7 calls then comes in the middle of a
pass."""
QUICK = (OVERFLOW, Fault(BACKWARD, math.inf, 7), Fault(FORWARD, math.nan, 7))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return overflow.site(tmp_path_factory.mktemp("overflow"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return overflow.site(tmp_path_factory.mktemp("shallow"), SHALLOW)


def forward(num_layers: int) -> int:
    """Returns the number of groups, and so of calls of a forward pass."""
    return 4 * num_layers + 1


def backward(num_layers: int) -> int:
    """Returns the number of calls of a backward pass. The input of the first group (q, k and v) needs no gradient."""
    return forward(num_layers) - 1


def test_a_tenant_that_stops_at_once_is_read(where: Site) -> None:
    outcome = overflow.measure(where, "training", OVERFLOW, stops_at_once=True)
    assert outcome.num_failed == len(DATA)
    assert outcome.bits > 0
    assert max(outcome.num_calls) < overflow.TRAIN_STEPS * forward(NUM_LAYERS)


@pytest.mark.parametrize(
    "fault",
    [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS],
    ids=lambda fault: fault.name,
)
def test_training_sends_the_planned_calls_whatever_overflows(where: Site, shallow: Site, fault: Fault) -> None:
    """Only a constant in gradients grows from layer to layer until it overflows. A NaN or an infinity is one from where
    it comes, and a forward pass has norms, so that a constant stays finite in it at any depth."""
    is_deep = fault.direction is BACKWARD and math.isfinite(fault.wrong)
    site, num_layers = (where, NUM_LAYERS) if is_deep else (shallow, SHALLOW)
    outcome = overflow.measure(site, "training", fault)
    assert outcome.num_calls == (overflow.TRAIN_STEPS * (forward(num_layers) + backward(num_layers)),) * len(DATA)
    assert outcome.bits == 0
    if not math.isfinite(fault.wrong) or fault == OVERFLOW:
        assert outcome.num_failed == len(DATA), "no adapter comes of it"


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow)
        for fault in FAULTS
        if fault.direction is FORWARD
    ],
    ids=lambda fault: fault.name,
)
def test_an_answer_of_fixed_length_sends_the_same_calls(shallow: Site, fault: Fault) -> None:
    outcome = overflow.measure(shallow, "answers", fault)
    assert outcome.num_calls == (NEW_TOKENS * forward(SHALLOW),) * len(DATA)
    assert outcome.bits == 0
    assert outcome.num_failed == (0 if math.isfinite(fault.wrong) else len(DATA))


def test_a_tenant_that_keeps_what_a_sound_answer_asked_for_is_read(shallow: Site) -> None:
    outcome = overflow.measure_second(shallow, keeps_products=True)
    assert outcome.num_failed == 1, "one of the four prompts holds the letter"
    assert outcome.bits == 1
    calls, products = NEW_TOKENS * forward(SHALLOW), 4 * SHALLOW
    assert sorted(outcome.num_calls) == [2 * calls + products] * 3 + [2 * (calls + products)]


def test_a_second_answer_sends_the_same_calls_whatever_the_first_prompt_was(shallow: Site) -> None:
    outcome = overflow.measure_second(shallow)
    assert outcome.num_failed == 1
    assert outcome.num_calls == (2 * (NEW_TOKENS * forward(SHALLOW) + 4 * SHALLOW),) * len(DATA)
    assert outcome.bits == 0


def kept_calls(num_layers: int) -> int:
    """Returns the number of calls of a forward pass whose attention the tenant computes itself."""
    return 2 * num_layers + 1


def test_a_tenant_that_stops_where_a_kept_layer_overflows_is_read(shallow: Site) -> None:
    outcome = overflow.measure_kept(shallow, stops_at_once=True)
    assert outcome.num_failed == 1, "one of the four prompts holds the letter"
    assert outcome.bits == 1
    assert sorted(outcome.num_calls) == [0] + [NEW_TOKENS * kept_calls(SHALLOW)] * 3


def test_the_same_calls_come_after_kept_layers_that_overflow(shallow: Site) -> None:
    """The largest numbers and scales that a tenant takes make values that are not finite, and nothing shows of it."""
    outcome = overflow.measure_kept(shallow)
    assert outcome.num_failed == 1
    assert outcome.num_calls == (NEW_TOKENS * kept_calls(SHALLOW),) * len(DATA)
    assert outcome.bits == 0


@pytest.mark.parametrize(("shipped_bits", "status"), [(0.0, 0), (1.0, 1)])
def test_the_command_fails_where_data_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped_bits: float, status: int
) -> None:
    outcomes = [
        Outcome("training", OVERFLOW.name, True, 4, (186, 188, 188, 188), 1.0),
        Outcome("training", OVERFLOW.name, False, 4, (450,) * 4, shipped_bits),
    ]
    monkeypatch.setattr(overflow, "measure_all", lambda folder: outcomes)
    assert overflow.main(["--out", str(tmp_path)]) == status
    assert json.loads((tmp_path / "overflow.json").read_text())[1]["bits"] == shipped_bits
    text = (tmp_path / "overflow.md").read_text()
    assert "| training | backward 2^31 | stops at once (control) | 4 | 186 188 188 188 | 1 |" in text
