"""The lattice mask against slow and obvious references, and against everything that could use a row twice."""

from __future__ import annotations

import copy
import gc
import hashlib
import math
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noise import lattice, sampling
from noise.blocks.pool import DEFAULT_BYTES
from noise.hints.store import HintStore
from noise.lattice import Lattice
from noise.ledger.ledger import Ledger
from noise.off import Off
from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import negacyclic
from noise.scheme import GroupSpec, Masked, RowCodecs, decode_rows, encode_rows
from wire.errors import ConfigurationError, InvalidTensor, MaskError, MaskReused, Unavailable, VerificationFailed
from wire.frame import HEADER_BYTES, Arithmetic, Call, Direction, Purpose, row_of
from wire.limits import Limits
from wire.ring import coding, kernels
from wire.ring.quantise import max_norms
from wire.ring.seeded_rows import Rows, SeededRows

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
DEFAULT = PARAMETERS["default"]
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
ETA = 21
"""The largest error of the centred binomial: Σ of 21 bits less Σ of 21 bits."""
FP32 = 2.0**-22
"""Relative error of a few fp32 operations (2^-24 each): quotient, scale, α and product."""
TIMEOUT_S = 60.0


def weight_of(d: int, m: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (d, m), generator=generator, dtype=torch.int8)
    return weight


def group_of(number: int, weight: torch.Tensor) -> GroupSpec:
    alpha = torch.linspace(0.001, 0.01, weight.shape[1])
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    return GroupSpec(number, *weight.shape, *max_norms(weight), alpha, digest)


@dataclass
class _Done:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.reply


class Provider:
    """Products with its weights; keeps what it was asked for and answers hints through the scheme's own road."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = list(weights)
        self.groups = [group_of(number, weight) for number, weight in enumerate(weights)]
        self.hints: list[tuple[Call, SeededRows]] = []
        self.fail: Callable[[], None] = lambda: None

    def matrix(self, call: Call) -> torch.Tensor:
        weight = self.weights[call.group]
        return weight if call.direction is FORWARD else weight.t()

    def effect(self, call: Call, rows: Rows, reply_cols: int) -> _Done:
        assert isinstance(rows, SeededRows)
        assert (call.purpose, call.arithmetic) == (Purpose.HINT, Arithmetic.RING)
        self.hints.append((call, rows))
        self.fail()
        matrix = self.matrix(call)
        assert matrix.shape[1] == reply_cols
        return _Done(coding.product(rows.expand(matrix.shape[0]), matrix))

    def answer(self, masked: Masked) -> torch.Tensor:
        (message,) = masked.messages
        assert isinstance(message.rows, torch.Tensor)
        assert message.call.purpose is Purpose.PRODUCT
        return masked.unmask([coding.product(message.rows, self.matrix(message.call))])


def sent(masked: Masked) -> torch.Tensor:
    rows = masked.messages[0].rows
    assert isinstance(rows, torch.Tensor)
    return rows


@pytest.fixture
def provider() -> Provider:
    return Provider([weight_of(40, 24, 1), weight_of(24, 56, 2)])


@pytest.fixture
def make(tmp_path: Path, provider: Provider) -> Any:
    made: list[Lattice] = []

    def run(
        parameters: LatticeParameters = DEFAULT,
        bits: int = 24,
        folder: Path | None = tmp_path / "hints",
        **options: Any,
    ) -> Lattice:
        ledger = Ledger.open(tmp_path / "ledger", "tenant")
        options = {"background": False, **options}
        made.append(Lattice(parameters, ledger, HintStore(folder, 32 - bits), **options))
        made[-1].bind(provider.effect)
        return made[-1]

    yield run
    for scheme in made:
        scheme.close()


def rows_of(num_rows: int, features: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, features, generator=torch.Generator().manual_seed(seed))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The secrets and errors that are drawn, in order."""
    seen: dict[str, list[torch.Tensor]] = {"secret": [], "error": []}
    ternary, error = sampling.ternary, sampling.error

    def spy_ternary(*arguments: Any) -> torch.Tensor:
        seen["secret"].append(ternary(*arguments))
        return seen["secret"][-1]

    def spy_error(*arguments: Any) -> torch.Tensor:
        seen["error"].append(error(*arguments))
        return seen["error"][-1]

    monkeypatch.setattr(sampling, "ternary", spy_ternary)
    monkeypatch.setattr(sampling, "error", spy_error)
    return seen


# ---- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("parameters", [TOY, DEFAULT], ids=lambda chosen: chosen.name)
def test_masks_and_effects_are_those_of_the_reference(
    make: Any, provider: Provider, drawn: Any, parameters: LatticeParameters, direction: Direction
) -> None:
    """mask = A·s + e and effect = (A·W̃)·s by the schoolbook product in integers, for several blocks at once."""
    scheme, spec = make(parameters, bits=32), provider.groups[0]
    num_rows = 2 * parameters.ring_degree
    mask, effect = scheme.pool.take(spec, direction, num_rows)
    (secret,), (error,) = drawn["secret"], drawn["error"]
    seed = provider.hints[0][1].seed
    matrix = provider.matrix(Call(0, direction, Arithmetic.RING))
    public = SeededRows(seed, 0, parameters.dimension).expand(matrix.shape[0])
    assert torch.equal(mask.view(error.shape), negacyclic.reference_product(public, secret) + error.to(torch.int32))
    hint = coding.product(public, matrix)
    assert torch.equal(effect.view(2, -1, matrix.shape[1]), negacyclic.reference_product(hint, secret))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_masks_less_effects_are_the_error_times_the_weight(
    make: Any, provider: Provider, drawn: Any, parameters: LatticeParameters, direction: Direction
) -> None:
    """Exactly, before hints are rounded; afterwards within 2^(t-1)·‖s‖₁ (and no closer than rounding can be)."""
    matrix = provider.matrix(Call(0, direction, Arithmetic.RING))
    for bits in (32, 24, 22):
        for spied in drawn.values():
            spied.clear()
        scheme = make(parameters, bits=bits)
        mask, effect = scheme.pool.take(provider.groups[0], direction, parameters.ring_degree)
        (secret,), (error,) = drawn["secret"], drawn["error"]
        left = coding.product(mask, matrix) - effect - coding.product(error[0].to(torch.int32), matrix)
        if bits == 32:
            assert not bool(left.any())
        else:
            bound = 2 ** (32 - bits - 1) * int(secret.abs().sum())
            assert 0 < int(left.abs().max()) <= bound


# ---- results --------------------------------------------------------------------------------------------------------


def bounds(
    spec: GroupSpec, direction: Direction, weight: torch.Tensor, rows: torch.Tensor, parameters: LatticeParameters,
    hint_error: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(exact product, largest distance a masked one may have, the scales), float64, shape (num_rows, reply columns).

    With input v (x, or g ⊙ α), ‖v − β·ṽ‖∞ ≤ β/2 and a few fp32 roundings of v; an error row e with ‖e‖₂ ≤ e_max·√d; a
    hint that is off by at most `hint_error` a coefficient, k·N of which meet trits. So with w the columns of the weight
    that is read, and the output scale a (α or 1), and by Cauchy-Schwarz:
    |y − v·w·a| ≤ a·(‖w‖₂·(β·√d/2 + FP32·‖v‖₂ + β·e_max·√d) + β·hint_error·k·N), and fp32 rounding of y itself.
    """
    matrix = wide(weight if direction is FORWARD else weight.t())
    given = wide(rows) * (1.0 if direction is FORWARD else wide(spec.alpha))
    out_scale = wide(spec.alpha) if direction is FORWARD else torch.ones(matrix.shape[1], dtype=torch.float64)
    d, largest = rows.shape[1], sampling.error_bound(parameters)
    _, beta = encode_rows(spec, direction, rows, largest * math.sqrt(d), float(hint_error * parameters.dimension))
    scale = wide(beta)
    reach = scale * math.sqrt(d) * (0.5 + largest) + FP32 * given.norm(dim=1, keepdim=True)
    exact = (given @ matrix) * out_scale
    bound = out_scale * (reach * matrix.norm(dim=0) + scale * hint_error * parameters.dimension)
    return exact, bound + FP32 * exact.abs(), scale


def hard_rows(features: int, weight: torch.Tensor, direction: Direction) -> torch.Tensor:
    """Zeros, tiny and huge rows, 1e4 of dynamic range in a row, an outlier, and one along the largest column."""
    rows = rows_of(9, features)
    rows[0] = 0.0
    rows[1] *= 1e-20
    rows[2] *= 1e20
    rows[3] = torch.logspace(-4, 0, features) * rows[3].sign()
    rows[4, features // 2] = 1e4
    matrix = wide(weight if direction is FORWARD else weight.t())
    rows[5] = matrix[:, int(matrix.norm(dim=0).argmax())].to(torch.float32)
    rows[6] = -rows[5] * 1e-6
    rows[7] = 1e-42  # denormal
    return rows


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize(("name", "bits"), [("default", 24), ("default", 32), ("lean", 24), ("conservative", 22)])
def test_results_stay_within_what_the_error_implies(
    make: Any, provider: Provider, name: str, bits: int, direction: Direction
) -> None:
    parameters, spec, weight = PARAMETERS[name], provider.groups[0], provider.weights[0]
    rows = hard_rows(spec.widths(direction)[0], weight, direction)
    scheme = make(parameters, bits=bits)
    hint_error = 2 ** (31 - bits) if bits < 32 else 0
    exact, bound, _ = bounds(spec, direction, weight, rows, parameters, hint_error)
    for _ in range(20):
        got = provider.answer(scheme.mask(spec, direction, rows))
        assert got.shape == exact.shape
        assert got.dtype == torch.float32
        assert bool(((wide(got) - exact).abs() <= bound + 1e-37).all())
    unmasked = provider.answer(Off(Arithmetic.RING).mask(spec, direction, rows))
    assert bool(((wide(unmasked) - wide(got)).abs() <= 2 * bound + 1e-37).all())


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_what_is_left_has_the_size_of_the_error_times_the_weight(
    make: Any, provider: Provider, direction: Direction
) -> None:
    """No less (a mask without error is broken) and no more: variance of e is 21/2, of both roundings 1/12.

    1,000 independent rows; the columns of a row are 24 or 40 numbers made of 24 or more independent errors by a random
    weight, which counts for 10 independent ones at the least. The root mean square of 10,000 normal numbers has a
    standard deviation of 1/√20,000 = 0.7%: 5% is seven of them.
    """
    spec, weight = provider.groups[0], provider.weights[0]
    rows = rows_of(1000, spec.widths(direction)[0])
    got = provider.answer(make(bits=32).mask(spec, direction, rows))
    exact, _, scale = bounds(spec, direction, weight, rows, DEFAULT, 0)
    matrix = wide(weight if direction is FORWARD else weight.t())
    out_scale = wide(spec.alpha) if direction is FORWARD else 1.0
    expected = scale * out_scale * matrix.norm(dim=0) * math.sqrt(ETA / 2 + 1 / 12)
    assert float((wide(got) - exact).div(expected).square().mean().sqrt()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bits", [32, 20])
def test_the_largest_error_and_secret_along_the_largest_column_do_not_wrap(
    make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch, bits: int, direction: Direction
) -> None:
    """The worst that could be drawn, met by the worst input: a wrap would be off by 2^32·β·α.

    At 32 bits it is the error that has to fit; at 20 the room for the hint's rounding is larger than the error.
    """
    spec, weight = provider.groups[0], provider.weights[0]
    matrix = weight if direction is FORWARD else weight.t()
    column = matrix[:, int(wide(matrix).norm(dim=0).argmax())]
    worst = (column.sign().to(torch.int8) * ETA).expand(1, TOY.ring_degree, -1)
    monkeypatch.setattr(sampling, "error", lambda rng, shape, parameters: worst.expand(tuple(shape)).contiguous())
    monkeypatch.setattr(sampling, "ternary", lambda rng, shape: torch.ones(tuple(shape), dtype=torch.int8))
    rows = column.to(torch.float32).expand(TOY.ring_degree, -1) / (1.0 if direction is FORWARD else spec.alpha)
    scheme = make(TOY, bits=bits)
    got = provider.answer(scheme.mask(spec, direction, rows))
    exact, bound, _ = bounds(spec, direction, weight, rows, TOY, 2**11 if bits == 20 else 0)
    assert bool(((wide(got) - exact).abs() <= bound).all())


def test_rows_are_scaled_alone(make: Any, provider: Provider) -> None:
    """A row's result does not depend on what shares its call: an outlier of 1e20 changes nothing in its neighbours."""
    spec, weight = provider.groups[0], provider.weights[0]
    rows = rows_of(3, spec.in_features)
    calm_bound = bounds(spec, FORWARD, weight, rows, DEFAULT, 128)[1]
    rows[1] *= 1e20
    exact, bound, _ = bounds(spec, FORWARD, weight, rows, DEFAULT, 128)
    assert torch.equal(bound[[0, 2]], calm_bound[[0, 2]])
    got = wide(provider.answer(make().mask(spec, FORWARD, rows)))
    assert bool(((got - exact).abs() <= bound).all())


# ---- one row, by the short way --------------------------------------------------------------------------------------

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels on this machine")


@needs_kernels
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_row_in_bytes_is_masked_and_unmasked_like_any(make: Any, provider: Provider, direction: Direction) -> None:
    scheme, spec = make(), provider.groups[1]
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []
    take = scheme.pool.take

    def spy(*arguments: Any) -> Any:
        mask, effect = take(*arguments)
        taken.append((mask.clone(), effect.clone()))
        return mask, effect

    scheme.pool.take = spy
    for number in range(5):
        rows = rows_of(1, spec.widths(direction)[0], number)
        call, message, unmask = masked = scheme.mask_row(spec, direction, rows)
        assert call == Call(1, direction, Arithmetic.RING)
        assert len(message) == HEADER_BYTES + 4 * rows.shape[1]
        error_norm = scheme._error_bound * math.sqrt(rows.shape[1])
        encoded, scales = encode_rows(spec, direction, rows, error_norm, scheme._slack)
        ((mask, effect),) = taken
        assert torch.equal(row_of(call, message), encoded + mask)
        reply = coding.product(row_of(call, message), provider.matrix(call))
        assert torch.equal(unmask(reply), decode_rows(spec, direction, reply, scales, effect))
        assert repr(masked) == "MaskedRow()"
        taken.clear()


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_costs_nothing_by_the_short_way_either(
    make: Any, provider: Provider, bad: float
) -> None:
    scheme, spec = make(), provider.groups[0]
    rows = rows_of(1, spec.in_features)
    rows[0, 2] = bad
    with pytest.raises(InvalidTensor, match="nothing was sent"):
        scheme.mask_row(spec, FORWARD, rows)
    assert (provider.hints, scheme._ledger.audit()) == ([], [])


@needs_kernels
def test_the_two_ways_share_no_slot(make: Any, provider: Provider) -> None:
    scheme, spec = make(TOY), provider.groups[0]
    rows, seen = torch.zeros(1, spec.in_features), []
    for number in range(3 * TOY.ring_degree):
        if number % 3:
            call, message, _ = scheme.mask_row(spec, FORWARD, rows)
            seen.append(row_of(call, message).numpy().tobytes())
        else:
            seen.append(sent(scheme.mask(spec, FORWARD, rows)).numpy().tobytes())
    assert len(set(seen)) == len(seen)


def test_a_group_of_another_session_has_a_codec_of_its_own(make: Any, provider: Provider) -> None:
    codecs, spec = RowCodecs(), provider.groups[0]
    twin = replace(spec, alpha=2 * spec.alpha)
    first = codecs.of(spec, FORWARD)
    assert codecs.of(spec, FORWARD)[1] is first[1]
    assert codecs.of(twin, FORWARD)[1] is not first[1] or first[1] is None


# ---- nothing twice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_costs_nothing(make: Any, provider: Provider, bad: float) -> None:
    scheme, spec = make(), provider.groups[0]
    rows = rows_of(3, spec.in_features)
    rows[1, 2] = bad
    for given in (rows, rows[1:2]):
        with pytest.raises(InvalidTensor, match="nothing was sent"):
            scheme.mask(spec, FORWARD, given)
    assert (provider.hints, scheme._ledger.audit()) == ([], [])
    scheme.mask(spec, FORWARD, rows[:1])
    left = scheme.pool._shelves[0, FORWARD].num_rows
    with pytest.raises(InvalidTensor):
        scheme.mask(spec, FORWARD, rows)
    assert scheme.pool._shelves[0, FORWARD].num_rows == left
    huge = torch.full((1, spec.out_features), 3e38)
    spec.alpha.mul_(1e4)
    with pytest.raises(InvalidTensor):  # g ⊙ α overflows
        scheme.mask(spec, BACKWARD, huge)
    assert (0, BACKWARD) not in scheme.pool._shelves


WIDE: dict[str, Any] = {"pool_bytes": 4 * 64 * 200, "features": 64}
"""A pool of 200 rows of the first group, of which half are one piece: 86 of a block's 512, the last one 82."""


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bits", [32, 24])
def test_pieces_of_a_block_are_rows_of_one_sample(
    make: Any, provider: Provider, drawn: Any, direction: Direction, bits: int
) -> None:
    """By the schoolbook product: row t of piece p is row t of A·s, with an error of its own; one secret is counted."""
    scheme, spec = make(bits=bits, **WIDE), provider.groups[0]
    parts = [scheme.pool.take(spec, direction, 1) for _ in range(DEFAULT.ring_degree)]
    mask, effect = (torch.cat(each) for each in zip(*parts, strict=True))
    (secret,) = drawn["secret"]
    error = torch.cat([each.to(torch.int32) for each in drawn["error"]])
    assert [len(each) for each in drawn["error"]] == [86, 86, 86, 86, 86, 82]
    matrix = provider.matrix(Call(0, direction, Arithmetic.RING))
    public = SeededRows(provider.hints[0][1].seed, 0, DEFAULT.dimension).expand(matrix.shape[0])
    assert torch.equal(mask - error, negacyclic.reference_product(public, secret)[0])
    off = effect - negacyclic.reference_product(coding.product(public, matrix), secret)[0]
    assert int(off.abs().max()) <= (0 if bits == 32 else 2**7 * int(secret.abs().sum()))
    assert scheme._cuts == {}, "a secret is dropped with its last row"
    scheme.pool.take(spec, direction, 1)
    assert len(drawn["secret"]) == 2


def test_results_of_pieces_and_whole_blocks(make: Any, provider: Provider) -> None:
    """A prompt longer than a block, then tokens; each call is right."""
    scheme, spec = make(**WIDE), provider.groups[0]
    for num_rows in (DEFAULT.ring_degree + 100, *[1] * 90, 120):
        rows = rows_of(num_rows, spec.in_features)
        masked = scheme.mask(spec, FORWARD, rows)
        exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
        assert bool(((wide(provider.answer(masked)) - exact).abs() <= bound).all())


def test_no_row_of_a_sample_is_in_two_pieces(make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without errors, which would make two uses of one row of A·s look different."""
    monkeypatch.setattr(sampling, "error", lambda rng, shape, parameters: torch.zeros(tuple(shape), dtype=torch.int8))
    scheme, seen, total = make(**WIDE), set[bytes](), 0
    for num_rows in (DEFAULT.ring_degree + 100, *[1] * 90, 120):
        mask, _ = scheme.pool.take(provider.groups[0], FORWARD, num_rows)
        seen.update(row.numpy().tobytes() for row in mask)
        total += num_rows
    assert len(seen) == total


def test_closing_while_a_block_is_opened_for_pieces_leaves_no_secret(make: Any, provider: Provider) -> None:
    scheme = make(**WIDE)
    open_blocks = scheme._open_blocks

    def closing(num_blocks: int) -> Any:
        opened = open_blocks(num_blocks)
        scheme.close()
        return opened

    scheme._open_blocks = closing
    with pytest.raises(MaskError, match="closed"):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert scheme._cuts == {}


def test_streamed_hints_are_fetched_once_for_a_block(make: Any, provider: Provider) -> None:
    """They are not made in pieces: each would fetch its hint again, where hints do not fit into memory either."""
    scheme = make(folder=None, **WIDE)
    for _ in range(DEFAULT.ring_degree):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert sum(rows.num_rows for _, rows in provider.hints) == DEFAULT.dimension


def test_pieces_under_an_old_seed_are_abandoned(make: Any, provider: Provider, drawn: Any) -> None:
    """Each secret meets the matrix and hint of one seed only."""
    scheme = make(replace(DEFAULT, bits=129), **WIDE)  # two secrets a seed
    scheme.pool.take(provider.groups[0], FORWARD, 1)
    old = scheme._current()
    scheme._renew(old)
    scheme.pool.take(provider.groups[0], FORWARD, 86)
    cut = scheme._cuts[0, FORWARD]
    assert cut.epoch is scheme._current() is not old
    assert len(drawn["secret"]) == 2
    assert provider.answer(scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))).shape == (1, 24)


def test_secrets_of_pieces_go_with_the_pool(make: Any, provider: Provider) -> None:
    closed, forked = make(**WIDE), make(**WIDE)
    for scheme in (closed, forked):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
        assert len(scheme._cuts) == 1
    closed.close()
    assert closed._cuts == {}
    pid = os.fork()
    if pid == 0:
        os._exit(len(forked._cuts))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(forked._cuts) == 1


@pytest.mark.parametrize("is_cutting", [False, True])
def test_a_hint_that_fails_costs_no_rows(make: Any, provider: Provider, is_cutting: bool) -> None:
    scheme = make(folder=None, **(WIDE if is_cutting else {}))

    def fail() -> None:
        raise Unavailable("gone")

    provider.fail = fail
    with pytest.raises(Unavailable, match="gone"):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    provider.fail = lambda: None
    mask, _ = scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert mask.shape == (1, 40)


def test_every_group_direction_and_block_has_a_secret_of_its_own(make: Any, provider: Provider, drawn: Any) -> None:
    """One secret in two layers would show the difference of their activations under the shared A."""
    scheme = make()
    for spec in provider.groups:
        for direction in Direction:
            scheme.mask(spec, direction, rows_of(1100, spec.widths(direction)[0]))
    secrets = [tuple(secret.flatten().tolist()) for batch in drawn["secret"] for secret in batch]
    errors = [tuple(error.flatten().tolist()) for batch in drawn["error"] for error in batch]
    assert len(secrets) == len(set(secrets)) == 2 * 2 * 3
    assert len(errors) == len(set(errors)) == 2 * 2 * 3
    assert scheme._ledger.audit()[0].used >= len(secrets)


def test_the_same_rows_never_look_the_same(make: Any, provider: Provider) -> None:
    """Two calls, two groups, two directions, two processes, zeros and data: no row of a message comes twice."""
    seen: list[bytes] = []
    square = Provider([weight_of(32, 32, 5), weight_of(32, 32, 5)])
    for _ in range(2):  # a restart: the same ledger, seed and stored hints
        scheme = make()
        scheme.bind(square.effect)
        for spec in square.groups:
            for direction in Direction:
                for rows in (rows_of(3, 32), rows_of(3, 32), torch.zeros(3, 32)):
                    seen += [bytes(row.numpy()) for row in sent(scheme.mask(spec, direction, rows))]
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * 3 * 3
    assert len({rows.seed for _, rows in square.hints}) == 1


@pytest.mark.parametrize("first_inside", [True, False])
def test_masks_made_in_inference_mode_can_be_used_outside(make: Any, provider: Provider, first_inside: bool) -> None:
    scheme, spec = make(), provider.groups[0]
    for inside in (first_inside, not first_inside):  # the second call takes rows of the first one's block
        with torch.inference_mode(inside):
            masked = scheme.mask(spec, FORWARD, rows_of(3, 40))
            masked.unmask([torch.zeros(3, 24, dtype=torch.int32)])


def test_zeros_cannot_be_told_from_data(make: Any, provider: Provider) -> None:
    """Bytes of masked zeros are uniform: χ² of 256 bins, 255 degrees of freedom, mean 255 and variance 510.

    450 is 8.6 standard deviations out (probability below 1e-11 by Laurent and Massart's bound, 2000, lemma 1:
    P(χ² > k + 2√(k·t) + 2t) ≤ e^-t with t = 26 gives 450).
    """
    rows = sent(make().mask(provider.groups[0], FORWARD, torch.zeros(1024, 40)))
    counts = torch.bincount(rows.contiguous().view(torch.uint8).flatten().to(torch.int64), minlength=256)
    expected = rows.numel() * 4 / 256
    assert float((counts - expected).square().sum() / expected) < 450


def test_eight_threads_and_a_worker(make: Any, provider: Provider) -> None:
    scheme = make(background=True)
    limits = {
        (spec.id, direction): bounds(
            spec, direction, provider.weights[spec.id], rows_of(7, spec.widths(direction)[0]), DEFAULT, 128
        )
        for spec in provider.groups
        for direction in Direction
    }

    def work(number: int) -> list[bytes]:
        mine = []
        for turn in range(60):
            spec, direction = provider.groups[(number + turn) % 2], Direction((number // 2 + turn // 2) % 2)
            masked = scheme.mask(spec, direction, rows_of(7, spec.widths(direction)[0]))
            exact, bound, _ = limits[spec.id, direction]
            assert bool(((wide(provider.answer(masked)) - exact).abs() <= bound).all())
            mine += [bytes(row.numpy()) for row in sent(masked)]
        return mine

    with ThreadPoolExecutor(8) as threads:
        seen = [row for mine in threads.map(work, range(8)) for row in mine]
    assert len(seen) == len(set(seen)) == 8 * 60 * 7
    assert sorted((call.group, call.direction) for call, rows in provider.hints if rows.first_row == 0) == sorted(
        limits
    )


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(make: Any, provider: Provider) -> None:
    scheme, spec, rows = make(background=True), provider.groups[0], rows_of(2, 40)
    scheme.mask(spec, FORWARD, rows)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        said = []
        for use in (lambda: scheme.mask(spec, FORWARD, rows), lambda: scheme.prepare(spec, FORWARD, 9000)):
            try:
                use()
                said.append("no error")
            except MaskReused:
                said.append("refused")
            except BaseException as exc:  # noqa: BLE001 - the child must end here, whatever happened
                said.append(type(exc).__name__)
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"refused refused"
    os.waitpid(pid, 0)
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
    assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())


# ---- seeds and budgets ----------------------------------------------------------------------------------------------


class Few(LatticeParameters):
    """A toy whose seeds serve few secrets."""

    budget = 4

    @property
    def max_secrets(self) -> int:
        return self.budget


@pytest.mark.parametrize("budget", [1, 4, 13, 70])
def test_a_seed_that_has_served_its_budget_is_replaced_with_its_hints(
    make: Any, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(Few, "budget", budget)
    few = Few("few", 16, 2, 3.2, 0, "a test", toy=True)
    scheme, spec = make(few), provider.groups[0]
    folders: list[set[str]] = []
    for turn in range(6):
        rows = rows_of(16 * 23, 40, turn)
        exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, few, 128)
        assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())
        folders.append({path.name for path in (tmp_path / "hints").iterdir()})
    seeds = scheme._ledger.audit()
    assert all(seed.used <= budget for seed in seeds)
    assert sum(seed.used for seed in seeds) >= 6 * 23
    fetched = [rows.seed for call, rows in provider.hints if rows.first_row == 0]
    assert len(fetched) == len(set(fetched)), "a seed's hint is fetched once"
    assert set(fetched) <= {seed.seed for seed in seeds}
    current = hashlib.sha256(fetched[-1]).hexdigest()
    assert folders[-1] == {current[:24]}, "hints of earlier seeds are deleted"
    assert len(seeds) >= 6 * 23 // max(budget, 1)


def test_a_restart_goes_on_with_the_seed_and_its_hints(make: Any, provider: Provider) -> None:
    spec, rows = provider.groups[0], rows_of(2, 40)
    first = make()
    first.mask(spec, FORWARD, rows)
    asked = len(provider.hints)
    second = make()
    second.mask(spec, FORWARD, rows)
    assert len(provider.hints) == asked
    (seed,) = second._ledger.audit()
    assert seed.used == 2 * lattice.BLOCKS_RESERVED_AT_ONCE


def test_streamed_hints_leave_no_file(make: Any, provider: Provider, tmp_path: Path) -> None:
    scheme, spec, rows = make(folder=None), provider.groups[0], rows_of(3, 40)
    got = provider.answer(scheme.mask(spec, FORWARD, rows))
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 0)
    assert bool(((wide(got) - exact).abs() <= bound).all())
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "ledger.lock"}
    assert not scheme.keeps_hints
    assert scheme.describe()["hints"] == "streamed, not stored"


def test_hints_are_asked_for_within_the_providers_limits(make: Any, provider: Provider) -> None:
    scheme = make(limits=Limits(max_rows=100, max_tensor_bytes=64 * 40 * 4))
    scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    assert max(rows.num_rows for _, rows in provider.hints) == 64
    assert sum(rows.num_rows for _, rows in provider.hints) == DEFAULT.dimension


# ---- bad days -------------------------------------------------------------------------------------------------------


def test_a_provider_that_goes_away_while_a_hint_is_fetched(make: Any, provider: Provider) -> None:
    scheme, spec, rows = make(limits=Limits(max_rows=256), background=True), provider.groups[0], rows_of(2, 40)

    def gone() -> None:
        if len(provider.hints) == 4:
            raise Unavailable("gone")

    provider.fail = gone
    with pytest.raises(Unavailable, match="gone"):
        scheme.mask(spec, FORWARD, rows)
    provider.fail = lambda: None
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
    assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())


def test_a_damaged_hint_file_is_an_error_and_nothing_is_masked(make: Any, provider: Provider, tmp_path: Path) -> None:
    spec, rows = provider.groups[0], rows_of(2, 40)
    make().mask(spec, FORWARD, rows)
    (file,) = (tmp_path / "hints").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    scheme = make()
    for _ in range(2):
        with pytest.raises(MaskError, match="delete it, and it will be fetched again"):
            scheme.mask(spec, FORWARD, rows)
    file.unlink()
    scheme = make()
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
    assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())


def test_hints_of_another_weight_or_seed_are_refused(make: Any, provider: Provider, tmp_path: Path) -> None:
    other = Provider([weight_of(40, 24, 9)])
    mine, theirs = make(TOY), make(LatticeParameters("other", 16, 2, 3.2, 0, "a test", toy=True))
    theirs.bind(other.effect)
    theirs.mask(other.groups[0], FORWARD, rows_of(1, 40))
    (foreign,) = (tmp_path / "hints").glob("*/*.safetensors")
    mine.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    (own,) = set((tmp_path / "hints").glob("*/*.safetensors")) - {foreign}
    own.write_bytes(foreign.read_bytes())
    again = make(TOY)
    with pytest.raises(MaskError, match="another model, seed or setting"):
        again.mask(provider.groups[0], FORWARD, rows_of(1, 40))


def test_a_ledger_that_breaks_stops_everything(make: Any, provider: Provider, tmp_path: Path) -> None:
    scheme, spec = make(TOY), provider.groups[0]
    path = tmp_path / "ledger"
    path.write_bytes(path.read_bytes() + b"0123456789abcdef {}\n")
    asked = len(provider.hints)
    with pytest.raises(ConfigurationError, match="damaged"):
        scheme.mask(spec, FORWARD, rows_of(1, 40))
    assert len(provider.hints) == asked
    assert scheme.describe()["secrets"] == "the ledger cannot be read"


def test_a_failed_check_of_a_hint_ends_it_there(make: Any, provider: Provider, tmp_path: Path) -> None:
    scheme = make(verified=True)

    def forged() -> None:
        raise VerificationFailed("forged")

    provider.fail = forged
    with pytest.raises(VerificationFailed, match="forged"):
        scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    assert not list((tmp_path / "hints").glob("*/*.safetensors"))


def test_use_before_a_connection_and_after_the_end(make: Any, provider: Provider) -> None:
    scheme, spec = make(), provider.groups[0]
    scheme.mask(spec, FORWARD, rows_of(1, 40))
    scheme.close()
    assert scheme.pool.ready_bytes == 0
    with pytest.raises(MaskError, match="closed"):
        scheme.mask(spec, FORWARD, rows_of(1, 40))
    scheme.close()
    unbound = make()
    unbound._effect_path = None
    with pytest.raises(ConfigurationError, match="before its client had a connection"):
        unbound.mask(spec, FORWARD, rows_of(1, 40))


def test_secrets_do_not_outlive_the_making(make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is the mask and its effect: secrets, errors and the secrets' transforms are dropped."""
    kept: list[weakref.ref[torch.Tensor]] = []
    for module, name in ((sampling, "ternary"), (sampling, "error"), (negacyclic, "secret_transform")):
        original = getattr(module, name)

        def spy(*arguments: Any, original: Any = original) -> torch.Tensor:
            made: torch.Tensor = original(*arguments)
            kept.append(weakref.ref(made))
            return made

        monkeypatch.setattr(module, name, spy)
    scheme = make()
    scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    gc.collect()
    assert len(kept) == 3
    assert [each() for each in kept] == [None] * 3


def test_nothing_can_be_pickled_copied_or_printed(make: Any, provider: Provider) -> None:
    scheme, rows = make(), rows_of(2, 40)
    masked = scheme.mask(provider.groups[0], FORWARD, rows)
    block = scheme.pool._shelves[0, FORWARD].blocks[0]
    for secret in (scheme, scheme.pool, block, scheme._rng, scheme._epoch, scheme._ledger, block.slots):
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                duplicate(secret)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(masked)
    numbers = [str(int(number)) for number in (*sent(masked)[0], *block.mask[1], *block.effect[1])]
    text = "".join(map(repr, (scheme, scheme.pool, block, masked, scheme._epoch, scheme._rng)))
    assert not any(number in text for number in numbers if len(number) > 5)
    assert "tensor" not in text
    assert scheme._epoch.seed.seed.hex() not in text


def test_it_says_what_is_in_force(make: Any, provider: Provider) -> None:
    scheme = make()
    scheme.prepare(provider.groups[0], FORWARD, 1)
    said = scheme.describe()
    assert "Module-LWE" in said["assumption"]
    assert said["parameters"] == "default: q=2^32, 3x512, sigma=3.2"
    assert said["bits"].startswith("161 ")
    assert said["secrets"].startswith(f"{lattice.BLOCKS_RESERVED_AT_ONCE} of {2**33} ")
    assert "24 bits" in said["hints"]
    assert scheme.pool._budget_bytes == DEFAULT_BYTES


def test_closing_while_the_worker_makes_masks(make: Any, provider: Provider) -> None:
    scheme, spec = make(background=True), provider.groups[0]
    scheme.prepare(spec, FORWARD, 512)
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(TIMEOUT_S)

    provider.fail = hold
    scheme._hints.forget(scheme._epoch.seed.seed)  # so that the worker has to ask the provider
    scheme.mask(spec, FORWARD, rows_of(511, 40))
    assert reached.wait(TIMEOUT_S)
    scheme.close()
    go_on.set()
    worker = scheme.pool._worker
    assert worker is not None
    worker.join(TIMEOUT_S)
    assert not worker.is_alive()
    assert scheme.pool.ready_bytes == 0
