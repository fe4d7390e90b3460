"""Tests an attack by a client who knows prompts. Unrounded results give the mask's error, the secret and other prompts;
rounded results, or too few of them, do not."""

from __future__ import annotations

import pytest
import torch

from attacks.adversaries.collusion import RELEASED_VALUES, seek_error
from attacks.controls import collusion as played
from attacks.controls.lattice import no_model, toy
from attacks.report import catalogue

TOY = toy(16, 2, 3.2)
ERROR = 1e-3
"""A bound on relative errors, which is above the mask's own error and below the error of any failed attack."""


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "NUM_KNOWN", 8)
    monkeypatch.setattr(played, "NUM_OTHERS", 8)


def test_the_control_wins_at_the_parameters_that_clients_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "NUM_KNOWN", 32)
    for _ in range(2):  # fresh secrets each time
        assert played.released_values_control().wins
    (control,) = catalogue.controls(RELEASED_VALUES.name)
    assert control is played.released_values_control


def test_unrounded_results_open_the_block_of_a_toy() -> None:
    assert played.relative_error(TOY, step=0.0) < ERROR
    assert played.relative_error(TOY, step=1.0) < ERROR


@pytest.mark.parametrize("step", [2e3, 1e5])
def test_rounded_results_leave_the_error_open(step: float) -> None:
    """The client gets 128 results for each row of 64 features, rounded to a multiple of `step`. Both steps are far
    larger than a number of the weight, and then the attack recovers no other prompt."""
    assert played.relative_error(TOY, step) == 1.0


@pytest.mark.parametrize("num_given", [20, 48])
def test_fewer_results_than_features_leave_it_open(num_given: int) -> None:
    """With far fewer results for a row than its 64 features, the attack recovers no other prompt. With 63 results it
    often still does, because the error consists of integers, so that a small mistake is rounded away."""
    assert played.relative_error(TOY, 0.0, num_given) == 1.0


def test_the_error_itself_is_found() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-1000, 1000, (4, 12), generator=generator)
    error = torch.randint(-9, 10, (4, 12), generator=generator)
    weight = torch.randint(-127, 128, (12, 30), generator=generator)
    released = ((rows + error) @ weight).to(torch.float64)
    assert torch.equal(seek_error(released, rows, weight), error)
    assert not torch.equal(seek_error(released[:, :8], rows, weight[:, :8]), error)


def test_it_claims_nothing_on_a_recording() -> None:
    assert RELEASED_VALUES.attack(None, no_model(), None) == []  # type: ignore[arg-type]
