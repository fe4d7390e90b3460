"""Tests the compiled transforms: they are available where they should be, exact for every width, and stay inside the
given memory."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

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
@pytest.mark.parametrize("dtype", [None, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("features", [1, 3, 4, 5, 15, 16, 17, 33])
@pytest.mark.parametrize(("rank", "degree"), [(1, 2), (2, 4), (3, 8), (1, 16), (2, 64), (5, 128)])
def test_every_width_and_error(rank: int, degree: int, features: int, dtype: torch.dtype | None) -> None:
    matrix, secrets = draw(rank, degree, features, 3)
    expected = reference_product(matrix, secrets)
    wide = None
    if dtype is not None:  # the matrix is a part of a larger matrix
        limit = torch.iinfo(dtype)
        wide = torch.randint(limit.min, limit.max, (3, degree, features + 5), dtype=dtype)[:, :, 2 : features + 2]
        expected = expected + wide.to(torch.int32)
    secrets_hat = kernels.secret_transform(secrets)
    for start in range(0, features, 4):
        for offset in (0, 1):  # the offset of the written part makes it once aligned and once not
            out = torch.full((3, degree, features + 8 + offset), 7, dtype=torch.int32)
            combiner = kernels.Combiner(secrets_hat, out[:, :, offset : offset + features], wide)
            assert combiner.by_matrix(matrix[:, start:], start, features) < 1e-3
            assert torch.equal(out[:, :, offset + start : offset + features], expected[:, :, start:])
            rest = torch.cat((out[:, :, : offset + start], out[:, :, offset + features :]), dim=2)
            assert bool((rest == 7).all())
            again = torch.empty_like(expected)
            assert kernels.Combiner(secrets_hat, again, wide).by_transforms(
                kernels.transform(matrix, rank, degree), start, features
            ) < 1e-3  # fmt: skip
            assert torch.equal(again[:, :, start:], expected[:, :, start:])


def packed_columns(matrix: torch.Tensor, before: int, behind: int) -> tuple[kernels.PackedColumns, torch.Tensor]:
    """Returns a matrix as packed columns, with bytes before and behind each row, and what they stand for."""
    num_rows, features = matrix.shape
    high = matrix.contiguous().view(torch.uint8).view(num_rows, features, 4)[..., 1:].reshape(num_rows, -1)
    data = torch.randint(0, 256, (num_rows, before + high.shape[1] + behind), dtype=torch.uint8)
    data[:, before : before + high.shape[1]] = high
    kept = matrix & ~0xFF
    return kernels.PackedColumns(data.view(-1).numpy(), before, data.shape[1]), kept


@needs_transforms
@pytest.mark.parametrize("features", [4, 12, 16, 20, 64])
@pytest.mark.parametrize(("rank", "degree"), [(1, 2), (2, 4), (3, 8), (1, 16), (2, 64), (5, 128), (3, 512)])
def test_packed_columns_give_the_product_of_their_numbers(rank: int, degree: int, features: int) -> None:
    matrix, secrets = draw(rank, degree, features, 3)
    columns, kept = packed_columns(matrix, 5, 3)
    out = torch.full((3, degree, features), 7, dtype=torch.int32)
    combiner = kernels.Combiner(kernels.secret_transform(secrets), out)
    for start in range(0, features, 4):
        there = replace(columns, first=columns.first + start * kernels.PACKED_BYTES)
        assert combiner.by_packed(there, start, features) < 1e-3
    assert torch.equal(out, reference_product(kept, secrets))


@needs_transforms
def test_packed_columns_lie_in_their_data() -> None:
    matrix, secrets = draw(2, 8, 8, 1)
    columns, _ = packed_columns(matrix, 4, 0)
    combiner = kernels.Combiner(kernels.secret_transform(secrets), torch.zeros(1, 8, 8, dtype=torch.int32))
    assert combiner.by_packed(columns, 0, 8) < 1e-3
    for bad in (
        replace(columns, first=3),
        replace(columns, first=5),
        replace(columns, row_bytes=columns.row_bytes + 1),
        replace(columns, row_bytes=-1),
        replace(columns, data=columns.data[:-1]),
        replace(columns, data=columns.data[::2]),
        replace(columns, data=columns.data.astype("int32")),
    ):
        with pytest.raises(ConfigurationError, match="packed columns"):
            combiner.by_packed(bad, 0, 8)
    with pytest.raises(ConfigurationError, match="packed columns"):
        combiner.by_packed(columns, 0, 6)


@needs_transforms
@pytest.mark.parametrize("rest", range(8))
@pytest.mark.parametrize("count", [1, 31, 32, 33, 500])
def test_ones_are_counted_as_numpy_counts_them(count: int, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def array(self, num_bytes: int) -> sampling.Bytes:
            return RNG_BYTES[:num_bytes].copy()

    compiled, plain = np.empty(count, dtype=np.uint8), np.empty(count, dtype=np.uint8)
    sampling.count_ones(Recorded(), compiled, 40 + rest)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "available", lambda: False)
    sampling.count_ones(Recorded(), plain, 40 + rest)  # type: ignore[arg-type]
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
            kernels.count_ones(bytes_, samples, planes, rest)
    kernels.count_ones(drawn[:53], out, 5, 2)


@needs_transforms
def test_what_is_not_a_number_has_an_infinite_distance() -> None:
    matrix, secrets = draw(3, 512, 4, 1)
    hat = kernels.secret_transform(secrets)
    hat[0, 1, 7, 0] = float("nan")
    out = torch.empty(1, 512, 4, dtype=torch.int32)
    assert kernels.Combiner(hat, out).by_matrix(matrix, 0, 4) == float("inf")
    hat[0, 1, 7, 0] = 1e-4  # the products are no integers now
    assert kernels.Combiner(hat, out).by_matrix(matrix, 0, 4) > 0.25


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
    for bad_hat, bad_out, bad_error in (
        (secrets_hat.to(torch.float32), out, None),
        (secrets_hat[:2], out, None),
        (secrets_hat[:, :, :2], out, None),
        (secrets_hat.transpose(0, 1), out, None),
        (secrets_hat, out.to(torch.int64), None),
        (secrets_hat, out.transpose(1, 2).contiguous().transpose(1, 2), None),
        (secrets_hat, [*out[:2], torch.zeros(8, 7, dtype=torch.int32)[:, :6]], None),
        (secrets_hat, [], None),
        (secrets_hat, out.to("meta"), None),
        (secrets_hat, out, torch.zeros(3, 8, 5, dtype=torch.int8)),
        (secrets_hat, out, torch.zeros(3, 8, 6, dtype=torch.int64)),
        (secrets_hat, out, torch.zeros(3, 8, 12, dtype=torch.int8)[:, :, ::2]),
        (secrets_hat, out, torch.zeros(3, 8, 6, dtype=torch.int8, device="meta")),
    ):
        with pytest.raises(ConfigurationError):
            kernels.Combiner(bad_hat, bad_out, bad_error)
    combiner = kernels.Combiner(secrets_hat, out)
    for bad in (matrix[:15], matrix.to(torch.int64), matrix[:, :5], matrix.to("meta")):
        with pytest.raises(ConfigurationError):
            combiner.by_matrix(bad, 0, 6)
    for start, stop in ((-1, 5), (1, 7), (4, 2)):
        with pytest.raises(ConfigurationError):
            combiner.by_matrix(matrix[:, : max(0, stop - start)], start, stop)
    hat = kernels.transform(matrix, 2, 8)
    for values, start, stop in (
        (hat, 2, 6),
        (hat[:1], 0, 6),
        (hat, 0, 9),
        (hat[:, :1], 0, 6),
        (hat.to(torch.float32), 0, 6),
    ):
        with pytest.raises(ConfigurationError):
            combiner.by_transforms(values, start, stop)
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
for rank, degree in [(1, 2), (2, 4), (3, 32), (2, 128)]:
    for features in (1, 3, 4, 6, 16, 18, 37):
        matrix = guarded(torch.randint(-2**31, 2**31, (rank * degree, features)).to(torch.int32))
        secrets = ternary(rng, (2, rank, degree))
        error = guarded(torch.randint(-21, 22, (2, degree, features)).to(torch.int8))
        out = guarded(torch.zeros(2, degree, features, dtype=torch.int32))
        secrets_hat = guarded(kernels.secret_transform(secrets))
        combiner = kernels.Combiner(secrets_hat, out, error)
        combiner._scratch = guarded(combiner._scratch)
        combiner.by_matrix(matrix, 0, features)
        expected = reference_product(matrix, secrets) + error
        assert torch.equal(out, expected)
        hat = guarded(kernels.transform(matrix, rank, degree))
        out.zero_()
        combiner.by_transforms(hat, 0, features)
        assert torch.equal(out, expected)
        if features % 4 == 0:
            high = matrix.contiguous().view(torch.uint8).view(rank * degree, features, 4)[..., 1:].reshape(-1)
            data = guarded(torch.cat((torch.zeros(4, dtype=torch.uint8), high)))
            combiner.by_packed(kernels.PackedColumns(data.numpy(), 4, 3 * features), 0, features)
            assert torch.equal(out, reference_product(matrix & ~0xFF, secrets) + error)
for count in (1, 31, 64, 100):
    drawn = guarded(rng.random_bytes(5 * count + -(-count // 4)))
    samples = guarded(torch.empty(count, dtype=torch.uint8))
    kernels.count_ones(drawn.numpy(), samples.numpy(), 5, 2)
print("kept inside")
"""


@needs_transforms
def test_reads_and_writes_nothing_past_an_end() -> None:
    """The test runs in a process of its own, which ends if the code reads or writes past an end."""
    done = subprocess.run([sys.executable, "-c", GUARDED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "kept inside\n"), done.stderr[-500:]
