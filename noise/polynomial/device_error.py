"""This module adds the error of lattice masks on an NVIDIA GPU: centred binomial samples from a ChaCha20 key stream,
under a key that the operating system draws for each call.

Guarantees: every call has a key of its own, so no part of a key stream is used twice. The device passes a self-test
against another implementation of ChaCha20 before its first use, and of every call some samples at random places are
compared with the CPU's, so that no mask is used without its error. The kernels branch on no drawn value and use none as
an index. The key is overwritten on the device after its use. Needs Triton; callers must ask `is_exact` first, and draw
on the CPU where that is False.

Source: RFC 8439 (ChaCha20); the error is that of noise/sampling.py, `centred_binomial`.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets as system_random
import struct
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from noise.staging import on_device
from wire.errors import MaskError
from wire.ring import product_triton

MOST_SAMPLES = 1 << 34
"""The most samples of one call: the counter of a key stream has 32 bits, and a block of it gives eight samples."""
COMPARED = 8
"""How many samples of a call are compared with the CPU's. A sample that was not added agrees in 12% of all cases."""
_SAMPLES_A_BLOCK = 8
BLOCK_LANES = 128
LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_TESTED_BLOCKS = 300
_LOGGER = logging.getLogger(__name__)


def kernels() -> Any:
    """Returns the module of the kernels. Raises ImportError if Triton is not installed."""
    from noise.polynomial import triton_chacha

    return triton_chacha


def add_centred_binomial(masks: torch.Tensor) -> None:
    """Adds to each number a fresh sample: the number of ones among 42 fair bits, minus 21.

    Args:
        masks: int32, contiguous, on a CUDA device for which `is_exact` is True.

    Raises:
        MaskError: the device added something else. The masks are overwritten.
        ValueError: the masks are not contiguous, or no int32 numbers.
    """
    if not masks.is_contiguous() or masks.dtype != torch.int32:
        raise ValueError("expected contiguous int32 masks")
    for part in masks.view(-1).split(MOST_SAMPLES):
        if part.numel() and not add_error(part):
            masks.zero_()
            raise MaskError("the device drew a wrong error: make masks on the CPU")


def add_error(numbers: torch.Tensor) -> bool:
    """Adds samples to at most `MOST_SAMPLES` numbers under a fresh key. Returns whether those at some places that
    nobody can foresee are the CPU's."""
    count = numbers.numel()
    num_blocks = -(-count // _SAMPLES_A_BLOCK)
    key = bytearray(os.urandom(32))
    places = [system_random.randbelow(count) for _ in range(COMPARED)]
    at = torch.tensor(places, device=numbers.device)
    before = numbers[at]
    with (
        product_triton.on(numbers.device),
        on_device(torch.frombuffer(key, dtype=torch.int32), numbers.device) as there,
    ):
        grid = (-(-num_blocks // BLOCK_LANES),)
        kernels().add_centred_binomial[grid](numbers, there, count, num_blocks, BLOCK=BLOCK_LANES, **LAUNCH_OPTIONS)
    found = numbers[at].sub_(before)
    is_right = found.tolist() == [_sample(key, place, num_blocks) for place in places]
    before.zero_()
    found.zero_()
    key[:] = bytes(len(key))
    return is_right


def _sample(key: bytes | bytearray, place: int, num_blocks: int) -> int:
    """Returns the sample that is added to the number at a place, by the cryptography library."""
    number, block = divmod(place, num_blocks)
    # The library's nonce is the counter of the first block, and then RFC 8439's nonce.
    nonce = block.to_bytes(4, "little") + bytes(12)
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(64))
    words: tuple[int, int] = struct.unpack_from("<2I", stream, 8 * number)
    return sum((word & 0x1FFFFF).bit_count() for word in words) - 21


@functools.cache
def is_exact(device: torch.device) -> bool:
    """Tells whether Triton is there and its ChaCha20 is right on a CUDA device. The result is computed once for each
    device. One line is logged if an installed Triton cannot be used."""
    if device.type != "cuda":
        return False
    try:
        passes = passes_self_test(device)
    except ImportError:
        return False
    except Exception as exc:  # noqa: BLE001 - compilers and drivers fail in many ways; the CPU draws instead
        _LOGGER.warning("errors of masks are drawn on the CPU: Triton fails on %s: %s", device, type(exc).__name__)
        return False
    if not passes:
        _LOGGER.warning("errors of masks are drawn on the CPU: ChaCha20 is not right on %s", device)
    return passes


def passes_self_test(device: torch.device) -> bool:
    """Tells whether a device's key stream is that of another implementation of ChaCha20, and whether samples that are
    made from it are right."""
    key = torch.arange(1, 9, dtype=torch.int32, device="cpu") * 0x01234567
    there, grid = key.to(device), (-(-_TESTED_BLOCKS // BLOCK_LANES),)
    words = torch.zeros(_TESTED_BLOCKS, 16, dtype=torch.int32, device=device)
    count = 8 * _TESTED_BLOCKS - 3
    samples = torch.full((count,), 5, dtype=torch.int32, device=device)
    with product_triton.on(device):
        kernels().key_stream[grid](words, there, _TESTED_BLOCKS, BLOCK=BLOCK_LANES, **LAUNCH_OPTIONS)
        kernels().add_centred_binomial[grid](samples, there, count, _TESTED_BLOCKS, BLOCK=BLOCK_LANES, **LAUNCH_OPTIONS)
    expected = key_stream(key, _TESTED_BLOCKS)
    return torch.equal(words.cpu(), expected) and torch.equal(samples.cpu(), 5 + samples_of(expected)[:count])


def key_stream(key: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns the first blocks of ChaCha20's key stream, with a nonce of zeros, as the cryptography library makes them:
    int32, shape (num_blocks, 16). `key` is int32, shape (8,)."""
    cipher = Cipher(algorithms.ChaCha20(key.numpy().tobytes(), bytes(16)), mode=None).encryptor()
    stream = bytearray(cipher.update(bytes(64 * num_blocks)))
    return torch.frombuffer(stream, dtype=torch.int32).view(num_blocks, 16)


def samples_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the samples of a key stream in the order in which the kernel adds them: int32, shape (8 · blocks,).
    Sample i of each block counts the ones among the low 21 bits of its words 2i and 2i + 1."""
    bits = (words.view(-1, 8, 2, 1) >> torch.arange(21, device="cpu")) & 1  # (blocks, samples, words, bits)
    return (bits.sum(dim=(2, 3)) - 21).t().reshape(-1).to(torch.int32)
