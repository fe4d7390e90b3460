"""Tests the two providers of `shares`: together they recover the rows, and each alone has only uniform numbers or
seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attacks.adversaries.collusion import COLLUSION, collude
from attacks.controls import collusion
from attacks.controls.collusion import SharesTraffic, shares_traffic
from attacks.controls.float_masks import public_of
from attacks.seen.view import Exchange, write_recording
from wire.errors import ConfigurationError

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
