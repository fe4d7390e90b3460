"""Tests the check of a tenant's secrets and errors as they are drawn, inside its process: honest draws pass, and each
weakness is noticed at the shipped size."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.programs.weakenings import WEAKNESSES, Weakness, changed
from attacks.victim import draws
from attacks.victim.draws import Check, Errors, Lags, Statistics, Watch, pair_lags, sequence_lags
from noise import sampling
from noise.blocks.arena import packed
from noise.hints.store import HintStore
from noise.ledger.ledger import Ledger
from noise.masks.lattice import Lattice
from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import kernels, negacyclic
from noise.scheme import GroupSpec
from tests.support.lattice import Answered
from wire.errors import ConfigurationError
from wire.frame import Call, Direction
from wire.payload import Payload
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows

DEFAULT = PARAMETERS["default"]
WIDTHS = ((40, 56), (40, 40), (64, 33))
"""The (inputs, outputs) of three groups."""
ROWS = 600
"""The number of rows that are sent, which is more than a block."""


@contextlib.contextmanager
def tenant(folder: Path, parameters: LatticeParameters, in_pieces: bool) -> Iterator[Lattice]:
    """Yields a lattice mask, made as a session makes it, with a provider that returns hints. If `in_pieces`, there is
    too little memory for whole blocks."""
    weights = [torch.randint(-127, 128, each, dtype=torch.int8) for each in WIDTHS]

    def effect(call: Call, payload: Payload, reply_cols: int) -> Answered:
        rows = payload.rows(call)
        assert isinstance(rows, SeededRows)
        weight = weights[call.group] if call.direction is Direction.FORWARD else weights[call.group].t().contiguous()
        return Answered(coding.product(rows.expand(weight.shape[0]), weight))

    store = HintStore(folder / "hints")
    pool_bytes = 1 if in_pieces else 1 << 28
    scheme = Lattice(parameters, Ledger.open(folder / "ledger", "t"), store, False, pool_bytes, background=False)
    scheme.bind(effect)
    try:
        yield scheme
    finally:
        scheme.close()


def send(scheme: Lattice, rows: int = ROWS) -> None:
    """Sends prompts of 60 rows and then single rows through every group, in both directions."""
    for group, (inputs, outputs) in enumerate(WIDTHS):
        spec = GroupSpec(group, inputs, outputs, 900.0, 900.0, torch.full((outputs,), 0.01), f"{group:064x}")
        for direction in Direction:
            width = spec.widths(direction)[0]
            for _ in range(rows // 60):
                scheme.mask(spec, direction, torch.randn(60, width))
            for _ in range(3):
                scheme.mask(spec, direction, torch.randn(1, width))


def look(
    folder: Path, weakness: Weakness | None = None, parameters: LatticeParameters = DEFAULT, in_pieces: bool = False
) -> tuple[Watch, list[Check]]:
    statistics = Statistics(parameters)
    watch = Watch(parameters, statistics.keep)
    injected = weakness.inject() if weakness else contextlib.nullcontext()
    with injected, watch(), tenant(folder, parameters, in_pieces) as scheme:
        send(scheme)
    return watch, statistics.checks(watch)


@pytest.mark.parametrize("in_pieces", [False, True], ids=["blocks", "pieces"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_an_honest_tenant_passes(
    in_pieces: bool, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "available", lambda: False)
    watch, checks = look(tmp_path, in_pieces=in_pieces)
    assert draws.alarms(checks) == []
    num_blocks = 2 * len(WIDTHS) * 2  # each group gets 603 rows, which is more than one block and less than two
    assert len(watch.secrets) == num_blocks
    assert (len(watch.units) > num_blocks) is in_pieces
    assert {place.group for place in watch.places} == {0, 1, 2}
    names = {one.name for one in checks}
    assert {"secrets of groups", "secrets of directions of a group", "errors of groups"} <= names
    assert ("errors of one block" in names) is in_pieces


@pytest.mark.parametrize("name", ["conservative", "lean"])
def test_so_do_the_other_parameter_sets(name: str, tmp_path: Path) -> None:
    _, checks = look(tmp_path, parameters=PARAMETERS[name])
    assert draws.alarms(checks) == []


EXPECTED = {
    "errors in {0, 1}": {"mean of a block's errors", "mean square of a block's errors", "errors of each value"},
    "errors in {-1, 0, 1}": {"mean square of a block's errors", "errors of each value"},
    "secrets of three trits": {"weight of a secret"},
    "secrets of three trits, in pieces": {"weight of a secret"},
    "one error for every block": {
        "equal rows of errors in blocks of a group and direction", "errors of blocks of a group and direction",
        "equal rows of errors in groups",
    },
    "one error for every piece": {"equal rows of errors in one block", "errors of one block"},
    "one secret for all groups": {"secrets of groups", "equal runs of 64 trits in groups"},
    "one secret for all groups, in pieces": {"secrets of groups", "equal runs of 64 trits in groups"},
    "one secret for both directions": {
        "secrets of directions of a group", "equal runs of 64 trits in directions of a group",
    },
    "one secret for all blocks of a group": {
        "secrets of blocks of a group and direction", "equal runs of 64 trits in blocks of a group and direction",
    },
    "a second half of errors that is the first": {
        "errors against other rows, at every distance", "errors against other numbers, row by row, at every distance",
        "equal rows of errors in one block or piece",
    },
    "errors whose row i + 2 is minus row i": {
        "errors against other rows, at every distance", "equal rows of errors in one block or piece",
    },
    "one error of four from seven rows before": {
        "errors against other rows, at every distance", "errors against other numbers, row by row, at every distance",
    },
    "a second polynomial that is the first reversed": {
        "secrets against those made soon after, mirrored", "equal runs of 64 trits in one block or piece",
    },
}  # fmt: skip


@pytest.mark.parametrize("weakness", WEAKNESSES, ids=lambda one: one.name)
def test_each_weakness_is_caught_at_shipped_size(weakness: Weakness, tmp_path: Path) -> None:
    _, checks = look(tmp_path, weakness, in_pieces=weakness.in_pieces)
    alarms = {one.name for one in checks if one.is_alarm}
    assert EXPECTED[weakness.name] <= alarms


def half_mirrored(errors: torch.Tensor) -> None:
    half = errors.shape[-2] // 2
    errors[..., half : 2 * half, :] = errors[..., :half, :].flip(-2)


def half_turned_round(errors: torch.Tensor) -> None:
    half = errors.shape[-2] // 2
    errors[..., half : 2 * half, :] = -errors[..., :half, :].flip(-2, -1)


def an_eighth(errors: torch.Tensor) -> None:
    eighth = errors.shape[-2] // 8
    if eighth:
        errors[..., -eighth:, :] = -errors[..., :eighth, :]


def shifted_numbers(errors: torch.Tensor) -> None:
    """The second half, in memory order, is the first one, at a distance that is no number of whole rows."""
    for block in errors.view(-1, *errors.shape[-2:]):
        flat = block.view(-1)
        distance = len(flat) // 2 + 3
        flat[distance:] = flat[: len(flat) - distance].clone()


def shifted_features(errors: torch.Tensor) -> None:
    errors[..., 20:33] = -errors[..., :13]


def mirrored_features(errors: torch.Tensor) -> None:
    half = errors.shape[-1] // 2
    errors[..., half : 2 * half] = errors[..., :half].flip(-1)


REPEATED = {
    half_mirrored: "errors against other rows, mirrored",
    half_turned_round: "errors against other numbers, row by row, mirrored",
    an_eighth: "errors against other rows, at every distance",
    shifted_numbers: "errors against other numbers, row by row, at every distance",
    shifted_features: "errors against other features, at every distance",
    mirrored_features: "errors against other features, mirrored",
}


@pytest.mark.parametrize("change", REPEATED, ids=lambda one: one.__name__)
@pytest.mark.parametrize("in_pieces", [False, True], ids=["blocks", "pieces"])
def test_errors_that_repeat_anywhere_are_caught(
    change: Callable[[torch.Tensor], None], in_pieces: bool, tmp_path: Path
) -> None:
    weakness = Weakness("repeated", lambda: changed("error", change))
    _, checks = look(tmp_path, weakness, in_pieces=in_pieces)
    assert REPEATED[change] in {one.name for one in checks if one.is_alarm}


@pytest.mark.parametrize("distance", [1, 200, 256, 511])
def test_a_polynomial_that_is_another_one_rotated_is_caught(distance: int, tmp_path: Path) -> None:
    """The third polynomial is the first one times X^distance, where X^512 is −1."""

    def rotate(secrets: torch.Tensor) -> None:
        secrets[:, 2] = secrets[:, 0].roll(distance, -1)
        secrets[:, 2, :distance] *= -1

    _, checks = look(tmp_path, Weakness("rotated", lambda: changed("ternary", rotate)))
    assert "secrets against those made soon after, at every distance" in {one.name for one in checks if one.is_alarm}


def test_a_block_that_is_an_earlier_one_turned_round_is_caught(tmp_path: Path) -> None:
    """Nothing repeats within one block, and no number is the one at the same place of another block."""
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def turn(errors: torch.Tensor) -> None:
        before = kept.setdefault(tuple(errors.shape), errors.clone())
        if not torch.equal(before, errors):
            errors.copy_(-before.flip(-2, -1))

    _, checks = look(tmp_path, Weakness("turned", lambda: changed("error", turn)))
    assert "equal rows of errors in groups" in {one.name for one in checks if one.is_alarm}


def test_every_distance_and_every_centre_is_tested() -> None:
    """The sums that are computed by Fourier transform are those of a plain loop."""
    numbers = torch.randint(-5, 6, (3, 11)).to(torch.float64)
    shifted, mirrored = sequence_lags(numbers)
    for distance in range(1, 11):
        one, other = numbers[:, :-distance], numbers[:, distance:]
        check_sums(shifted, distance - 1, (one * other).sum(), one.square().sum(), one.numel())
    for centre in range(1, 20):
        pairs = [(i, centre - i) for i in range(11) if i < centre - i < 11]
        one, other = (numbers[:, list(places)] for places in zip(*pairs, strict=True))
        squares = (one.square() + other.square()).sum() / 2
        check_sums(mirrored, centre - 1, (one * other).sum(), squares, one.numel())
    rows = torch.randint(-5, 6, (4, 7)).to(torch.float64)
    found = list(pair_lags(rows))
    assert [one.is_mirrored for one in found] == [False, True] * 3
    for index, distance in itertools.product(range(2), range(-6, 7)):  # pairs of rows with one row between them
        places = [i for i in range(7) if 0 <= i + distance < 7]
        one, other = rows[index, places], rows[index + 2, [i + distance for i in places]]
        check_sums(found[2], (index, distance + 6), one @ other, one.square().sum(), len(places))
        images = [i for i in range(7) if 0 <= distance + 6 - i < 7]
        one, other = rows[index, images], rows[index + 2, [distance + 6 - i for i in images]]
        check_sums(found[3], (index, distance + 6), one @ other, one.square().sum(), len(images))


def check_sums(lags: Lags, at: int | tuple[int, int], total: torch.Tensor, squares: torch.Tensor, count: int) -> None:
    assert float(lags.totals[at]) == pytest.approx(float(total), abs=1e-9)
    assert float(lags.squares[at]) == pytest.approx(float(squares), abs=1e-9)
    assert float(lags.counts.expand(lags.totals.shape)[at]) == count


def test_the_error_is_what_the_mask_has_beside_its_secret(tmp_path: Path) -> None:
    """The watch computes the error from the finished mask, so a fault that changes the error after sampling is noticed,
    too."""
    kept: list[Errors] = []
    drawn: list[torch.Tensor] = []
    watch = Watch(DEFAULT, kept.append)
    error = sampling.error

    def noting(*arguments: object) -> torch.Tensor:
        drawn.append(error(*arguments))  # type: ignore[arg-type]
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sampling, "error", noting)
        with watch(), tenant(tmp_path, DEFAULT, False) as scheme:
            send(scheme, 60)
    whole = torch.cat([one.flatten() for one in drawn])
    assert torch.equal(torch.cat([one.numbers.flatten() for one in kept]), whole.to(torch.int32))


def test_an_error_that_is_lost_behind_the_sampler_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    combine = negacyclic.combine

    def without(
        matrix: Any, secrets: torch.Tensor, hint: Any, draw: Callable[..., torch.Tensor], parameters: Any, packs: bool
    ) -> tuple[Any, Any]:
        draw((len(secrets), parameters.ring_degree, matrix.features))
        effects = negacyclic.product(hint, secrets, parameters)
        return combine(matrix, secrets), [packed(each) for each in effects] if packs else effects

    monkeypatch.setattr(negacyclic, "masks_and_effects", without)
    _, checks = look(tmp_path)
    assert "mean square of a block's errors" in {one.name for one in checks if one.is_alarm}


def test_a_secret_that_is_kept_for_the_next_block_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks use one secret. It is neither drawn nor transformed again, so a check of the sampler alone would not
    notice this."""
    transform, kept = negacyclic.secret_transform, {}

    def careless(secrets: torch.Tensor) -> torch.Tensor:
        if secrets.shape not in kept:
            kept[secrets.shape] = transform(secrets)
        return kept[secrets.shape]

    watch = Watch(DEFAULT, (statistics := Statistics(DEFAULT)).keep)
    with watch():
        seen = negacyclic.secret_transform  # the function that the watch wraps: a cache in front of it hides blocks
        monkeypatch.setattr(negacyclic, "secret_transform", careless)
        transform = seen
        with tenant(tmp_path, DEFAULT, False) as scheme:
            send(scheme)
        monkeypatch.undo()
    alarms = {one.name for one in statistics.checks(watch) if one.is_alarm}
    assert {"equal runs of 64 trits in groups", "secrets of groups"} <= alarms


def test_a_tail_that_is_always_zero_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last feature of the errors, or the last trit of the secrets, is always zero. These are too few numbers to
    show in sums over a block."""
    error, ternary = sampling.error, sampling.ternary

    def no_last(drawn: torch.Tensor) -> torch.Tensor:
        drawn[..., -1] = 0
        return drawn

    monkeypatch.setattr(sampling, "error", lambda rng, shape, parameters: no_last(error(rng, shape, parameters)))
    monkeypatch.setattr(sampling, "ternary", lambda rng, shape: no_last(ternary(rng, shape)))
    statistics = Statistics(DEFAULT)
    watch = Watch(DEFAULT, statistics.keep)
    with watch():
        for number in range(4):
            with tenant(tmp_path / str(number), DEFAULT, False) as scheme:
                send(scheme)
    alarms = {one.name for one in statistics.checks(watch) if one.is_alarm}
    assert {"mean square of a feature's errors", "weight of one place in all secrets"} <= alarms


def test_a_mask_that_is_not_made_of_a_known_secret_is_an_alarm(tmp_path: Path) -> None:
    statistics = Statistics(DEFAULT)
    watch = Watch(DEFAULT, statistics.keep)
    with watch(), pytest.MonkeyPatch.context() as patches:
        transform = negacyclic.secret_transform
        patches.setattr(negacyclic, "secret_transform", lambda secrets: transform(secrets).clone())
        with tenant(tmp_path, DEFAULT, False) as scheme:
            send(scheme, 60)
    assert "masks made where nobody looked" in {one.name for one in statistics.checks(watch) if one.is_alarm}


def test_where_nothing_is_seen_nothing_passes() -> None:
    statistics = Statistics(DEFAULT)
    (alarm,) = draws.alarms(statistics.checks(Watch(DEFAULT, statistics.keep)))
    assert alarm.startswith("masks made where nobody looked")


def test_zero_errors_are_refused_before_anything_is_watched() -> None:
    toy = LatticeParameters("toy", 16, 2, 0.0, 0, "a test", toy=True)
    with pytest.raises(ConfigurationError, match="sigma above 0"):
        Statistics(toy)


def test_what_is_written_holds_no_sample(tmp_path: Path) -> None:
    """For each of some forty kinds of test, the file has a name, a count, two numbers, a unit and a verdict, and
    nothing else."""
    watch, checks = look(tmp_path)
    text = json.dumps(draws.checks_to_json(checks))
    assert sum(secret.numel() for secret in watch.secrets) > 15_000
    assert len(text) < 12_000
    assert len(checks) < 60
    for one in json.loads(text):
        assert set(one) == {"name", "num_tests", "value", "unit", "log10_chance", "is_alarm"}
        assert isinstance(one["value"], float)


def test_the_scheme_is_as_it_was_after_the_watch(tmp_path: Path) -> None:
    before = sampling.error, sampling.ternary, negacyclic.combine, dict(vars(Lattice))
    look(tmp_path)
    after = sampling.error, sampling.ternary, negacyclic.combine, dict(vars(Lattice))
    assert before == after
