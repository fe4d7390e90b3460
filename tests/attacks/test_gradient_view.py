"""The batch of a training step and its full gradients, from plain traffic; nothing from uniform rows."""

from __future__ import annotations

import pytest
import torch

from attacks.adversaries.gradient_view import (
    ADVERSARY,
    LABELS,
    NO_LABEL,
    TOKENS,
    batch_labels,
    batch_tokens,
    weight_gradient,
)
from attacks.controls import gradient_view
from attacks.controls.gradient_view import Traffic, make, share_right
from attacks.passes import Pass, passes
from attacks.view import View

BY_CHANCE = 0.3
"""Of 24 tokens of 95 by guessing: 7 right once in a billion times."""


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-gpt2"])
def traffic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return make(tmp_path_factory.mktemp("gradients"), request.param)


def training(traffic: Traffic) -> Pass:
    (step,) = [one for one in passes(traffic.view) if one.is_training]
    return step


def test_wins_on_its_control() -> None:
    assert gradient_view.control().wins


def test_every_token_of_the_batch(traffic: Traffic) -> None:
    assert share_right(traffic, TOKENS) == 1.0


def test_labels_where_the_provider_has_the_head(traffic: Traffic) -> None:
    assert share_right(traffic, LABELS) == (0.0 if traffic.public.head_group is None else 1.0)


def test_the_full_gradient_of_every_layer_that_has_both_directions(traffic: Traffic) -> None:
    step = training(traffic)
    assert len(step.backward) == len(step.forward) - 1, "all but the first: it is the lowest adapted layer"
    for group in step.backward:
        found, wanted = weight_gradient(step, group), traffic.gradients[group].to(torch.float64)
        assert found is not None
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert weight_gradient(step, traffic.public.blocks[0].q.group) is None


def test_rows_scaled_one_by_one_keep_tokens_and_labels(traffic: Traffic) -> None:
    """As ring arithmetic without a mask sends them."""
    step, generator = training(traffic), torch.Generator().manual_seed(0)

    def scaled(rows: torch.Tensor) -> torch.Tensor:
        return (rows * (1 + 9 * torch.rand(len(rows), 1, generator=generator)) * 1e4).round().to(torch.float64)

    first = traffic.public.blocks[0].q.group
    assert batch_tokens(scaled(step.forward[first].request()), traffic.public).tolist() == traffic.token_ids
    if traffic.public.head_group is not None:
        gradients = step.backward[traffic.public.head_group].request()
        assert batch_labels(scaled(gradients * 1e3)).tolist() == traffic.labels
        assert NO_LABEL in traffic.labels


def test_rows_under_a_one_time_mask_give_no_more_than_guessing(traffic: Traffic) -> None:
    generator = torch.Generator().manual_seed(1)
    opened = {
        message.seq: torch.randint(-(2**31), 2**31, message.request().shape, generator=generator).to(torch.float64)
        for message in traffic.view.messages
    }
    wanted = {TOKENS: traffic.token_ids, LABELS: traffic.labels}
    for claim in ADVERSARY.attack(traffic.view, traffic.public, opened):
        named = [int(part) for part in claim.value.split(",")]  # type: ignore[union-attr]
        right = sum(one == other for one, other in zip(named, wanted[claim.name], strict=True))  # type: ignore[union-attr]
        assert right / len(named) < BY_CHANCE


def test_traffic_without_training_gives_nothing(traffic: Traffic) -> None:
    inference = View(traffic.view.manifest, traffic.view.messages[: len(traffic.view.manifest.groups)])
    assert ADVERSARY.attack(inference, traffic.public, None) == []
