"""Tests masks and effects that are made as ring products on a device: on torch's `cpu` device, and on a GPU if there is
one, they are those of the transforms to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from noise import staging
from noise.masks.lattice import Lattice
from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import device_error, negacyclic, toeplitz
from noise.polynomial.toeplitz import DeviceProducts
from noise.sampling import Csprng, error, ternary
from tests.support.cuda import cpu_and, needs_cuda
from tests.support.lattice import BACKWARD, DEFAULT, FORWARD, TOY, Provider, bounds, reference_product, rows_of, wide
from tests.support.triton_kernels import interpret_chacha
from wire.errors import MaskError
from wire.frame import Direction
from wire.ring import coding

RNG, CPU = Csprng(), torch.device("cpu")
DEVICES = cpu_and("cuda:0")
SHAPES = [(TOY, 3, 5), (DEFAULT, 1, 3), (DEFAULT, 2, 9), (PARAMETERS["conservative"], 1, 2)]


@pytest.fixture(params=DEVICES)
def products(request: pytest.FixtureRequest) -> DeviceProducts:
    return DeviceProducts(torch.device(request.param))


def drawn(parameters: LatticeParameters, num_blocks: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix with extreme numbers, and secrets."""
    matrix = RNG.random_bytes(4 * parameters.dimension * features).view(torch.int32).view(-1, features)
    matrix[::7], matrix[3::7] = -(2**31), 2**31 - 1
    return matrix, ternary(RNG, (num_blocks, parameters.rank, parameters.ring_degree))


# ---- the same numbers -----------------------------------------------------------------------------------------------


def test_the_matrix_multiplies_as_polynomials_do() -> None:
    """Row t of block b holds coefficient t of X^j · s: for N = 3 and s = a + bX + cX², X·s is −c + aX + bX²."""
    a, b, c = 1, 2, 3
    made = toeplitz.toeplitz(torch.tensor([[[a, b, c]]], dtype=torch.int8))
    assert made.tolist() == [[a, -c, -b], [b, a, -c], [c, b, a]]
    assert made.is_contiguous()


@pytest.mark.parametrize(("parameters", "num_blocks", "features"), SHAPES)
def test_products_are_those_of_the_schoolbook(
    products: DeviceProducts, parameters: LatticeParameters, num_blocks: int, features: int
) -> None:
    matrix, secrets = drawn(parameters, num_blocks, features)
    expected = reference_product(matrix, secrets)
    secrets_hat = products.secret_transform(secrets)
    assert torch.equal(products.product(matrix, secrets_hat, parameters).cpu(), expected)
    assert torch.equal(products.combine(products.transform(matrix, parameters), secrets_hat).cpu(), expected)


@pytest.mark.parametrize(("parameters", "num_blocks", "features"), SHAPES)
def test_masks_and_effects_are_the_cpus_to_the_last_bit(
    products: DeviceProducts, parameters: LatticeParameters, num_blocks: int, features: int
) -> None:
    matrix, secrets = drawn(parameters, num_blocks, features + 1)
    noise = error(RNG, (num_blocks, parameters.ring_degree, features), parameters)
    found, expected = (
        each.combine(each.transform(matrix, parameters).first(features), each.secret_transform(secrets), noise)
        for each in (products, negacyclic)
    )
    assert torch.equal(found.cpu(), torch.stack(list(expected)))
    assert (found.dtype, found.is_contiguous()) == (torch.int32, True)


def test_more_columns_than_a_chunk(products: DeviceProducts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toeplitz, "CHUNK_FEATURES", 4)
    matrix, secrets = drawn(TOY, 2, 11)
    assert torch.equal(products.product(matrix, secrets, TOY).cpu(), reference_product(matrix, secrets))


def test_rows_made_in_inference_mode_can_be_added_to_outside(products: DeviceProducts) -> None:
    matrix, secrets = drawn(TOY, 1, 3)
    with torch.inference_mode():
        made = products.combine(products.transform(matrix, TOY), products.secret_transform(secrets))
    expected = made + 1
    assert torch.equal(made.add_(1), expected)


def test_hints_are_kept_on_the_device_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept crosses once; what finds no room crosses for each product, with the same numbers."""

    class Counted:
        def __init__(self, matrix: torch.Tensor) -> None:
            self.matrix, self.features, self.loaded = matrix, matrix.shape[1], 0

        def load(self, start: int, stop: int) -> torch.Tensor:
            self.loaded += (stop - start) * (stop - start > 1)
            return self.matrix[:, start:stop].contiguous()

    (first, secrets), (second, _) = drawn(TOY, 2, 11), drawn(TOY, 2, 7)
    products = DeviceProducts(torch.device("cpu"), kept_bytes=TOY.dimension * 4 * 12)
    hints = Counted(first), Counted(second)
    for _ in range(3):
        for hint in hints:
            found = products.product(hint, products.secret_transform(secrets), TOY)  # type: ignore[arg-type]
            assert torch.equal(found, reference_product(hint.matrix, secrets))
    assert [hint.loaded for hint in hints] == [11, 3 * 7]


@pytest.mark.parametrize("places", [[0], [5, 0, 3]])
def test_single_rows_of_the_secrets_matrix(places: list[int]) -> None:
    secrets = drawn(TOY, 2, 1)[1]
    whole = toeplitz.toeplitz(secrets).view(2, TOY.ring_degree, -1)
    assert torch.equal(toeplitz.toeplitz_rows(secrets, places), whole[:, places])


# ---- the error ------------------------------------------------------------------------------------------------------


def test_chacha20_is_that_of_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; on a GPU the same test decides whether errors are drawn there."""
    interpret_chacha(monkeypatch)
    assert device_error.passes_self_test(CPU)
    right = device_error.key_stream
    monkeypatch.setattr(device_error, "key_stream", lambda key, num_blocks: right(key + 1, num_blocks))
    assert not device_error.passes_self_test(CPU)


def test_the_key_stream_is_the_standards() -> None:
    """RFC 8439, appendix A.1, test vectors 1 and 2: a key and a nonce of zeros, counters 0 and 1."""
    stream = device_error.key_stream(torch.zeros(8, dtype=torch.int32), 2).view(torch.uint8).numpy().tobytes()
    assert stream[:16].hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert stream[64:80].hex() == "9f07e7be5551387a98ba977c732d080d"


def test_errors_drawn_on_a_device_have_the_right_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_chacha(monkeypatch)
    masks = torch.full((2, 20, 97), 1000, dtype=torch.int32)
    device_error.add_centred_binomial(masks)
    found = (masks - 1000).double().flatten()
    assert abs(float(found.mean())) < 5 * (10.5 / found.numel()) ** 0.5
    assert abs(float(found.var()) - 10.5) < 5 * 10.5 * (2 / found.numel()) ** 0.5
    assert 9 < float(found.abs().max()) <= 21
    again = torch.full_like(masks, 1000)
    device_error.add_centred_binomial(again)
    assert not torch.equal(masks, again), "each call has a key of its own"


@pytest.mark.parametrize("fault", ["adds nothing", "adds one more", "adds elsewhere"])
def test_a_device_that_draws_no_error_makes_no_mask(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask without its error is a linear function of the secret."""

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            def add(numbers: torch.Tensor, key: torch.Tensor, count: int, num_blocks: int, **_: int) -> None:
                words = device_error.key_stream(key, num_blocks)
                samples = device_error.samples_of(words)[:count]
                if fault == "adds one more":
                    samples = samples + 1
                numbers += 0 if fault == "adds nothing" else samples.roll(int(fault == "adds elsewhere"))

            return add

    kernels = type("Kernels", (), {"add_centred_binomial": Kernel()})
    monkeypatch.setattr(device_error, "kernels", lambda: kernels)
    monkeypatch.setattr(device_error, "COMPARED", 30)
    masks = torch.full((3, 40), 7, dtype=torch.int32)
    with pytest.raises(MaskError, match="the device drew a wrong error"):
        device_error.add_centred_binomial(masks)
    assert not masks.any()


def test_a_call_that_is_longer_than_a_key_stream_has_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_error, "MOST_SAMPLES", 50)
    parts: list[int] = []
    monkeypatch.setattr(device_error, "add_error", lambda numbers: parts.append(numbers.numel()) or True)
    device_error.add_centred_binomial(torch.zeros(11, 11, dtype=torch.int32))
    assert parts == [50, 50, 21]
    for wrong in (torch.zeros(4, 3, dtype=torch.int32).t(), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="contiguous int32"):
            device_error.add_centred_binomial(wrong)


def test_errors_on_a_device_are_named_in_the_description(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lattice = make(TOY, device=CPU)
    assert "ChaCha20" not in lattice.describe()["assumption"]
    monkeypatch.setattr(device_error, "is_exact", lambda device: True)
    assert "ChaCha20" in lattice.describe()["assumption"]


@pytest.mark.gpu
@needs_cuda
def test_errors_are_drawn_on_a_real_gpu() -> None:
    """Every number of a mask has an error, and two masks have different ones."""
    gpu = torch.device("cuda", 0)
    assert device_error.is_exact(gpu)
    first, second = (torch.zeros(3, 512, 1000, dtype=torch.int32, device=gpu) for _ in range(2))
    for each in (first, second):
        device_error.add_centred_binomial(each)
        assert float(each.double().var()) == pytest.approx(10.5, rel=0.02)
        assert float(each.double().mean()) == pytest.approx(0, abs=0.02)
        assert int(each.abs().max()) <= 21
    assert float((first == second).double().mean()) < 0.12, "two independent samples agree in 8.7% of all numbers"


# ---- secrets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Returns a list to which the weight and the result of each later ring product are added. The weights are matrices
    of secrets, and the results are masks."""
    seen: list[torch.Tensor] = []
    product = coding.product

    def spy(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = product(rows, weight)
        seen.extend((weight, made))
        return made

    monkeypatch.setattr(coding, "product", spy)
    return seen


@pytest.mark.parametrize("fails", [False, True])
def test_what_held_secrets_is_overwritten(
    products: DeviceProducts, weights: list[torch.Tensor], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, secrets = drawn(TOY, 2, 5)
    if fails:
        monkeypatch.setattr(toeplitz, "compare", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(MaskError):
            products.product(matrix, secrets, TOY)
        assert weights
        assert not weights[0].any(), "the matrix of the secrets"
        return
    assert products.product(matrix, secrets, TOY).any()
    assert len(weights) == 2
    assert not any(each.any() for each in weights)


def test_kernels_make_no_copy_of_the_secrets_matrix() -> None:
    """The kernels for GPUs keep a copy of a weight that has another memory layout than theirs. Nothing would overwrite
    such a copy of the secrets, so their matrix must have the right layout from the start."""
    from wire.ring import product_cuda

    with DeviceProducts(torch.device("cpu")).matrix_of(drawn(TOY, 2, 1)[1]) as there:
        assert product_cuda.prepared(there) is there


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_device_that_computes_nothing_sends_no_row_without_a_mask(
    products: DeviceProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, secrets = drawn(TOY, 2, 5)
    product, num_rows = coding.product, []

    def broken(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_rows.append(rows.shape[0])
        made = product(rows, weight)
        return torch.zeros_like(made) if len(num_rows) == 1 else made

    monkeypatch.setattr(coding, "product", broken)
    with pytest.raises(MaskError, match="the device computed a wrong mask") as caught:
        products.product(matrix, secrets, TOY)
    assert num_rows == [5]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError, "has no memory left to make masks: free some, or make masks on the CPU"),
        (torch.AcceleratorError, "failed while it made masks: AcceleratorError"),
    ],
)
def test_a_device_that_fails_is_one_line(
    products: DeviceProducts, monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError], line: str
) -> None:
    monkeypatch.setattr(coding, "product", lambda *given: (_ for _ in ()).throw(error("secret\nnumbers")))
    with pytest.raises(MaskError, match=line) as caught:
        products.product(*drawn(TOY, 1, 2), TOY)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the mask -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["whole blocks", "pieces"])
def scheme(request: pytest.FixtureRequest, make: Any) -> Lattice:
    options: dict[str, Any] = {"pool_bytes": 1, "features": 64} if request.param else {}
    made: Lattice = make(DEFAULT, device=torch.device("cpu"), **options)
    assert (made.pool.piece_rows < DEFAULT.ring_degree) is request.param
    return made


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_mask_made_on_a_device_comes_off(
    scheme: Lattice, provider: Provider, direction: Direction, num_rows: int
) -> None:
    spec = provider.groups[0]
    rows = rows_of(num_rows, spec.widths(direction)[0])
    exact, bound, _ = bounds(spec, direction, provider.weights[0], rows, DEFAULT, 128)
    for _ in range(3):
        found = provider.answer(scheme.mask(spec, direction, rows))
        assert bool(((wide(found) - exact).abs() <= bound).all())


def test_secrets_are_overwritten_once_their_rows_are_made(
    make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []
    copy = DeviceProducts.secret_transform
    monkeypatch.setattr(
        DeviceProducts, "secret_transform", lambda self, secrets: kept.append(copy(self, secrets)) or kept[-1]
    )
    scheme = make(TOY, device=torch.device("cpu"))
    scheme.mask(provider.groups[0], FORWARD, rows_of(3, 40))
    assert kept
    assert not any(each.any() for each in kept)


# ---- staging --------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Makes rows of the CPU count as rows of a device, and returns the staging buffers that are used."""
    buffers: list[torch.Tensor] = []
    make = staging.staging_buffer
    monkeypatch.setattr(staging, "is_here", lambda tensor: False)
    monkeypatch.setattr(staging, "staging_buffer", lambda like: buffers.append(make(like)) or buffers[-1])
    yield buffers
    assert buffers


def test_rows_come_to_the_cpu_and_leave_nothing_there(elsewhere: list[torch.Tensor]) -> None:
    rows, out = torch.arange(6).view(2, 3), torch.zeros(3, 2, dtype=torch.int64).t()
    with staging.on_host(rows) as here:
        assert torch.equal(here, rows)
        assert here.data_ptr() != rows.data_ptr()
    staging.to_host(rows, out)
    assert torch.equal(out, rows)
    assert len(elsewhere) == 2
    assert not any(each.any() for each in elsewhere)


def test_rows_go_to_a_device_and_leave_nothing_behind(elsewhere: list[torch.Tensor]) -> None:
    rows = torch.arange(1, 7).view(2, 3)
    with staging.on_device(rows, torch.device("cpu")) as there:
        assert torch.equal(there, rows)
    assert not there.any()
    assert not elsewhere[0].any()
    assert rows.all(), "the caller's own rows stay"


def test_on_the_cpu_nothing_is_copied() -> None:
    rows = torch.ones(2, 3)
    with staging.on_host(rows) as here, staging.on_device(rows, torch.device("cpu")) as there:
        assert here is there is rows
    assert rows.all()
