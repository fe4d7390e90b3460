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
GROUPS, SHALLOW_GROUPS = 4 * NUM_LAYERS + 1, 4 * 2 + 1
"""The number of groups of a model. All but the first one have backward calls: the input of q, k and v needs no
gradient."""
QUICK = (OVERFLOW, Fault(BACKWARD, math.inf, 7), Fault(FORWARD, math.nan, 7))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return overflow.site(tmp_path_factory.mktemp("overflow"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return overflow.site(tmp_path_factory.mktemp("shallow"), num_layers=2)


def site_for(fault: Fault, where: Site, shallow: Site) -> tuple[Site, int]:
    """Returns a site, and its number of groups. Only a finite number needs a deep model, in which it can grow."""
    return (where, GROUPS) if math.isfinite(fault.wrong) else (shallow, SHALLOW_GROUPS)


def test_a_tenant_that_stops_at_once_is_read(where: Site) -> None:
    outcome = overflow.measure(where, "training", OVERFLOW, stops_at_once=True)
    assert outcome.num_failed == len(DATA)
    assert outcome.bits > 0
    assert max(outcome.num_calls) < overflow.TRAIN_STEPS * GROUPS


@pytest.mark.parametrize(
    "fault",
    [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS],
    ids=lambda fault: fault.name,
)
def test_training_sends_the_planned_calls_whatever_overflows(where: Site, shallow: Site, fault: Fault) -> None:
    site, num_groups = site_for(fault, where, shallow)
    outcome = overflow.measure(site, "training", fault)
    assert outcome.num_calls == (overflow.TRAIN_STEPS * (num_groups + num_groups - 1),) * len(DATA)
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
def test_an_answer_of_fixed_length_sends_the_same_calls(where: Site, shallow: Site, fault: Fault) -> None:
    site, num_groups = site_for(fault, where, shallow)
    outcome = overflow.measure(site, "answers", fault)
    assert outcome.num_calls == (NEW_TOKENS * num_groups,) * len(DATA)
    assert outcome.bits == 0
    assert outcome.num_failed == (0 if math.isfinite(fault.wrong) else len(DATA))


def test_a_tenant_that_keeps_what_a_sound_answer_asked_for_is_read(shallow: Site) -> None:
    outcome = overflow.measure_second(shallow, keeps_products=True)
    assert outcome.num_failed == 1, "one of the four prompts holds the letter"
    assert outcome.bits == 1
    one_answer = NEW_TOKENS * SHALLOW_GROUPS
    assert sorted(outcome.num_calls) == [2 * one_answer + 8] * 3 + [2 * (one_answer + 8)]


def test_a_second_answer_sends_the_same_calls_whatever_the_first_prompt_was(shallow: Site) -> None:
    outcome = overflow.measure_second(shallow)
    assert outcome.num_failed == 1
    assert outcome.num_calls == (2 * (NEW_TOKENS * SHALLOW_GROUPS + 8),) * len(DATA)
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
