"""Tests the two providers of `shares`, and a provider with a client who knows prompts and gets results.

The two providers recover the rows together, and each alone has only uniform numbers or seeds. Unrounded results give
the mask's error, the secret and other prompts; rounded results, or too few of them, do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attacks.adversaries.collusion import COLLUSION, RELEASED_VALUES, collude, seek_error
from attacks.controls import collusion
from attacks.controls.collusion import SharesTraffic, shares_traffic
from attacks.controls.float_masks import public_of
from attacks.controls.lattice import no_model, toy
from attacks.report import catalogue
from attacks.seen.view import Exchange, write_recording
from wire.errors import ConfigurationError

# ---- two providers --------------------------------------------------------------------------------------------------

NUM_PROMPTS = 24
CHI_SQUARE_255 = 363.0
"""A bound on chi-square that uniform bytes exceed once in 100,000 times."""


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> SharesTraffic:
    return shares_traffic(tmp_path_factory.mktemp("shares"), NUM_PROMPTS)


def masked(traffic: SharesTraffic) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers that the first provider received, and the same numbers without a mask, both flattened."""
    messages = traffic.view_1.messages
    rows = torch.cat([message.request().flatten() for message in messages])
    return rows, torch.cat([traffic.truth[message.seq].flatten() for message in messages])


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.to(torch.float64), other.to(torch.float64))))[0, 1])


def test_two_together_win() -> None:
    result = collusion.collusion_control()
    assert result.wins
    assert result.value == 0.0


def test_all_messages_are_opened_exactly(traffic: SharesTraffic) -> None:
    stolen = {claim.seq: claim.rows for claim in collude(traffic.view_1, traffic.view_2)}
    assert stolen.keys() == traffic.truth.keys()
    assert all(torch.equal(stolen[seq], rows) for seq, rows in traffic.truth.items())


def test_one_view_alone_claims_nothing(traffic: SharesTraffic) -> None:
    for view in (traffic.view_1, traffic.view_2):
        assert COLLUSION.attack(view, public_of("llama"), None) == []
        assert collude(view, view) == []


def test_the_first_view_alone_is_at_baseline(traffic: SharesTraffic) -> None:
    rows, truth = masked(traffic)
    bound = 4.5 / len(rows) ** 0.5  # in standard deviations; exceeded once in 150,000 times
    assert abs(correlation(rows, truth)) < bound
    assert abs(correlation(rows.abs(), truth.abs())) < bound


def test_the_first_views_bytes_look_uniform(traffic: SharesTraffic) -> None:
    rows, truth = masked(traffic)
    assert chi_square(rows) < CHI_SQUARE_255
    assert chi_square(truth.to(torch.int32)) > 10 * CHI_SQUARE_255, "the test sees rows that are not hidden"


def chi_square(rows: torch.Tensor) -> float:
    counts = torch.bincount(rows.contiguous().view(torch.uint8).to(torch.int64), minlength=256).to(torch.float64)
    expected = counts.sum() / 256
    return float(((counts - expected).square() / expected).sum())


def test_the_second_view_alone_does_not_depend_on_the_data(traffic: SharesTraffic) -> None:
    """The seeds are fresh, so the rows that they expand to do not depend on the data."""
    seeds = [message.seeded_rows() for message in traffic.view_2.messages]
    assert len({each.seed for each in seeds}) == len(seeds)
    pairs = zip(seeds, traffic.truth.values(), strict=True)
    expanded = torch.cat([each.expand(rows.shape[1]).flatten() for each, rows in pairs])
    truth = torch.cat([rows.flatten() for rows in traffic.truth.values()])
    assert abs(correlation(expanded, truth)) < 4.5 / len(truth) ** 0.5


def test_the_wrong_seeds_open_nothing(traffic: SharesTraffic, tmp_path: Path) -> None:
    """With the seeds of another session of the same shape, the result is uniform again."""
    other = shares_traffic(tmp_path, NUM_PROMPTS)
    stolen = torch.cat([claim.rows.flatten() for claim in collude(traffic.view_1, other.view_2)])
    _, truth = masked(traffic)
    assert abs(correlation(stolen, truth)) < 4.5 / len(truth) ** 0.5


def test_views_of_different_models_are_refused(traffic: SharesTraffic, tmp_path: Path) -> None:
    manifest = traffic.view_1.manifest
    fewer = manifest.model_copy(update={"groups": manifest.groups[:1]})
    zeros = torch.zeros(1, manifest.groups[0].in_features, dtype=torch.int32)
    other = write_recording(tmp_path / "other", fewer, [Exchange(0, zeros, zeros.clone())])
    with pytest.raises(ConfigurationError, match="different models"):
        collude(traffic.view_1, other)


# ---- a client who knows prompts -------------------------------------------------------------------------------------

TOY = toy(16, 2, 3.2)
ERROR = 1e-3
"""A bound on relative errors, which is above the mask's own error and below the error of any failed attack."""


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collusion, "NUM_KNOWN", 8)
    monkeypatch.setattr(collusion, "NUM_OTHERS", 8)


def test_the_control_wins_at_the_parameters_that_clients_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collusion, "NUM_KNOWN", 32)
    for _ in range(2):  # fresh secrets each time
        assert collusion.released_values_control().wins
    (control,) = catalogue.controls(RELEASED_VALUES.name)
    assert control is collusion.released_values_control


def test_unrounded_results_open_the_block_of_a_toy() -> None:
    assert collusion.relative_error(TOY, step=0.0) < ERROR
    assert collusion.relative_error(TOY, step=1.0) < ERROR


@pytest.mark.parametrize("step", [2e3, 1e5])
def test_rounded_results_leave_the_error_open(step: float) -> None:
    """The client gets 128 results for each row of 64 features, rounded to a multiple of `step`. Both steps are far
    larger than a number of the weight, and then the attack recovers no other prompt."""
    assert collusion.relative_error(TOY, step) == 1.0


@pytest.mark.parametrize("num_given", [20, 48])
def test_fewer_results_than_features_leave_it_open(num_given: int) -> None:
    """With far fewer results for a row than its 64 features, the attack recovers no other prompt. With 63 results it
    often still does, because the error consists of integers, so that a small mistake is rounded away."""
    assert collusion.relative_error(TOY, 0.0, num_given) == 1.0


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
