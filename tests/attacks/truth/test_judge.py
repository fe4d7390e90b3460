"""Tests the judge on claims about a training step: true claims win, and guesses are at the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from attacks.adversaries.gradients import LABELS, NO_LABEL, TOKENS, batch_tokens
from attacks.seen.adversary import StolenDelta, StolenFact, StolenRows, StolenTokens
from attacks.seen.public_model import describe
from attacks.seen.view import Exchange, View, write_recording
from attacks.truth.judge import Finding, judge, judge_deltas, judge_tokens
from attacks.truth.secrets import Batch, Truth
from attacks.victim import models
from provider.model.load import load, resolve
from provider.model.weights import serve_model
from wire.ring import coding

PAD = 0
BATCH = Batch(
    torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, PAD, PAD]]),
    torch.tensor([[-100, -100, -100, 13, 14, 15], [-100, -100, 22, 23, -100, -100]]),
    torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
)
HEAD_ROWS = [NO_LABEL, 13, 14, 15, 22, 23, NO_LABEL, NO_LABEL]
"""Logits are computed at positions 1 to 4, at which some sequence has a target."""


@dataclass(frozen=True)
class Site:
    """Holds one training step of a fresh adapter, as the provider receives it without a mask."""

    view: View
    truth: Truth
    sent: dict[int, torch.Tensor]


@pytest.fixture(scope="module", params=["float", "ring"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("judge")
    path = models.make("tiny-llama", folder / "model")
    model = AutoModelForCausalLM.from_pretrained(path)
    fresh = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    fresh.save_pretrained(folder / "adapter")
    manifest = serve_model(load(resolve(str(path))), "native").manifest
    public = describe(model, manifest)
    truth = Truth(model, public, manifest, folder / "adapter")
    exchanges, sent = [], {}
    for group, rows in truth.fresh_rows(BATCH).items():
        rows = rows[BATCH.has_logits.flatten()] if group == public.head_group else rows
        norm = manifest.groups[group].max_column_norm
        sent[group] = rows.to(torch.float32) if request.param == "float" else coding.encode(rows.float(), norm)[0]
        exchanges.append(Exchange(group, sent[group], torch.zeros(len(rows), 1)))
    gradients = torch.zeros(len(HEAD_ROWS), len(public.embedding))
    reply = torch.zeros(len(HEAD_ROWS), 1)
    if request.param == "ring":
        exchanges = [Exchange(one.group, one.request, one.reply.int()) for one in exchanges]
        gradients, reply = gradients.int(), reply.int()
    exchanges.append(Exchange(public.head_group, gradients, reply, "backward"))
    return Site(write_recording(folder / "seen", manifest, exchanges), truth, sent)


def judged(site: Site, name: str, ids: list[int]) -> Finding:
    (found,) = judge([StolenFact(name, ",".join(map(str, ids)))], site.view, site.truth, [], [BATCH])
    assert found.module == name
    return found


def test_a_batch_row_after_row_with_its_padding(site: Site) -> None:
    assert judged(site, TOKENS, BATCH.token_ids.flatten().tolist()).verdict == "wins"
    assert judged(site, TOKENS, BATCH.token_ids.t().flatten().tolist()).value < 0.3
    assert judged(site, TOKENS, [10, 11, 12]).value == 0.25, "what is missing is not right"


def test_labels_are_those_of_the_rows_that_the_head_was_sent(site: Site) -> None:
    assert judged(site, LABELS, HEAD_ROWS).verdict == "wins"
    assert judged(site, LABELS, HEAD_ROWS).value == 1.0
    assert judged(site, LABELS, HEAD_ROWS[1:]).value < 0.5


@pytest.mark.parametrize("guess", [NO_LABEL, 22])
def test_one_guess_for_all_is_at_baseline(site: Site, guess: int) -> None:
    found = judged(site, LABELS, [guess] * len(HEAD_ROWS))
    assert found.value == pytest.approx(found.baseline)
    assert found.verdict == "at baseline"


def test_tokens_are_read_from_what_the_provider_is_sent(site: Site) -> None:
    first = site.sent[site.truth.public.blocks[0].q.group].to(torch.float64)
    assert batch_tokens(first, site.truth.public).tolist() == BATCH.token_ids.flatten().tolist()


def test_rows_of_the_first_step_are_judged(site: Site) -> None:
    messages = site.view.select("product", "forward")
    right = [StolenRows(one.seq, one.request().to(torch.float64)) for one in messages]
    (found,) = judge(right, site.view, site.truth, [], [BATCH])
    assert (found.module, found.verdict) == ("rows", "wins")
    wrong = [StolenRows(one.seq, torch.randn(one.request().shape, dtype=torch.float64)) for one in messages]
    (found,) = judge(wrong, site.view, site.truth, [], [BATCH])
    assert abs(found.value) < 0.2


def test_without_batches_nothing_is_judged(site: Site) -> None:
    claims = [StolenFact(TOKENS, "1,2"), StolenRows(site.view.messages[0].seq, torch.ones(12, 32))]
    assert judge(claims, site.view, site.truth, []) == []


def test_weights_of_nothing_know_nothing_about_the_scores(site: Site) -> None:
    """The true change shrinks the base weights W, as a rotation may. A claim of −W has a part in common with it,
    although it contains no knowledge of the adapter. The judge must not count this as a success."""
    public = site.truth.public
    generator = torch.Generator().manual_seed(0)
    deltas = {name: torch.zeros_like(layer.weight) for name, layer in public.layers().items()}
    for block in public.blocks:
        noise = torch.randn(block.q.weight.shape, generator=generator, dtype=torch.float64)
        deltas[block.q.name] = 0.1 * block.q.weight.std() * noise - 0.3 * block.q.weight
    truth = SimpleNamespace(public=public, deltas=deltas)
    layers = [layer for block in public.blocks for layer in (block.q, block.k)]

    def cosine(claims: list[StolenDelta]) -> Finding:
        findings = judge_deltas(claims, truth)
        return next(one for one in findings if (one.module, one.metric) == ("q·k", "cosine with ΔW"))

    assert cosine([StolenDelta(layer.name, -layer.weight) for layer in layers]).verdict == "at baseline"
    assert cosine([StolenDelta(layer.name, deltas[layer.name]) for layer in layers]).verdict == "wins"


SENT = [[1, *range(10 * place, 10 * place + 7)] for place in range(1, 9)]
"""Eight prompts of eight tokens each. All begin with the same token."""


def tokens(claims: list[list[int]]) -> tuple[Finding, Finding]:
    rate, tried = judge_tokens([StolenTokens(place, tuple(ids)) for place, ids in enumerate(claims)], SENT)
    assert (rate.metric, tried.metric) == ("recovery rate", "share tried")
    return rate, tried


def test_tokens_are_judged_over_those_that_were_tried() -> None:
    rate, tried = tokens([SENT[0][:7], SENT[1][:4]])
    assert (rate.value, tried.value, tried.verdict) == (1.0, 11 / 64, "11 of 64")
    assert rate.verdict == "wins where tried", "eleven tokens are not the prompts"
    rate, tried = tokens(SENT)
    assert (rate.value, rate.verdict, tried.value) == (1.0, "wins", 1.0)


def test_tokens_that_were_tried_and_missed_are_wrong() -> None:
    rate, _ = tokens([[*SENT[0][:4], 0, 0, 0, 0]])
    assert (rate.value, rate.verdict) == (0.5, "above baseline")
    rate, _ = tokens([[0] * 8])
    assert (rate.value, rate.verdict) == (0.0, "at baseline")


def test_trying_what_is_alike_in_all_prompts_wins_nothing() -> None:
    rate, tried = tokens([ids[:1] for ids in SENT])
    assert (rate.value, rate.baseline, rate.verdict) == (1.0, 1.0, "at baseline")
    assert tried.verdict == "8 of 64"


def test_no_tokens_are_no_finding() -> None:
    assert judge_tokens([], SENT) == judge_tokens([StolenTokens(99, (1,)), StolenTokens(0, ())], SENT) == []
