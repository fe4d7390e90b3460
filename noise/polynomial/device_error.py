"""This module adds the error of lattice masks on an NVIDIA GPU: centred binomial samples from a ChaCha20 key stream, under
a key that the operating system draws for each call.

Guarantees: every call has a key of its own, so no part of a key stream is used twice. The device passes a self-test
against another implementation of ChaCha20 before its first use. The kernels branch on no drawn value and use none as an
index. The key is overwritten on the device after its use. Needs Triton; callers must ask `is_exact` first, and draw on
the CPU where that is False.

Source: RFC 8439 (ChaCha20); the error is that of noise/sampling.py, `centred_binomial`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

MOST_SAMPLES = 1 << 34
"""The most samples of one call: the counter of a key stream has 32 bits, and a block of it gives eight samples."""
_BLOCK = 128
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
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
    """
    count = masks.numel()
    if count == 0:
        return
    key = _fresh_key(masks.device)
    num_blocks = -(-count // 8)
    with torch.cuda.device(masks.device) if masks.is_cuda else contextlib.nullcontext():
        grid = (-(-num_blocks // _BLOCK),)
        kernels().add_centred_binomial[grid](masks, key, count, num_blocks, BLOCK=_BLOCK, **_OPTIONS)
    key.zero_()


def _fresh_key(device: torch.device) -> torch.Tensor:
    here = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.int32)
    there = here.to(device, copy=True)
    here.zero_()
    return there


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
    key = torch.arange(1, 9, dtype=torch.int32) * 0x01234567
    there, grid = key.to(device), (-(-_TESTED_BLOCKS // _BLOCK),)
    words = torch.zeros(_TESTED_BLOCKS, 16, dtype=torch.int32, device=device)
    count = 8 * _TESTED_BLOCKS - 3
    samples = torch.full((count,), 5, dtype=torch.int32, device=device)
    kernels().key_stream[grid](words, there, _TESTED_BLOCKS, BLOCK=_BLOCK, **_OPTIONS)
    kernels().add_centred_binomial[grid](samples, there, count, _TESTED_BLOCKS, BLOCK=_BLOCK, **_OPTIONS)
    expected = key_stream(key, _TESTED_BLOCKS)
    return torch.equal(words.cpu(), expected) and torch.equal(samples.cpu(), 5 + samples_of(expected)[:count])


def key_stream(key: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns the first blocks of ChaCha20's key stream, with a nonce of zeros, as the cryptography library makes them:
    int32, shape (num_blocks, 16). `key` is int32, shape (8,)."""
    cipher = Cipher(algorithms.ChaCha20(key.numpy().tobytes(), bytes(16)), mode=None).encryptor()
    stream = bytearray(cipher.update(bytes(64 * num_blocks)))
    return torch.frombuffer(stream, dtype=torch.int32).view(num_blocks, 16)


def samples_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the samples of a key stream in the order in which the kernel adds them: int32, shape (8 · blocks,). Sample
    i of each block counts the ones among the low 21 bits of its words 2i and 2i + 1."""
    bits = (words.view(-1, 8, 2, 1) >> torch.arange(21)) & 1  # (blocks, samples, words, bits)
    return (bits.sum(dim=(2, 3)) - 21).t().reshape(-1).to(torch.int32)
