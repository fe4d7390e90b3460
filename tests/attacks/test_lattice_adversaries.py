"""Tests that adversaries of the lattice mask win on their controls, and fail at the shipped error or dimension."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attacks.adversaries import collusion, lattice_equations, lattice_reduction, ring_lwe, slot_reuse, sparse_secret
from attacks.adversaries.lattice_equations import BinarySystem
from attacks.adversaries.ring_lwe import PublicMatrix
from attacks.controls import ControlResult
from attacks.controls import collusion as collusion_controls
from attacks.controls import lattice as controls
from attacks.controls.lattice import ACTIVATION, LatticeTraffic, manifest, no_model, toy
from attacks.seen.adversary import Adversary, Claim, StolenDifference, StolenFact, StolenRows
from attacks.seen.view import Exchange, View, write_recording
from noise import sampling
from noise.hints.store import HintStore
from noise.ledger.ledger import Ledger
from noise.masks.lattice import Lattice
from noise.params import NOMINAL_SIGMA, PARAMETERS, LatticeParameters
from noise.scheme import GroupSpec, encode_rows
from runtime.threads import one_core
from tests.support.lattice import Answered, reference_product
from tests.support.spies import results_of
from wire.errors import ConfigurationError
from wire.frame import Call, Direction
from wire.payload import Payload
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows

DEFAULT = PARAMETERS["default"]
ADVERSARIES = [
    lattice_equations.NO_ERROR, collusion.LEAKED_SECRET, slot_reuse.SLOT_REUSE, lattice_equations.TINY_ERROR,
    lattice_reduction.LATTICE_REDUCTION, sparse_secret.SPARSE_SECRET, lattice_equations.SHARED_ERROR,
]  # fmt: skip
MOST_S = 15.0
"""The most processor seconds that an adversary may take for a recording of a few hundred messages; 0.1 to 1.5 s were
measured on quiet cores, and up to 5.9 s on a core that other processes slowed down."""


def has_fpylll() -> bool:
    try:
        lattice_reduction.load_fpylll()
    except ConfigurationError:
        return False
    return True


needs_fpylll = pytest.mark.skipif(not has_fpylll(), reason="fpylll is not installed")


# ---- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [toy(8, 1, 3.2), toy(16, 3, 3.2), DEFAULT], ids=lambda chosen: chosen.name)
def test_equations_are_the_masks_of_noise(parameters: LatticeParameters) -> None:
    rng = sampling.Csprng()
    seed = SeededRows(bytes(range(32)), 0, parameters.dimension)
    secret = sampling.ternary(rng, (1, parameters.rank, parameters.ring_degree))
    masks = reference_product(seed.expand(5), secret)[0]
    public = PublicMatrix.of(seed, parameters.ring_degree, 5)
    flat = secret.reshape(-1).to(torch.int64)
    for offset in range(0, parameters.ring_degree, max(1, parameters.ring_degree // 16)):
        assert torch.equal(public.mask(flat, offset), masks[offset].to(torch.int64))


@pytest.mark.parametrize("at", [0, 3, 15])
def test_any_row_may_be_taken_as_row_0(at: int) -> None:
    """If row `at` is counted as row 0, the secret is X^-at·s. With this secret, the rows before and after row `at` can
    be unmasked as well."""
    traffic = LatticeTraffic(toy(16, 2, 0.0), 6)
    masks = traffic.block().to(torch.int64)
    public = PublicMatrix(traffic.matrix.to(torch.int64), 16)
    turned = traffic.secrets[0].to(torch.int64)
    for _ in range(at):  # X^-1: down by one place, the lowest coefficient comes back negated on top
        turned = torch.cat((turned[:, 1:], -turned[:, :1]), dim=1)
    for row in range(16):
        assert torch.equal(public.mask(turned.reshape(-1), row - at), masks[row])


def test_the_secret_opens_what_the_scheme_itself_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses noise.masks.lattice from end to end. A request minus the mask that its secret gives is the encoded
    input plus the lattice error."""
    parameters, weight = toy(16, 2, NOMINAL_SIGMA), torch.randint(-127, 128, (40, 24), dtype=torch.int8)
    spec = GroupSpec(0, 40, 24, 700.0, 700.0, torch.full((24,), 0.01), "0" * 64)
    asked: list[SeededRows] = []

    def effect(call: Call, payload: Payload, reply_cols: int) -> Answered:
        rows = payload.rows(call)
        assert isinstance(rows, SeededRows)
        asked.append(rows)
        return Answered(coding.product(rows.expand(40), weight))

    drawn = results_of(monkeypatch, sampling, "ternary")
    scheme = Lattice(parameters, Ledger.open(tmp_path / "ledger", "tenant"), HintStore(None), background=False)
    scheme.bind(effect)
    rows = torch.randn(16, 40)
    sent = scheme.mask(spec, Direction.FORWARD, rows).messages[0].rows
    scheme.close()
    assert isinstance(sent, torch.Tensor)
    public = PublicMatrix.of(SeededRows(asked[0].seed, 0, 32), 16, 40)
    opened = collusion.open_block(sent, public, drawn[0][0])
    error_norm = sampling.error_bound(parameters) * 40**0.5
    encoded, _ = encode_rows(spec, Direction.FORWARD, rows, error_norm, 128.0 * 32)
    assert int((opened - encoded.to(torch.int64)).abs().max()) <= sampling.error_bound(parameters)


def test_a_wrong_secret_does_not_open() -> None:
    traffic = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 32)
    rows, mask = traffic.activations(16), traffic.block()
    sent = coding.to_int32(rows + mask.to(torch.int64))
    public = PublicMatrix(traffic.matrix.to(torch.int64), 16)
    wrong = traffic.secrets[0].clone()
    wrong[0, 0] = (wrong[0, 0] + 2) % 3 - 1  # one trit of 32 is wrong
    assert not torch.equal(wrong, traffic.secrets[0])
    opened = collusion.open_block(sent, public, wrong).to(torch.float64)
    both = torch.stack((opened.flatten(), rows.to(torch.float64).flatten()))
    assert abs(float(torch.corrcoef(both)[0, 1])) < 6 / rows.numel() ** 0.5
    assert float(opened.abs().mean()) == pytest.approx(2**30, rel=0.15)  # the mean of uniform numbers


def test_binary_systems() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randint(0, 2, (100, 70), generator=generator, dtype=torch.uint8).numpy()
    solution = torch.randint(0, 2, (70,), generator=generator, dtype=torch.uint8).numpy()
    system = BinarySystem(matrix)
    side = (matrix.astype(int) @ solution % 2).astype("uint8")
    found = system.solve(side)
    assert found is not None
    assert (found == solution).all()
    side[3] ^= 1
    assert system.solve(side) is None
    matrix[:, 9] = matrix[:, 8]
    assert not BinarySystem(matrix).has_full_rank


# ---- controls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "control",
    [
        controls.no_error_control,
        collusion_controls.leaked_secret_control,
        controls.slot_reuse_control,
        controls.tiny_error_control,
        pytest.param(controls.lattice_reduction_control, marks=needs_fpylll),
    ],
    ids=lambda control: control.__module__.rsplit(".", 1)[1],
)
def test_controls_win(control: Callable[[], ControlResult]) -> None:
    for _ in range(3):  # each run draws fresh secrets
        result = control()
        assert result.wins, result


def test_no_error_takes_several_rows_where_one_has_too_few_features() -> None:
    traffic = LatticeTraffic(toy(16, 2, 0.0), 24)
    traffic.send_block([8, 9, 10])
    assert traffic.relative_error(traffic.attacked(lattice_equations.attack_no_error)) == 0.0


def test_no_error_opens_the_real_dimension_too() -> None:
    """Without an error, all rows are unmasked even at the shipped dimension, so it is the error that protects them."""
    traffic = LatticeTraffic(toy(512, 3, 0.0), 64)
    traffic.send_block(range(30), 4)
    traffic.send_block(range(100, 126), 4)
    assert traffic.relative_error(traffic.attacked(lattice_equations.attack_no_error)) == 0.0


def test_no_error_fails_at_the_real_parameters() -> None:
    traffic = LatticeTraffic(DEFAULT, 64)
    traffic.send_block(range(128), 4)
    assert traffic.attacked(lattice_equations.attack_no_error) == []


def test_layers_of_all_widths_are_tried(tmp_path: Path) -> None:
    """As in a model, groups of 40, 64 and 100 features share one public matrix. The rows of all three are claimed."""
    wide = LatticeTraffic(toy(16, 2, 0.0), 100)
    for group, features in enumerate((40, 64, 100)):
        rows, mask = wide.activations(16), wide.block()
        rows[3:5] = 0
        sent = coding.to_int32(rows + mask.to(torch.int64))[:, :features]
        wide.exchanges.append(Exchange(group, sent, sent.clone(), "backward"))
    view = write_recording(tmp_path / "recording", manifest(40, 64, 100), wide.exchanges)
    assert len(lattice_equations.attack_no_error(view, no_model())) == 3
    if has_fpylll():
        assert len(lattice_reduction.attack(view, no_model())) == 3


def test_known_rows_serve_as_well_as_zero_ones(tmp_path: Path) -> None:
    traffic = LatticeTraffic(toy(16, 2, 0.0), 64)
    traffic.send_block([])
    view = traffic.view(tmp_path / "recording")
    assert lattice_equations.attack_no_error(view, no_model(), None) == []
    assert traffic.truth[1] is not None
    claims = lattice_equations.attack_no_error(view, no_model(), {1: traffic.truth[1].to(torch.float64)})
    assert traffic.relative_error(claims) == 0.0


@needs_fpylll
def test_lattice_reduction_takes_several_rows_and_known_rows(tmp_path: Path) -> None:
    few = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 5)
    few.send_block([1, 2])
    few.send_block([])
    view = few.view(tmp_path / "recording")
    opened = {one.seq for one in lattice_reduction.attack(view, no_model()) if isinstance(one, StolenRows)}
    assert opened == {1, 2}
    assert few.truth[3] is not None
    known = {3: few.truth[3].to(torch.float64)}
    opened = {one.seq for one in lattice_reduction.attack(view, no_model(), known) if isinstance(one, StolenRows)}
    assert opened == {3, 4}


# ---- where they must not win ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adversary", [lattice_equations.NO_ERROR, lattice_equations.TINY_ERROR], ids=lambda one: one.name
)
@pytest.mark.parametrize("parameters", [toy(8, 1, NOMINAL_SIGMA), toy(16, 2, NOMINAL_SIGMA)], ids=lambda p: p.name)
def test_linear_algebra_fails_at_the_true_error(adversary: Adversary, parameters: LatticeParameters) -> None:
    traffic = LatticeTraffic(parameters, 128)
    for _ in range(10):
        traffic.send_block(range(6))
    claims = traffic.attacked(adversary.attack)
    assert claims == []
    assert traffic.relative_error(claims) == 1.0


def test_slot_reuse_finds_nothing_in_honest_traffic() -> None:
    traffic = LatticeTraffic(DEFAULT, 64, num_groups=2)
    for group in (0, 1):
        for direction in ("forward", "backward"):
            for _ in range(3):
                for part in traffic.block().split(64):
                    traffic.send(torch.zeros(64, 64, dtype=torch.int64), part, direction, group)
    traffic.exchanges.append(traffic.exchanges[-1])  # the same bytes are sent again, which is allowed
    assert slot_reuse.false_positive_log2(3 * 512, 64) < -400
    assert traffic.attacked(slot_reuse.attack) == []


def test_slot_reuse_says_nothing_where_chance_would_do() -> None:
    traffic = LatticeTraffic(DEFAULT, 4)
    mask = traffic.block()[:4]
    for _ in range(2):
        traffic.send(traffic.activations(4), mask)
    assert traffic.attacked(slot_reuse.attack) == []


@pytest.mark.parametrize("size", [9_000, 1 << 27])
def test_slot_reuse_does_not_compare_what_is_not_masked(tmp_path: Path, size: int) -> None:
    rows = [torch.randint(-size, size, (100, 64), dtype=torch.int32) for _ in range(60)]
    view = write_recording(tmp_path / "recording", manifest(64), [Exchange(0, one, one.clone()) for one in rows])
    start = time.process_time()
    assert slot_reuse.attack(view, no_model()) == []
    assert time.process_time() - start < MOST_S


def test_slot_reuse_is_bounded_where_all_masks_are_one(tmp_path: Path) -> None:
    mask = torch.randint(-(2**31), 2**31, (1, 64), dtype=torch.int64)
    rows = [_wrapped(mask + torch.randint(-9000, 9000, (100, 64))) for _ in range(60)]
    view = write_recording(tmp_path / "recording", manifest(64), [Exchange(0, one, one.clone()) for one in rows])
    start = time.process_time()
    claims = slot_reuse.attack(view, no_model())
    assert time.process_time() - start < MOST_S
    assert 0 < len(claims) <= slot_reuse.MOST_CLAIMS


def _wrapped(rows: torch.Tensor) -> torch.Tensor:
    return ((rows + 2**31) % 2**32 - 2**31).to(torch.int32)


def test_slot_reuse_across_other_rows_is_a_fact() -> None:
    traffic = LatticeTraffic(DEFAULT, 32)
    mask = traffic.block()
    traffic.send(traffic.activations(4), mask[:4])
    traffic.send(traffic.activations(4), mask[2:6])
    (claim,) = traffic.attacked(slot_reuse.attack)
    assert isinstance(claim, StolenFact)
    assert claim.value == "1, 2"


def test_slot_reuse_sees_differences_across_the_wrap(tmp_path: Path) -> None:
    rows = torch.tensor([[-(2**31)] * 8, [2**31 - 1] * 8], dtype=torch.int32)
    exchanges = [Exchange(0, row[None], torch.zeros(1, 8, dtype=torch.int32)) for row in rows]
    view = write_recording(tmp_path / "recording", manifest(8), exchanges)
    (claim,) = slot_reuse.attack(view, no_model())
    assert isinstance(claim, StolenDifference)
    assert claim.rows.tolist() == [[1.0] * 8]


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_lattice_reduction_states_the_estimate_at_real_parameters(parameters: LatticeParameters) -> None:
    traffic = LatticeTraffic(parameters, 64)
    traffic.send_block(range(parameters.ring_degree))
    (claim,) = traffic.attacked(lattice_reduction.attack)
    assert isinstance(claim, StolenFact)
    assert claim.value == parameters.bits


def test_lattice_reduction_gives_up_between_toy_and_real() -> None:
    traffic = LatticeTraffic(toy(64, 2, NOMINAL_SIGMA), 64)
    traffic.send_block(range(64))
    (claim,) = traffic.attacked(lattice_reduction.attack)
    assert isinstance(claim, StolenFact)
    assert "not tried at dimension 128" in str(claim.value)


def test_without_fpylll_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigurationError, match="pip install fpylll"):
        lattice_reduction.load_fpylll()
    traffic = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 64)
    traffic.send_block([0])
    (claim,) = traffic.attacked(lattice_reduction.attack)
    assert isinstance(claim, StolenFact)
    assert "pip install fpylll" in str(claim.value)


# ---- any view -------------------------------------------------------------------------------------------------------


def views(tmp_path: Path) -> dict[str, View]:
    """Returns recordings with faults, by the name of the fault: missing tensors, no hint, odd shapes and types, or
    damaged files."""
    traffic = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 32)
    traffic.send_block([0])
    tidy = traffic.view(tmp_path / "tidy")
    truncated = View(tidy.manifest, tuple(dataclasses.replace(message, file=None) for message in tidy.messages))
    no_hint = View(tidy.manifest, tidy.messages[1:])
    floats = torch.randn(5, 7)
    strange = [
        Exchange(0, floats, floats.clone()),
        Exchange(0, torch.zeros(3, 7, dtype=torch.int32), torch.zeros(3, 7, dtype=torch.int32)),
        Exchange(0, torch.zeros(0, 7, dtype=torch.int32), torch.zeros(0, 7, dtype=torch.int32), "backward"),
        Exchange(0, _payload(1 << 40), torch.zeros(3, 7, dtype=torch.int32), "forward", "hint"),
        Exchange(0, _payload(7), torch.zeros(7, 7, dtype=torch.int32), "forward", "hint"),
        Exchange(0, _payload(12), torch.zeros(7, 7, dtype=torch.int32), "forward", "hint"),
    ]
    damaged = traffic.view(tmp_path / "damaged")
    for message in damaged.messages:
        assert message.file is not None
        message.file.write_bytes(b"gone")
    return {
        "truncated": truncated,
        "no hint": no_hint,
        "strange": write_recording(tmp_path / "strange", manifest(7), strange),
        "damaged": damaged,
    }


def _payload(num_rows: int) -> torch.Tensor:
    return torch.tensor(list(SeededRows(bytes(32), 0, num_rows).pack()), dtype=torch.uint8)


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda adversary: adversary.name)
def test_any_view_gives_a_list(adversary: Adversary, tmp_path: Path) -> None:
    for name, view in views(tmp_path).items():
        if name == "damaged" and adversary.name == "leaked-secret":  # this adversary reads no recording
            continue
        if name == "damaged":  # an error, so that it does not look like a mask that holds
            with pytest.raises(ConfigurationError, match="damaged"):
                adversary.attack(view, no_model(), None)
            continue
        for opened in (None, {}, {1: torch.zeros(2, 3, dtype=torch.float64)}):
            claims = adversary.attack(view, no_model(), opened)
            assert not [one for one in claims if isinstance(one, StolenRows)], name


@pytest.mark.slow
@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda adversary: adversary.name)
@pytest.mark.parametrize("parameters", [DEFAULT, toy(64, 1, NOMINAL_SIGMA), toy(32, 1, 0.0)], ids=lambda p: p.name)
def test_work_is_bounded(adversary: Adversary, parameters: LatticeParameters, tmp_path: Path) -> None:
    """An adversary ends in time on three hundred messages of which none can be unmasked, so that it makes every
    attempt that it can."""
    traffic = LatticeTraffic(parameters, 64, num_groups=3)
    for number in range(300):
        if number % 50 == 0:
            parts = torch.cat([traffic.block() for _ in range(-(-50 * 10 // parameters.ring_degree))]).split(10)
        traffic.send(traffic.activations(10), parts[number % 50], ("forward", "backward")[number % 2], number % 3)
    view = traffic.view(tmp_path / "recording")
    with one_core():  # A thread that waits for another one spins, and its time counts too.
        start = time.process_time()
        claims: list[Claim] = adversary.attack(view, no_model(), None)
        assert time.process_time() - start < MOST_S
    assert not [one for one in claims if isinstance(one, StolenRows)]


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traffic = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 32)
    for _ in range(3):
        traffic.send_block([0])
    view = traffic.view(tmp_path / "recording")
    monkeypatch.setattr(ring_lwe, "MOST_BYTES", 3 * 8 * 32 * 8)
    (stream,) = ring_lwe.streams(view)
    assert len(stream.rows) == 24


# ---- growth ---------------------------------------------------------------------------------------------------------


@needs_fpylll
def test_growth_is_measured() -> None:
    said: list[str] = []
    measured = lattice_reduction.measure_growth([8, 16, 24], say=said.append)
    assert [line.partition(",")[0] for line in said] == [
        f"reduces a lattice of dimension {each}" for each in (8, 16, 24)
    ]
    assert [one.block_size for one in measured] == [2, 2, 2]
    assert set(lattice_reduction.extrapolate(measured)) == set(PARAMETERS)


def test_growth_is_fitted() -> None:
    points = [lattice_reduction.Growth(n, 3.2, n, 2.0 ** (0.5 * n - 7), 2) for n in (10, 20, 30)]
    failed = lattice_reduction.Growth(99, 3.2, 99, 1.0, None)
    assert lattice_reduction.fit([*points, failed]) == pytest.approx((0.5, -7))
    bits, published = lattice_reduction.extrapolate(points)["default"]
    assert published == 161
    assert bits == pytest.approx(0.5 * 1536 - 7 + lattice_reduction.OPS_A_SECOND_LOG2)


def test_the_control_traffic_is_what_it_says() -> None:
    traffic = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 32)
    traffic.send_block([3])
    assert traffic.relative_error([]) == 1.0
    first = traffic.truth[1]
    assert first is not None
    assert not first[3].any()
    assert int(first.abs().max()) <= ACTIVATION
