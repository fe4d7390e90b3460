"""Tests the generator, which never gives the same bytes twice, and the distributions of the samplers.

Nothing is seeded, because the generator takes its key from the system. So every statistical bound is wide enough that a
correct sampler fails less than once in 10^9 runs: chi-square at z = 7 of its normal approximation (Wilson and Hilferty
1931), and means at 7 standard errors.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import pickle
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import mpmath
import numpy as np
import pytest
import torch

from noise import sampling
from noise.params import PARAMETERS, LatticeParameters
from noise.sampling import Csprng, centred_binomial, discrete_gaussian, error, error_bound, ternary
from tests.support.threads import in_child
from tests.support.waiting import end
from wire.errors import ConfigurationError

RNG = Csprng()
SAMPLES = 1_000_003  # this is several batches, and no multiple of any batch size
Z = 7.0


def chi_square_z(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the standard normal deviate of a chi-square statistic. Neighbouring cells are merged until each is
    expected to have 20 samples."""
    cells: list[list[float]] = [[0.0, 0.0]]
    for seen, wanted in zip(observed, expected, strict=True):
        if cells[-1][1] >= 20:
            cells.append([0.0, 0.0])
        cells[-1][0] += seen
        cells[-1][1] += wanted
    if cells[-1][1] < 20:
        last = cells.pop()
        cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    free = len(cells) - 1
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def histogram(samples: torch.Tensor, lowest: int, highest: int) -> list[float]:
    assert int(samples.min()) >= lowest
    assert int(samples.max()) <= highest
    shifted = samples.to(torch.int64) - lowest
    return [float(count) for count in torch.bincount(shifted.flatten(), minlength=highest - lowest + 1)]


def uncorrelated(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two rows of samples with mean 0 have correlation 0, within Z standard errors."""
    x, y = a.double(), b.double()
    return abs(float((x * y).mean())) < Z * float(x.std() * y.std()) / math.sqrt(x.numel())


def test_the_statistic_itself_can_fail() -> None:
    assert chi_square_z([1000, 1000, 1000], [1000, 1000, 1000]) < 0
    assert chi_square_z([1300, 1000, 700], [1000, 1000, 1000]) > Z


# the generator


def test_it_is_aes_256_in_counter_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.os, "urandom", bytes)  # makes every key zero
    # NIST CAVP, AESAVS: AES-256, key 0, plaintext 0
    assert bytes(Csprng().array(16)).hex() == "dc95c078a2408989ad48a21492842087"


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 19) + 7])
def test_it_fills_any_length(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.os, "urandom", bytes)
    stream = bytes(Csprng().array(1 << 20))
    guarded = np.zeros(count + 2, dtype=np.uint8)
    Csprng().fill(guarded[1:-1])
    assert bytes(guarded) == b"\0" + stream[:count] + b"\0"
    made = Csprng().random_bytes(count)
    assert made.dtype == torch.uint8
    assert bytes(made.numpy()) == stream[:count]


def test_calls_continue_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.os, "urandom", bytes)
    stream, rng = bytes(Csprng().array(4096)), Csprng()
    assert b"".join(bytes(rng.array(size)) for size in (1, 15, 16, 33, 4031)) == stream


def test_two_generators_have_two_keys() -> None:
    assert bytes(Csprng().array(32)) != bytes(Csprng().array(32))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list of the keys that are requested from the operating system from now on."""
    drawn: list[bytes] = []
    real = os.urandom

    def spy(size: int) -> bytes:
        drawn.append(real(size))
        return drawn[-1]

    monkeypatch.setattr(sampling.os, "urandom", spy)
    return drawn


class Counting:
    """Stands in for a cipher but encrypts nothing, so that the test can draw more bytes than there is time to
    encrypt."""

    encrypted_bytes: ClassVar[list[int]] = []

    def __init__(self, *_: object) -> None:
        self.encrypted_bytes.append(0)

    def encryptor(self) -> Counting:
        return self

    def update_into(self, data: bytes, out: memoryview) -> int:
        self.encrypted_bytes[-1] += len(data)
        return len(data)


def test_a_key_serves_2_36_bytes_and_no_more(keys: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "Cipher", Counting)
    monkeypatch.setattr(Counting, "encrypted_bytes", [])
    rng, large = Csprng(), np.empty(1 << 30, dtype=np.uint8)
    for _ in range(64):
        rng.fill(large)
    assert Counting.encrypted_bytes == [2**36]
    rng.array(7)
    for _ in range(64):
        rng.fill(large)
    assert Counting.encrypted_bytes == [2**36, 7 + 2**36 - (1 << 18), 1 << 18], "a piece is under one key"
    assert [len(key) for key in keys] == [32] * 3
    assert len(set(keys)) == 3


def child_bytes(rng: Csprng) -> bytes:
    """Returns the bytes that a forked child draws next."""
    made = bytes.fromhex(in_child(lambda: bytes(rng.array(64)).hex()))
    assert len(made) == 64
    return made


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_draws_other_bytes() -> None:
    rng = Csprng()
    rng.array(16)
    first, second = child_bytes(rng), child_bytes(rng)
    own = bytes(rng.array(64))
    assert len({first, second, own}) == 3


def test_another_process_id_alone_means_another_key(keys: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork, a new key is drawn even if Python's fork hook is not called, because the process id has changed."""
    rng = Csprng()
    rng.array(16)
    rng.array(16)
    assert len(keys) == 1
    monkeypatch.setattr(sampling.os, "getpid", lambda: -5)
    rng.array(16)
    assert len(set(keys)) == len(keys) == 2


def test_each_thread_draws_under_a_key_of_its_own(keys: list[bytes]) -> None:
    rng = Csprng()
    rng.array(16)

    def draw() -> None:
        rng.array(16)
        rng.array(16)

    for number in (2, 3):
        thread = threading.Thread(target=draw)
        thread.start()
        end(thread)
        assert len(set(keys)) == len(keys) == number
    rng.array(16)
    assert len(keys) == 3, "this thread goes on under its own"


@pytest.mark.parametrize("clone", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_copied(clone: Any) -> None:
    rng = Csprng()
    rng.array(16)
    with pytest.raises(TypeError, match="used twice"):
        clone(rng)


def test_it_prints_nothing() -> None:
    assert repr(RNG) == str(RNG) == "<Csprng>"


def test_threads_never_share_a_block() -> None:
    rng, made = Csprng(), []

    def draw() -> None:
        made.append(bytes(rng.array(1 << 18)))

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    end(threads)
    blocks = [piece[start : start + 16] for piece in made for start in range(0, len(piece), 16)]
    assert len(blocks) == 8 << 14
    assert len(set(blocks)) == len(blocks)


def test_bytes_are_uniform() -> None:
    counts = torch.bincount(RNG.random_bytes(1 << 22).to(torch.int64), minlength=256)
    assert chi_square_z([float(count) for count in counts], [2**22 / 256] * 256) < Z


# ternary


def test_trits_are_uniform_at_each_place_and_in_pairs() -> None:
    trits = ternary(RNG, (SAMPLES // 5, 5))
    assert trits.dtype == torch.int8
    for place in range(5):
        assert chi_square_z(histogram(trits[:, place], -1, 1), [SAMPLES // 5 / 3] * 3) < Z
        pair = 3 * (trits[:, place] + 1) + trits[:, (place + 1) % 5] + 1
        assert chi_square_z(histogram(pair, 0, 8), [SAMPLES // 5 / 9] * 9) < Z


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3, 4), (1, 3, 512), (5, 0)])
def test_ternary_shapes(shape: tuple[int, ...]) -> None:
    assert tuple(ternary(RNG, shape).shape) == shape


def test_bytes_from_243_up_are_thrown_away() -> None:
    class Scripted(Csprng):
        def array(self, count: int) -> Any:
            return np.arange(count, dtype=np.int64).astype(np.uint8)

    trits = ternary(Scripted(), (5 * 243 + 5,)).view(-1, 5)
    weights = torch.tensor([1, 3, 9, 27, 81])
    assert ((trits.long() + 1) * weights).sum(1).tolist() == [*range(243), 0]


# errors


@pytest.mark.parametrize("eta", [1, 2, 3, 4, 5, 6, 7, 21, 63])
def test_centred_binomial_has_its_distribution(eta: int) -> None:
    samples = centred_binomial(RNG, (SAMPLES,), eta)
    assert samples.dtype == torch.int8
    expected = [SAMPLES * math.comb(2 * eta, ones) / 4**eta for ones in range(2 * eta + 1)]
    assert chi_square_z(histogram(samples, -eta, eta), expected) < Z


@pytest.mark.parametrize("lag", [1, 2, 1 << 15, (1 << 15) + 1, 1 << 16, 1 << 17])
def test_samples_that_share_a_byte_are_independent(lag: int) -> None:
    """With η = 21, four samples that are a quarter of a batch apart take two bits each from the same byte."""
    samples = centred_binomial(RNG, (SAMPLES,))
    assert uncorrelated(samples[:-lag], samples[lag:])


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 3, 5), (1, 512, 7)])
def test_error_shapes(shape: tuple[int, ...]) -> None:
    assert tuple(centred_binomial(RNG, shape).shape) == shape
    assert tuple(discrete_gaussian(RNG, shape, 32.0).shape) == shape


def gaussian_weights(sigma: float, tail: int) -> list[float]:
    weights = [math.exp(-(x**2) / (2 * sigma**2)) for x in range(-tail, tail + 1)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


@pytest.mark.parametrize("sigma", [0.5, 3.2, 32.0, 256.0])
def test_discrete_gaussian_has_its_distribution(sigma: float) -> None:
    samples = discrete_gaussian(RNG, (SAMPLES,), sigma)
    assert samples.dtype == torch.int16
    tail = math.ceil(11 * sigma)
    expected = [SAMPLES * weight for weight in gaussian_weights(sigma, tail)]
    assert chi_square_z(histogram(samples, -tail, tail), expected) < Z
    assert uncorrelated(samples[:-1], samples[1:])


@functools.cache
def boundaries_of(sigma: float) -> list[int]:
    """Returns round(2^80·P(X ≤ x)) for each x from −11σ to below 11σ, computed by mpmath. The sampler's table must have
    the same numbers."""
    tail = math.ceil(11 * sigma)
    with mpmath.workdps(60):
        weights = [mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(sigma) ** 2)) for x in range(-tail, tail + 1)]
        scale = mpmath.mpf(2) ** 80 / mpmath.fsum(weights)
        sums = itertools.accumulate(weights[:-1])
        return [min(int(mpmath.nint(each * scale)), 2**80 - 1) for each in sums]


class _Numbers(Csprng):
    """Gives the sampler prescribed 80-bit numbers: first their top 16 bits, then the other bits of those numbers for
    which they are requested."""

    def __init__(self, numbers: list[int], undecided: Any) -> None:
        super().__init__()
        cells = np.array([number >> 64 for number in numbers], dtype=np.uint16)
        lows = [number & (2**64 - 1) for number in numbers if undecided(number >> 64)]
        self._answers = [cells.view(np.uint8), np.array(lows, dtype=np.uint64).view(np.uint8)]

    def array(self, count: int) -> Any:
        answer = self._answers.pop(0)
        assert answer.size == count
        return answer


@pytest.mark.parametrize("sigma", [0.7, 3.3, 32.0, 300.0])
def test_samples_are_the_inverse_of_the_distribution_function(sigma: float) -> None:
    """The samples are compared with Python integers at, just below and just above every boundary of the distribution
    function to 80 bits."""
    tail, boundaries = math.ceil(11 * sigma), boundaries_of(sigma)
    assert boundaries == sorted(boundaries)
    cells = {boundary >> 64 for boundary in boundaries}
    numbers = [0, 2**80 - 1]
    for boundary in boundaries[:: max(1, len(boundaries) // 3000)]:
        numbers += [min(max(boundary + step, 0), 2**80 - 1) for step in (-(2**64), -1, 0, 1, 2**64)]
    made = discrete_gaussian(_Numbers(numbers, cells.__contains__), (len(numbers),), sigma)
    expected = np.searchsorted(np.array(boundaries, dtype=object), np.array(numbers, dtype=object), side="right")
    assert made.tolist() == (expected - tail).tolist()


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_each_set_has_its_error(name: str) -> None:
    parameters = PARAMETERS[name]
    drawn = error(RNG, (100, 1000), parameters).double()
    spread = math.sqrt(10.5) if parameters.sigma == 3.2 else parameters.sigma
    assert spread >= parameters.sigma
    # The standard error of the standard deviation of n normal numbers is sigma / √(2n), and 7 of them are allowed.
    assert abs(float(drawn.std()) - spread) < Z * spread / math.sqrt(2e5)
    assert float(drawn.abs().max()) <= error_bound(parameters)


def test_a_toy_without_error_has_none() -> None:
    toy = LatticeParameters("toy", 16, 1, 0.0, 0, "a test", toy=True)
    assert not bool(error(RNG, (4, 4), toy).any())
    assert error_bound(toy) == 0


@pytest.mark.parametrize("eta", [0, 64])
def test_an_eta_that_does_not_fit_is_refused(eta: int) -> None:
    with pytest.raises(ConfigurationError):
        centred_binomial(RNG, (1,), eta)


@pytest.mark.parametrize("sigma", [0.0, -1.0, 2049.0, float("nan")])
def test_a_sigma_that_does_not_fit_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigurationError):
        discrete_gaussian(RNG, (1,), sigma)
