"""Tests adversaries that win at the shipped dimension if the mask is weakened, and that claim nothing if it is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attacks.adversaries import lattice_equations, sparse_secret
from attacks.adversaries.lattice_equations import SHARED, distances, undone
from attacks.adversaries.ring_lwe import PublicMatrix
from attacks.controls import Control
from attacks.controls import lattice as controls
from attacks.controls.lattice import ACTIVATION, LatticeTraffic, no_model
from attacks.programs import weakenings
from attacks.programs.weakenings import WEAKNESSES
from attacks.report.evaluate import Case, attack
from attacks.report.verdict import weakened
from attacks.seen.adversary import Adversary, Claim, StolenDifference, StolenFact, StolenRows
from noise.params import PARAMETERS
from wire.ring.seeded_rows import SeededRows

DEFAULT = PARAMETERS["default"]
ERROR = 21 / ACTIVATION


@pytest.mark.parametrize("control", [controls.sparse_secret_control, controls.shared_error_control])
def test_they_win_on_their_controls(control: Control) -> None:
    result = control()
    assert result.wins, result


# ---- sparse secrets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_sparse_secrets_of_every_parameter_set(name: str) -> None:
    parameters = PARAMETERS[name]
    traffic = LatticeTraffic(parameters, 32)
    for places in ((3,), (0, 700), (5, 600, parameters.dimension - 1)):
        secret = torch.zeros(1, parameters.rank, parameters.ring_degree, dtype=torch.int8)
        secret.view(-1)[list(places)] = torch.tensor([1, -1, 1], dtype=torch.int8)[: len(places)]
        mask = traffic.block(secret)
        traffic.send(traffic.activations(40), mask[:40])
    claims = traffic.attacked(sparse_secret.attack)
    assert len([one for one in claims if isinstance(one, StolenRows)]) == 3
    assert traffic.relative_error(claims) < 12 * parameters.sigma / ACTIVATION


def test_four_trits_are_found_on_a_few_rows() -> None:
    traffic = controls.sparse_secret_traffic((4,))
    assert traffic.relative_error(traffic.attacked(sparse_secret.attack)) < ERROR


def test_any_row_of_a_block_will_do() -> None:
    """The attacker sees only rows from the middle of a block. It finds the block's secret multiplied by a power of X,
    which also unmasks the block's other rows."""
    traffic = LatticeTraffic(DEFAULT, 32)
    mask = traffic.block(controls.sparse(3))
    for rows in (mask[300:340], mask[340:400]):
        traffic.send(traffic.activations(len(rows)), rows)
    assert traffic.relative_error(traffic.attacked(sparse_secret.attack)) < ERROR


def test_sparse_secret_says_nothing_of_honest_secrets() -> None:
    traffic = controls.sparse_secret_traffic((0,) * 8)
    assert traffic.attacked(sparse_secret.attack) == []


def test_sparse_secret_says_nothing_where_chance_would_do() -> None:
    traffic = LatticeTraffic(DEFAULT, sparse_secret.LEAST_FEATURES - 1)
    traffic.send(traffic.activations(40), traffic.block(controls.sparse(2))[:40])
    assert traffic.attacked(sparse_secret.attack) == []


# ---- shared errors --------------------------------------------------------------------------------------------------


def test_two_blocks_with_one_error_give_all_their_differences() -> None:
    traffic = controls.shared_error_traffic(share_blocks=True, share_pieces=False)
    claims = traffic.attacked(lattice_equations.attack_shared_error)
    assert StolenFact(SHARED, "1, 9") in claims
    assert controls.differences_error(traffic, claims) == 0.0, "the error cancels: exact"
    assert not [one for one in claims if isinstance(one, StolenRows)]


def test_known_rows_of_one_block_give_those_of_the_other(tmp_path: Path) -> None:
    traffic = controls.shared_error_traffic(share_blocks=True, share_pieces=False)
    view = traffic.view(tmp_path / "recording")
    # All rows of the first block are known, and of the second block those of the prompt that both hold.
    known = {seq: traffic.truth[seq].to(torch.float64) for seq in (*range(1, 9), 9)}  # type: ignore[union-attr]
    claims = lattice_equations.attack_shared_error(view, no_model(), known)
    opened = {one.seq: one.rows for one in claims if isinstance(one, StolenRows)}
    assert set(opened) == set(range(10, 17))
    for seq, rows in opened.items():
        assert torch.equal(rows, traffic.truth[seq].to(torch.float64))  # type: ignore[union-attr]


def test_pieces_with_one_error_give_their_block() -> None:
    traffic = controls.shared_error_traffic(share_blocks=False, share_pieces=True)
    claims = traffic.attacked(lattice_equations.attack_shared_error)
    assert len([one for one in claims if isinstance(one, StolenRows)]) == 16
    assert traffic.relative_error(claims) < ERROR


def test_wide_rows_need_one_pair(tmp_path: Path) -> None:
    """On a layer of 1,600 features, two prompts have the same first row and the same error. From this pair alone, the
    adversary finds the shared error and the exact difference of the two prompts' rows."""
    traffic = LatticeTraffic(DEFAULT, 1600)
    error = torch.randint(-21, 22, (1, 512, 1600), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    traffic.error = lambda shape: error
    first = traffic.activations(1)
    for _ in range(2):
        mask = traffic.block()
        rows = torch.cat((first, traffic.activations(511)))
        traffic.send(rows, mask, "forward")
    claims = lattice_equations.attack_shared_error(traffic.view(tmp_path / "recording"), no_model())
    (fact, difference) = claims
    assert fact == StolenFact(SHARED, "1, 2")
    assert isinstance(difference, StolenDifference)
    one, two = traffic.truth[1], traffic.truth[2]
    assert one is not None
    assert two is not None
    assert torch.equal(difference.rows, (one - two).to(torch.float64))


def test_shared_error_says_nothing_of_honest_blocks() -> None:
    """One prompt is sent several times, each time under a fresh mask. The adversary must not take this for a shared
    error."""
    traffic = controls.shared_error_traffic(share_blocks=False, share_pieces=False, num_blocks=3)
    assert traffic.attacked(lattice_equations.attack_shared_error) == []


def test_shared_error_says_nothing_of_messages_sent_again() -> None:
    traffic = controls.shared_error_traffic(share_blocks=False, share_pieces=False, num_blocks=1)
    traffic.exchanges += traffic.exchanges[1:]
    traffic.truth += traffic.truth[1:]
    assert traffic.attacked(lattice_equations.attack_shared_error) == []


@pytest.mark.parametrize("distance", [64, 74, 128, 171, 256, 448])
def test_a_secret_comes_back_from_its_difference(distance: int) -> None:
    secret = torch.randint(-1, 2, (3 * 512,), generator=torch.Generator().manual_seed(distance))
    public = PublicMatrix.of(SeededRows(bytes(range(32)), 0, 1536), 512, 3)
    change = public.equations(0) @ secret - public.equations(distance) @ secret
    polynomials = secret.view(3, 512)
    turned = torch.cat((polynomials[:, distance:], -polynomials[:, :distance]), dim=1).flatten()
    assert torch.equal(change, public.equations(0) @ (secret - turned))
    found = undone(secret - turned, distance, 512)
    assert found is not None
    assert torch.equal(found, secret)
    wrong = (secret - turned).clone()
    wrong[7] += 1
    assert undone(wrong, distance, 512) is None


def test_distances_are_those_of_blocks_and_pieces() -> None:
    found = distances(512, 49)
    assert len(found) == len(set(found)) <= lattice_equations.MOST_DISTANCES
    assert {64, 128, 171, 256, 512, 1024} <= set(found)


@pytest.mark.parametrize(
    ("name", "claim"),
    [("sparse-secret", StolenRows(1, torch.zeros(1, 1))), ("shared-error", StolenFact(SHARED, "1, 2"))],
)
def test_what_they_claim_is_certain(name: str, claim: Claim, tmp_path: Path) -> None:
    """A claim raises an alarm for any private mask, whether or not the truth is known."""
    view = SimpleNamespace(select=lambda *_: [], with_tensors=lambda: SimpleNamespace(messages=[None]))
    case = Case("seen", "lattice", view, no_model(), None, [], None)  # type: ignore[arg-type]
    results = attack(case, [Adversary(name, "", lambda *_: [claim])], [], tmp_path, lambda _: None)
    (certain,) = [one for one in results if one.finding.metric == "certain claims"]
    assert weakened([certain])


# ---- all of it, with a real tenant ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> weakenings.Site:
    return weakenings.Site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", weakenings.SETTINGS, ids=lambda one: one.name)
def test_an_honest_tenant_passes_on_both_sides(setting: weakenings.Setting, site: weakenings.Site) -> None:
    outcome = site.run(setting)
    assert outcome.alarms == []
    assert not any(outcome.claims.values())
    assert outcome.num_secrets >= 30, "forward and backward of all groups"
    assert outcome.is_right


def test_adversaries_see_shared_secrets_and_errors() -> None:
    """Small errors, and what repeats negated, in part or mirrored, are seen from inside only."""
    assert {one.name for one in WEAKNESSES if one.adversary is None} == {
        "errors in {0, 1}", "errors in {-1, 0, 1}", "errors whose row i + 2 is minus row i",
        "one error of four from seven rows before", "a second polynomial that is the first reversed",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("weakness", WEAKNESSES, ids=lambda one: one.name)
def test_a_weakened_tenant_is_noticed(weakness: weakenings.Weakness, site: weakenings.Site) -> None:
    outcome = site.run(weakenings.SETTINGS[1] if weakness.in_pieces else weakenings.SETTINGS[0], weakness)
    assert outcome.alarms
    if weakness.adversary is not None:
        assert outcome.claims[weakness.adversary] > 0
    assert outcome.is_right
