"""Tests what an unmasked training step reveals: its batch, its full gradients and ΔW of down_proj. Uniform rows reveal
nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attacks.adversaries.gradients import (
    GRADIENT_EQUATIONS,
    GRADIENT_VIEW,
    LABELS,
    NO_LABEL,
    TOKENS,
    batch_labels,
    batch_tokens,
    last_down,
    weight_gradient,
)
from attacks.controls import unmasked
from attacks.controls.unmasked import StepTraffic, down_errors, share_right, step_traffic
from attacks.programs import active
from attacks.seen.adversary import Adversary, StolenDelta
from attacks.seen.forward_passes import ForwardPass, Opened, forward_passes
from attacks.seen.public_model import describe
from attacks.seen.view import Exchange, View, write_recording
from tenant_sdk import TenantClient, embedded
from tests.support.providers import WrappedModel
from tests.support.training import lora
from wire.frame import Call
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.inproc import InprocConnection

# ---- the batch, and full gradients ----------------------------------------------------------------------------------

BY_CHANCE = 0.3
"""A bound on the share of correct guesses. Each of 96 tokens is one of 95, so that on average one guess is right."""


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-gpt2"])
def traffic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StepTraffic:
    return step_traffic(tmp_path_factory.mktemp("gradients"), request.param)


def training(traffic: StepTraffic) -> ForwardPass:
    (step,) = [one for one in forward_passes(traffic.view) if one.is_training]
    return step


def test_gradient_view_wins_on_its_control() -> None:
    assert unmasked.gradient_view_control().wins


def test_every_token_of_the_batch(traffic: StepTraffic) -> None:
    assert share_right(traffic, TOKENS) == 1.0


def test_labels_where_the_provider_has_the_head(traffic: StepTraffic) -> None:
    assert share_right(traffic, LABELS) == (0.0 if traffic.public.head_group is None else 1.0)


def test_the_full_gradient_of_every_layer_that_has_both_directions(traffic: StepTraffic) -> None:
    step = training(traffic)
    assert len(step.backward) == len(step.forward) - 1, "all but the first: it is the lowest adapted layer"
    for group in step.backward:
        found, wanted = weight_gradient(step, group), traffic.gradients[group].to(torch.float64)
        assert found is not None
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert weight_gradient(step, traffic.public.blocks[0].q.group) is None


def test_rows_scaled_one_by_one_keep_tokens_and_labels(traffic: StepTraffic) -> None:
    """The rows are scaled one by one, as in ring arithmetic without a mask. Tokens and labels are still read
    correctly."""
    step, generator = training(traffic), torch.Generator().manual_seed(0)

    def scaled(rows: torch.Tensor) -> torch.Tensor:
        return (rows * (1 + 9 * torch.rand(len(rows), 1, generator=generator)) * 1e4).round().to(torch.float64)

    first = traffic.public.blocks[0].q.group
    assert batch_tokens(scaled(step.forward[first].request()), traffic.public).tolist() == traffic.token_ids
    if traffic.public.head_group is not None:
        gradients = step.backward[traffic.public.head_group].request()
        assert batch_labels(scaled(gradients * 1e3)).tolist() == traffic.labels
        assert NO_LABEL in traffic.labels


def test_rows_under_a_one_time_mask_give_no_more_than_guessing(traffic: StepTraffic) -> None:
    generator = torch.Generator().manual_seed(1)
    opened = {
        message.seq: torch.randint(-(2**31), 2**31, message.request().shape, generator=generator).to(torch.float64)
        for message in traffic.view.messages
    }
    wanted = {TOKENS: traffic.token_ids, LABELS: traffic.labels}
    for claim in GRADIENT_VIEW.attack(traffic.view, traffic.public, opened):
        named = [int(part) for part in claim.value.split(",")]  # type: ignore[union-attr]
        right = sum(one == other for one, other in zip(named, wanted[claim.name], strict=True))  # type: ignore[union-attr]
        assert right / len(named) < BY_CHANCE


def test_batches_of_rows_that_were_opened_with_a_little_left_of_the_noise(traffic: StepTraffic) -> None:
    """After a mask was removed, rows that should be zero (padding, positions without a label) are small noise. Tokens
    and labels are still read correctly."""
    step, generator = training(traffic), torch.Generator().manual_seed(2)

    def opened(rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.float64) + 1e-6 * rows.abs().max() * torch.randn(rows.shape, generator=generator)

    first = opened(step.forward[traffic.public.blocks[0].q.group].request())
    assert batch_tokens(first, traffic.public).tolist() == traffic.token_ids
    if traffic.public.head_group is not None:
        assert batch_labels(opened(step.backward[traffic.public.head_group].request())).tolist() == traffic.labels


def test_padding_whose_embedding_is_zero(traffic: StepTraffic) -> None:
    if traffic.public.positions is not None:
        return  # a position is added to each row, so no row is zero
    padding = int(traffic.public.embedding.norm(dim=1).argmin())
    rows = training(traffic).forward[traffic.public.blocks[0].q.group].request().to(torch.float64)
    rows[5:8] = 1e-7
    ids = batch_tokens(rows, traffic.public).tolist()
    assert ids == [*traffic.token_ids[:5], *[padding] * 3, *traffic.token_ids[8:]]


def test_traffic_without_training_has_no_batch(traffic: StepTraffic) -> None:
    inference = View(traffic.view.manifest, traffic.view.messages[: len(traffic.view.manifest.groups)])
    assert GRADIENT_VIEW.attack(inference, traffic.public, None) == []


# ---- fine-tuning by the SDK -----------------------------------------------------------------------------------------


class Recording(WrappedModel):
    """Plays an honest provider that keeps what it sees."""

    def __init__(self, served_model: Any) -> None:
        super().__init__(served_model)
        self.seen: list[Exchange] = []

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        reply = self.served_model.compute(call, rows)
        request = torch.tensor(list(rows.pack()), dtype=torch.uint8) if isinstance(rows, SeededRows) else rows.clone()
        names = call.direction.name.lower(), call.purpose.name.lower()
        self.seen.append(Exchange(call.group, request, reply.clone(), *names))
        return reply


def read_by_the_provider(folder: Path, monkeypatch: pytest.MonkeyPatch, mask: str, arithmetic: str) -> dict[str, str]:
    """Lets a real tenant train one step on active.DATA[0], and returns the tokens and the labels that the adversary
    claims, each decoded to text, by the claim's name."""
    site = active.site(folder / "site")
    provider = Recording(site.served_model)
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(provider))
    rows = [{"prompt": question, "completion": answer} for question, answer in active.DATA[0]]
    with TenantClient("inproc:x", mask=mask, arithmetic=arithmetic, cache=folder / "cache", progress=False) as client:
        client.finetune(rows, lora(), folder / "out", max_steps=1, batch_size=2, warmup_steps=0, progress=False)
    view = write_recording(folder / "seen", site.served_model.manifest(), provider.seen)
    public = describe(AutoModelForCausalLM.from_pretrained(site.model), view.manifest)
    tokenizer = AutoTokenizer.from_pretrained(site.model)
    return {
        claim.name: tokenizer.decode([int(part) for part in claim.value.split(",") if int(part) != NO_LABEL])  # type: ignore[union-attr]
        for claim in GRADIENT_VIEW.attack(view, public, None)
    }


@pytest.mark.parametrize("arithmetic", ["ring", "float"])
def test_data_sent_without_a_mask_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arithmetic: str) -> None:
    read = read_by_the_provider(tmp_path, monkeypatch, "off", arithmetic)
    for question, answer in active.DATA[0]:
        assert f"{question}{answer}<|end|>" in read[TOKENS]
        assert f"{answer}<|end|>" in read[LABELS]


@pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
def test_data_under_the_default_mask_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_by_the_provider(tmp_path, monkeypatch, "lattice", "ring")
    assert read.keys() == {TOKENS}, "no row of gradients has one negative number"
    for question, answer in active.DATA[0]:
        assert question[:4] not in read[TOKENS]
        assert answer[:4] not in read[TOKENS]


# ---- what the adapter adds to down_proj -----------------------------------------------------------------------------


def claimed(traffic: StepTraffic, opened: Opened | None = None, adversary: Adversary = GRADIENT_EQUATIONS) -> set[str]:
    claims = adversary.attack(traffic.view, traffic.public, opened)
    return {claim.layer for claim in claims if isinstance(claim, StolenDelta)}


def as_sent(traffic: StepTraffic) -> dict[int, torch.Tensor]:
    return {message.seq: message.request().to(torch.float64) for message in traffic.view.messages}


def test_gradient_equations_win_on_their_control() -> None:
    assert unmasked.gradient_equations_control().wins


def test_every_down_proj_the_last_one_too(traffic: StepTraffic) -> None:
    found = down_errors(traffic)
    assert len(found) == 2
    assert max(found.values()) < 1e-4


def test_equations_under_one_time_masks_give_nothing(traffic: StepTraffic) -> None:
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
