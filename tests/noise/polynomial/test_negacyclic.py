"""Tests exactness: the FFT is compared with schoolbook products, and these with vectors that independent code made."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import kernels, negacyclic
from noise.polynomial.negacyclic import secret_transform, transform
from noise.sampling import Csprng, error, ternary
from tests.support.compiled_kernels import compiled_and_torch, needs_transforms
from tests.support.lattice import reference_product
from tests.support.repository import ROOT
from tests.vectors import make_lattice_vectors
from wire.errors import ConfigurationError, MaskError
from wire.ring import coding
from wire.ring.widths import unpacked_effect

LOWEST, HIGHEST = -(2**31), 2**31 - 1
VECTORS = ROOT / "tests" / "vectors"
RNG = Csprng()

is_compiled = compiled_and_torch(kernels, needs_transforms)


pytestmark = pytest.mark.usefixtures("is_compiled")


def combine(*arguments: Any) -> torch.Tensor:
    return torch.stack(list(negacyclic.combine(*arguments)))


def product(*arguments: Any) -> torch.Tensor:
    return torch.stack(list(negacyclic.product(*arguments)))


def toy(degree: int, rank: int, sigma: float = 3.2) -> LatticeParameters:
    return LatticeParameters("toy", degree, rank, sigma, 0, "a test", toy=True)


def random_matrix(parameters: LatticeParameters, features: int) -> torch.Tensor:
    return RNG.random_bytes(4 * parameters.dimension * features).view(torch.int32).view(parameters.dimension, features)


def random_secrets(parameters: LatticeParameters, num_blocks: int) -> torch.Tensor:
    return ternary(RNG, (num_blocks, parameters.rank, parameters.ring_degree))


def wrapped(wide: torch.Tensor) -> torch.Tensor:
    return coding.to_int32(wide)


def int_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the matrix product mod 2^32, computed in int64. For the sizes in this file, 2^31·127·d is below 2^63."""
    return wrapped(a.to(torch.int64) @ b.to(torch.int64))


def check(matrix: torch.Tensor, secrets: torch.Tensor, parameters: LatticeParameters) -> None:
    expected = reference_product(matrix, secrets)
    secrets_hat = secret_transform(secrets)
    assert torch.equal(combine(transform(matrix, parameters), secrets_hat), expected)
    assert torch.equal(product(matrix, secrets_hat, parameters), expected)


# vectors


def vector_cases() -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in json.loads((VECTORS / "lattice.json").read_text())["cases"]]


@pytest.mark.parametrize("case", vector_cases())
def test_vectors(case: dict[str, Any]) -> None:
    parameters = toy(case["ring_degree"], case["rank"])
    public, hint, mask, effect = (
        torch.tensor(case[key], dtype=torch.int32) for key in ("public", "hint", "mask", "effect")
    )
    drawn = torch.tensor(case["error"], dtype=torch.int8)[None]
    secrets = torch.tensor(case["secret"], dtype=torch.int8)[None]
    secrets_hat = secret_transform(secrets)
    assert torch.equal(reference_product(hint, secrets)[0], effect)
    assert torch.equal(combine(transform(public, parameters), secrets_hat, drawn)[0], mask)
    assert torch.equal(product(hint, secrets_hat, parameters)[0], effect)


def test_the_script_makes_the_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_lattice_vectors, "HERE", tmp_path)
    make_lattice_vectors.main()
    assert (tmp_path / "lattice.json").read_text() == (VECTORS / "lattice.json").read_text()


def test_the_script_is_independent_of_what_it_tests() -> None:
    source = (VECTORS / "make_lattice_vectors.py").read_text()
    assert not any(word in source for word in ("torch", "numpy", "import noise", "from noise", "from wire"))


@pytest.fixture
def _many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks as small as for 64 threads: eight features in each, or sixteen in the compiled form."""
    monkeypatch.setattr(negacyclic, "get_num_threads", lambda: 64)
    monkeypatch.setattr(negacyclic, "LEAST_FEATURES", 16)


# against the schoolbook


@settings(max_examples=40, deadline=None)
@given(log_degree=st.integers(1, 6), rank=st.integers(1, 6), num_blocks=st.integers(1, 3), features=st.integers(1, 20))
def test_random_shapes(log_degree: int, rank: int, num_blocks: int, features: int) -> None:
    parameters = toy(1 << log_degree, rank)
    check(random_matrix(parameters, features), random_secrets(parameters, num_blocks), parameters)


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_shipped_sets(name: str) -> None:
    parameters = PARAMETERS[name]
    check(random_matrix(parameters, 3), random_secrets(parameters, 2), parameters)


@pytest.mark.parametrize("parameters", [PARAMETERS["default"], toy(2048, 6)], ids=["default", "largest"])
@pytest.mark.parametrize("low_bits", [0, 8])
def test_the_largest_coefficients_with_the_largest_secrets(parameters: LatticeParameters, low_bits: int) -> None:
    """This is the worst case of the bound in the docstring of noise/polynomial/negacyclic.py: every coefficient is
    ±2^31 and every trit is 1, so that nothing cancels."""
    top = HIGHEST >> low_bits << low_bits
    rows = torch.full((parameters.dimension, 3), LOWEST, dtype=torch.int32)
    rows[:, 1] = top
    rows[::2, 2] = top
    secrets = torch.ones(3, parameters.rank, parameters.ring_degree, dtype=torch.int8)
    secrets[1] = -1
    secrets[2, :, ::2] = -1
    # The result is a sum of N equal terms with signs. By hand, coefficient t of (Σ X^j)·(Σ X^j) is 2t + 2 − N.
    degree = parameters.ring_degree
    ramp = 2 * torch.arange(degree) + 2 - degree
    made = product(rows, secret_transform(secrets), parameters)
    assert torch.equal(made[0, :, 0], wrapped(LOWEST * parameters.rank * ramp))
    assert torch.equal(made[1, :, 1], wrapped(-top * parameters.rank * ramp))
    check(rows[:, 2:], secrets[2:], parameters)


def test_the_largest_ring_at_random() -> None:
    parameters = toy(2048, 6)
    check(random_matrix(parameters, 1), random_secrets(parameters, 1), parameters)


@pytest.mark.usefixtures("_many_threads")
@pytest.mark.parametrize("features", [0, 1, 7, 8, 9, 64])
def test_chunks_do_not_show(features: int) -> None:
    parameters = toy(16, 3)
    check(random_matrix(parameters, features), random_secrets(parameters, 2), parameters)


def test_chunks_of_one_thread_do_not_show(is_compiled: bool) -> None:
    """A chunk reuses the memory of the chunk before, and the last chunk is smaller than the others. The product is
    right nevertheless."""
    parameters = toy(512, 1)
    matrix, secrets = random_matrix(parameters, 401), random_secrets(parameters, 2)
    seen = Packed(matrix & -256)
    assert torch.equal(product(seen, secret_transform(secrets), parameters), reference_product(matrix & -256, secrets))
    assert len(seen.loads) == (2 if is_compiled else 3)
    check(matrix, secrets, parameters)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_each_column_of_a_mask_has_the_error_that_was_drawn_for_it(num_threads: int, is_compiled: bool) -> None:
    """The errors of each draw are one number that no other draw has. Every column of every block has one of them."""
    parameters = toy(16, 2)
    matrix, hint = random_matrix(parameters, 401), random_matrix(parameters, 300)
    secrets, numbers, lock = random_secrets(parameters, 3), iter(range(1, 1000)), threading.Lock()
    widths: list[int] = []

    def draw(shape: Any) -> torch.Tensor:
        with lock:
            widths.append(shape[-1])
            return torch.full(tuple(shape), next(numbers), dtype=torch.int16)

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        arguments = transform(matrix, parameters), secret_transform(secrets), hint, draw, parameters
        masks, effects = negacyclic.masks_and_effects(*arguments)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.stack(list(effects)), reference_product(hint, secrets))
    errors = torch.stack(list(masks)) - reference_product(matrix, secrets)
    assert torch.equal(errors, errors[:1, :1].expand_as(errors))  # all rows of all blocks
    found, counts = errors[0, 0].unique(return_counts=True)
    assert found.tolist() == list(range(1, len(widths) + 1))
    assert counts.tolist() == widths
    assert sum(widths) == 401
    assert len(widths) > 1 or not is_compiled


@pytest.mark.parametrize("features", [5, 64, 401])
def test_packed_effects_are_the_effects_rounded(features: int) -> None:
    parameters = toy(16, 2)
    matrix, hint = random_matrix(parameters, 7), random_matrix(parameters, features)
    secrets = random_secrets(parameters, 3)

    def draw(shape: Any) -> torch.Tensor:
        return torch.ones(tuple(shape), dtype=torch.int16)

    arguments = transform(matrix, parameters), secret_transform(secrets), hint, draw, parameters
    masks, effects = negacyclic.masks_and_effects(*arguments, packs_effects=True)
    expected = (reference_product(hint, secrets) + 128) & ~0xFF
    assert torch.equal(torch.stack([unpacked_effect(each) for each in effects]), expected)
    assert torch.equal(torch.stack(list(masks)), reference_product(matrix, secrets) + 1)


def test_whole_effects_do_not_outlive_their_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, seen, packed = toy(16, 2), list[torch.Tensor](), negacyclic.packed
    monkeypatch.setattr(negacyclic.kernels, "available", lambda: False)
    monkeypatch.setattr(negacyclic, "packed", lambda whole: seen.append(whole) or packed(whole))
    matrix, hint = random_matrix(parameters, 7), random_matrix(parameters, 5)
    hats = transform(matrix, parameters), secret_transform(random_secrets(parameters, 3))

    def draw(shape: Any) -> torch.Tensor:
        return torch.ones(tuple(shape), dtype=torch.int16)

    _, effects = negacyclic.masks_and_effects(*hats, hint, draw, parameters, packs_effects=True)
    assert all(each.count_nonzero() for each in effects)
    assert [int(each.count_nonzero()) for each in seen] == [0, 0, 0]


def test_a_slice_of_the_transforms_serves_a_narrower_layer() -> None:
    parameters = toy(64, 2)
    matrix, secrets = random_matrix(parameters, 40), random_secrets(parameters, 2)
    for features in (1, 4, 16, 23, 40):
        made = combine(transform(matrix, parameters).first(features), secret_transform(secrets))
        assert torch.equal(made, reference_product(matrix[:, :features], secrets))


def test_any_strides() -> None:
    parameters = toy(32, 2)
    wide, secrets = random_matrix(parameters, 20), random_secrets(parameters, 3)
    matrix, secrets_hat = wide[:, 4:16], secret_transform(secrets)
    expected = reference_product(matrix.contiguous(), secrets)
    for laid_out in (matrix, matrix.t().contiguous().t(), wide.t().contiguous().t()[:, 4:16]):
        assert torch.equal(product(laid_out, secrets_hat, parameters), expected)
        assert torch.equal(combine(transform(laid_out, parameters), secrets_hat), expected)


class Packed:
    """Holds a matrix as 24-bit numbers, which are decoded when they are read."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.features = matrix.shape[1]
        self.loads: list[tuple[int, int]] = []
        self._kept = matrix.t().contiguous().view(torch.uint8).view(*matrix.t().shape, 4)[..., 1:].contiguous()

    def packed(self, start: int, stop: int) -> None:
        return None

    def load(self, start: int, stop: int) -> torch.Tensor:
        self.loads.append((start, stop))
        kept = self._kept[start:stop]
        wide = torch.zeros(*kept.shape[:2], 4, dtype=torch.uint8)
        wide[..., 1:] = kept
        return wide.view(torch.int32).squeeze(-1).t()


@pytest.mark.usefixtures("_many_threads")
def test_packed_hints_are_decoded_chunk_by_chunk(is_compiled: bool) -> None:
    parameters = toy(64, 3)
    matrix, secrets = random_matrix(parameters, 19) & -256, random_secrets(parameters, 2)
    packed = Packed(matrix)
    assert torch.equal(product(packed, secret_transform(secrets), parameters), reference_product(matrix, secrets))
    assert sorted(packed.loads) == ([(0, 16), (16, 19)] if is_compiled else [(0, 8), (8, 16), (16, 19)])


# what the mask needs


@pytest.mark.parametrize("sigma", [3.2, 32.0])
def test_mask_minus_effect_is_the_error_times_the_weight(sigma: float) -> None:
    parameters = toy(64, 3, sigma)
    public, secrets = random_matrix(parameters, 48), random_secrets(parameters, 4)
    weight = RNG.random_bytes(48 * 80).view(torch.int8).clamp_min(-127).view(48, 80)
    drawn = error(RNG, (4, 64, 48), parameters)
    hint = int_matmul(public, weight)
    secrets_hat = secret_transform(secrets)
    mask = combine(transform(public, parameters), secrets_hat, drawn)
    effect = product(hint, secrets_hat, parameters)
    assert bool(drawn.any())
    left = wrapped(int_matmul(mask, weight).to(torch.int64) - effect)
    assert torch.equal(left, int_matmul(drawn, weight))


def test_the_error_is_added_mod_2_32() -> None:
    parameters = toy(2, 1)
    rows = torch.tensor([[HIGHEST], [LOWEST]], dtype=torch.int32)
    secrets = torch.tensor([[[1, 0]]], dtype=torch.int8)
    for dtype in (torch.int8, torch.int16, torch.int32):
        drawn = torch.tensor([[[1], [-1]]], dtype=dtype)
        made = combine(transform(rows, parameters), secret_transform(secrets), drawn)
        assert made.flatten().tolist() == [LOWEST, HIGHEST]


# faults


def measured_error(parameters: LatticeParameters) -> float:
    """Returns the largest distance to an integer that the coefficients of random products have before they are
    rounded."""
    matrix = random_matrix(parameters, 4)
    hat = transform(matrix, parameters).values
    secrets_hat = secret_transform(random_secrets(parameters, 2))
    half = parameters.ring_degree // 2
    if not hat.is_complex():
        combiner, out = (
            kernels.Combiner(secrets_hat),
            kernels.Rows(list(torch.empty(2, 2 * half, 4, dtype=torch.int32))),
        )
        return max(combiner.by_transforms(hat, out, 0, 4), combiner.by_matrix(matrix, out, 0, 4))
    sums = (hat[None] * secrets_hat[:, :, None]).sum(1)
    angles = torch.arange(half, dtype=torch.float64) * (-math.pi / (2 * half))
    values = torch.view_as_real(torch.fft.ifft(sums) * torch.polar(torch.ones_like(angles), angles))
    return float((values - values.round()).abs().max())


@pytest.mark.parametrize(
    ("parameters", "bound"), [(PARAMETERS["default"], 1e-3), (toy(2048, 1), 2e-3), (toy(2048, 6), 1e-2)]
)
def test_the_rounding_error_is_far_from_the_threshold(parameters: LatticeParameters, bound: float) -> None:
    assert 0.0 < measured_error(parameters) < bound


@pytest.mark.parametrize("parameters", [PARAMETERS["default"], toy(2048, 6)], ids=["default", "largest"])
def test_a_library_that_loses_precision_is_noticed(
    parameters: LatticeParameters, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        pytest.skip("torch's library is not used")
    hat = transform(random_matrix(parameters, 9), parameters)
    secrets_hat = secret_transform(random_secrets(parameters, 1))
    combine(hat, secrets_hat)
    exact = torch.fft.ifft

    def single_precision(values: torch.Tensor, **options: Any) -> torch.Tensor:
        return exact(values.to(torch.complex64), **options).to(torch.complex128)

    monkeypatch.setattr(torch.fft, "ifft", single_precision)
    with pytest.raises(MaskError, match="precision"):
        combine(hat, secrets_hat)


def test_not_a_number_is_noticed() -> None:
    parameters = toy(8, 1)
    hat = transform(random_matrix(parameters, 2), parameters)
    secrets_hat = secret_transform(random_secrets(parameters, 1))
    combine(hat, secrets_hat)
    hat.values.view(-1)[0] = float("nan")
    with pytest.raises(MaskError, match="precision"):
        combine(hat, secrets_hat)


def test_a_coefficient_that_is_no_integer_is_noticed() -> None:
    parameters = toy(512, 3)
    hat = transform(torch.zeros(parameters.dimension, 40, dtype=torch.int32), parameters)
    secrets_hat = secret_transform(torch.ones(2, 3, 512, dtype=torch.int8))
    assert not combine(hat, secrets_hat).any()
    hat.values[-1] = torch.randn_like(hat.values[-1])  # of the last features, or the last polynomial of each
    with pytest.raises(MaskError, match="precision"):
        combine(hat, secrets_hat)


@pytest.mark.parametrize("bad", [torch.zeros(23, 4, dtype=torch.int32), torch.zeros(24, 4, dtype=torch.int64)])
def test_a_matrix_of_another_shape_is_refused(bad: torch.Tensor) -> None:
    parameters = toy(8, 3)
    with pytest.raises(ConfigurationError, match="24 rows"):
        transform(bad, parameters)
    with pytest.raises(ConfigurationError, match="24 rows"):
        product(bad, secret_transform(random_secrets(parameters, 1)), parameters)
