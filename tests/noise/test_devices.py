"""Tests masks if torch's default device is another one, and if rows are on another device than a group's scales."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noise import sampling
from noise.hints.store import HintStore
from noise.ledger.ledger import Ledger
from noise.masks.lattice import Lattice
from noise.masks.off import Off
from noise.masks.pad import Pad
from noise.polynomial import kernels as mask_kernels
from noise.polynomial import negacyclic
from noise.scheme import GroupSpec, RowEncoder, decode_rows, encode_rows
from tests.support.compiled_kernels import forget, needs_products, needs_transforms
from tests.support.lattice import (
    BACKWARD,
    DEFAULT,
    FORWARD,
    TOY,
    Provider,
    bounds,
    reference_product,
    rows_of,
    weight_of,
    wide,
)
from tests.support.ring_products import ring_rows
from wire.frame import Arithmetic, Direction
from wire.ring import coding, product
from wire.ring import kernels as wire_kernels
from wire.ring.seeded_rows import SeededRows

CPU, META = torch.device("cpu"), torch.device("meta")
FORMS = [
    pytest.param(True, id="compiled", marks=[needs_transforms, needs_products]),
    pytest.param(False, id="torch"),
]


@pytest.fixture
def provider() -> Provider:
    return Provider([weight_of(40, 24, 1), weight_of(24, 56, 2)])


@dataclass
class Schemes:
    """Makes each mask by name, and closes all of them at the end."""

    folder: Path
    provider: Provider

    def make(self, name: str) -> Any:
        if name == "off":
            return Off(Arithmetic.RING)
        ledger = Ledger.open(self.folder / "ledger", "tenant")
        if name == "pad":
            weights = self.provider.weights
            return Pad(weights.__getitem__, lambda: ledger.fresh_seed("pad"), background=False, on_close=ledger.close)
        made = Lattice(DEFAULT, ledger, HintStore(self.folder / "hints", 8), background=False)
        made.bind(self.provider.effect)
        return made


@pytest.fixture(params=["lattice", "pad", "off"])
def scheme(request: Any, tmp_path: Path, provider: Provider) -> Iterator[Any]:
    made = Schemes(tmp_path, provider).make(request.param)
    yield made
    made.close()


@pytest.fixture(params=FORMS)
def form(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test with the compiled form and with torch's form of masks, coding and products. No cached value from
    before is used, and none remains.

    The device of a value that is computed once per process must not depend on the first caller.
    """
    if not request.param:
        monkeypatch.setattr(mask_kernels, "available", lambda: False)
        monkeypatch.setattr(wire_kernels, "available", lambda: False)
    forget(negacyclic, product)
    yield
    forget(negacyclic, product)


@pytest.fixture
def on_meta() -> Iterator[Callable[[], None]]:
    """Yields a function that makes a device without data the default, as a user may make a GPU the default. After the
    test, the CPU is the default again."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_default_device_changes_nothing(
    scheme: Any, provider: Provider, direction: Direction, num_rows: int, on_meta: Callable[[], None]
) -> None:
    spec = provider.groups[0]
    rows = rows_of(num_rows, spec.widths(direction)[0])
    off = provider.answer(Off(Arithmetic.RING).mask(spec, direction, rows))
    exact, bound, _ = bounds(spec, direction, provider.weights[0], rows, DEFAULT, 128)
    on_meta()
    result = provider.answer(scheme.mask(spec, direction, rows))
    torch.set_default_device(None)
    assert (result.device, result.dtype) == (CPU, torch.float32)
    assert bool(((wide(result) - exact).abs() <= bound).all())
    if scheme.name != "lattice":
        assert torch.equal(result, off)


@pytest.mark.usefixtures("form")
def test_what_is_drawn_and_kept_stays_on_the_cpu(on_meta: Callable[[], None]) -> None:
    on_meta()
    rng = sampling.Csprng()
    drawn = [
        (rng.random_bytes(9), torch.uint8),
        (sampling.gaussian(2, 3), torch.float32),
        (sampling.gaussian(0, 3), torch.float32),
        (sampling.ternary(rng, (2, 3)), torch.int8),
        (sampling.error(rng, (2, 3), DEFAULT), torch.int8),
        (sampling.error(rng, (2, 3), replace(DEFAULT, sigma=0.0)), torch.int8),
        (sampling.error(rng, (2, 3), replace(DEFAULT, sigma=32.0)), torch.int16),
        (SeededRows(bytes(32), 0, 3).expand(5), torch.int32),
    ]
    assert [(tensor.device, tensor.dtype) for tensor, _ in drawn] == [(CPU, dtype) for _, dtype in drawn]


@pytest.mark.usefixtures("form")
def test_products_of_polynomials_are_made_on_the_cpu(on_meta: Callable[[], None]) -> None:
    """Products are right and on the CPU, whatever torch's default device is. The last product uses values cached by the
    first, after the default device has become the CPU again."""
    toy = replace(TOY, ring_degree=16)
    rng, secrets = sampling.Csprng(), torch.randint(-1, 2, (2, toy.rank, 16), dtype=torch.int8)
    matrix = rng.random_bytes(4 * toy.dimension * 5).view(torch.int32).view(toy.dimension, 5)
    on_meta()
    secrets_hat = negacyclic.secret_transform(secrets)
    made = [negacyclic.combine(negacyclic.transform(matrix, toy), secrets_hat)]
    made.append(negacyclic.product(matrix, secrets_hat, toy))
    torch.set_default_device(None)
    made.append(negacyclic.product(matrix, negacyclic.secret_transform(secrets), toy))
    assert secrets_hat.is_cpu
    assert all(torch.equal(torch.stack(list(each)), reference_product(matrix, secrets)) for each in made)


@pytest.mark.usefixtures("form")
def test_a_self_test_is_of_the_cpu(on_meta: Callable[[], None]) -> None:
    expected = product.int_mm_is_exact()
    product.int_mm_is_exact.cache_clear()
    on_meta()
    assert product.int_mm_is_exact() is expected
    product.int_mm_is_fast()  # the result may vary on a busy machine, but the call must end


@pytest.mark.skipif(not product.int_mm_is_exact(), reason="this machine's _int_mm is not exact")
@pytest.mark.parametrize("num_rows", [3, 30])
def test_a_module_that_is_imported_then_multiplies_on_the_cpu(
    num_rows: int, on_meta: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_kernels, "available", lambda: False)
    rows, weight = ring_rows(num_rows, 24), weight_of(24, 16)
    expected = product.product(rows, weight)
    on_meta()
    spec = importlib.util.spec_from_file_location("another_product", product.__file__)
    assert spec is not None
    assert spec.loader is not None
    another: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    another.int_mm_is_fast = lambda: True
    assert torch.equal(another.product(rows, weight), expected)


# ---- rows elsewhere: a model that was moved -------------------------------------------------------------------------


@pytest.fixture
def spec(provider: Provider) -> GroupSpec:
    return provider.groups[0]


def test_scales_follow_the_rows(spec: GroupSpec) -> None:
    assert spec.alpha_on(CPU) is spec.alpha
    with torch.inference_mode():
        moved = spec.alpha_on(META)
    assert (moved.device, moved.dtype, moved.shape) == (META, torch.float32, spec.alpha.shape)
    assert not moved.is_inference()
    assert spec.alpha_on(META) is moved, "moved once"
    assert spec.alpha_on(CPU) is spec.alpha
    assert replace(spec, alpha=2 * spec.alpha).alpha_on(META) is not moved
    assert "meta" not in repr(spec)


def test_a_reply_elsewhere_is_decoded_there(spec: GroupSpec) -> None:
    """The result is on the device of the reply. The reply is on the device without data; torch refuses to multiply it
    by a tensor on the CPU, as it would on a GPU."""
    for direction in (FORWARD, BACKWARD):
        reply_cols = spec.widths(direction)[1]
        reply = torch.empty(3, reply_cols, dtype=torch.int32, device=META)
        scales = torch.empty(3, 1, device=META)
        found = decode_rows(spec, direction, reply, scales, reply)
        assert (found.device, found.shape, found.dtype) == (META, (3, reply_cols), torch.float32)


def test_rows_elsewhere_meet_scales_there(spec: GroupSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' scales are on the same device as the rows. Only the device is checked, since a tensor on the device
    without data has no numbers."""
    seen: list[torch.Tensor | None] = []
    monkeypatch.setattr(coding, "encode", lambda rows, norm, error, slack, alpha=None: seen.append(alpha))
    for rows in (torch.empty(3, 24, device=META), torch.empty(3, 24)):
        encode_rows(spec, BACKWARD, rows)
    assert [alpha.device for alpha in seen if alpha is not None] == [META, CPU]


@needs_products
def test_one_row_on_the_cpu_after_the_model_came_back(spec: GroupSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales were made on another device, and the model was then moved to the CPU. A single row there still has the
    right result."""
    away = replace(spec, alpha=torch.empty_like(spec.alpha, device=META))
    back = {CPU: spec.alpha.clone()}  # a tensor without data cannot be copied back, so this is set by hand
    monkeypatch.setattr(GroupSpec, "alpha_on", lambda group, device: back[device])
    for direction in (FORWARD, BACKWARD):
        row = rows_of(1, spec.widths(direction)[0])
        encoded = RowEncoder().encode(away, direction, row)
        assert encoded is not None
        weight = weight_of(40, 24, 1)
        sent = encoded.payload.rows(encoded.call)
        reply = coding.product(sent, weight if direction is FORWARD else weight.t())
        assert torch.equal(encoded.codec.decode(reply, encoded.scale), _by_the_longer_way(spec, direction, row))


def _by_the_longer_way(spec: GroupSpec, direction: Direction, row: torch.Tensor) -> torch.Tensor:
    encoded, scales = encode_rows(spec, direction, row)
    weight = weight_of(40, 24, 1)
    return decode_rows(spec, direction, coding.product(encoded, weight if direction is FORWARD else weight.t()), scales)
