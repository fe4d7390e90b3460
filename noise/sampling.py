"""This module draws noise from the operating system's CSPRNG. It never uses torch's or numpy's generators, which can be
predicted or replayed.

`gaussian` and `other_index` read os.urandom directly. The lattice mask needs gigabytes, so `Csprng` expands a key from
os.urandom by AES-256-CTR. The samplers that use it draw ternary secrets and errors. None branches on a drawn value,
with two exceptions: `ternary` rejects whole bytes, and `discrete_gaussian` draws more bits where the first 16 do not
decide a sample. Only `discrete_gaussian` uses a secret number as an index into a table. The tenant's own machine is
trusted, so shared caches are not defended against (docs/threat-model.md, "What is not protected against").
"""

from __future__ import annotations

import decimal
import functools
import math
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from noise.blocks.pool import share
from noise.params import NOMINAL_SIGMA, LatticeParameters
from noise.polynomial import kernels
from wire.errors import ConfigurationError

Bytes = npt.NDArray[np.uint8]

_REKEY_BYTES = 1 << 36
"""The bytes drawn under one key: 2^32 blocks of AES. A counter stream of that length differs from random by at most
2^64 / 2^129 (PRP/PRF switching, Bellare and Rogaway, "The security of triple encryption", EUROCRYPT 2006, lemma 1)."""

_PIECE = bytes(1 << 18)
"""The zeros that are encrypted, 256 KiB at a time, to get random bytes. A piece of this size stays in the cache and
gives 8 GB/s; 64 KiB give 7.9 GB/s, and 4 KiB give 5.2 GB/s."""

_ETA = 21
"""The η of the centred binomial that stands for a Gaussian with σ = 3.2, as in Microsoft SEAL's `sample_poly_cbd`."""

_BATCH = 1 << 17
"""How many samples are drawn at a time. It is small enough for their bytes to stay in the cache."""


def gaussian(rows: int, features: int) -> torch.Tensor:
    """Draws standard normal numbers from os.urandom, by the Box-Muller transform.

    Returns:
        float32, shape (rows, features), CPU.

    Source: Box and Muller, 1958. The uniform numbers have 53 bits and are in (0, 1], so the logarithm is finite.
    """
    count = rows * features
    half = (count + 1) // 2
    words = torch.from_numpy(np.frombuffer(bytearray(os.urandom(16 * half)), dtype=np.int64))
    uniform = ((words & ((1 << 53) - 1)) + 1).to(torch.float64) * 2.0**-53
    radius = torch.sqrt(-2.0 * torch.log(uniform[:half]))
    angle = 2.0 * math.pi * uniform[half:]
    pair = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)))
    return pair[:count].to(torch.float32).view(rows, features)


def other_index(count: int, last: int | None) -> int:
    """Draws a uniform index below `count` that is not `last`, unless `count` is 1."""
    if last is None or count < 2:
        return secrets.randbelow(count)
    drawn = secrets.randbelow(count - 1)
    return drawn + (drawn >= last)


class Csprng:
    """Gives random bytes by AES-256-CTR under keys from os.urandom. Each thread that draws has a key of its own, so
    that no thread waits for another.

    A forked child draws a new key before its first byte. A generator cannot be copied or pickled, and printing it shows
    nothing. Python cannot wipe a key from memory: when a generator is dropped, its keys stay until the allocator reuses
    their memory.
    """

    def __init__(self) -> None:
        """Makes a generator without a key. The first key is drawn when the first byte is requested."""
        self._forget()
        _GENERATORS.add(self)

    def _forget(self) -> None:
        self._streams = threading.local()

    def fill(self, buffer: Bytes | bytearray | memoryview) -> None:
        """Overwrites a contiguous writable buffer with random bytes."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type,unused-ignore]  # numpy's stubs lack __buffer__
        for start in range(0, len(view), len(_PIECE)):
            piece = view[start : start + len(_PIECE)]
            self._stream(len(piece)).update_into(_PIECE[: len(piece)], piece)

    def _stream(self, num_bytes: int) -> CipherContext:
        """Returns this thread's key stream, under a new key if `num_bytes` more would be too many for the old key. If
        Python did not see a fork, the process id shows the fork, and the child gets another key."""
        own: Any = self._streams
        if getattr(own, "process", None) != os.getpid() or own.left < num_bytes:
            # The key is fresh, so the counter may start at zero.
            own.context = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
            own.left, own.process = _REKEY_BYTES, os.getpid()
        own.left -= num_bytes
        context: CipherContext = own.context
        return context

    def random_bytes(self, count: int) -> torch.Tensor:
        """Returns random bytes as uint8, shape (count,), CPU."""
        drawn = torch.empty(count, dtype=torch.uint8, device="cpu")
        self.fill(drawn.numpy())
        return drawn

    def array(self, count: int) -> Bytes:
        """Returns random bytes as a numpy array, uint8, shape (count,)."""
        drawn = np.empty(count, dtype=np.uint8)
        self.fill(drawn)
        return drawn

    def __repr__(self) -> str:
        """Returns a text that shows nothing secret."""
        return "<Csprng>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled: the copy would give the same random stream again, and two masks from one
        stream would be a two-time pad."""
        raise TypeError("a Csprng cannot be copied or pickled: its stream would be used twice")


_GENERATORS: weakref.WeakSet[Csprng] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for generator in list(_GENERATORS):
        generator._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def ternary(rng: Csprng, shape: Sequence[int]) -> torch.Tensor:
    """Draws exactly uniformly from {−1, 0, 1}. A byte below 3^5 = 243 gives five ternary digits; other bytes are thrown
    away.

    Returns:
        int8, of the given shape, CPU.
    """
    count = math.prod(shape)
    trits = np.empty((0, 5), dtype=np.int8)
    while trits.size < count:
        missing = -(-(count - trits.size) // 5)
        drawn = rng.array(missing * 256 // 243 + missing // 16 + 16)  # This many bytes are seldom too few.
        trits = np.concatenate((trits, _five_trits(drawn[drawn < 243])))
    return torch.from_numpy(trits.reshape(-1)[:count].copy()).view(*shape)


def _five_trits(below_243: Bytes) -> npt.NDArray[np.int8]:
    """Returns the five base-3 digits of each byte, each reduced by 1. It divides instead of using a table, since the
    cache would reveal which entries were read."""
    digits = np.empty((below_243.size, 5), dtype=np.int8)
    rest = below_243
    for position in range(5):
        digits[:, position] = rest % 3
        rest = rest // 3
    return digits - np.int8(1)


def centred_binomial(rng: Csprng, shape: Sequence[int], eta: int = _ETA) -> torch.Tensor:
    """Draws Σ a_i − Σ b_i over η pairs of fair bits; its variance is η/2.

    The sample is computed as the number of ones among 2η bits, minus η, since 1 − b_i is as fair as b_i. A sample takes
    its bits from whole bytes. The remaining bits, an even number, come from a byte that several samples may share.

    Args:
        rng: the generator of the random bits.
        shape: the shape of the result.
        eta: 1 to 63; 21 has σ = 3.24.

    Returns:
        int8, of the given shape, CPU.

    Raises:
        ConfigurationError: `eta` is any other number.

    Source: see `_ETA`.
    """
    if not 1 <= eta <= 63:
        raise ConfigurationError(f"eta is 1 to 63, got {eta}")
    ones = np.empty(math.prod(shape), dtype=np.uint8)

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            count_ones(rng, ones[start : start + _BATCH], 2 * eta, eta)

    starts = range(0, ones.size, _BATCH)
    if len(starts) == 1:
        work(iter(starts))
    else:
        share(work, starts)
    return torch.from_numpy(ones.view(np.int8)).view(*shape)


def count_ones(rng: Csprng, out: Bytes, num_bits: int, mean: int) -> None:
    """Writes to each element of `out` the number of ones among `num_bits` fresh bits, minus `mean`. Below zero this
    wraps to the two's complement of an int8."""
    count, whole, rest = out.size, num_bits // 8, num_bits % 8
    share = 8 // rest if rest else 1  # This many samples share one byte for their remaining bits.
    width = -(-count // share)
    drawn = rng.array(whole * count + (width if rest else 0))
    if kernels.available():
        kernels.count_ones(drawn, out, whole, rest, mean)
        return
    ones = np.bitwise_count(drawn[: whole * count].reshape(whole, count))
    out[:] = -mean & 0xFF
    for plane in ones:
        out += plane
    for part in range(share if rest else 0):
        piece = out[part * width : (part + 1) * width]
        bits = (drawn[whole * count :] >> (part * rest)) & ((1 << rest) - 1)
        piece += np.bitwise_count(bits[: piece.size])


def discrete_gaussian(rng: Csprng, shape: Sequence[int], sigma: float) -> torch.Tensor:
    """Draws integers x with probability proportional to exp(−x²/2σ²), by inverting their distribution function.

    The function is stored as 80-bit numbers, and |x| > 11σ is left out (mass below 2^-86). The statistical distance of
    the result from the true distribution is at most (22σ + 1)·2^-81 + 2^-86, below 2^-71 at σ = 32. The first 16
    bits of a draw choose a cell, and usually the sample with it. Only if a boundary of the function lies in that cell
    are 64 more bits drawn.

    Args:
        rng: the generator of the random bits.
        shape: the shape of the result.
        sigma: above 0, at most 2048.

    Returns:
        int16, of the given shape, CPU.

    Raises:
        ConfigurationError: `sigma` is any other number.

    Source: inversion as in Peikert, "An efficient and parallel Gaussian sampler for lattices", CRYPTO 2010, sec. 4.1.
    """
    if not 0 < sigma <= 2048:
        raise ConfigurationError(f"a table-sampled sigma is above 0 and at most 2048, got {sigma}")
    table = _gaussian_table(sigma)
    out = np.empty(math.prod(shape), dtype=np.int16)

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            table.sample(rng, out[start : start + _BATCH])

    share(work, range(0, out.size, _BATCH))
    return torch.from_numpy(out).view(*shape)


class _GaussianTable:
    """Holds the boundaries of a distribution function at 80 bits: `cell` is the top 16 bits of a boundary, `low` the
    other 64."""

    def __init__(self, sigma: float) -> None:
        tail = _tail(sigma)
        boundaries = _boundaries(sigma, tail)
        cells = np.array([boundary >> 64 for boundary in boundaries], dtype=np.int64)
        self._low = np.array([boundary & (2**64 - 1) for boundary in boundaries], dtype=np.uint64)
        # `_first` and `_end` are the indices of each cell's first boundary and of the first one after it. A sample is
        # -tail plus the number of boundaries at or below the drawn number.
        self._first = np.searchsorted(cells, np.arange(1 << 16), side="left")
        self._end = np.searchsorted(cells, np.arange(1 << 16), side="right")
        undecided = self._end > self._first
        self._value = np.where(undecided, _UNDECIDED, self._first - tail).astype(np.int16)
        self._steps = int((self._end - self._first).max()).bit_length()
        self._tail = tail

    def sample(self, rng: Csprng, out: npt.NDArray[np.int16]) -> None:
        """Fills `out` with random samples of the distribution."""
        cell = rng.array(2 * out.size).view(np.uint16)
        np.take(self._value, cell, out=out, mode="clip")  # No cell is out of range; clip lets numpy write in place.
        where = np.flatnonzero(out == _UNDECIDED)
        out[where] = self._search(cell[where], rng.array(8 * where.size).view(np.uint64)) - self._tail

    def _search(self, cell: npt.NDArray[np.uint16], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Returns how many boundaries are at or below each number (cell, low), by binary searches among the boundaries
        of its cell, all in parallel."""
        begin, end = self._first[cell], self._end[cell]
        for _ in range(self._steps):
            middle = (begin + end) // 2
            above = (begin < end) & (low >= self._low[np.minimum(middle, self._low.size - 1)])
            begin, end = np.where(above, middle + 1, begin), np.where(above, end, middle)
        return begin


_UNDECIDED = np.int16(-(2**15))
"""Marks cells that do not decide a sample. No sample has this value, since the tail at the largest σ is 22528."""


def _tail(sigma: float) -> int:
    return math.ceil(11 * sigma)


def _boundaries(sigma: float, tail: int) -> list[int]:
    """Returns round(2^80·P(X ≤ x)), but at most 2^80 − 1, for x = −tail … tail − 1, computed from 50-digit
    exponentials."""
    with decimal.localcontext(prec=50):
        width = 2 * decimal.Decimal(sigma) ** 2
        weights = [(-(decimal.Decimal(x) ** 2) / width).exp() for x in range(-tail, tail + 1)]
        total = decimal.Decimal(0)
        scale = 2**80 / sum(weights, total)
        boundaries = []
        for weight in weights[:-1]:
            total += weight
            boundaries.append(int((total * scale).to_integral_value()))
    return [min(boundary, 2**80 - 1) for boundary in boundaries]


@functools.cache
def _gaussian_table(sigma: float) -> _GaussianTable:
    return _GaussianTable(sigma)


def error(rng: Csprng, shape: Sequence[int], parameters: LatticeParameters) -> torch.Tensor:
    """Draws the error of a parameter set: a centred binomial for the nominal σ = 3.2, a table-sampled Gaussian for
    other σ.

    Returns:
        int8 or int16, of the given shape, CPU; zeros for a toy with σ = 0.
    """
    if parameters.sigma == NOMINAL_SIGMA:
        return centred_binomial(rng, shape)
    if parameters.sigma == 0:
        return torch.zeros(tuple(shape), dtype=torch.int8, device="cpu")
    return discrete_gaussian(rng, shape, parameters.sigma)


def error_bound(parameters: LatticeParameters) -> int:
    """Returns the largest |e| that `error` can draw, for bounds that must hold for every draw."""
    if parameters.sigma == NOMINAL_SIGMA:
        return _ETA
    return _tail(parameters.sigma)
