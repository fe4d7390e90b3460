"""Tests the compiled transforms: they are available where they should be, exact for every width, and stay inside the
given memory."""

from __future__ import annotations

import ctypes
import itertools
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from noise import sampling
from noise.polynomial import kernels
from noise.sampling import Csprng, ternary
from tests.support.compiled_kernels import forget, needs_transforms
from tests.support.lattice import reference_product
from tests.support.repository import ROOT
from wire.errors import ConfigurationError

CPU_INFO = Path("/proc/cpuinfo")
FLAGS = CPU_INFO.read_text().split() if platform.machine() == "x86_64" and CPU_INFO.exists() else []
RNG = Csprng()
RNG_BYTES = RNG.array(4000)


def draw(rank: int, degree: int, features: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    matrix = RNG.random_bytes(4 * rank * degree * features).view(torch.int32).view(rank * degree, features)
    return matrix, ternary(RNG, (num_blocks, rank, degree))


@pytest.mark.skipif(not {"avx2", "fma"} <= set(FLAGS), reason="this processor has no AVX2 or FMA")
def test_setting_up_has_built_them() -> None:
    assert kernels.LIBRARY.is_file()
    assert kernels.available()


@pytest.fixture(params=["avx2", "avx512"])
def form(request: pytest.FixtureRequest) -> kernels.Form:
    """Returns each form of the compiled code that this processor can run."""
    try:
        return kernels.Form(request.param)
    except ConfigurationError:
        pytest.skip(f"this processor cannot run the compiled form {request.param}")


@pytest.fixture
def _loaded_anew() -> Iterator[None]:
    forget(kernels)
    yield
    forget(kernels)


@needs_transforms
@pytest.mark.usefixtures("_loaded_anew")
def test_they_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILBASE_KERNELS", "none")
    assert not kernels.available()
    with pytest.raises(ConfigurationError, match="no compiled transforms"):
        kernels.transform(torch.zeros(2, 1, dtype=torch.int32), 1, 2)


@needs_transforms
@pytest.mark.usefixtures("_loaded_anew")
def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "_kernels.so")
    assert not kernels.available()


@needs_transforms
@pytest.mark.usefixtures("_loaded_anew")
def test_the_widest_form_is_used_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    has_avx512 = {"avx512f", "avx512vl"} <= set(FLAGS)
    assert kernels.form().name == ("avx512" if has_avx512 else "avx2")
    forget(kernels)
    monkeypatch.setenv("VEILBASE_KERNELS", "avx2")
    assert (kernels.form().name, kernels.form().lanes) == ("avx2", 4)
    for name in ("sse2", "") if has_avx512 else ("sse2", "", "avx512"):
        with pytest.raises(ConfigurationError, match="no compiled transforms of the form"):
            kernels.Form(name)


@needs_transforms
@pytest.mark.parametrize("dtype", [None, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("features", [1, 3, 4, 5, 8, 15, 16, 17, 33])
@pytest.mark.parametrize(("rank", "degree"), [(1, 2), (2, 4), (3, 8), (1, 16), (2, 64), (5, 128)])
def test_every_width_and_error(
    rank: int, degree: int, features: int, dtype: torch.dtype | None, form: kernels.Form
) -> None:
    matrix, secrets = draw(rank, degree, features, 3)
    expected = reference_product(matrix, secrets)
    wide = None
    if dtype is not None:  # the matrix is a part of a larger matrix
        limit = torch.iinfo(dtype)
        wide = torch.randint(limit.min, limit.max, (3, degree, features + 5), dtype=dtype)[:, :, 2 : features + 2]
        expected = expected + wide.to(torch.int32)
    secrets_hat = kernels.secret_transform(secrets)
    combiner, hat = kernels.Combiner(secrets_hat, form), kernels.transform(matrix, rank, degree, form)
    for start in range(0, features, form.lanes):
        added = None if wide is None else wide[:, :, start:]
        for offset in (0, 1):  # the offset of the written part makes it once aligned and once not
            out = torch.full((3, degree, features + 8 + offset), 7, dtype=torch.int32)
            rows = kernels.Rows(list(out[:, :, offset : offset + features]))
            assert combiner.by_matrix(matrix[:, start:], rows, start, features, added) < 1e-3
            assert torch.equal(out[:, :, offset + start : offset + features], expected[:, :, start:])
            rest = torch.cat((out[:, :, : offset + start], out[:, :, offset + features :]), dim=2)
            assert bool((rest == 7).all())
            again = torch.empty_like(expected)
            assert combiner.by_transforms(hat, kernels.Rows(list(again)), start, features, added) < 1e-3
            assert torch.equal(again[:, :, start:], expected[:, :, start:])


@needs_transforms
@pytest.mark.parametrize("features", [1, 4, 17, 32, 48, 64, 80, 128, 192, 200])
@pytest.mark.parametrize(("rank", "degree"), [(1, 2), (2, 4), (1, 16), (2, 64)])
def test_products_are_packed_as_their_high_bytes(rank: int, degree: int, features: int, form: kernels.Form) -> None:
    """In whole cache lines and in parts, wherever a call begins and ends: the three high bytes, rounded."""
    matrix, secrets = draw(rank, degree, features, 3)
    rounded = (reference_product(matrix, secrets) + 128).view(torch.uint8).view(3, degree, features, 4)
    expected = rounded[..., 1:].reshape(3, degree, 3 * features)
    combiner = kernels.Combiner(kernels.secret_transform(secrets), form)
    hat = kernels.transform(matrix, rank, degree, form)
    starts = {0, form.lanes, 64, 128, features // 64 * 64, features // form.lanes * form.lanes}
    for start, stop in itertools.product(starts, {*starts, features // 2, features}):
        if not start < stop <= features:
            continue
        for offset in (0, 64, 16, 3):  # as cache lines, as vectors, and as neither
            memory = torch.full((3 * degree * (3 * features + 64) + 256,), 7, dtype=torch.uint8)
            begin = -memory.data_ptr() % 64 + offset
            row = 3 * features if offset == 0 else -(-(3 * features) // 64) * 64
            out = memory[begin : begin + 3 * degree * row].view(3, degree, row)[:, :, : 3 * features]
            assert combiner.by_transforms(hat, kernels.Rows(list(out)), start, stop) < 1e-3
            assert torch.equal(out[:, :, 3 * start : 3 * stop], expected[:, :, 3 * start : 3 * stop])
            out[:, :, 3 * start : 3 * stop] = 7
            assert bool((memory == 7).all())


@needs_transforms
@pytest.mark.parametrize("features", [32, 48, 64, 80])
def test_no_product_stays_in_the_memory_that_calls_share(
    features: int, form: kernels.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without an error give the secret away. A matrix's transforms are public and may stay."""
    rank, degree = 2, 64
    matrix, secrets = draw(rank, degree, features, 3)
    used: list[torch.Tensor] = []

    def noted(size: int) -> torch.Tensor:
        used.append(torch.full((size,), 1.0, dtype=torch.float64))
        return used[-1]

    secrets_hat = kernels.secret_transform(secrets)
    monkeypatch.setitem(vars(kernels), "_scratch", noted)
    memory = torch.zeros(3 * degree * 3 * 128 + 64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64
    out = memory[begin : begin + 3 * degree * 3 * 128].view(3, degree, 3 * 128)[:, :, : 3 * features]
    kernels.Combiner(secrets_hat, form).by_matrix(matrix, kernels.Rows(list(out)), 0, features)
    assert bool(out.any())
    (scratch,) = used
    numbers, hat = degree // 2 * 2 * form.lanes, rank * degree // 2 * 2 * form.lanes
    assert not bool(scratch[:numbers].any())
    assert not bool(scratch[numbers + hat :].any())


def packed_matrix(matrix: torch.Tensor, tile_features: int, before: int) -> tuple[kernels.PackedMatrix, torch.Tensor]:
    """Returns a matrix in packed tiles, with some bytes before and behind it, and what it stands for."""
    num_rows, features = matrix.shape
    high = matrix.contiguous().view(torch.uint8).view(num_rows, features, 4)[..., 1:]
    tiles = [each.reshape(-1) for each in high.split(tile_features, dim=1)]
    data = torch.cat((torch.randint(0, 256, (before,), dtype=torch.uint8), *tiles, torch.ones(9, dtype=torch.uint8)))
    return kernels.PackedMatrix(data.numpy(), before, num_rows, features, tile_features), matrix & ~0xFF


@needs_transforms
@pytest.mark.parametrize(("features", "tile"), [(8, 8), (24, 16), (16, 64), (40, 24), (64, 32), (88, 64)])
@pytest.mark.parametrize(("rank", "degree"), [(1, 2), (2, 4), (3, 8), (1, 16), (2, 64), (5, 128), (3, 512)])
def test_a_packed_matrix_gives_the_product_of_its_numbers(
    rank: int, degree: int, features: int, tile: int, form: kernels.Form
) -> None:
    matrix, secrets = draw(rank, degree, features, 3)
    packed, kept = packed_matrix(matrix, tile, 5)
    combiner, expected = kernels.Combiner(kernels.secret_transform(secrets), form), reference_product(kept, secrets)
    for start in range(0, features, kernels.LANES):
        for stop in {start + kernels.LANES, features}:
            out = torch.full((3, degree, features), 7, dtype=torch.int32)
            assert combiner.by_packed(packed, kernels.Rows(list(out)), start, stop) < 1e-3
            assert torch.equal(out[:, :, start:stop], expected[:, :, start:stop])
            assert bool((out[:, :, :start] == 7).all() and (out[:, :, stop:] == 7).all())


@needs_transforms
def test_a_packed_matrix_lies_in_its_data() -> None:
    matrix, secrets = draw(2, 8, 8, 1)
    packed, _ = packed_matrix(matrix, 8, 4)
    packed = replace(packed, data=packed.data[: 4 + 3 * 16 * 8])
    combiner, rows = (
        kernels.Combiner(kernels.secret_transform(secrets)),
        kernels.Rows([torch.zeros(8, 8).to(torch.int32)]),
    )
    assert combiner.by_packed(packed, rows, 0, 8) < 1e-3
    for changed in (
        {"first": 3},
        {"first": 5},
        {"num_rows": 17},
        {"num_rows": -1},
        {"features": 16},
        {"features": 4},
        {"features": -8},
        {"tile_features": 4},
        {"tile_features": 0},
        {"data": packed.data[:-1]},
        {"data": packed.data[::2]},
        {"data": packed.data.astype("int32")},
    ):
        with pytest.raises(ConfigurationError, match="does not lie in its data"):
            replace(packed, **changed)  # type: ignore[arg-type]
    for other, start, stop in ((packed, 0, 4), (packed, 4, 8), (packed, 0, 16), (replace(packed, num_rows=8), 0, 8)):
        with pytest.raises(ConfigurationError, match="packed matrix of another shape"):
            combiner.by_packed(other, rows, start, stop)


@needs_transforms
@pytest.mark.parametrize("rest", range(8))
@pytest.mark.parametrize("count", [1, 31, 32, 33, 500])
def test_ones_are_counted_as_numpy_counts_them(count: int, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def array(self, num_bytes: int) -> sampling.Bytes:
            return RNG_BYTES[:num_bytes].copy()

    compiled, plain = np.empty(count, dtype=np.uint8), np.empty(count, dtype=np.uint8)
    sampling.count_ones(Recorded(), compiled, 40 + rest, 21)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "available", lambda: False)
    sampling.count_ones(Recorded(), plain, 40 + rest, 21)  # type: ignore[arg-type]
    assert np.array_equal(compiled, plain)


@needs_transforms
def test_bytes_that_do_not_fit_the_samples_are_not_counted() -> None:
    drawn, out = RNG_BYTES[:63].copy(), np.empty(10, dtype=np.uint8)  # five planes, and two bits from 13 // 4 bytes
    for bytes_, samples, planes, rest in (
        (drawn[:52], out, 5, 2),
        (drawn[:54], out, 5, 2),
        (drawn[:53], out, 5, 8),
        (drawn[:53], out, 5, -1),
        (drawn[:53].astype(np.int8), out, 5, 2),
        (drawn[:53], out.astype(np.int32), 5, 2),
        (np.repeat(drawn, 2)[:106:2], out, 5, 2),
        (drawn[:53], np.frombuffer(bytes(10), dtype=np.uint8), 5, 2),
    ):
        with pytest.raises(ConfigurationError, match="random bytes"):
            kernels.count_ones(bytes_, samples, planes, rest, 0)
    kernels.count_ones(drawn[:53], out, 5, 2, 0)


@needs_transforms
def test_what_is_not_a_number_has_an_infinite_distance(form: kernels.Form) -> None:
    matrix, secrets = draw(3, 512, 4, 1)
    hat = kernels.secret_transform(secrets)
    hat[0, 1, 7, 0] = float("nan")
    rows = kernels.Rows([torch.empty(512, 4, dtype=torch.int32)])
    assert kernels.Combiner(hat, form).by_matrix(matrix, rows, 0, 4) == float("inf")
    hat[0, 1, 7, 0] = 1e-4  # the products are no integers now
    assert kernels.Combiner(hat, form).by_matrix(matrix, rows, 0, 4) > 0.25


@needs_transforms
@pytest.mark.usefixtures("_loaded_anew")
def test_a_table_is_kept_by_whoever_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that need a table first both make one, and the cache keeps one of them."""
    meeting = threading.Barrier(2, timeout=20)
    made = kernels.twiddles.__wrapped__

    def slow(half: int) -> Any:
        meeting.wait()
        return made(half)

    monkeypatch.setattr(kernels, "twiddles", slow)
    with ThreadPoolExecutor(2) as pool:
        tables = [each.result() for each in [pool.submit(kernels.table_of, 8) for _ in range(2)]]
    assert tables[0] is not tables[1]
    for each in tables:
        kept = np.ctypeslib.as_array((ctypes.c_double * each.size).from_address(each.place))
        assert np.array_equal(kept, made(8))


@needs_transforms
@pytest.mark.parametrize("half", [1, 2, 4, 8, 64, 256, 1024])
def test_roots_are_within_a_unit_in_the_last_place(half: int) -> None:
    table = kernels.twiddles(half).reshape(-1, 2)
    angles: list[Fraction] = []
    nodes, size = [Fraction(1, 2)], half
    if half.bit_length() % 2 == 0:
        angles, nodes, size = [Fraction(1, 4)], [Fraction(1, 4), Fraction(5, 4)], half // 2
    while size > 1:
        angles += [node * part / 4 for node in nodes for part in (1, 2, 3)]
        nodes = [(node + 2 * turn) / 4 for node in nodes for turn in (0, 2, 1, -1)]
        size //= 4
    assert len(angles) == (0 if half == 1 else len(table))
    with mpmath.workdps(40):
        for angle, (re, im) in zip(angles, table.tolist(), strict=bool(angles)):
            exact = mpmath.expjpi(mpmath.mpf(angle.numerator) / angle.denominator)
            assert abs(mpmath.mpf(re) - exact.real) <= mpmath.mpf(2) ** -53
            assert abs(mpmath.mpf(im) - exact.imag) <= mpmath.mpf(2) ** -53


@needs_transforms
def test_refuses_what_the_compiled_code_would_not_notice() -> None:
    matrix, secrets = draw(2, 8, 6, 3)
    secrets_hat, out = kernels.secret_transform(secrets), torch.zeros(3, 8, 6, dtype=torch.int32)
    for degree in (0, 1, 3, 24, 1023):
        with pytest.raises(ConfigurationError, match="power of two"):
            kernels.secret_transform(torch.ones(1, 3, degree, dtype=torch.int8))
        with pytest.raises(ConfigurationError, match="power of two"):
            kernels.transform(torch.ones(3 * degree, 4, dtype=torch.int32), 3, degree)
    for bad_secrets in (secrets.to(torch.int32), secrets[0], secrets.transpose(0, 1), secrets.to("meta")):
        with pytest.raises(ConfigurationError, match="int8 secrets"):
            kernels.secret_transform(bad_secrets)
    for bad_hat in (
        secrets_hat.to(torch.float32),
        secrets_hat[:0],
        secrets_hat[:, :, :2],
        secrets_hat[..., :1].contiguous(),
        secrets_hat.transpose(0, 1),
        secrets_hat.to("meta"),
    ):
        with pytest.raises(ConfigurationError, match="transforms of secrets"):
            kernels.Combiner(bad_hat)
    for bad_out in (
        out.to(torch.int64),
        out.transpose(1, 2).contiguous().transpose(1, 2),
        [*out[:2], torch.zeros(8, 7, dtype=torch.int32)[:, :6]],
        [*out[:2], torch.zeros(8, 7, dtype=torch.int32)],
        [],
        out.to("meta"),
        torch.zeros(3, 8, 16, dtype=torch.uint8),
        [out[0], *torch.zeros(2, 8, 18, dtype=torch.uint8)],
    ):
        with pytest.raises(ConfigurationError, match="rows of blocks"):
            kernels.Rows(list(bad_out))
    combiner, rows = kernels.Combiner(secrets_hat), kernels.Rows(list(out))
    for bad_rows in (list(out[:2]), [torch.zeros(4, 6, dtype=torch.int32)] * 3):
        with pytest.raises(ConfigurationError, match="expected rows"):
            combiner.by_matrix(matrix, kernels.Rows(bad_rows), 0, 6)
    for bad_error in (
        torch.zeros(3, 8, 5, dtype=torch.int8),
        torch.zeros(2, 8, 6, dtype=torch.int8),
        torch.zeros(3, 8, 6, dtype=torch.int64),
        torch.zeros(3, 8, 12, dtype=torch.int8)[:, :, ::2],
        torch.zeros(3, 8, 6, dtype=torch.int8, device="meta"),
    ):
        with pytest.raises(ConfigurationError, match="does not fit the masks"):
            combiner.by_matrix(matrix, rows, 0, 6, bad_error)
    packed = kernels.Rows(list(torch.zeros(3, 8, 18, dtype=torch.uint8)))
    with pytest.raises(ConfigurationError, match="does not fit the masks"):
        combiner.by_matrix(matrix, packed, 0, 6, torch.zeros(3, 8, 6, dtype=torch.int8))
    for bad in (matrix[:15], matrix.to(torch.int64), matrix[:, :5], matrix.to("meta")):
        with pytest.raises(ConfigurationError):
            combiner.by_matrix(bad, rows, 0, 6)
    for start, stop in ((-1, 5), (1, 7), (4, 2)):
        with pytest.raises(ConfigurationError):
            combiner.by_matrix(matrix[:, : max(0, stop - start)], rows, start, stop)
    hat = kernels.transform(matrix, 2, 8)
    for values, start, stop in (
        (hat, 2, 6),
        (hat[:0], 0, 6),
        (hat, 0, 9),
        (hat[:, :1], 0, 6),
        (hat.to(torch.float32), 0, 6),
    ):
        with pytest.raises(ConfigurationError):
            combiner.by_transforms(values, rows, start, stop)
    for bad in (matrix[:7], matrix.to(torch.int64), matrix[0]):
        with pytest.raises(ConfigurationError):
            kernels.transform(bad, 2, 8)


GUARDED = """
import torch
from noise.polynomial import kernels
from noise.sampling import Csprng, ternary
from tests.support.compiled_kernels import guarded
from tests.support.lattice import reference_product
rng = Csprng()
form = kernels.Form({form!r})
for rank, degree in [(1, 2), (2, 4), (3, 32), (2, 128)]:
    for features in (1, 3, 4, 6, 16, 18, 37, 64, 128, 144):
        matrix = guarded(torch.randint(-2**31, 2**31, (rank * degree, features)).to(torch.int32))
        secrets = guarded(ternary(rng, (2, rank, degree)))
        error = guarded(torch.randint(-21, 22, (2, degree, features)).to(torch.int8))
        out = guarded(torch.zeros(2, degree, features, dtype=torch.int32))
        vars(kernels)["_scratch"] = lambda size: guarded(torch.empty(size, dtype=torch.float64))
        secrets_hat = guarded(kernels.secret_transform(secrets))
        combiner, rows = kernels.Combiner(secrets_hat, form), kernels.Rows(list(out))
        combiner.by_matrix(matrix, rows, 0, features, error)
        expected = reference_product(matrix, secrets) + error
        assert torch.equal(out, expected)
        hat = guarded(kernels.transform(matrix, rank, degree, form))
        out.zero_()
        combiner.by_transforms(hat, rows, 0, features, error)
        assert torch.equal(out, expected)
        high_bytes = guarded(torch.zeros(2, degree, 3 * features, dtype=torch.uint8))
        combiner.by_transforms(hat, kernels.Rows(list(high_bytes)), 0, features)
        rounded = (reference_product(matrix, secrets) + 128).view(torch.uint8).view(2, degree, features, 4)
        assert torch.equal(high_bytes, rounded[..., 1:].reshape(2, degree, -1))
        if features % 8 == 0:
            high = matrix.contiguous().view(torch.uint8).view(rank * degree, features, 4)[..., 1:]
            tiles = [each.reshape(-1) for each in high.split(24, dim=1)]
            data = guarded(torch.cat((torch.zeros(4, dtype=torch.uint8), *tiles)))
            packed = kernels.PackedMatrix(data.numpy(), 4, rank * degree, features, 24)
            combiner.by_packed(packed, rows, 0, features, error)
            assert torch.equal(out, reference_product(matrix & ~0xFF, secrets) + error)
for count in (1, 31, 64, 100):
    drawn = guarded(rng.random_bytes(5 * count + -(-count // 4)))
    samples = guarded(torch.empty(count, dtype=torch.uint8))
    kernels.count_ones(drawn.numpy(), samples.numpy(), 5, 2, 21)
print("kept inside")
"""


@needs_transforms
def test_reads_and_writes_nothing_past_an_end(form: kernels.Form) -> None:
    """The test runs in a process of its own, which ends if the code reads or writes past an end."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED.format(form=form.name)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "kept inside\n"), done.stderr[-500:]
