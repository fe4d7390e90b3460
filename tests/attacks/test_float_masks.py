"""Tests adversaries against float masks: each wins on its control and stays at its baseline on one-time masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.adversaries import float_masks, seed_search
from attacks.controls import Control
from attacks.controls import float_masks as controls
from attacks.controls.float_masks import (
    MaskedTraffic,
    difference_errors,
    exchange,
    inputs_of,
    record,
    row_errors,
    to_ring,
    uniform,
    uniform_traffic,
)
from attacks.seen.adversary import Adversary, StolenDifference, StolenRows
from attacks.seen.view import Exchange, View

ADVERSARIES = [
    float_masks.KNOWN_MASK, float_masks.WHICH_OF_K, float_masks.SPHERE_FIT, float_masks.DIFFERENCING,
    float_masks.AVERAGING, float_masks.PRINCIPAL_COMPONENTS, float_masks.SUBSPACE, float_masks.LOW_BITS,
    seed_search.SEED_SEARCH,
]  # fmt: skip
CONTROLS = [
    controls.known_mask_control, controls.which_of_k_control, controls.sphere_fit_control,
    controls.differencing_control, controls.averaging_control, controls.principal_components_control,
    controls.subspace_control, controls.low_bits_control, controls.seed_search_control,
]  # fmt: skip
CHANCE = 0.08
"""A bound on correlations: more than four standard deviations for the fewest independent elements, which are the 3,400
of averaging."""
BASELINE = 0.99
"""A lower bound on the relative errors of an adversary that knows nothing. A guess of zero has the error 1.0."""

by_name = pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda adversary: adversary.name)
on_both = pytest.mark.parametrize("kind", ["llama", "gpt2"])


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_wins_on_its_control(control: Control) -> None:
    result = control()
    assert result.wins, result


def test_every_control_is_of_its_adversary() -> None:
    names = [control().adversary for control in CONTROLS]
    assert names == [adversary.name for adversary in ADVERSARIES]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def one_time(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MaskedTraffic:
    """Returns the traffic of 40 prompts under fresh uniform masks, 320 messages. The first prompt is sent 20 times."""
    inputs = inputs_of(request.param, 21, 12)
    return uniform_traffic(request.param, str(tmp_path_factory.mktemp("uniform")), [inputs[0]] * 19 + inputs)


@by_name
def test_stays_at_its_baseline_on_one_time_masks(adversary: Adversary, one_time: MaskedTraffic) -> None:
    wins, guessed, wanted = 0, [], []
    for claim in adversary.attack(one_time.view, one_time.public, None):
        if isinstance(claim, StolenRows):
            truth = one_time.truth[claim.seq]
        else:
            assert isinstance(claim, StolenDifference)
            truth = one_time.truth[claim.seq] - one_time.truth[claim.other_seq]
        wins += float((claim.rows - truth).norm()) < BASELINE * float(truth.norm())
        guessed.append((claim.rows / claim.rows.norm().clamp_min(1e-30)).flatten())
        wanted.append((truth / truth.norm().clamp_min(1e-30)).flatten())
    assert wins == 0
    if guessed:
        alike = torch.nn.functional.cosine_similarity(torch.cat(guessed), torch.cat(wanted), dim=0)
        assert abs(float(alike)) < CHANCE


def test_low_bits_of_one_time_masks_are_chance(one_time: MaskedTraffic) -> None:
    rows = [(claim.rows, one_time.truth[claim.seq]) for claim in _rows_of(float_masks.LOW_BITS, one_time)]
    guess, truth = (torch.cat([pair[side].flatten() for pair in rows]) for side in (0, 1))
    spacing = 2.0**16
    off = (guess - truth) / spacing
    right = ((off - off.round()).abs() < 2.0**-6).to(torch.float64).mean()
    assert float(right) == pytest.approx(2.0**-5, rel=0.1)


@by_name
def test_knows_nothing_of_masks_that_do_not_fit(adversary: Adversary, tmp_path: Path) -> None:
    """Each float row has fresh Gaussian noise that is 100 times as strong as the row. No adversary may claim rows that
    are close to the true ones."""
    sent: list[tuple[Exchange, torch.Tensor | None]] = []
    generator = torch.Generator().manual_seed(0x5EED0007)
    for one in inputs_of("llama", 10, 12):
        for group, rows in one.items():
            strength = 100 * rows.pow(2).mean().sqrt()
            sent.append(
                (exchange("llama", group, rows + strength * torch.randn(rows.shape, generator=generator)), rows)
            )
    traffic = record("llama", str(tmp_path), sent)
    errors = row_errors(adversary.attack(traffic.view, traffic.public, None), traffic.truth)
    assert all(error > BASELINE - CHANCE for error in errors.values())


@pytest.mark.parametrize("adversary", [float_masks.KNOWN_MASK, float_masks.WHICH_OF_K], ids=lambda one: one.name)
@on_both
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.3])
def test_opens_normed_inputs_under_a_pool(adversary: Adversary, kind: str, sigma: float, tmp_path: Path) -> None:
    inputs = controls.decode_steps(inputs_of(kind, 2, 12), 3)
    traffic = controls.pool_traffic(kind, str(tmp_path), sigma, inputs)
    errors = row_errors(adversary.attack(traffic.view, traffic.public, None), traffic.truth)
    groups = controls.normed_groups(traffic.public)
    wanted = [message.seq for message in traffic.view.select("product") if message.group in groups]
    assert max(errors.get(seq, 1.0) for seq in wanted) < 1e-4


def test_known_mask_opens_gradients(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0x5EED0008)
    pool = torch.randn(8, 32, generator=generator)
    rows = 1e-9 * torch.randn(12, 32, generator=generator)
    strength = float(rows.pow(2).mean().sqrt())
    masked = rows + strength * pool[5]
    sent: list[tuple[Exchange, torch.Tensor | None]] = [
        (exchange("llama", 1, pool, purpose="effect", direction="backward"), None),
        (exchange("llama", 1, masked, direction="backward"), rows),
        (exchange("llama", 1, masked, direction="forward"), rows),
    ]
    traffic = record("llama", str(tmp_path), sent)
    errors = row_errors(float_masks.attack_known_mask(traffic.view, traffic.public, None), traffic.truth)
    assert list(errors) == [1]
    assert errors[1] < 1e-5


def test_known_mask_needs_effects(tmp_path: Path) -> None:
    rows = inputs_of("llama", 1, 12)[0]
    traffic = record("llama", str(tmp_path), [(exchange("llama", group, rows[group]), rows[group]) for group in rows])
    assert float_masks.attack_known_mask(traffic.view, traffic.public, None) == []
    assert float_masks.attack_which_of_k(traffic.view, traffic.public, None) == []


def test_sphere_fit_of_layer_norms(tmp_path: Path) -> None:
    """GPT-2's rows are recovered to 1e-3, and not better, because its norm adds an eps of 1e-5 to the small variances
    of the tiny model."""
    traffic = controls.fixed_mask_traffic("gpt2", str(tmp_path), controls.public_of("gpt2"), 10)
    errors = row_errors(float_masks.attack_sphere_fit(traffic.view, traffic.public, None), traffic.truth)
    assert max(errors[seq] for seq in traffic.truth) < 1e-3


@pytest.mark.slow
def test_seed_search_misses_a_seed_out_of_its_range(tmp_path: Path) -> None:
    for ring in (False, True):
        traffic = controls.seeded_traffic(str(tmp_path / str(ring)), ring, 0x5EED0100)
        assert seed_search.attack(traffic.view, traffic.public, None) == []
        found = seed_search.search(traffic.view, traffic.public, range(0x5EED00FB, 0x5EED0105))
        assert max(row_errors(found, traffic.truth).values()) < 1e-4
        assert len(found) == len(traffic.truth)


def test_a_plain_mean_and_a_plain_difference_fail_where_principal_components_win(tmp_path: Path) -> None:
    traffic = controls.traffic_under_one_mask(str(tmp_path))
    rows = row_errors(float_masks.AVERAGING.attack(traffic.view, traffic.public, None), traffic.truth)
    assert min(rows.values()) > 10, "the mean is the mask"
    plain, found = (
        [
            error
            for error in difference_errors(one.attack(traffic.view, traffic.public, None), traffic.truth)
            if error < 1e6  # the rows are of two different prompts
        ]
        for one in (float_masks.DIFFERENCING, float_masks.PRINCIPAL_COMPONENTS)
    )
    assert min(plain) > 1.0, "worse than a guess of zero"
    assert max(found) < 0.25
    assert len(found) >= 4


def test_principal_components_of_a_pad_that_is_used_again(tmp_path: Path) -> None:
    """Three prompts are sent seven times each under one uniform mask, and the sums wrap mod 2^32. The differences of
    the prompts are still recovered."""
    generator = torch.Generator().manual_seed(0x5EED000A)
    inputs = [to_ring(one[4]) for one in inputs_of("llama", 3, 12)] * 7
    pad = uniform(inputs[0].shape, generator)
    traffic = record("llama", str(tmp_path), [(exchange("llama", 4, rows + pad), rows) for rows in inputs])
    errors = difference_errors(
        float_masks.PRINCIPAL_COMPONENTS.attack(traffic.view, traffic.public, None), traffic.truth
    )
    assert len(errors) == 8
    assert max(errors) < 1e-6


@pytest.mark.parametrize("number", [0.0, torch.nan, torch.inf, 3e38])
def test_principal_components_of_equal_messages_are_none(number: float, tmp_path: Path) -> None:
    rows = torch.full((12, 32), number)
    traffic = record("llama", str(tmp_path), [(exchange("llama", 0, rows), None)] * 20)
    assert float_masks.PRINCIPAL_COMPONENTS.attack(traffic.view, traffic.public, None) == []


def _odd_views(folder: Path) -> Iterator[tuple[str, View]]:
    """Yields views that are empty, nearly empty, or hold meaningless numbers."""
    one = inputs_of("llama", 1, 12)[0]
    zeros, bad = torch.zeros(12, 32), torch.full((12, 32), torch.nan)
    huge = torch.full((12, 32), 3e38)
    pool = torch.randn(4, 32, generator=torch.Generator().manual_seed(0x5EED0009))
    hint = Exchange(0, torch.zeros(48, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.int32), purpose="hint")
    odd: dict[str, list[Any]] = {
        "one row": [exchange("llama", 0, one[0][:1])],
        "no row": [exchange("llama", 0, one[0][:0])] * 2,
        "zeros": [exchange("llama", 0, zeros)] * 4,
        "not numbers": [exchange("llama", 0, bad)] * 4,
        "huge": [exchange("llama", 0, huge)] * 4,
        "ring zeros": [exchange("llama", 0, zeros.to(torch.int32))] * 4,
        "hints": [hint, exchange("llama", 0, torch.full((12, 32), -(2**31), dtype=torch.int32))],
        "ring and float": [exchange("llama", 0, zeros.to(torch.int32)), exchange("llama", 0, one[0])] * 2,
    }
    effects = {"": pool, " of zeros": torch.zeros(4, 32), " of no vector": pool[:0]}
    for name, vectors in effects.items():
        effect = exchange("llama", 0, vectors, purpose="effect")
        odd |= {f"{key} after effects{name}": [effect, *exchanges] for key, exchanges in list(odd.items())[:8]}
    for name, exchanges in odd.items():
        view = record("llama", str(folder / name), [(one, None) for one in exchanges]).view
        yield name, view
    yield "nothing", View(view.manifest, ())
    cut = tuple(dataclasses.replace(message, file=None) for message in view.messages)
    yield "truncated", View(view.manifest, cut)
    yield "partly truncated", View(view.manifest, (*cut[:2], *view.messages[2:]))


@pytest.mark.slow
@by_name
def test_raises_on_no_view(adversary: Adversary, tmp_path: Path) -> None:
    public = controls.public_of("llama")
    for name, view in _odd_views(tmp_path):
        claims = adversary.attack(view, public, None)
        assert isinstance(claims, list), name
        if name in ("nothing", "truncated"):
            assert claims == []


def _rows_of(adversary: Adversary, traffic: MaskedTraffic) -> list[StolenRows]:
    claims = adversary.attack(traffic.view, traffic.public, None)
    return [claim for claim in claims if isinstance(claim, StolenRows)]
