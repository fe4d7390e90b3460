"""This module holds the Triton kernels of noise/polynomial/device_error.py: ChaCha20 (RFC 8439) with a key in the
device's memory and a nonce of zeros, one block of the key stream for each lane, and centred binomial samples made from
it. Nothing here branches on a drawn word or uses one as an index."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turned(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d = _turned(d ^ a, 16)
    c += d
    b = _turned(b ^ c, 12)
    a += b
    d = _turned(d ^ a, 8)
    c += d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(key, index: tl.constexpr, lanes):
    return lanes * 0 + tl.load(key + index).to(tl.uint32, bitcast=True)


@triton.jit
def _chacha20(key, counter):
    """Returns the 16 words of the block with each counter. The state's words 0 to 3 are RFC 8439's constants, 4 to 11
    the key, 12 the counter and 13 to 15 the nonce."""
    zero = counter * 0
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1, k2, k3 = _word(key, 0, zero), _word(key, 1, zero), _word(key, 2, zero), _word(key, 3, zero)
    k4, k5, k6, k7 = _word(key, 4, zero), _word(key, 5, zero), _word(key, 6, zero), _word(key, 7, zero)
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, counter, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + counter, x13, x14, x15,
    )  # fmt: skip


@triton.jit
def _ones(x):
    """Returns the number of ones among the low 21 bits of each word, without a table."""
    x = x & 0x1FFFFF
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def _add(masks, at, count, first, second):
    is_real = at < count
    sample = (_ones(first) + _ones(second)).to(tl.int32) - 21
    tl.store(masks + at, tl.load(masks + at, mask=is_real, other=0) + sample, mask=is_real)


@triton.jit
def add_centred_binomial(masks, key, count, num_blocks, BLOCK: tl.constexpr):
    """Adds a sample to each of `count` numbers: sample i of block b to number i · num_blocks + b."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha20(key, lane.to(tl.uint32))
    at = tl.where(lane < num_blocks, lane, count)
    step = tl.cast(num_blocks, tl.int64)
    _add(masks, at, count, w0, w1)
    _add(masks, at + step, count, w2, w3)
    _add(masks, at + 2 * step, count, w4, w5)
    _add(masks, at + 3 * step, count, w6, w7)
    _add(masks, at + 4 * step, count, w8, w9)
    _add(masks, at + 5 * step, count, w10, w11)
    _add(masks, at + 6 * step, count, w12, w13)
    _add(masks, at + 7 * step, count, w14, w15)


@triton.jit
def _put(words, lane, num_blocks, index: tl.constexpr, word):
    tl.store(words + lane * 16 + index, word.to(tl.int32, bitcast=True), mask=lane < num_blocks)


@triton.jit
def key_stream(words, key, num_blocks, BLOCK: tl.constexpr):
    """Writes the words of the first blocks of the key stream: int32, shape (num_blocks, 16)."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha20(key, lane.to(tl.uint32))
    _put(words, lane, num_blocks, 0, w0)
    _put(words, lane, num_blocks, 1, w1)
    _put(words, lane, num_blocks, 2, w2)
    _put(words, lane, num_blocks, 3, w3)
    _put(words, lane, num_blocks, 4, w4)
    _put(words, lane, num_blocks, 5, w5)
    _put(words, lane, num_blocks, 6, w6)
    _put(words, lane, num_blocks, 7, w7)
    _put(words, lane, num_blocks, 8, w8)
    _put(words, lane, num_blocks, 9, w9)
    _put(words, lane, num_blocks, 10, w10)
    _put(words, lane, num_blocks, 11, w11)
    _put(words, lane, num_blocks, 12, w12)
    _put(words, lane, num_blocks, 13, w13)
    _put(words, lane, num_blocks, 14, w14)
    _put(words, lane, num_blocks, 15, w15)
