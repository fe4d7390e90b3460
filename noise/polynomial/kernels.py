"""This module calls the compiled form of noise/polynomial/negacyclic.py's transforms and products, for x86-64
processors with AVX2 and FMA, and, where there is AVX-512, with its wider registers.

Guarantees: the numbers equal those of torch's form, since all forms are exact. The distance of every coefficient to the
nearest integer is measured. If kernels.c was not built, or the processor lacks what the compiled code needs,
`available()` is False, and callers must not call anything else.

This module checks all arguments of the compiled code, which checks nothing itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from runtime.compiled import COUNT, INT, POINTER, Signature, load
from wire.errors import ConfigurationError
from wire.frame import ITEM_BYTES

LIBRARY = Path(__file__).with_name("_kernels.so")
LANES = 8
"""The most features (columns of a matrix) that a form of the compiled code transforms at once; see `Form.lanes`."""
WIDTH = 16
"""How many features (columns of a product) the compiled code writes at once."""
LINE_WIDTH = 64
"""How many packed features fill whole cache lines, which the compiled code writes past the caches."""
PACKED_BYTES = 3
"""The bytes of a packed number, whose low byte is zero and not stored."""

_VERSION = 6
"""The version of the functions' signatures, as in kernels.c; see `wire.ring.kernels`."""


_OF_A_FORM: dict[str, Signature] = {
    # blocks, rank, degree
    "veilbase_mask_scratch": ([COUNT] * 3, COUNT),
    # matrix, stride, rank, degree, features, twiddles, out
    "veilbase_transform": ([POINTER, *[COUNT] * 4, *[POINTER] * 2], None),
    # hat, matrix, its bytes a row, columns of a tile, all columns, secrets, blocks, rank, degree, first, last,
    # twiddles, how many, error, its bytes and strides, pointers to out, its bytes a row and a number, scratch
    "veilbase_combine": (
        [*[POINTER] * 2, *[COUNT] * 3, POINTER, *[COUNT] * 5, POINTER, COUNT, POINTER, *[COUNT] * 3, POINTER,
         *[COUNT] * 2, POINTER],
        ctypes.c_double,
    ),
    # secrets, how many, degree, twiddles, out, scratch
    "veilbase_transform_secrets": ([POINTER, *[COUNT] * 2, *[POINTER] * 3], None),
}  # fmt: skip
"""The compiled functions of which each form has its own, with the types of their arguments and results."""
_FORMS = {"avx2": 4, "avx512": 8}
"""The forms, by the ends of their functions' names, and how many features each transforms at once."""
_FUNCTIONS: dict[str, Signature] = {
    **{f"{name}_{form}": signature for name, signature in _OF_A_FORM.items() for form in _FORMS},
    "veilbase_masks_avx512": ([], INT),
    # drawn, samples, planes, rest, mean, out
    "veilbase_count_ones": ([POINTER, *[COUNT] * 4, POINTER], None),
}
"""The compiled functions, with the types of their arguments and results."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(LIBRARY, ("veilbase_masks_version", _VERSION), "veilbase_masks_usable", _FUNCTIONS)


def available() -> bool:
    """Tells whether this machine has the compiled form; it returns False if VEILBASE_KERNELS is `none`."""
    return _library() is not None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise ConfigurationError("no compiled transforms on this machine")
    return library


class Form:
    """Holds the compiled functions for registers of one width. Forms keep transforms in different layouts and return
    the same products.

    Attributes:
        name: `avx2` or `avx512`.
        lanes: how many features (columns of a matrix) are transformed at once.
    """

    def __init__(self, name: str) -> None:
        """Takes the functions from the library.

        Raises:
            ConfigurationError: there is no such form, or the processor cannot run it.
        """
        library = _loaded()
        if name not in _FORMS or (name == "avx512" and not library.veilbase_masks_avx512()):
            raise ConfigurationError(f"no compiled transforms of the form {name!r} on this machine")
        self.name, self.lanes = name, _FORMS[name]
        self.scratch, self.transform, self.combine, self.transform_secrets = (
            getattr(library, f"{function}_{name}") for function in _OF_A_FORM
        )


@functools.cache
def form() -> Form:
    """Returns the form that is used where none is named: the one for AVX-512 if the processor can run it, unless
    VEILBASE_KERNELS is `avx2`.

    Raises:
        ConfigurationError: this machine has no compiled form.
    """
    narrow = os.environ.get("VEILBASE_KERNELS", "") == "avx2" or not _loaded().veilbase_masks_avx512()
    return Form("avx2" if narrow else "avx512")


def transform(matrix: torch.Tensor, rank: int, degree: int, using: Form | None = None) -> torch.Tensor:
    """Returns the transforms of a matrix's columns.

    Args:
        matrix: int32, shape (rank·N, features), CPU, any strides.
        rank, degree: k and N.
        using: the form of the compiled code; None for `form()`.

    Returns:
        float64, shape (groups of `Form.lanes` features, rank, N/2, 2, lanes): real and imaginary parts.

    Raises:
        ConfigurationError: the matrix has another shape or type.
    """
    _check_degree(degree)
    matrix = _rows(matrix, rank * degree)
    features, half, using = matrix.shape[1], degree // 2, using or form()
    made = torch.empty(-(-features // using.lanes), rank, half, 2, using.lanes, dtype=torch.float64, device="cpu")
    table = table_of(half)
    using.transform(matrix.data_ptr(), matrix.stride(0), rank, degree, features, table.place, made.data_ptr())
    return made


def secret_transform(secrets: torch.Tensor) -> torch.Tensor:
    """Returns the transforms of the secrets of B blocks, divided by N/2, in the layout that `Combiner` takes. N/2 is a
    power of two, so the division is exact.

    Args:
        secrets: int8, shape (B, k, N), CPU, contiguous.

    Returns:
        float64, shape (B, k, N/2, 2).

    Raises:
        ConfigurationError: the secrets have another type, device or layout.
    """
    if secrets.dtype != torch.int8 or secrets.dim() != 3 or not secrets.is_contiguous() or not secrets.is_cpu:
        raise ConfigurationError(f"expected int8 secrets, got {secrets.dtype} of {tuple(secrets.shape)}")
    num_blocks, rank, degree = secrets.shape
    _check_degree(degree)
    made = torch.empty(num_blocks, rank, degree // 2, 2, dtype=torch.float64, device="cpu")
    scratch, table = _scratch(degree * LANES), table_of(degree // 2)
    form().transform_secrets(
        secrets.data_ptr(), num_blocks * rank, degree, table.place, made.data_ptr(), scratch.data_ptr()
    )
    return made


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Holds an int32 matrix whose numbers end in eight zero bits, as it lies in a file: tiles of columns, one after the
    other, the last of which may be narrower; in a tile row after row, of each number the high three bytes,
    little-endian.

    Attributes:
        data: uint8, one-dimensional, contiguous; the bytes of the file.
        first: the index in `data` of the first tile, at least 4.
        num_rows: the number of rows, k·N.
        features: the number of columns, a multiple of `LANES`.
        tile_features: how many columns a tile has, a multiple of `LANES`.
    """

    data: npt.NDArray[np.uint8]
    first: int
    num_rows: int
    features: int
    tile_features: int

    def __post_init__(self) -> None:
        """Raises ConfigurationError if the matrix does not lie in its data."""
        data, last = self.data, self.first + PACKED_BYTES * self.num_rows * self.features
        is_right = data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous
        is_right &= self.tile_features > 0 and self.tile_features % LANES == self.features % LANES == 0
        if not is_right or self.num_rows < 0 or self.features < 0 or not 4 <= self.first <= last <= data.size:
            raise ConfigurationError("a packed matrix that does not lie in its data")

    @functools.cached_property
    def place(self) -> int:
        """Returns the address of the first tile."""
        return int(self.data.ctypes.data) + self.first


class Rows:
    """Refers to the memory of the rows of some blocks, to which products are written. Threads may share it."""

    def __init__(self, out: Sequence[torch.Tensor]) -> None:
        """Checks the memory.

        Args:
            out: for each block int32, shape (N, features), or uint8, shape (N, 3 · features), for the high three bytes
                of each number, little-endian, rounded; CPU, all with the same stride from row to row, the numbers of a
                row contiguous.

        Raises:
            ConfigurationError: the tensors have other shapes, types, devices or layouts.
        """
        self._out = tuple(out)
        is_right = bool(out) and out[0].dim() == 2 and out[0].dtype in (torch.int32, torch.uint8)
        for each in out:
            is_right = is_right and each.dtype == out[0].dtype and each.shape == out[0].shape and _has_rows(each)
            is_right = is_right and each.stride() == out[0].stride()
        self.number_bytes = PACKED_BYTES if is_right and out[0].dtype == torch.uint8 else ITEM_BYTES
        if not is_right or (self.number_bytes == PACKED_BYTES and out[0].shape[1] % PACKED_BYTES):
            raise ConfigurationError("expected rows of blocks, int32 or three bytes a number, and of one shape")
        num_rows, width = out[0].shape
        self.shape = len(out), num_rows, width * out[0].itemsize // self.number_bytes
        self.row_bytes = out[0].stride(0) * out[0].itemsize
        self.pointers = torch.tensor([each.data_ptr() for each in out], dtype=torch.int64, device="cpu")


_local = threading.local()


def _scratch(num_doubles: int) -> torch.Tensor:
    """Returns memory of the calling thread, which its next call uses again, since fresh pages cost time."""
    kept: torch.Tensor | None = getattr(_local, "scratch", None)
    if kept is None or kept.numel() < num_doubles:
        kept = _local.scratch = torch.empty(num_doubles, dtype=torch.float64, device="cpu")
    return kept


class Combiner:
    """Multiplies matrices by the secrets of some blocks. Threads may share it."""

    def __init__(self, secrets_hat: torch.Tensor, using: Form | None = None) -> None:
        """Checks the secrets.

        Args:
            secrets_hat: the result of `secret_transform`.
            using: the form of the compiled code; None for `form()`.

        Raises:
            ConfigurationError: the secrets have another shape, type, device or layout.
        """
        self._form = using or form()
        num_blocks, rank, half, two = secrets_hat.shape
        is_right = secrets_hat.dtype == torch.float64 and secrets_hat.is_contiguous() and secrets_hat.is_cpu
        if not is_right or two != 2 or num_blocks == 0 or half <= 0 or half & (half - 1):
            raise ConfigurationError("expected transforms of secrets")
        self._shape, self._secrets = (num_blocks, rank, 2 * half), secrets_hat
        self._table = table_of(half)
        self._num_doubles = self._form.scratch(num_blocks, rank, 2 * half)

    def by_transforms(
        self, matrix_hat: torch.Tensor, rows: Rows, start: int, stop: int, error: torch.Tensor | None = None
    ) -> float:
        """Writes features `start` to `stop` of the products, from a matrix's transforms.

        Args:
            matrix_hat: the result of `transform` in this form, for at least these features.
            rows: where the products are written.
            start, stop: the range of features; `start` is a multiple of the form's lanes.
            error: int8, int16 or int32, shape (B, N, stop − start), CPU, the numbers of a row contiguous, which is
                added to the products; or None.

        Returns:
            A bound of the distances of the coefficients to the nearest integers, above the largest by less than one
            part in a million; infinity if a coefficient was NaN.

        Raises:
            ConfigurationError: an argument or the range does not fit.
        """
        _, rank, degree = self._shape
        lanes = self._form.lanes
        groups = matrix_hat[start // lanes : -(-stop // lanes)]
        shape = (-(-stop // lanes) - start // lanes, rank, degree // 2, 2, lanes)
        is_whole = groups.dtype == torch.float64 and groups.is_contiguous() and groups.is_cpu
        if start % lanes or groups.shape != shape or not is_whole:
            raise ConfigurationError("transforms of another shape, or not from the first feature of a group")
        return self._combine((groups.data_ptr(), None, 0, 0, 0), rows, start, stop, error)

    def by_matrix(
        self, matrix: torch.Tensor, rows: Rows, start: int, stop: int, error: torch.Tensor | None = None
    ) -> float:
        """Writes features `start` to `stop` of the products, and returns what `by_transforms` returns. `matrix` holds
        these features of the matrix itself: int32, shape (k·N, stop − start), any strides."""
        _, rank, degree = self._shape
        matrix = _rows(matrix, rank * degree)
        if matrix.shape[1] != stop - start:
            raise ConfigurationError(f"expected {stop - start} features, got {matrix.shape[1]}")
        return self._combine((None, matrix.data_ptr(), 4 * matrix.stride(0), 0, 0), rows, start, stop, error)

    def by_packed(
        self, matrix: PackedMatrix, rows: Rows, start: int, stop: int, error: torch.Tensor | None = None
    ) -> float:
        """Writes features `start` to `stop` of the products, and returns what `by_transforms` returns. Both are
        multiples of `LANES`."""
        _, rank, degree = self._shape
        if matrix.num_rows != rank * degree or start % LANES or stop % LANES or stop > matrix.features:
            raise ConfigurationError("a packed matrix of another shape, or not from the first feature of a group")
        place = matrix.place
        return self._combine((None, place, 0, matrix.tile_features, matrix.features), rows, start, stop, error)

    def _combine(
        self,
        matrix: tuple[int | None, int | None, int, int, int],
        rows: Rows,
        start: int,
        stop: int,
        error: torch.Tensor | None,
    ) -> float:
        num_blocks, rank, degree = self._shape
        features = rows.shape[2]
        if rows.shape[:2] != (num_blocks, degree):
            raise ConfigurationError(f"expected rows of {num_blocks} blocks of {degree}, got {rows.shape}")
        if not 0 <= start <= stop <= features:
            raise ConfigurationError(f"expected features up to {features}, got {start} to {stop}")
        added: tuple[int | None, int, int, int] = (None, 0, 0, 0)
        if error is not None:
            is_right = error.dtype in (torch.int8, torch.int16, torch.int32) and _has_rows(error)
            is_right = is_right and rows.number_bytes == ITEM_BYTES  # Packed products take no error.
            if not is_right or error.shape != (num_blocks, degree, stop - start):
                raise ConfigurationError("an error that does not fit the masks")
            added = error.data_ptr(), error.itemsize, error.stride(1), error.stride(0)
        scratch = _scratch(self._num_doubles)
        return float(
            self._form.combine(
                *matrix, self._secrets.data_ptr(), num_blocks, rank, degree, start, stop, self._table.place,
                self._table.size, *added, rows.pointers.data_ptr(), rows.row_bytes, rows.number_bytes,
                scratch.data_ptr(),
            )
        )  # fmt: skip


def count_ones(drawn: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8], planes: int, rest: int, mean: int) -> None:
    """Counts the ones among the random bits of each sample, and subtracts `mean`, mod 256.

    Args:
        drawn: uint8, contiguous: `planes` planes of one byte for each sample, and then, if `rest` is not 0, bytes that
            serve 8 // rest samples each.
        out: uint8, contiguous; written, one number for each sample.
        planes: how many whole bytes a sample takes.
        rest: how many more bits a sample takes, 0 to 7.
        mean: what is subtracted.

    Raises:
        ConfigurationError: the arguments do not fit each other.
    """
    shared = -(-out.size // (8 // rest)) if 0 < rest < 8 else 0
    is_right = 0 <= rest < 8 and planes >= 0 and drawn.size == planes * out.size + shared
    for each in (drawn, out):
        is_right &= each.dtype == np.uint8 and each.ndim == 1 and bool(each.flags.c_contiguous)
    if not is_right or not out.flags.writeable:
        raise ConfigurationError("random bytes and samples do not fit each other")
    _loaded().veilbase_count_ones(drawn.ctypes.data, out.size, planes, rest, mean, out.ctypes.data)


def _check_degree(degree: int) -> None:
    if degree < 2 or degree & (degree - 1):
        raise ConfigurationError(f"expected a ring degree that is a power of two, got {degree}")


def _has_rows(numbers: torch.Tensor) -> bool:
    """Tells whether the numbers of each row lie one after the other in the CPU's memory."""
    return numbers.is_cpu and (numbers.stride(-1) == 1 or numbers.shape[-1] <= 1)


def _rows(matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Checks a matrix of `num_rows` rows and returns it with the numbers of each row contiguous."""
    if matrix.dtype != torch.int32 or matrix.dim() != 2 or matrix.shape[0] != num_rows or not matrix.is_cpu:
        raise ConfigurationError(
            f"expected an int32 matrix of {num_rows} rows, got {matrix.dtype} of {tuple(matrix.shape)}"
        )
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] <= 1 else matrix.contiguous()


class _Table:
    """Holds `twiddles`, their address and their number. Whoever uses the address must hold this object: of two threads
    that ask for a table first, one gets an object that the cache does not keep."""

    def __init__(self, half: int) -> None:
        self._numbers = twiddles(half)
        self.place, self.size = int(self._numbers.ctypes.data), self._numbers.size


table_of = functools.cache(_Table)


@functools.cache
def twiddles(half: int) -> npt.NDArray[np.float64]:
    """Returns the complex roots of the imaginary unit i in the order in which kernels.c reads them, with real and
    imaginary parts alternating; two zeros, which are not read, if `half` is 1.

    The transform is a tree. A node stands for C[X]/(X^size − e^{iπθ}). Its four children stand for C[X]/(X^(size/4) −
    r), one for each fourth root r of e^{iπθ}. Angles are exact fractions, and their sines and cosines are computed in
    extended precision, so each part is within a unit in the last place.
    """
    angles: list[Fraction] = []
    nodes = [Fraction(1, 2)]
    size = half
    if half.bit_length() % 2 == 0:  # The number of doublings is odd.
        angles.append(nodes[0] / 2)
        nodes = [nodes[0] / 2, nodes[0] / 2 + 1]
        size //= 2
    while size > 1:
        angles += [node * part / 4 for node in nodes for part in (1, 2, 3)]
        nodes = [
            node / 4 + turn for node in nodes for turn in (Fraction(0), Fraction(1), Fraction(1, 2), Fraction(-1, 2))
        ]
        size //= 4
    exact = np.array([np.longdouble(a.numerator) / np.longdouble(a.denominator) for a in angles], dtype=np.longdouble)
    pi = np.longdouble("3.14159265358979323846264338327950288")
    parts = np.stack((np.cos(exact * pi), np.sin(exact * pi)), axis=1).astype(np.float64).reshape(-1)
    return np.ascontiguousarray(parts) if parts.size else np.zeros(2)
