"""This module computes products in Z_q[X]/(X^N + 1), q = 2^32, of 32-bit polynomials with ternary secrets. It is exact,
although it uses floating-point FFTs.

A negacyclic product of length N is a cyclic product of N/2 complex numbers: fold u_j = a_j + i·a_{j+N/2}, twist by
exp(iπj/N), transform, multiply, transform back, untwist, unfold (Bernstein, "Multidigit multiplication for
mathematicians", 2001, section 4, the right-angle convolution of Crandall and Fagin, 1994).

Why the result is exact: a true coefficient is an integer below k·N·2^31 ≤ 2^44.6 in size (k ≤ 6, N ≤ 2048). Adding
1.5·2^52 rounds the float64 to an integer, and its low 32 bits then hold that integer mod 2^32, in two's complement. The
integer is right if the transforms err by less than 1/2. With u = 2^-53, a transform of length n errs by at most
6.7·u·log2(n) of its 2-norm (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 24.2). A
coefficient of the product of a polynomial a and a secret s therefore errs by at most about 6.7·u·log2(N/2)·‖a‖₂·(2·‖s‖₂
+ max_f ‖ŝ_f‖₂), with the secret's transform ŝ_f at frequency f. At 3×512 (k×N) that is 0.08, with the largest ‖a‖₂
= √1536·2^31, ‖s‖₂ ≤ √1536 and the ‖ŝ_f‖₂ ≈ 80 of a uniform secret. On random input 8e-5 was measured at 3×512 and 2e-4
at 6×2048. With every coefficient −2^31 and every secret number 1 it was 2e-3 and 1.2e-2, a few units in the last place
of a float64 of that size.

The vendor's FFT is not proven. Every call of torch's form therefore measures the distance to the nearest integer on
some features (see `_CHECK_EVERY`), on all of them if k·N > 2048, and raises MaskError past 1/4. The compiled form
measures all features.

There are two forms: the compiled form (noise/polynomial/kernels.py, if it was built and the processor has AVX2 and FMA)
and torch's form. The two keep transforms in different orders. They give the same numbers, since both are exact. The
compiled form has its own FFT, whose factors are exact to a unit in the last place.

Threads: a call shares its chunks among the threads of noise/blocks/pool.py, so several threads call `Columns.load`.
Calls share no state and may come from any thread. Under torch.set_num_threads(1) the calling thread does everything.

Integer arithmetic would be slower: one int8 matrix product of the four bytes of H with a ternary Toeplitz matrix takes
8·k·N operations for each token and feature, 12,288 at 3×512. That is 14 ns at the 850 GOP/s measured for `_int_mm` on a
quiet 2-core machine.

The code is not constant time in the sense of a cryptographic library: no branch or index depends on a secret here, but
torch and its FFT make no such promise. The tenant's own machine is trusted (docs/threat-model.md, "Who is trusted").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import get_num_threads

from noise.blocks.arena import arena, packed
from noise.blocks.pool import alone, share
from noise.params import LatticeParameters
from noise.polynomial import kernels
from noise.polynomial.kernels import PackedMatrix
from wire.errors import ConfigurationError, MaskError

_ROUNDER = 1.5 * 2.0**52
"""A float64 r for which x + r has unit spacing if |x| < 2^51, so that the low 32 bits of x + r are round(x) mod
2^32."""

_LOST_PRECISION = "a mask's transform lost precision: the FFT library of this machine cannot be used"
_LARGEST_ERROR = 0.25
"""The largest accepted distance to an integer: half of 1/2, at which rounding goes wrong."""

_CHECK_EVERY = 4
_SAMPLED_DIMENSION = 2048
"""If k·N is at most this, a thread measures one feature in four, in one chunk in four, beginning with its first chunk.
All features share transforms, so a faulty library shows in each. For larger k·N every feature is measured."""

_CHUNK_BYTES = 3 << 20
"""Bytes of the working set of one chunk of features. Values of 2 to 4 MiB were equally fast on a 2-core machine with 1
MiB of L2 cache per core."""

LEAST_FEATURES, MOST_FEATURES = 64, 256
"""The fewest and the most features that a thread takes at a time in the compiled form. A call from Python takes some
20 µs, and 64 features of one block 120 µs."""

_PADDING = 4
"""The number of complex numbers by which each row of a buffer is longer if the buffer is read by columns. Without this
padding the rows are a multiple of 4 KiB apart and share cache sets, so that the transposing copy takes four times as
long."""


class Columns(Protocol):
    """Gives access to an int32 matrix of k·N rows, a few columns (features) at a time. A memory-mapped or packed hint
    is such a matrix."""

    @property
    def features(self) -> int:
        """Returns how many columns the matrix has."""
        ...

    def load(self, start: int, stop: int) -> torch.Tensor:
        """Returns some columns: int32, shape (k·N, stop − start), any strides. Several threads may call this at
        once."""
        ...

    def packed(self, start: int, stop: int) -> PackedMatrix | None:
        """Returns the whole matrix as it is stored, if the compiled form can read it so, after some columns have been
        checked; if not, None."""
        ...


class TensorColumns:
    """Gives a tensor the interface of `Columns`."""

    def __init__(self, matrix: torch.Tensor) -> None:
        """Keeps `matrix`: int32, shape (k·N, features), CPU, any strides."""
        self._matrix = matrix

    @property
    def features(self) -> int:
        """Returns how many columns the matrix has."""
        return self._matrix.shape[1]

    def load(self, start: int, stop: int) -> torch.Tensor:
        """Returns a view of some columns."""
        return self._matrix[:, start:stop]

    def packed(self, start: int, stop: int) -> PackedMatrix | None:
        """Returns None, since a tensor's numbers are not packed."""
        return None


@dataclass(frozen=True)
class Transforms:
    """Holds the transforms of a public matrix.

    Attributes:
        values: complex128, shape (k, features, N/2); in the compiled form, the result of `kernels.transform`.
        features: the number of columns of the matrix.
    """

    values: torch.Tensor
    features: int

    def first(self, features: int) -> Transforms:
        """Returns the transforms of the first `features` columns, as a view."""
        if self.values.is_complex():
            return Transforms(self.values[:, :features], features)
        return Transforms(self.values[: -(-features // self.values.shape[-1])], features)


def transform(matrix: torch.Tensor | Columns, parameters: LatticeParameters) -> Transforms:
    """Returns the transforms of a public matrix, which `combine` can use again and again.

    Args:
        matrix: int32, shape (k·N, features), CPU; row i·N + j holds coefficient j of polynomial i.
        parameters: gives k and N.

    Returns:
        The transforms, of 8·k·N bytes for each feature, which is twice the size of the matrix.

    Raises:
        ConfigurationError: the matrix has another shape or type.
    """
    columns = _as_columns(matrix)
    if kernels.available():
        lanes, half = kernels.form().lanes, parameters.ring_degree // 2
        groups = -(-columns.features // lanes)
        values = torch.empty(groups, parameters.rank, half, 2, lanes, dtype=torch.float64, device="cpu")

        def fill(chunks: Iterator[tuple[int, int]]) -> None:
            for start, stop in chunks:
                part = kernels.transform(columns.load(start, stop), parameters.rank, parameters.ring_degree)
                values[start // lanes : -(-stop // lanes)] = part

        share(fill, _compiled_chunks(columns.features))
        return Transforms(values, columns.features)
    shape = parameters.rank, columns.features, parameters.ring_degree // 2
    made = torch.empty(shape, dtype=torch.complex128, device="cpu")

    def work(chunks: Iterator[tuple[int, int]]) -> None:
        for start, stop in chunks:
            made[:, start:stop] = _transform_chunk(columns.load(start, stop), parameters)

    share(work, _chunks(columns.features, 2 * parameters.rank, parameters.ring_degree))
    return Transforms(made, columns.features)


def secret_transform(secrets: torch.Tensor) -> torch.Tensor:
    """Returns the transforms of the secrets of several blocks. The transforms are as secret as the secrets.

    Args:
        secrets: int8 in {−1, 0, 1}, shape (B, k, N), CPU.

    Returns:
        complex128, shape (B, k, N/2); in the compiled form float64, shape (B, k, N/2, 2).
    """
    if kernels.available():
        return kernels.secret_transform(secrets)
    num_blocks, rank, degree = secrets.shape

    def work() -> torch.Tensor:
        folded = torch.empty(num_blocks, rank, degree // 2, 2, dtype=torch.float64, device="cpu")
        folded.copy_(secrets.view(num_blocks, rank, 2, degree // 2).transpose(2, 3))
        return _fft(torch.view_as_complex(folded))

    return alone(work)


def combine(
    matrix_hat: Transforms, secrets_hat: torch.Tensor, error: torch.Tensor | None = None
) -> Sequence[torch.Tensor]:
    """Multiplies a matrix by the secrets of blocks. For row t of block b and feature c the result is coefficient t of
    Σ_i matrix_{i,c}·s_{b,i}, plus the error, mod 2^32.

    Args:
        matrix_hat: the result of `transform`.
        secrets_hat: the result of `secret_transform`.
        error: int8, int16 or int32, shape (B, N, features), which is added; or None.

    Returns:
        For each block int32, shape (N, features), contiguous, in memory of noise/blocks/arena.py.

    Raises:
        MaskError: a coefficient is too far from an integer.
    """
    num_blocks, rank, half = secrets_hat.shape[:3]
    values, features = matrix_hat.values, matrix_hat.features
    made = _output(num_blocks, 2 * half, features)
    if not values.is_complex():
        combiner, rows = kernels.Combiner(secrets_hat), kernels.Rows(made)

        def fill(chunks: Iterator[tuple[int, int]]) -> None:
            for start, stop in chunks:
                added = None if error is None else error[:, :, start:stop]
                _check_distance(combiner.by_transforms(values, rows, start, stop, added))

        share(fill, _compiled_chunks(features))
        return made

    def work(chunks: Iterator[tuple[int, int]]) -> None:
        inverse = _Inverse(num_blocks, rank, half)
        for start, stop in chunks:
            inverse(values[:, start:stop], secrets_hat, [each[:, start:stop] for each in made])
            if error is not None:
                for each, added in zip(made, error, strict=True):
                    each[:, start:stop] += added[:, start:stop]

    share(work, _chunks(features, num_blocks + rank, 2 * half))
    return made


def product(
    matrix: torch.Tensor | Columns, secrets_hat: torch.Tensor, parameters: LatticeParameters
) -> Sequence[torch.Tensor]:
    """Multiplies a matrix by the secrets of blocks, as `combine` does, but adds no error. This is for a matrix whose
    transforms are not kept, such as a hint. Each chunk is transformed once for all blocks.

    Args:
        matrix: int32, shape (k·N, features), or an object that loads its columns.
        secrets_hat: the result of `secret_transform`.
        parameters: gives k and N.

    Returns:
        As `combine` does.

    Raises:
        ConfigurationError: the matrix has another shape or type.
        MaskError: a coefficient is too far from an integer.
    """
    columns = _as_columns(matrix)
    num_blocks, rank, half = secrets_hat.shape[:3]
    made = _output(num_blocks, 2 * half, columns.features)
    if not secrets_hat.is_complex():
        combiner, rows = kernels.Combiner(secrets_hat), kernels.Rows(made)

        def fill(chunks: Iterator[tuple[int, int]]) -> None:
            for start, stop in chunks:
                _fill_product(combiner, columns, rows, start, stop)

        share(fill, _compiled_chunks(columns.features))
        return made

    def work(chunks: Iterator[tuple[int, int]]) -> None:
        inverse = _Inverse(num_blocks, rank, half)
        for start, stop in chunks:
            hat = _transform_chunk(columns.load(start, stop), parameters)
            inverse(hat, secrets_hat, [each[:, start:stop] for each in made])

    share(work, _chunks(columns.features, num_blocks + 2 * rank, 2 * half))
    return made


def masks_and_effects(
    matrix_hat: Transforms,
    secrets_hat: torch.Tensor,
    hint: torch.Tensor | Columns,
    draw: Callable[[Sequence[int]], torch.Tensor],
    parameters: LatticeParameters,
    packs_effects: bool = False,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Makes the masks of blocks, as `combine` does, and their effects, as `product` does. In the compiled form the
    threads share all of this at once, and an error is drawn where it is added, in the cache.

    Args:
        matrix_hat: the transforms of the public matrix.
        secrets_hat: the transforms of the secrets.
        hint: the hint.
        draw: returns a fresh error of a given shape. Several threads call it.
        parameters: gives k and N.
        packs_effects: whether effects are packed (`wire.ring.widths.pack_effect`), which takes no longer.

    Returns:
        The masks and the effects; see `combine` for both. Packed effects are uint8, shape (N, 3 · features).

    Raises:
        ConfigurationError, MaskError: see `product`.
    """
    columns, features = _as_columns(hint), matrix_hat.features
    num_blocks, half = secrets_hat.shape[0], secrets_hat.shape[2]
    if secrets_hat.is_complex():
        error = draw((num_blocks, 2 * half, features))
        masks, effects = combine(matrix_hat, secrets_hat, error), product(columns, secrets_hat, parameters)
        if not packs_effects:
            return masks, effects
        kept = []
        for each in effects:
            kept.append(packed(each))
            each.zero_()  # It is as secret as what is kept, and its memory is used again.
        return masks, kept
    masks, effects = (
        _output(num_blocks, 2 * half, features),
        _output(num_blocks, 2 * half, columns.features, packs_effects),
    )
    combiner, mask_rows, effect_rows = kernels.Combiner(secrets_hat), kernels.Rows(masks), kernels.Rows(effects)

    def fill(chunks: Iterator[tuple[bool, int, int]]) -> None:
        for is_mask, start, stop in chunks:
            if is_mask:
                error = draw((num_blocks, 2 * half, stop - start))
                _check_distance(combiner.by_transforms(matrix_hat.values, mask_rows, start, stop, error))
            else:
                _fill_product(combiner, columns, effect_rows, start, stop)

    effect_unit = kernels.LINE_WIDTH if packs_effects else kernels.WIDTH
    # Effects come first, since they take longer, so that the threads end at about the same time.
    chunks = [(False, *each) for each in _compiled_chunks(columns.features, effect_unit)]
    share(fill, chunks + [(True, *each) for each in _compiled_chunks(features)])
    return masks, effects


def _fill_product(combiner: kernels.Combiner, columns: Columns, rows: kernels.Rows, start: int, stop: int) -> None:
    packed = columns.packed(start, stop)
    if packed is None:
        _check_distance(combiner.by_matrix(columns.load(start, stop), rows, start, stop))
    else:
        _check_distance(combiner.by_packed(packed, rows, start, stop))


def _output(num_blocks: int, degree: int, features: int, is_packed: bool = False) -> Sequence[torch.Tensor]:
    """Returns memory for the rows of each block. A block's memory is free again as soon as the block is used up,
    whatever becomes of the blocks that were made with it."""
    form = (kernels.PACKED_BYTES * features, torch.uint8) if is_packed else (features, torch.int32)
    return [arena().rows(degree, *form) for _ in range(num_blocks)]


class _Inverse:
    """Multiplies transforms, transforms the products back, rounds them and writes them out. The object's buffers are
    reused for all chunks of one thread."""

    def __init__(self, num_blocks: int, rank: int, half: int) -> None:
        self._shape = num_blocks, rank, half
        self._every = _CHECK_EVERY if rank * 2 * half <= _SAMPLED_DIMENSION else 1
        self._calls = 0
        self._sums = self._rounded = torch.empty(0, dtype=torch.complex128, device="cpu")

    def __call__(self, matrix_hat: torch.Tensor, secrets_hat: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        """Computes the product of some columns of the matrix and all secrets, and writes it to `out`.

        Args:
            matrix_hat, secrets_hat: the transforms, shapes (k, c, N/2) and (B, k, N/2), any strides.
            out: for each block, shape (N, c), any strides; written.
        """
        num_blocks, rank, half = self._shape
        chunk = matrix_hat.shape[1]
        if self._sums.shape[1:2] != (chunk,):
            self._calls = 0  # For another number of transforms, the library may run other code.
            self._sums = torch.empty(num_blocks, chunk, half, dtype=torch.complex128, device="cpu")
            self._rounded = torch.empty(num_blocks, chunk, half + _PADDING, dtype=torch.complex128, device="cpu")
        factors = secrets_hat.unsqueeze(2)  # (B, k, 1, N/2)
        torch.mul(matrix_hat[0], factors[:, 0], out=self._sums)
        for i in range(1, rank):
            self._sums.addcmul_(matrix_hat[i], factors[:, i])
        # norm="forward" leaves out the 1/n, which the untwisting factors hold. There is no out=, since it would copy.
        turned = torch.fft.ifft(self._sums, norm="forward")
        if self._calls % self._every == 0:
            _check_rounding(turned[:, :: self._every], half)
        self._calls += 1
        rounded = torch.addcmul(_rounder(), turned, _untwist(half), out=self._rounded[:, :, :half])
        words = torch.view_as_real(rounded).view(torch.int32)  # (B, c, N/2, 4): low and high of real and imaginary
        for each, low in zip(out, words[..., ::2].permute(0, 3, 2, 1), strict=True):
            each.view(2, half, chunk).copy_(low)


def _check_distance(largest: float) -> None:
    if not largest < _LARGEST_ERROR:
        raise MaskError(_LOST_PRECISION)


def _check_rounding(turned: torch.Tensor, half: int) -> None:
    values = torch.view_as_real(turned * _untwist(half))
    error = float(torch.linalg.vector_norm(values - values.round(), ord=math.inf))
    if not error < _LARGEST_ERROR:  # NaN fails this test, too.
        raise MaskError(_LOST_PRECISION)


def _transform_chunk(matrix: torch.Tensor, parameters: LatticeParameters) -> torch.Tensor:
    """Returns the transforms of a chunk of c columns: int32 of shape (k·N, c) gives complex128 of shape (k, c, N/2)."""
    rank, half, chunk = parameters.rank, parameters.ring_degree // 2, matrix.shape[-1]
    if matrix.dtype != torch.int32 or matrix.shape[0] != parameters.dimension:
        raise ConfigurationError(
            f"expected an int32 matrix of {parameters.dimension} rows, got {matrix.dtype} of {matrix.shape[0]}"
        )
    if matrix.stride(1) == 1:
        # Rows of a wide matrix collide in the cache (see `_PADDING`), so the chunk is copied into a padded buffer first
        # and then read by columns.
        padded = torch.empty(matrix.shape[0], chunk + 4 * _PADDING, dtype=torch.int32, device="cpu")
        matrix = padded[:, :chunk].copy_(matrix)
    halves = matrix.unflatten(0, (rank, 2, half)).transpose(2, 3)  # (k, 2, c, N/2)
    folded = torch.empty(rank, chunk, half, 2, dtype=torch.float64, device="cpu")
    folded.copy_(halves.permute(0, 2, 3, 1))
    return _fft(torch.view_as_complex(folded))


def _fft(folded: torch.Tensor) -> torch.Tensor:
    """Twists the input in place and returns the transform of its last dimension."""
    turned: torch.Tensor = torch.fft.fft(folded.mul_(_twist(folded.shape[-1])))
    return turned


@functools.cache
def _twist(half: int) -> torch.Tensor:
    """Returns exp(iπj/N) for j < N/2, each part within about a unit in the last place."""
    angle = torch.arange(half, dtype=torch.float64, device="cpu") * (math.pi / (2 * half))
    return torch.complex(torch.cos(angle), torch.sin(angle))


@functools.cache
def _untwist(half: int) -> torch.Tensor:
    # `half` is a power of two, so the division is exact.
    untwist: torch.Tensor = _twist(half).conj().resolve_conj() / half
    return untwist


@functools.cache
def _rounder() -> torch.Tensor:
    return torch.tensor(complex(_ROUNDER, _ROUNDER), dtype=torch.complex128, device="cpu")


def _as_columns(matrix: torch.Tensor | Columns) -> Columns:
    return TensorColumns(matrix) if isinstance(matrix, torch.Tensor) else matrix


def _compiled_chunks(features: int, unit: int = kernels.WIDTH) -> list[tuple[int, int]]:
    """Returns the bounds (start, stop) of chunks of features for the compiled form. Each size but the last is a
    multiple of `unit`, which is a multiple of `kernels.WIDTH`. Each thread takes about two chunks, within
    `LEAST_FEATURES` and `MOST_FEATURES`."""
    each = -(-features // (2 * get_num_threads()))
    size = -(-min(max(each, LEAST_FEATURES), MOST_FEATURES) // unit) * unit
    return [(start, min(start + size, features)) for start in range(0, features, size)]


def _chunks(features: int, num_transforms: int, degree: int) -> list[tuple[int, int]]:
    """Returns the bounds (start, stop) of chunks of features for torch's form. A chunk takes at most `_CHUNK_BYTES`,
    with `num_transforms` of 8·N bytes for each feature.

    All chunks are multiples of 8 features, as packed hints are read, and of one size except for the last. The threads
    share them evenly.
    """
    most = max(1, _CHUNK_BYTES // (8 * degree * num_transforms) // 8)  # This counts groups of eight features.
    eights, num_threads = -(-features // 8), get_num_threads()
    rounds = -(-eights // (most * num_threads))  # Each thread takes this many turns.
    size = 8 * max(1, -(-eights // max(1, rounds * num_threads)))
    return [(start, min(start + size, features)) for start in range(0, features, size)]
