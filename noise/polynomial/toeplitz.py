"""This module multiplies a matrix by secrets on a device, by the exact ring product of wire/ring/product.py.

The product with a polynomial s mod X^N + 1 is a product with the negacyclic Toeplitz matrix of s, whose entries are −1,
0 and 1 for a ternary secret. So masks and their effects are ring products with an int8 weight. `DeviceProducts` has the
functions of noise/polynomial/negacyclic.py, and gives the same numbers to the last bit; its masks and effects stay on
the device, where rows are masked and replies unmasked.

Guarantees: secrets are drawn on the CPU and come to the device for one product. Memory of the device that held a
secret, its matrix or a product that was copied is overwritten before it is released. Of every product and of every
drawn error, some numbers at random places are compared with the CPU's, so that no row is sent without a mask if the
device computes nothing. Matrices are public; those of hints are kept on the device, within a bound (`kept_bytes`).
"""

from __future__ import annotations

import contextlib
import secrets as system_random
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noise import sampling
from noise.params import NOMINAL_SIGMA, LatticeParameters
from noise.polynomial import device_error
from noise.polynomial.negacyclic import Columns, TensorColumns
from noise.staging import on_device
from wire.errors import MaskError
from wire.frame import ITEM_BYTES
from wire.ring import coding

CHUNK_FEATURES = 8192
"""How many columns of a matrix that is not kept are multiplied at a time. At 3×512 their numbers take 48 MiB."""
COMPARED = 4
"""How many columns of a product, and how many rows of each block in them, are compared with the CPU's product."""
KEPT_SHARE = 0.25
"""The share of a CUDA device's free memory, when the first hint comes, that hints may take there."""
_MOVED_AT_ONCE = 2048
"""How many columns are decoded and copied to the device at a time."""


@dataclass(frozen=True)
class DeviceMatrix:
    """Holds a public matrix on the device.

    Attributes:
        rows: int32, shape (features, k·N): the matrix's columns as rows.
    """

    rows: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the device's memory that the matrix takes."""
        return self.rows.numel() * ITEM_BYTES

    @property
    def features(self) -> int:
        """Returns how many columns the matrix has."""
        return self.rows.shape[0]

    def first(self, features: int) -> DeviceMatrix:
        """Returns the first `features` columns, as a view."""
        return DeviceMatrix(self.rows[:features])


class DeviceProducts:
    """Multiplies matrices by the secrets of blocks, on one device. It is safe under threads."""

    def __init__(self, device: torch.device, kept_bytes: int | None = None) -> None:
        """Keeps the device: a CUDA device, or torch's `cpu`.

        Args:
            device: where products are made, and stay.
            kept_bytes: the most bytes of hints that are kept there, so that they cross to the device once; None for
                `KEPT_SHARE` of what is free, and for none on torch's `cpu`.
        """
        self._device, self._kept_bytes = device, kept_bytes
        self._kept: weakref.WeakKeyDictionary[Any, DeviceMatrix] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def transform(self, matrix: torch.Tensor | Columns, parameters: LatticeParameters) -> DeviceMatrix:
        """Moves a public matrix to the device, for `combine`; see `negacyclic.transform`."""
        columns = TensorColumns(matrix) if isinstance(matrix, torch.Tensor) else matrix
        return self._moved(columns, 0, columns.features)

    def secret_transform(self, secrets: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the secrets, on the CPU: int8, shape (B, k, N), which the caller overwrites after its last
        product. Their matrix is made for each product."""
        return secrets.clone()

    def combine(
        self, matrix_hat: DeviceMatrix, secrets_hat: torch.Tensor, error: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiplies a matrix by the secrets of blocks and adds the error; see `negacyclic.combine`.

        Returns:
            int32, shape (B, N, features), on the device, contiguous.
        """
        with torch.inference_mode(False), self.matrix_of(secrets_hat) as weight:
            made = _products(matrix_hat.rows, weight, secrets_hat.shape[0])
            compare(matrix_hat.rows, secrets_hat, made)
            if error is not None:
                with on_device(error, self._device) as drawn:
                    made += drawn
            return made

    def draws_errors(self, parameters: LatticeParameters) -> bool:
        """Tells whether the device draws the errors of masks itself (noise/polynomial/device_error.py)."""
        return parameters.sigma == NOMINAL_SIGMA and device_error.is_exact(self._device)

    def add_error(self, masks: torch.Tensor, rng: sampling.Csprng, parameters: LatticeParameters) -> None:
        """Adds a fresh error to masks on the device, contiguous, which draws it where it can.

        Raises:
            MaskError: the device drew something else, has no memory left, or failed.
        """
        with self._faults():
            if self.draws_errors(parameters):
                device_error.add_centred_binomial(masks)
                return
            with on_device(sampling.error(rng, masks.shape, parameters), self._device) as drawn:
                masks += drawn

    def finish(self) -> None:
        """Waits until what was made is complete, since another thread may read it on another stream."""
        if self._device.type == "cuda":
            with self._faults():
                torch.cuda.current_stream(self._device).synchronize()

    def product(
        self, matrix: torch.Tensor | Columns, secrets_hat: torch.Tensor, parameters: LatticeParameters
    ) -> torch.Tensor:
        """Multiplies a hint by the secrets of blocks; see `negacyclic.product`. Returns a tensor as `combine` does."""
        columns = TensorColumns(matrix) if isinstance(matrix, torch.Tensor) else matrix
        num_blocks = secrets_hat.shape[0]
        with torch.inference_mode(False), self.matrix_of(secrets_hat) as weight:
            kept = self._kept_matrix(columns)
            if kept is not None:
                made = _products(kept.rows, weight, num_blocks)
                compare(kept.rows, secrets_hat, made)
                return made
            shape = num_blocks, secrets_hat.shape[2], columns.features
            made = torch.empty(shape, dtype=torch.int32, device=self._device)
            for start in range(0, columns.features, CHUNK_FEATURES):
                stop = min(columns.features, start + CHUNK_FEATURES)
                rows = self._moved(columns, start, stop).rows
                part = _products(rows, weight, num_blocks)
                compare(rows, secrets_hat, part)
                made[:, :, start:stop] = part
                _overwrite(part)
            return made

    def _kept_matrix(self, columns: Columns) -> DeviceMatrix | None:
        """Returns a hint that is on the device, or moves it there if there is room; None if there is not."""
        if isinstance(columns, TensorColumns):
            return None
        with self._lock:
            kept = self._kept.get(columns)
            if kept is not None:
                return kept
            if self._kept_bytes is None:
                is_cuda = self._device.type == "cuda"
                self._kept_bytes = int(KEPT_SHARE * torch.cuda.mem_get_info(self._device)[0]) if is_cuda else 0
            num_bytes = columns.features * columns.load(0, 1).shape[0] * ITEM_BYTES
            if sum(one.num_bytes for one in self._kept.values()) + num_bytes > self._kept_bytes:
                return None
            kept = self._kept[columns] = self._moved(columns, 0, columns.features)
            return kept

    def _moved(self, columns: Columns, start: int, stop: int) -> DeviceMatrix:
        with torch.inference_mode(False):  # The matrix may be kept, and later calls may run outside inference mode.
            dimension = columns.load(start, start + 1).shape[0]
            rows = torch.empty(stop - start, dimension, dtype=torch.int32, device=self._device)
            for first in range(start, stop, _MOVED_AT_ONCE):
                last = min(stop, first + _MOVED_AT_ONCE)
                # (k·N, columns) -> (columns, k·N); the turning is the device's work
                rows[first - start : last - start] = columns.load(first, last).to(self._device).t()
            return DeviceMatrix(rows)

    @contextlib.contextmanager
    def matrix_of(self, secrets: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gives the Toeplitz matrix of the secrets on the device, and overwrites it afterwards.

        Yields:
            int8, shape (k·N, B·N), not contiguous.

        Raises:
            MaskError: the device has no memory left, or failed.
        """
        there: torch.Tensor | None = None
        with self._faults():
            try:
                with on_device(secrets, self._device) as moved:
                    there = toeplitz(moved)
                # The weight's inner width is contiguous, so kernels make no copy of it.
                yield there.t()
            finally:
                if there is not None:
                    with contextlib.suppress(RuntimeError):  # A device that is lost overwrites nothing.
                        there.zero_()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turns errors of the device into `MaskError`, without their texts, which may hold numbers."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise MaskError(
                f"{self._device} has no memory left to make masks: free some, or make masks on the CPU"
            ) from None
        except RuntimeError as exc:
            raise MaskError(f"{self._device} failed while it made masks: {type(exc).__name__}") from None


def _products(rows: torch.Tensor, weight: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns int32, shape (B, N, features), contiguous, from a matrix's columns as rows and the Toeplitz matrix."""
    product = coding.product(rows, weight)  # (features, B·N)
    made = product.t().clone(memory_format=torch.contiguous_format)  # Never a view of what is overwritten next.
    _overwrite(product)
    return made.view(num_blocks, -1, rows.shape[0])


def toeplitz(secrets: torch.Tensor) -> torch.Tensor:
    """Returns the transposed Toeplitz matrix of the secrets of blocks.

    Args:
        secrets: int8, shape (B, k, N), any device.

    Returns:
        int8, shape (B·N, k·N), contiguous, on that device. In row b·N + t, the entry of column i·N + j is coefficient t
        of X^j · s_{b,i} mod X^N + 1: s_{b,i} at t − j, or its negative at N + t − j if t < j.
    """
    num_blocks, rank, degree = secrets.shape
    # Entry N − 1 − (t − j) of `line` is the coefficient for the difference t − j, from N − 1 down to −(N − 1).
    turned = secrets.flip(-1)
    line = torch.empty(num_blocks, rank, 2 * degree - 1, dtype=torch.int8, device=secrets.device)
    line[..., :degree] = turned
    torch.neg(turned[..., :-1], out=line[..., degree:])
    windows = line.unfold(-1, degree, 1).flip(-2)  # (B, k, N, N): row t is the window that begins at N − 1 − t
    made = torch.empty(num_blocks, degree, rank, degree, dtype=torch.int8, device=secrets.device)
    made.copy_(windows.permute(0, 2, 1, 3))
    _overwrite(turned, line, windows)
    return made.view(num_blocks * degree, rank * degree)


def _overwrite(*secret: torch.Tensor) -> None:
    for each in secret:
        each.zero_()


def compare(rows: torch.Tensor, secrets: torch.Tensor, made: torch.Tensor) -> None:
    """Compares numbers of a product, at places that nobody can foresee, with the CPU's.

    Args:
        rows: int32, shape (features, k·N), on the device.
        secrets: int8, shape (B, k, N), CPU.
        made: int32, shape (B, N, features), on the device.

    Raises:
        MaskError: the device computed something else. The product is overwritten.
    """
    columns = [system_random.randbelow(rows.shape[0]) for _ in range(COMPARED)]
    places = [system_random.randbelow(secrets.shape[2]) for _ in range(COMPARED)]
    matrix = rows[columns].to("cpu").to(torch.float64)  # (4, k·N)
    # One step picks rows and columns, so that no other number of the mask is copied: (B, 4, 4)
    there = made[:, torch.tensor(places, device=made.device)[:, None], torch.tensor(columns, device=made.device)]
    found = there.to("cpu")
    turned = toeplitz_rows(secrets, places).to(torch.float64)  # (B, 4, k·N)
    # The sums are below 2^43 in size, so float64 is exact; the conversion from int64 keeps the low 32 bits.
    expected = (turned @ matrix.t()).to(torch.int64).to(torch.int32)
    is_right = torch.equal(expected, found)
    _overwrite(expected, found, there, turned)
    if not is_right:
        _overwrite(made)
        raise MaskError("the device computed a wrong mask: make masks on the CPU")


def toeplitz_rows(secrets: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Returns some rows of `toeplitz` of each block: int8, shape (B, number of places, k·N)."""
    num_blocks, rank, degree = secrets.shape
    difference = torch.tensor(places, device="cpu")[:, None] - torch.arange(degree, device="cpu")
    sign = ((difference >= 0).to(torch.int8) * 2).sub_(1)
    # (B, k, places, N) -> (B, places, k, N) -> (B, places, k·N)
    rows = (secrets[:, :, difference % degree] * sign).permute(0, 2, 1, 3)
    return rows.reshape(num_blocks, len(places), rank * degree)
