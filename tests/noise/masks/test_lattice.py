"""Tests the lattice mask against slow and obvious references: its masks, effects and results, for many rows and for
one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from noise import sampling
from noise.masks import lattice
from noise.masks.off import Off
from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import negacyclic
from noise.scheme import RowEncoder, decode_rows, encode_rows
from tests.support.compiled_kernels import needs_products
from tests.support.lattice import (
    BACKWARD,
    DEFAULT,
    ETA,
    FORWARD,
    TOY,
    Provider,
    bounds,
    reference_product,
    rows_of,
    sent,
    weight_of,
    whole,
    wide,
)
from wire.errors import InvalidTensor
from wire.frame import Arithmetic, Call, Direction
from wire.payload import MessagePayload
from wire.ring import coding, kernels
from wire.ring.seeded_rows import SeededRows

# ---- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("parameters", [TOY, DEFAULT], ids=lambda chosen: chosen.name)
def test_masks_and_effects_are_those_of_the_reference(
    make: Any, provider: Provider, drawn: Any, parameters: LatticeParameters, direction: Direction
) -> None:
    """Mask and effect must be A·s + e and (A·W̃)·s. Both are computed as schoolbook products of integers, for several
    blocks at once."""
    scheme, spec = make(parameters, bits=32), provider.groups[0]
    num_rows = 2 * parameters.ring_degree
    mask, effect = scheme.pool.take(spec, direction, num_rows)
    (secret,), (error,) = drawn["secret"], drawn["error"]
    seed = provider.hints[0][1].seed
    matrix = provider.matrix(Call(0, direction, Arithmetic.RING))
    public = SeededRows(seed, 0, parameters.dimension).expand(matrix.shape[0])
    assert torch.equal(mask.view(error.shape), reference_product(public, secret) + error.to(torch.int32))
    hint = coding.product(public, matrix)
    assert torch.equal(effect.view(2, -1, matrix.shape[1]), reference_product(hint, secret))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_masks_less_effects_are_the_error_times_the_weight(
    make: Any, provider: Provider, drawn: Any, parameters: LatticeParameters, direction: Direction
) -> None:
    """The equation is exact before hints are rounded. Afterwards it holds within 2^(t-1)·‖s‖₁, and not better than
    rounding can be."""
    matrix = provider.matrix(Call(0, direction, Arithmetic.RING))
    for bits in (32, 24, 22):
        for spied in drawn.values():
            spied.clear()
        scheme = make(parameters, bits=bits)
        mask, effect = scheme.pool.take(provider.groups[0], direction, parameters.ring_degree)
        (secret,), (error,) = drawn["secret"], drawn["error"]
        left = coding.product(mask, matrix) - whole(effect) - coding.product(error[0].to(torch.int32), matrix)
        if bits == 32:
            assert not bool(left.any())
        else:
            bound = 2 ** (32 - bits - 1) * int(secret.abs().sum())
            assert 0 < int(left.abs().max()) <= bound


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bits", [24, 22])
@pytest.mark.parametrize("num_rows", [1, DEFAULT.ring_degree, 3 * DEFAULT.ring_degree // 2])
def test_packing_an_effect_loses_nothing(
    make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch, direction: Direction, bits: int, num_rows: int
) -> None:
    """Rounded hints are multiples of 256, and so are their products with secrets. One row comes from a piece."""
    spec, wholes = provider.groups[0], []
    scheme = make(bits=bits, features=64, pool_bytes=4 * 64 * 200 if num_rows == 1 else 1 << 30)
    original, pack = negacyclic.masks_and_effects, lattice.packed

    def whole_effects(*arguments: Any) -> Any:
        masks, effects = original(*arguments[:-1])
        wholes.extend(effects)
        return masks, [pack(each) for each in effects]

    def noted(effect: torch.Tensor) -> torch.Tensor:
        wholes.append(effect.clone())
        return pack(effect)

    monkeypatch.setattr(lattice, "packed", noted)
    with monkeypatch.context() as patched:
        patched.setattr(negacyclic, "masks_and_effects", whole_effects)
        _, effect = scheme.pool.take(spec, direction, num_rows)
    exact = torch.cat(wholes)[:num_rows]
    assert effect.dtype == torch.uint8
    assert torch.equal(whole(effect), exact)
    assert bool(exact.any())
    reply, scales = (
        coding.product(rows_of(num_rows, 9).to(torch.int32), weight_of(9, exact.shape[1])),
        rows_of(num_rows, 1),
    )
    unmasked = decode_rows(spec, direction, reply, scales, effect)
    assert torch.equal(unmasked, decode_rows(spec, direction, reply, scales, exact))


def test_effects_keep_32_bits_where_hints_do(make: Any, provider: Provider) -> None:
    for options in ({"bits": 32}, {"folder": None}, {"bits": 32, "precision": "balanced"}):
        scheme, spec = make(**options), provider.groups[0]
        _, effect = scheme.pool.take(spec, FORWARD, DEFAULT.ring_degree // 2)
        assert effect.dtype == torch.int32
        assert bool((effect & 0xFF).any())
        assert scheme.pool.ready_bytes == DEFAULT.ring_degree * 4 * (spec.in_features + spec.out_features)
    scheme, spec = make(), provider.groups[0]
    _, effect = scheme.pool.take(spec, FORWARD, 1)
    assert effect.shape == (1, 3 * spec.out_features)
    assert scheme.pool.ready_bytes == DEFAULT.ring_degree * (4 * spec.in_features + 3 * spec.out_features)


# ---- results --------------------------------------------------------------------------------------------------------


def hard_rows(features: int, weight: torch.Tensor, direction: Direction) -> torch.Tensor:
    """Returns nine float32 rows: one of zeros, tiny and huge ones, one with a dynamic range of 1e4, one with an
    outlier, two along the largest column of the weight, one of denormal numbers, and an ordinary one."""
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
    """The error that remains must be neither smaller (a mask without an error is broken) nor larger than it should be.
    The variance of e is 21/2, and that of both roundings 1/12.

    There are 1,000 independent rows. The columns of a row are 24 or 40 numbers. They come from at least 24 independent
    errors by a random weight, which counts as at least 10 independent numbers. The root mean square of 10,000 normal
    numbers has a standard deviation of 1/√20,000 = 0.7%, so the tolerance of 5% is seven standard deviations.
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
    """The worst error and secret meet the worst input. If a result wrapped, it would be wrong by 2^32·β·α.

    With 32 bits for a hint's numbers, the error has to fit. With 20 bits, the allowance for the hint's rounding is
    larger than the error.
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
    """The result of a row does not depend on the other rows of its call: an outlier of 1e20 does not change its
    neighbours."""
    spec, weight = provider.groups[0], provider.weights[0]
    rows = rows_of(3, spec.in_features)
    calm_bound = bounds(spec, FORWARD, weight, rows, DEFAULT, 128)[1]
    rows[1] *= 1e20
    exact, bound, _ = bounds(spec, FORWARD, weight, rows, DEFAULT, 128)
    assert torch.equal(bound[[0, 2]], calm_bound[[0, 2]])
    got = wide(provider.answer(make().mask(spec, FORWARD, rows)))
    assert bool(((got - exact).abs() <= bound).all())


# ---- one row, by the short way --------------------------------------------------------------------------------------


@needs_products
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
        masked = scheme.mask(spec, direction, rows)
        (message,) = masked.messages
        assert message.call == Call(1, direction, Arithmetic.RING)
        assert isinstance(message.payload, MessagePayload)
        error_norm, slack = ETA * math.sqrt(rows.shape[1]), float(2**7 * DEFAULT.dimension)  # for hints at 24 bits
        encoded, scales = encode_rows(spec, direction, rows, error_norm, slack)
        ((mask, effect),) = taken
        assert torch.equal(message.rows, encoded + mask)
        reply = coding.product(message.rows, provider.matrix(message.call))
        assert torch.equal(masked.unmask([reply]), decode_rows(spec, direction, reply, scales, effect))
        assert "tensor" not in repr(masked)
        assert not any(str(number) in repr(masked) for number in message.rows.flatten().tolist())
        taken.clear()


@needs_products
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_costs_nothing_by_the_short_way_either(
    make: Any, provider: Provider, counted: Any, bad: float
) -> None:
    scheme, spec = make(), provider.groups[0]
    rows = rows_of(1, spec.in_features)
    rows[0, 2] = bad
    with pytest.raises(InvalidTensor, match="nothing was sent"):
        scheme.mask(spec, FORWARD, rows)
    assert (provider.hints, counted()) == ([], [])


@needs_products
def test_the_two_ways_share_no_slot(make: Any, provider: Provider) -> None:
    scheme, spec = make(TOY), provider.groups[0]
    rows, seen = torch.zeros(3, spec.in_features), []
    for number in range(TOY.ring_degree):
        for part in rows.split(1) if number % 3 else (rows,):
            seen += [bytes(row.numpy()) for row in sent(scheme.mask(spec, FORWARD, part))]
    assert len(set(seen)) == len(seen) == 3 * TOY.ring_degree


def test_a_group_of_another_session_has_a_codec_of_its_own(make: Any, provider: Provider) -> None:
    encoder, spec = RowEncoder(), provider.groups[0]
    twin = replace(spec, alpha=2 * spec.alpha)
    row = rows_of(1, spec.in_features)
    first, second, other = (encoder.encode(each, FORWARD, row) for each in (spec, spec, twin))
    if not kernels.available():
        assert first is second is other is None
        return
    assert first is not None
    assert second is not None
    assert other is not None
    assert second.codec is first.codec
    assert other.codec is not first.codec


@needs_products
def test_what_does_not_fit_a_message_goes_the_other_way(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, spec = RowEncoder(), provider.groups[0]
    row = rows_of(1, spec.in_features)
    assert encoder.encode(spec, FORWARD, row) is not None
    assert encoder.encode(spec, FORWARD, rows_of(2, spec.in_features)) is None
    assert encoder.encode(spec, FORWARD, rows_of(1, 2 * spec.in_features)[:, ::2]) is None
    monkeypatch.setattr("wire.payload.CHUNK_BYTES", 4 * spec.in_features - 1)
    assert encoder.encode(spec, FORWARD, row) is None
