"""Tests the compiled kernels: they are available where they should be, exact in pieces and threads, and stay inside the
given memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compiled_kernels import forget, guarded, needs_products
from tests.support.threads import in_child
from tests.support.waiting import WAIT_S, end
from wire.errors import InvalidTensor
from wire.ring import coding, kernels, tiles, widths
from wire.ring import product as plain
from wire.ring.buffers import unwritten_tensor

CPU_FLAGS = Path("/proc/cpuinfo")
HAS_AVX2 = platform.machine() == "x86_64" and CPU_FLAGS.exists() and " avx2 " in CPU_FLAGS.read_text()
needs_vnni = pytest.mark.skipif(not kernels.has_vnni(), reason="this processor has no AVX-512 with VNNI")


@pytest.fixture(params=["avx2", pytest.param("vnni", marks=needs_vnni)])
def _each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_vnni", lambda: request.param == "vnni")


def draw(num_rows: int, d: int, m: int, is_transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * d + m)
    rows = torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator).to(torch.int32)
    weight = torch.randint(-128, 128, (d, m), generator=generator).to(torch.int8)
    return rows, weight.t().contiguous().t() if is_transposed else weight


def product(parts: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    replies = [torch.empty(part.shape[0], weight.shape[1], dtype=torch.int32) for part in parts]
    kernels.products(parts, weight, replies)
    return torch.cat(replies)


@pytest.mark.skipif(not HAS_AVX2, reason="this processor has no AVX2")
def test_setting_up_has_built_them() -> None:
    assert kernels.LIBRARY.is_file()
    assert kernels.available()
    flags = CPU_FLAGS.read_text()
    assert kernels.has_vnni() is all(f" {name} " in flags for name in ("avx512bw", "avx512vl", "avx512_vnni"))


@pytest.fixture
def _loaded_anew() -> Iterator[None]:
    forget(kernels)
    yield
    forget(kernels)


@needs_products
@pytest.mark.usefixtures("_loaded_anew")
def test_vnni_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILBASE_KERNELS", "avx2")
    assert not kernels.has_vnni()
    assert kernels.available()


@needs_products
@pytest.mark.usefixtures("_loaded_anew")
def test_they_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILBASE_KERNELS", "none")
    assert not kernels.available()
    assert not kernels.has_vnni()


@needs_products
@pytest.mark.usefixtures("_loaded_anew")
def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "_kernels.so")
    assert not kernels.available()
    forget(kernels)
    kernels.LIBRARY.write_bytes(b"\x7fELF")
    assert not kernels.available()


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 31, 63, 64, 65, 511, 513])
@pytest.mark.parametrize("d", [1, 2, 7, 8, 17, 33, 63, 64, 1023, 1025])
def test_every_edge_of_a_block(d: int, m: int, is_transposed: bool) -> None:
    for num_rows in (1, 2, 3, 4, 5, 49, 97):
        rows, weight = draw(num_rows, d, m, is_transposed)
        assert torch.equal(product([rows], weight), plain.plain_product(rows, weight)), num_rows


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("d", "m"), [(1, 1100), (64, 1024), (193, 1091), (577, 960), (700, 2049), (1537, 64)])
def test_a_few_rows_in_several_blocks(d: int, m: int, is_transposed: bool) -> None:
    for num_rows in (0, 2, 3, 4, 7, 16, 33, 96):
        rows, weight = draw(num_rows, d, m, is_transposed)
        assert torch.equal(product([rows], weight), plain.plain_product(rows, weight)), num_rows


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("number", [-(2**31), 2**31 - 1, -(2**15), 2**15, 2**15 - 1, 0xFF00FF, -1, 0])
def test_extremes_of_a_few_rows_wrap_as_integers_do(number: int, is_transposed: bool) -> None:
    generator = torch.Generator().manual_seed(number & 0xFFFF)
    rows = torch.full((17, 333), number, dtype=torch.int32)
    rows[5:9, ::3] = -(2**31)
    for least, most in [(-128, -128), (127, 127), (-128, 127)]:
        weight = torch.tensor([least, most], dtype=torch.int8)[torch.randint(0, 2, (333, 90), generator=generator)]
        weight = weight.t().contiguous().t() if is_transposed else weight
        exact = plain.to_int32(rows.to(torch.int64) @ weight.to(torch.int64))
        for num_rows in (1, 2, 3, 4, 16, 17):
            assert torch.equal(product([rows[:num_rows]], weight), exact[:num_rows])


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("sizes", [[512], [1, 511], [200, 0, 300, 1], [40], [5, 30]])
def test_pieces_in_several_threads(sizes: list[int], is_transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(tiles, "_SHARED_WORK", 1 << 22)  # 35 rows are shared in both forms.
    rows, weight = draw(sum(sizes), 700, 800, is_transposed)
    assert len(tiles.product_tiles(sum(sizes), 700, 800, kernels.has_vnni())) > 2
    expected = plain.plain_product(rows, weight)
    for _ in range(20):
        assert torch.equal(product(list(rows.split(sizes)), weight), expected)


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("are_secret", [False, True])
def test_rows_of_24_bits_among_others(is_transposed: bool, are_secret: bool) -> None:
    """Rows whose lowest bytes are zero may be multiplied in a way of their own, three rows and 1,024 numbers at a
    time."""
    rows, weight = draw(300, 1500, 130, is_transposed)
    short = widths.rounded(rows.clone(), 24)
    for chosen in (range(300), range(0), range(0, 300, 2), range(17, 203)):
        mixed = rows.clone()
        mixed[list(chosen)] = short[list(chosen)]
        mixed[5, :1024], mixed[6] = 1, 0  # short in the second block only, and in both
        reply = torch.empty(300, 130, dtype=torch.int32)
        kernels.products([mixed], weight, [reply], are_secret)
        assert torch.equal(reply, plain.plain_product(mixed, weight))


MUCH = 1 << 24
"""The number of multiplications for each number of a product, so that every product is worth sharing among threads."""


@needs_products
def test_pieces_cover_every_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_threads in (1, 2, 3, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        for num_rows, m in [(1, 1), (1, 3000), (95, 257), (96, 1), (97, 5), (5000, 5000), (0, 9)]:
            seen = torch.zeros(num_rows, m, dtype=torch.int8)
            for first_row, last_row, first_column, last_column in tiles.product_tiles(num_rows, MUCH, m):
                assert 0 <= first_row <= last_row <= num_rows
                assert 0 <= first_column <= last_column <= m
                seen[first_row:last_row, first_column:last_column] += 1
            assert bool((seen == 1).all()), (num_threads, num_rows, m)


def test_threads_share_later_with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    widest = (16, 576, 3072)
    assert len(tiles.product_tiles(*widest)) == 4
    assert tiles.product_tiles(*widest, with_vnni=True) == [(0, 16, 0, 3072)]
    assert len(tiles.product_tiles(64, 576, 3072, with_vnni=True)) == 4


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("num_rows", [1, 5, 50, 100])
def test_rows_and_weights_that_are_parts_of_larger_ones(num_rows: int) -> None:
    rows, weight = draw(num_rows, 100, 90)
    expected = plain.plain_product(rows[:, 7:40], weight[7:40, 3:80])
    assert torch.equal(product([rows[:, 7:40]], weight[7:40, 3:80]), expected)
    across = weight.t().contiguous().t()
    assert torch.equal(product([rows[:, 7:40]], across[7:40, 3:80]), expected)
    assert torch.equal(product([rows.t().contiguous().t()[:, 7:40]], weight[7:40, 3:80]), expected)


def zeros(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@needs_products
@pytest.mark.parametrize(
    ("rows", "weight", "reply"),
    [
        (zeros(2, 3, dtype=torch.float32), zeros(3, 2, dtype=torch.int8), zeros(2, 2)),
        (zeros(2, 4), zeros(3, 2, dtype=torch.int8), zeros(2, 2)),
        (zeros(2, 3), zeros(3, 2, dtype=torch.uint8), zeros(2, 2)),
        (zeros(2, 3), zeros(3, 2, dtype=torch.int8), zeros(2, 1)),
        (zeros(2, 3), zeros(3, 2, dtype=torch.int8), zeros(2, 2, dtype=torch.float32)),
        (zeros(2, 3), zeros(3, 2, dtype=torch.int8), zeros(2, 4)[:, ::2]),
        (zeros(2, 3), zeros(6, 4, dtype=torch.int8)[::2, ::2], zeros(2, 2)),
        (zeros(2, 3, device="meta"), zeros(3, 2, dtype=torch.int8), zeros(2, 2)),
        (zeros(2, 3), zeros(3, 2, dtype=torch.int8, device="meta"), zeros(2, 2)),
        (zeros(2, 3), zeros(3, 2, dtype=torch.int8), zeros(2, 2, device="meta")),
    ],
)
def test_refuses_what_the_compiled_code_would_not_notice(
    rows: torch.Tensor, weight: torch.Tensor, reply: torch.Tensor
) -> None:
    with pytest.raises(InvalidTensor):
        kernels.products([rows], weight, [reply])


def inside_guarded_memory() -> str:
    """Runs the kernels on memory that ends where they must end, and compares what they compute."""
    torch.manual_seed(0)
    areas: dict[tuple[int, int], torch.Tensor] = {}

    def scratch(size: int) -> int:
        """Returns memory for packing that ends where memory ends, too. It begins 16 bytes past a cache line, as what
        numpy allocates does: kernels that skip to the next line then use the last byte."""
        mine = threading.get_ident(), size  # As in production, each thread has its own.
        if mine not in areas:
            areas[mine] = guarded(torch.zeros(size, dtype=torch.uint8))
        assert size % 64 == 0
        return areas[mine].data_ptr() + 16

    kernels._scratch = scratch
    for d, m in [(4032, 70), (70, 4032), (3840, 17)]:  # d is no multiple of both forms' blocks
        rows = torch.randint(-(2**31), 2**31, (96, d)).to(torch.int32)
        weight = torch.randint(-128, 128, (m, d)).to(torch.int8)
        for stored in (weight.t(), weight.t().contiguous()):
            reply = torch.zeros(96, m, dtype=torch.int32)
            kernels.products([rows], stored, [reply])
            assert torch.equal(reply, plain.plain_product(rows, stored))

    for num_rows in (1, 2, 3, 4, 16, 50, 100):
        for d, m in [
            (1, 1), (3, 5), (8, 8), (16, 16), (17, 24), (33, 40), (64, 7), (80, 65), (15, 64), (200, 128), (70, 1090),
            (1030, 520),
        ]:  # fmt: skip
            rows = guarded(torch.randint(-(2**31), 2**31, (num_rows, d)).to(torch.int32))
            weight = torch.randint(-128, 128, (d, m)).to(torch.int8)
            for stored in (guarded(weight), guarded(weight.t().contiguous()).t()):
                reply = guarded(torch.zeros(num_rows, m, dtype=torch.int32))
                kernels.products([rows], stored, [reply])
                assert torch.equal(reply, plain.plain_product(rows, weight))

    for num_rows in (1, 2, 5):
        for d in (1, 3, 7, 8, 9, 15, 16, 17, 31, 40):
            code_in_guarded_memory(num_rows, d)
    return "kept inside"


def code_in_guarded_memory(num_rows: int, d: int) -> None:
    rows, alpha = guarded(torch.randn(num_rows, d)), guarded(torch.rand(d) + 0.5)
    numbers, effect = (guarded(torch.randint(-(2**31), 2**31, (num_rows, d)).to(torch.int32)) for _ in range(2))
    for scale in (alpha, None):
        encoded = guarded(torch.zeros(num_rows, d, dtype=torch.int32))
        betas = kernels.encode(rows, scale, 1e6, 2.0**-100, encoded)
        assert betas is not None
        betas = guarded(betas)
        scaled = rows if scale is None else rows * scale
        # Rounding to whole numbers moves a number by a half. Numbers of up to 1e6 are moved too by the roundings of
        # float32: of the scale, of its reciprocal, of the product, and of the product here.
        most = 0.5 + 4 * 1e6 * 2.0**-24
        assert ((encoded.double() * betas - scaled).abs() <= most * betas).all()
        for taken in (effect, None):
            decoded = (numbers if taken is None else numbers - taken) * (1 if scale is None else scale) * betas
            assert torch.equal(kernels.decode(numbers, taken, betas, scale), decoded)
        packed = guarded(widths.pack_effect(effect, torch.empty(num_rows, 3 * d, dtype=torch.uint8)))
        decoded = kernels.decode(numbers, widths.rounded(effect.clone(), 24), betas, scale)
        assert torch.equal(kernels.decode(numbers, packed, betas, scale), decoded)


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (70, 65), (1030, 9)])
def test_one_row_in_bytes(d: int, m: int, is_transposed: bool) -> None:
    rows, weight = draw(1, d, m, is_transposed)
    one, message, reply = kernels.OneRow(weight), bytearray(48 + 4 * d), bytearray(b"\xff" * (48 + 4 * m + 4))
    message[48:] = rows.numpy().tobytes()
    one.multiply(memoryview(message)[48:], memoryview(reply)[48:-4])
    assert reply[48:-4] == plain.plain_product(rows, weight).numpy().tobytes()
    assert (reply[:48], reply[-4:]) == (b"\xff" * 48, b"\xff" * 4)


@needs_products
@pytest.mark.usefixtures("_each_form")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("bits", "reply_bits"), [(24, 24), (26, 26), (28, 16), (32, 16), (24, 32)])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (70, 65), (1031, 9)])
def test_one_packed_row(d: int, m: int, bits: int, reply_bits: int, is_transposed: bool) -> None:
    rows, weight = draw(1, d, m, is_transposed)
    rows = widths.rounded(rows, bits)
    row = bytearray(rows.numpy().tobytes() if bits == 32 else widths.pack(rows, bits))
    reply = bytearray(b"\xff" * (3 + widths.row_bytes(m, reply_bits) + 3))  # at an odd address
    kernels.OneRow(weight).multiply_packed(memoryview(row), bits, memoryview(reply)[3:-3], reply_bits)
    product = plain.plain_product(rows, weight)
    assert reply[3:-3] == (product.numpy().tobytes() if reply_bits == 32 else bytes(widths.pack(product, reply_bits)))
    assert reply[:3] + reply[-3:] == b"\xff" * 6


@needs_products
def test_one_packed_row_refuses_what_the_compiled_code_would_not_notice() -> None:
    one = kernels.OneRow(zeros(3, 5, dtype=torch.int8))
    row, reply = memoryview(bytearray(10)), memoryview(bytearray(17))
    one.multiply_packed(row, 26, reply, 26)
    row[-1] = 0x80  # three numbers of 26 bits end with two bits that must be zero
    with pytest.raises(InvalidTensor, match="zero bits"):
        one.multiply_packed(row, 26, reply, 26)
    row[-1] = 0
    for bad, bits, written, reply_bits in [
        (row[:9], 26, reply, 26),
        (row, 24, reply, 26),
        (row, 26, reply[:16], 26),
        (row, 26, reply, 24),
        (row.toreadonly(), 26, reply, 26),
        (row, 26, reply.toreadonly(), 26),
        (memoryview(bytearray(20))[::2], 26, reply, 26),
        (memoryview(bytearray(12)), 30, reply, 26),
        (row, 26, memoryview(bytearray(19)), 30),
        (memoryview(bytearray(5)), 14, reply, 26),
    ]:
        with pytest.raises(InvalidTensor):
            one.multiply_packed(bad, bits, written, reply_bits)


@needs_products
@pytest.mark.parametrize("width", [1, 7, 8, 33, 40])
def test_one_row_is_coded_as_many_are(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, alpha = torch.randn(1, width, generator=generator), torch.rand(width, generator=generator) + 0.5
    mask, effect = (draw(1, width, 1)[0] for _ in range(2))
    for scale in (None, alpha):
        codec = kernels.RowCodec(scale, scale, width, width, 1e6, 2.0**-100)
        out, encoded = bytearray(b"\xff" * (4 * width + 8)), torch.empty(1, width, dtype=torch.int32)
        beta = codec.encode(rows, memoryview(out)[4:-4])
        betas = kernels.encode(rows, scale, 1e6, 2.0**-100, encoded)
        assert betas is not None
        assert (beta.value, out[4:-4]) == (float(betas), encoded.numpy().tobytes())
        codec.add(mask, memoryview(out)[4:-4])
        assert out[4:-4] == (encoded + mask).numpy().tobytes()
        codec.encode(rows, memoryview(out)[4:-4])
        sent = bytearray(b"\xff" * (widths.row_bytes(width, 26) + 8))
        codec.add(mask, memoryview(out)[4:-4], 26, memoryview(sent)[4:-4])
        assert out[4:-4] == widths.rounded(encoded + mask, 26).numpy().tobytes()
        assert sent[4:-4] == bytes(widths.pack(encoded + mask, 26))
        assert sent[:4] + sent[-4:] == b"\xff" * 8
        assert out[:4] + out[-4:] == b"\xff" * 8
        packed = widths.pack_effect(effect, torch.empty(1, 3 * width, dtype=torch.uint8))
        rounded = widths.rounded(effect.clone(), 24)
        assert torch.equal(codec.decode(mask, beta, packed), codec.decode(mask, beta, rounded))
        for taken in (None, effect, packed):
            assert torch.equal(codec.decode(mask, beta, taken), kernels.decode(mask, taken, betas, scale))
    rows[0, -1] = float("nan")
    assert codec.encode(rows, memoryview(out)[4:-4]) is None


@needs_products
def test_one_row_is_coded_within_its_memory_only() -> None:
    codec, out = kernels.RowCodec(None, None, 4, 6, 1e6, 1.0), memoryview(bytearray(16))
    beta = codec.encode(torch.ones(1, 4), out)
    for row in (torch.ones(1, 5), torch.ones(2, 4), torch.ones(1, 8)[:, ::2], zeros(1, 4)):
        with pytest.raises(InvalidTensor):
            codec.encode(row, out)
    for bad in (memoryview(bytearray(12)), memoryview(bytearray(20)), out.toreadonly()):
        with pytest.raises(InvalidTensor):
            codec.encode(torch.ones(1, 4), bad)
        with pytest.raises(InvalidTensor):
            codec.add(zeros(1, 4), bad)
    for mask in (zeros(1, 3), zeros(1, 4, dtype=torch.float32), zeros(1, 8)[:, ::2]):
        with pytest.raises(InvalidTensor):
            codec.add(mask, out)
    for bits, sent in [(24, 11), (24, 13), (32, 16), (30, 15), (14, 7)]:
        with pytest.raises(InvalidTensor):
            codec.add(zeros(1, 4), out, bits, memoryview(bytearray(sent)))
    with pytest.raises(InvalidTensor):
        codec.add(zeros(1, 4), out, 24, memoryview(bytes(12)))
    for reply, effect in [
        (zeros(1, 4), None),
        (zeros(1, 6), zeros(1, 4)),
        (zeros(1, 12)[:, ::2], None),
        (zeros(1, 6), zeros(1, 6, dtype=torch.uint8)),
        (zeros(1, 6), zeros(1, 36, dtype=torch.uint8)[:, ::2]),
        (zeros(1, 18, dtype=torch.uint8), None),
    ]:
        with pytest.raises(InvalidTensor):
            codec.decode(reply, beta, effect)
    for arguments in [
        (torch.ones(3), None, 4, 6, 1e6, 1.0),
        (None, torch.ones(4), 4, 6, 1e6, 1.0),
        (None, None, 0, 6, 1e6, 1.0),
        (None, None, 4, 6, 2.0**31, 1.0),
    ]:
        with pytest.raises(InvalidTensor):
            kernels.RowCodec(*arguments)  # type: ignore[arg-type]


@needs_products
def test_one_row_refuses_what_the_compiled_code_would_not_notice() -> None:
    one = kernels.OneRow(zeros(3, 2, dtype=torch.int8))
    row, reply = memoryview(bytearray(16)), memoryview(bytearray(16))
    one.multiply(row[:12], reply[:8])
    for bad, written in [
        (row[:8], reply[:8]),
        (row, reply[:8]),
        (row[:12], reply[:12]),
        (row[:12], reply[:4]),
        (row[:12].toreadonly(), reply[:8]),
        (row[:12], reply[:8].toreadonly()),
        (row[1:13], reply[:8]),
        (row[:12], reply[2:10]),
    ]:
        with pytest.raises(InvalidTensor):
            one.multiply(bad, written)
    for weight in (
        zeros(3, 2),
        zeros(3, 0, dtype=torch.int8),
        zeros(3, dtype=torch.int8),
        zeros(4, 4, dtype=torch.int8)[::2, ::2],
    ):
        with pytest.raises(InvalidTensor):
            kernels.OneRow(weight)


@needs_products
@pytest.mark.parametrize("form", ["avx2", pytest.param("", marks=needs_vnni)])
def test_reads_and_writes_nothing_past_an_end(form: str) -> None:
    """The kernels run in a process of their own, which ends if one reads or writes past an end."""

    def run() -> str:
        os.environ["VEILBASE_KERNELS"] = form
        forget(kernels)
        return inside_guarded_memory()

    assert in_child(run) == "kept inside"


@needs_products
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_the_users_default_type_is_not_that_of_the_memory(name: str) -> None:
    """Results are float32, whatever torch's default dtype is. transformers sets the default for the whole process while
    it loads a model."""
    rows = torch.randn(64, 300)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        encoded, betas = coding.encode(rows, 100.0)
        decoded = coding.decode(encoded, betas)
    finally:
        torch.set_default_dtype(before)
    assert (betas.dtype, decoded.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(decoded, rows, atol=1e-4)


@needs_products
def test_nor_is_the_users_default_device_its_place() -> None:
    rows, weight = torch.randn(64, 300), torch.randint(-127, 128, (300, 40), dtype=torch.int8)
    with torch.device("meta"):
        encoded, betas = coding.encode(rows, 2000.0)
        decoded = coding.decode(coding.product(encoded, weight), betas)
    assert torch.allclose(decoded, rows @ weight.to(torch.float32), atol=0.1)


@needs_products
def test_memory_is_held_by_who_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call is interrupted, a helper thread may end its piece later. Until then the memory must not be used for
    another reply."""
    given: list[Callable[[], None]] = []
    monkeypatch.setattr(kernels, "share", lambda work, items: given.append(lambda: work(iter(items))))
    rows, weight = draw(200, 512, 512)
    plain.product(rows, weight)
    with contextlib.suppress(InvalidTensor):  # its rows have not been used
        coding.encode(torch.randn(200, 512), 100.0)
    others = [unwritten_tensor(200, 512, torch.int32).fill_(7) for _ in range(3)]
    while given:
        given.pop()()
    assert all((other == 7).all() for other in others)


@needs_products
@pytest.mark.usefixtures("_loaded_anew")
@pytest.mark.parametrize("older", [0, 1])
def test_a_library_of_another_version_is_not_used(older: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git pull` may leave a compiled library of an older version beside new sources. It must not be used."""
    load = ctypes.CDLL

    def versioned(path: str) -> Any:
        library: Any = load(path)
        number = library.veilbase_kernels_version()
        library.veilbase_kernels_version = lambda: number - older
        return library

    monkeypatch.setattr(ctypes, "CDLL", versioned)
    assert kernels.available() is not bool(older)


@needs_products
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_rows_that_are_no_matrix_are_refused(shape: tuple[int, ...]) -> None:
    weight = torch.zeros(4, 6, dtype=torch.int8)
    with pytest.raises(InvalidTensor, match="expected int32 rows"):
        kernels.products([torch.zeros(shape, dtype=torch.int32)], weight, [torch.zeros(2, 6, dtype=torch.int32)])


@needs_products
def test_threads_at_once_do_not_share_scratch_memory() -> None:
    cases = [draw(num_rows, 64 + num_rows, 48) for num_rows in (1, 3, 40, 200)]
    expected = [plain.plain_product(*case) for case in cases]
    begin = threading.Barrier(len(cases), timeout=WAIT_S)
    right: list[bool] = []

    def run(index: int) -> None:
        begin.wait()
        right.extend(torch.equal(product([cases[index][0]], cases[index][1]), expected[index]) for _ in range(50))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    end(threads)
    assert right == [True] * 50 * len(cases)
