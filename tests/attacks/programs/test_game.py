"""Tests the distinguisher game, in which an adversary guesses which of two inputs was masked. It does no better
than chance under the masks of noise/, and wins on every control. The game's statistics equal slow reference ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.adversaries.distinguisher import SCORES, Seen
from attacks.programs import game
from noise import sampling
from noise.blocks.pool import MaskPool
from noise.params import PARAMETERS
from tests.support.spies import results_of
from wire.errors import ConfigurationError
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import rounded

DEFAULT = PARAMETERS["default"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- the game -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", game.SECRETS)
def test_lattice_is_at_chance(secret: str) -> None:
    """A quick game misses by chance once in a thousand. A game that misses is played again, so that the test fails by
    chance once in a million."""
    for _ in range(2):
        found = game.play("lattice", game.QUICK_RUNS, secret)
        if all(one.is_at_chance for one in found):
            break
    assert [one.score for one in found] == list(SCORES)
    assert all(one.is_at_chance for one in found), found
    for one in found:
        assert one.half_width == pytest.approx(game.expected_half_width(game.QUICK_RUNS), rel=0.1)


@pytest.mark.slow
def test_a_full_game_is_precise_enough() -> None:
    assert game.expected_half_width(game.FULL_RUNS) <= game.NEEDED_HALF_WIDTH
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(SCORES), game.FULL_RUNS, generator=generator, dtype=torch.float64)
    coins = torch.randint(2, (game.FULL_RUNS,), generator=generator).bool()
    for one in game.outcomes(scores, coins):
        assert one.is_at_chance
        assert one.half_width <= game.NEEDED_HALF_WIDTH
        assert one.half_width == pytest.approx(game.expected_half_width(game.FULL_RUNS), rel=0.1)


def test_every_score_wins_on_its_control() -> None:
    found = game.controls(60)
    assert {one.metric.removeprefix("AUC of ") for one in found} == set(SCORES)
    assert all(one.wins for one in found), found
    assert all(one.value > 0.95 for one in found)
    (unmasked,) = [one for one in found if one.setting == "no mask"]
    assert unmasked.value == 1.0


@pytest.mark.parametrize("mask", ["pad", "shares"])
def test_other_masks_can_be_played(mask: str) -> None:
    for _ in range(2):
        found = game.play(mask, 100)
        if all(one.is_at_chance for one in found):
            break
    assert all(one.is_at_chance for one in found), found


# ---- the adversary knows what it should -----------------------------------------------------------------------------


@pytest.mark.parametrize("secret", game.SECRETS)
def test_candidates_are_exactly_what_the_mask_hides(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sent message minus its mask is the candidate that the coin chose. Each message also has a secret and an error
    of its own: it fills a whole block (all rows under one secret), and no two blocks share a secret."""
    drawn = results_of(monkeypatch, sampling, "ternary")
    tenant = game.Tenant("lattice", secret, tmp_path)
    masks: list[torch.Tensor] = []
    take = MaskPool.take

    def spy_take(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mask, effect = take(*arguments)
        masks.append(mask.clone())
        return mask, effect

    monkeypatch.setattr(MaskPool, "take", spy_take)
    coins = [0, 1, 1, 0]
    seen = [tenant.send(coin) for coin in coins]
    for coin, one, mask in zip(coins, seen, masks, strict=True):
        assert torch.equal(one.sent, rounded(mask + tenant.candidates[coin], tenant.call.bits))
    assert tenant.call.bits == 24
    assert torch.equal(seen[1].before, seen[0].sent)
    assert torch.equal(seen[2].before_plain, tenant.candidates[1])
    secrets = torch.cat(drawn).flatten(1)
    assert len(secrets) >= len(coins) + 1
    assert len(torch.unique(secrets, dim=0)) == len(secrets)
    tenant.close()


def test_the_two_inputs_are_a_block_each() -> None:
    """Both inputs have as many rows as a block, which is all the rows under one secret. With two adapters on one text,
    the inputs differ by less than their own size."""
    first, second = game.choice("adapter").inputs
    assert first.shape == second.shape == (DEFAULT.ring_degree, 32)
    assert 0 < float((first - second).norm()) < float(first.norm())
    assert game.choice("prompt").inputs[0].shape == first.shape


def test_the_public_matrix_is_the_one_that_the_provider_was_told(tmp_path: Path) -> None:
    tenant = game.Tenant("lattice", "prompt", tmp_path)
    assert tenant.public_matrix.shape == (DEFAULT.dimension, 32)
    untold = SeededRows(bytes(32), 0, DEFAULT.dimension).expand(32)
    assert not torch.equal(tenant.public_matrix, untold)
    assert tenant.known.public_hat.shape[:2] == (DEFAULT.rank, 2 * DEFAULT.ring_degree)
    tenant.close()


def test_scores_change_sign_with_the_candidates(tmp_path: Path) -> None:
    """No score prefers one side: if the candidates are exchanged, the score changes its sign."""
    tenant = game.Tenant("lattice", "prompt", tmp_path)
    facts = tenant.known
    turned = game.known((facts.candidates[1], facts.candidates[0]), tenant.public_matrix, facts.bits)
    seen: Seen = tenant.send(1)
    for score in SCORES.values():
        assert score(turned, seen) == pytest.approx(-score(facts, seen), rel=1e-3, abs=1e-3)
    tenant.close()


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_auc_counts_pairs() -> None:
    generator = torch.Generator().manual_seed(4)
    ranks = torch.randint(6, (40,), generator=generator)  # this gives many ties
    coins = torch.randint(2, (40,), generator=generator).bool()
    pairs = [
        1.0 if one > zero else 0.5 if one == zero else 0.0
        for one in ranks[coins].tolist()
        for zero in ranks[~coins].tolist()
    ]
    assert game.auc(ranks, coins) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_the_quantile_is_shared_by_all_scores() -> None:
    assert game.quantile(1) == pytest.approx(3.2905, abs=1e-4)  # 99.9%, two-sided
    tail = 0.5 * math.erfc(game.quantile(5) / math.sqrt(2))
    assert 2 * 5 * tail == pytest.approx(0.001, rel=1e-6)


@pytest.mark.slow
def test_a_weak_leak_is_seen() -> None:
    """Scores are shifted by a fifth of their standard deviation. This gives an AUC of Φ(0.2/√2) = 0.556, which a full
    game distinguishes from 0.5."""
    generator = torch.Generator().manual_seed(5)
    coins = torch.randint(2, (game.FULL_RUNS,), generator=generator).bool()
    scores = torch.randn(len(SCORES), game.FULL_RUNS, generator=generator, dtype=torch.float64) + 0.2 * coins
    for one in game.outcomes(scores, coins):
        assert not one.is_at_chance
        assert one.auc == pytest.approx(0.556, abs=0.03)


# ---- command line ---------------------------------------------------------------------------------------------------


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(game, "CONTROL_RUNS", 20)
    monkeypatch.setattr(game.controls, "__defaults__", (20,))
    assert game.main(["--mask", "off", "--runs", "20", "--out", str(tmp_path)]) == 1  # the texts must be told apart
    printed = capsys.readouterr().out
    assert "NOT at chance" in printed
    data = json.loads((tmp_path / "game.json").read_text())
    assert (data["mask"], data["runs"], len(data["scores"])) == ("off", 20, len(SCORES))
    assert all(check["wins"] for check in data["controls"])


@pytest.mark.parametrize("arguments", [["--mask", "gaussian-pool"], ["--secret", "key"], ["--runs", "1"]])
def test_what_cannot_be_played_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert game.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_runs_are_counted() -> None:
    with pytest.raises(ConfigurationError, match="at least 2 runs"):
        game.play("off", 1)
