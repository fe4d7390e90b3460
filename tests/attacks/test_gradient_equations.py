"""Tests what the gradients of a training step reveal about ΔW of down_proj, and when nothing is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attacks.adversaries.gradients import GRADIENT_EQUATIONS, last_down
from attacks.controls import unmasked
from attacks.controls.unmasked import StepTraffic, down_errors, step_traffic
from attacks.seen.adversary import Adversary, StolenDelta
from attacks.seen.forward_passes import Opened
from attacks.seen.view import View


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-gpt2"])
def traffic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StepTraffic:
    return step_traffic(tmp_path_factory.mktemp("equations"), request.param)


def claimed(traffic: StepTraffic, opened: Opened | None = None, adversary: Adversary = GRADIENT_EQUATIONS) -> set[str]:
    claims = adversary.attack(traffic.view, traffic.public, opened)
    return {claim.layer for claim in claims if isinstance(claim, StolenDelta)}


def as_sent(traffic: StepTraffic) -> dict[int, torch.Tensor]:
    return {message.seq: message.request().to(torch.float64) for message in traffic.view.messages}


def test_wins_on_its_control() -> None:
    assert unmasked.gradient_equations_control().wins


def test_every_down_proj_the_last_one_too(traffic: StepTraffic) -> None:
    found = down_errors(traffic)
    assert len(found) == 2
    assert max(found.values()) < 1e-4


def test_rows_under_one_time_masks_give_nothing(traffic: StepTraffic) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = {
        seq: torch.randint(-(2**31), 2**31, rows.shape, generator=generator).to(torch.float64)
        for seq, rows in as_sent(traffic).items()
    }
    assert claimed(traffic, noise) == set()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_half_of_a_step_under_masks_gives_nothing(traffic: StepTraffic, direction: str) -> None:
    opened, generator = as_sent(traffic), torch.Generator().manual_seed(1)
    for message in traffic.view.select("product", direction):
        rows = opened[message.seq]
        opened[message.seq] = rows + 10 * rows.std() * torch.randn(rows.shape, generator=generator).to(torch.float64)
    assert claimed(traffic, opened) == set()


def test_rows_that_were_opened_with_a_little_left_of_the_noise(traffic: StepTraffic) -> None:
    opened, generator = as_sent(traffic), torch.Generator().manual_seed(2)
    for rows in opened.values():
        rows += 1e-7 * rows.abs().max() * torch.randn(rows.shape, generator=generator)
    assert max(down_errors(traffic, opened).values()) < 1e-3


def test_gradients_of_a_layer_that_nobody_changed_give_nothing(traffic: StepTraffic) -> None:
    """The gradients of gate and up are exactly those of the public weights W, as with a fresh adapter. The adversary
    must claim nothing."""
    opened = as_sent(traffic)
    for block in traffic.public.blocks:
        messages = {
            (one.group, one.direction): one.seq for one in traffic.view.messages if one.num_rows > 5
        }  # the tokens of the prompt are left out
        down = opened[messages[block.down.group, "backward"]] @ block.down.weight.T
        given = opened[messages[block.up[0].group, "forward"]]
        terms = [layer(given).requires_grad_() for layer in block.up]
        act = torch.nn.functional.silu if len(terms) == 2 else lambda x: torch.nn.functional.gelu(x, approximate="tanh")
        inner = act(terms[0]) * (terms[1] if len(terms) == 2 else 1)
        slopes = torch.autograd.grad(inner.sum(), terms)
        opened[messages[block.down.group, "forward"]] = inner.detach()
        opened[messages[block.up[0].group, "backward"]] = torch.cat([down * slope for slope in slopes], dim=1)
    assert claimed(traffic, opened) == set()


def test_fewer_gradients_than_outputs_give_nothing(traffic: StepTraffic) -> None:
    opened = as_sent(traffic)
    for message in traffic.view.select("product", "backward"):
        opened[message.seq][20:] = 0
    assert claimed(traffic, opened) == set()


def test_the_last_layer_is_taken_from_a_step_of_the_same_adapter_only(traffic: StepTraffic) -> None:
    stolen = {}
    for name in traffic.public.layers():
        module, _, part = name.partition("[")
        if not part and name != traffic.public.blocks[-1].down.name:
            stolen[name] = traffic.deltas[module]
    last = last_down(traffic.view, traffic.public, None, stolen)
    assert last is not None
    wanted = traffic.deltas[last.layer]
    wanted = wanted if traffic.public.style == "llama" else wanted - wanted.mean(1, keepdim=True)
    assert float((last.delta - wanted).norm() / wanted.norm()) < 1e-4
    first, final = traffic.public.blocks
    for layer in (first.up[0], first.down, final.up[0]):
        assert last_down(traffic.view, traffic.public, None, {**stolen, layer.name: 0.5 * stolen[layer.name]}) is None
    assert last_down(traffic.view, traffic.public, None, {}) is None
    assert last_down(traffic.view, traffic.public, None, {**stolen, last.layer: wanted}) is None, "it is known already"


def test_ring_rows_have_a_secret_factor_each(traffic: StepTraffic) -> None:
    messages = tuple(replace(message, arithmetic="ring") for message in traffic.view.messages)
    ring = replace(traffic, view=View(traffic.view.manifest, messages))
    assert claimed(traffic)
    assert claimed(ring) == set()


def test_traffic_without_training_gives_nothing(traffic: StepTraffic) -> None:
    inference = View(traffic.view.manifest, traffic.view.messages[: len(traffic.view.manifest.groups)])
    assert claimed(replace(traffic, view=inference)) == set()
