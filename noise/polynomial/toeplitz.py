"""This module multiplies a matrix by secrets on a device, by the exact ring product of wire/ring/product.py.

The product with a polynomial s mod X^N + 1 is a product with the negacyclic Toeplitz matrix of s, whose entries are −1,
0 and 1 for a ternary secret. So masks and their effects are ring products with an int8 weight. `DeviceProducts` has the
functions of noise/polynomial/negacyclic.py, and gives the same numbers to the last bit.

Guarantees: secrets are drawn on the CPU and come to the device for one product. Memory of the device that held a
secret, its matrix or a product is overwritten before it is released. From every chunk some columns, drawn at random,
are compared with the CPU's product, so that no row is sent without a mask if the device computes nothing. The module
runs on torch's `cpu` device as well, where it is tested; it has not been run on a GPU.
"""

from __future__ import annotations

import contextlib
import secrets as system_random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from noise.params import LatticeParameters
from noise.polynomial.negacyclic import Columns, TensorColumns
from noise.staging import to_host
from wire.errors import MaskError
from wire.ring import coding

CHUNK_FEATURES = 2048
"""How many columns of a matrix are multiplied at a time. At 3×512 their numbers take 12 MiB, and the products of eight
blocks 32 MiB."""
COMPARED = 4
"""How many columns of each chunk are compared with the CPU's product."""


_RowsOf = Callable[[int, int], torch.Tensor]
"""A function that maps a range of columns to these columns as rows, int32, on the device."""


@dataclass(frozen=True)
class DeviceMatrix:
    """Holds a public matrix on the device.

    Attributes:
        rows: int32, shape (features, k·N): the matrix's columns as rows.
    """

    rows: torch.Tensor

    @property
    def features(self) -> int:
        """Returns how many columns the matrix has."""
        return self.rows.shape[0]

    def first(self, features: int) -> DeviceMatrix:
        """Returns the first `features` columns, as a view."""
        return DeviceMatrix(self.rows[:features])


class DeviceProducts:
    """Multiplies matrices by the secrets of blocks, on one device."""

    def __init__(self, device: torch.device) -> None:
        """Keeps the device: a CUDA device, or torch's `cpu`."""
        self._device = device

    def transform(self, matrix: torch.Tensor | Columns, parameters: LatticeParameters) -> DeviceMatrix:
        """Moves a public matrix to the device, for `combine`; see `negacyclic.transform`."""
        columns = TensorColumns(matrix) if isinstance(matrix, torch.Tensor) else matrix
        with torch.inference_mode(False):  # The matrix is kept, and later calls may run outside inference mode.
            return DeviceMatrix(_turned(columns.load(0, columns.features)).to(self._device))

    def secret_transform(self, secrets: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the secrets, on the CPU: int8, shape (B, k, N), which the caller overwrites after its last
        product. Their matrix is made for each product."""
        return secrets.clone()

    def combine(
        self, matrix_hat: DeviceMatrix, secrets_hat: torch.Tensor, error: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiplies a matrix by the secrets of blocks and adds the error; see `negacyclic.combine`."""
        made = self._multiply(matrix_hat.features, lambda start, stop: matrix_hat.rows[start:stop], secrets_hat)
        return made if error is None else made.add_(error)

    def product(
        self, matrix: torch.Tensor | Columns, secrets_hat: torch.Tensor, parameters: LatticeParameters
    ) -> torch.Tensor:
        """Multiplies a matrix that is not kept, such as a hint; see `negacyclic.product`."""
        columns = TensorColumns(matrix) if isinstance(matrix, torch.Tensor) else matrix
        return self._multiply(
            columns.features,
            lambda start, stop: _turned(columns.load(start, stop)).to(self._device),
            secrets_hat,
        )

    def _multiply(self, features: int, rows_of: _RowsOf, secrets: torch.Tensor) -> torch.Tensor:
        """Returns the products: int32, shape (B, N, features), CPU, contiguous."""
        num_blocks, _, degree = secrets.shape
        # Rows are added to masks in place, possibly outside inference mode, where inference tensors refuse that.
        with torch.inference_mode(False), self.matrix_of(secrets) as (weight, here):
            made = torch.empty(num_blocks, degree, features, dtype=torch.int32, device="cpu")
            for start in range(0, features, CHUNK_FEATURES):
                stop = min(features, start + CHUNK_FEATURES)
                rows = rows_of(start, stop)
                product = coding.product(rows, weight)  # (c, B·N)
                # (c, B·N) -> (c, B, N) -> (B, N, c)
                turned = product.view(stop - start, num_blocks, degree).permute(1, 2, 0).contiguous()
                to_host(turned, made[:, :, start:stop])
                _overwrite(product, turned)
                _compare(rows, here, made[:, :, start:stop])
        return made

    @contextlib.contextmanager
    def matrix_of(self, secrets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gives the Toeplitz matrix of the secrets on the device and on the CPU, and overwrites both afterwards.

        Yields:
            (the matrix on the device, the matrix on the CPU), int8, shape (k·N, B·N), not contiguous.

        Raises:
            MaskError: the device has no memory left, or failed.
        """
        here = toeplitz(secrets)
        there = here
        try:
            there = here.to(self._device)
            # The weight's inner width is contiguous, so kernels make no copy of it.
            yield there.t(), here.t()
        except torch.OutOfMemoryError:  # `from None`, here and below: the cause's text may hold numbers.
            raise MaskError(
                f"{self._device} has no memory left to make masks: free some, or make masks on the CPU"
            ) from None
        except RuntimeError as exc:
            raise MaskError(f"{self._device} failed while it made masks: {type(exc).__name__}") from None
        finally:
            here.zero_()
            with contextlib.suppress(RuntimeError):  # A device that is lost overwrites nothing.
                there.zero_()


def toeplitz(secrets: torch.Tensor) -> torch.Tensor:
    """Returns the transposed Toeplitz matrix of the secrets of blocks.

    Args:
        secrets: int8, shape (B, k, N), CPU.

    Returns:
        int8, shape (B·N, k·N), contiguous. In row b·N + t, the entry of column i·N + j is coefficient t of
        X^j · s_{b,i} mod X^N + 1: s_{b,i} at t − j, or its negative at N + t − j if t < j.
    """
    num_blocks, rank, degree = secrets.shape
    # Entry N − 1 − (t − j) of `line` is the coefficient for the difference t − j, from N − 1 down to −(N − 1).
    turned = secrets.flip(-1)
    line = torch.empty(num_blocks, rank, 2 * degree - 1, dtype=torch.int8, device="cpu")
    line[..., :degree] = turned
    torch.neg(turned[..., :-1], out=line[..., degree:])
    windows = line.unfold(-1, degree, 1).flip(-2)  # (B, k, N, N): row t is the window that begins at N − 1 − t
    made = torch.empty(num_blocks, degree, rank, degree, dtype=torch.int8, device="cpu")
    made.copy_(windows.permute(0, 2, 1, 3))
    _overwrite(turned, line, windows)
    return made.view(num_blocks * degree, rank * degree)


def _turned(columns: torch.Tensor) -> torch.Tensor:
    return columns.t().contiguous()


def _overwrite(*secret: torch.Tensor) -> None:
    for each in secret:
        each.zero_()


def _compare(rows: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> None:
    """Compares some columns of a product, which nobody can foresee, with the CPU's product.

    Args:
        rows: int32, shape (c, k·N), on the device.
        weight: int8, shape (k·N, B·N), on the CPU.
        made: int32, shape (B, N, c), on the CPU.

    Raises:
        MaskError: the device computed something else. The product is overwritten.
    """
    columns = [system_random.randbelow(rows.shape[0]) for _ in range(COMPARED)]
    expected = coding.product(rows[columns].to("cpu"), weight)  # (4, B·N)
    found = made[:, :, columns].permute(2, 0, 1).reshape(expected.shape)  # (B, N, 4) -> (4, B, N) -> (4, B·N)
    is_right = torch.equal(expected, found)
    _overwrite(expected, found)
    if not is_right:
        made.zero_()
        raise MaskError("the device computed a wrong mask: make masks on the CPU")
