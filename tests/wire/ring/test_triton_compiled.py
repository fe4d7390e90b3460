"""Tests the Triton kernels' code for each kind of chip, compiled without a GPU: whether int8 sums saturate, and whether
registers spill to memory.

These tests fail, and do not skip, where Triton or its assembler is missing.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import triton.backends.nvidia

from noise.polynomial import device_error
from tests.support.triton_kernels import compile_kernel
from wire.ring import codec_triton, product_triton
from wire.ring.product_triton import (
    BLOCKS,
    FEW_BLOCKS,
    SMALL_BLOCKS,
    SPLIT_BLOCKS,
    STACKED_BLOCKS,
    WRAPPING,
    Form,
    form_of,
)

ASSEMBLER = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas-blackwell"
CHIPS = [80, 89, 90, 100, 103]
"""The compute capabilities for which kernels are compiled: A100, L4 and RTX 40, H100 and H200, B200, B300."""
_compiled: list[Callable[..., str]] = []


@pytest.fixture(scope="module", autouse=True)
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts the process that compiles, with an empty folder for what was compiled."""
    folder = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        _compiled.append(functools.cache(lambda *what: pool.submit(compile_kernel, *what, folder).result()))
        yield
        _compiled.clear()


def compiled(kernel: str, chip: int, types: tuple[str, ...], settings: tuple[tuple[str, int], ...]) -> str:
    """Returns the PTX of a kernel; see `compile_kernel`. Each kernel is compiled once."""
    (compile_once,) = _compiled
    return compile_once(kernel, chip, types, settings)


def code_of(form: Form, chip: int, bits: int = 32, **changes: int) -> str:
    """Returns the PTX of the product of planes in a form."""
    settings: dict[str, int] = {**BLOCKS[form], "GROUP_M": 8, "ADDS": False, **changes}
    if form == "digits":
        settings |= {"NUM_PLANES": 3 if bits == 32 else 2, "BITS": 11 if bits == 32 else 12}
        return compiled("multiply_digits", chip, ("*fp16", "*i8", "*i32"), tuple(settings.items()))
    if form == "described":
        settings["NUM_PLANES"] = bits // 8
        described = (
            f"tensordesc<i8[{settings['BLOCK_M']}, {settings['BLOCK_K']}]>",
            f"tensordesc<i8[{settings['BLOCK_N']}, {settings['BLOCK_K']}]>",
        )
        return compiled("multiply_described", chip, (*described, "*i32"), tuple(settings.items()))
    settings |= {"NUM_PLANES": bits // 8, "SUM_PER_PLANE": form == "planes"}
    return compiled("multiply_planes", chip, ("*i8", "*i8", "*i32"), tuple(settings.items()))


def code_for_few(chip: int, height: int, bits: int = 32) -> str:
    """Returns the PTX of the product of at most `height` rows."""
    is_split = height > product_triton.MOST_FEW_ROWS
    blocks = STACKED_BLOCKS if is_split else FEW_BLOCKS
    settings = {**blocks, "ROWS": height, "IS_SPLIT": is_split, "NUM_PLANES": bits // 8, "inner_stride": 1}
    return compiled("multiply_few", chip, ("*i8" if is_split else "*i32", "*i8", "*i32"), tuple(settings.items()))


def spilled_bytes(ptx: str, folder: Path) -> int:
    """Returns the bytes of registers that the assembler spills to memory."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    (folder / "kernel.ptx").write_text(ptx)
    said = subprocess.run(
        [ASSEMBLER, "-v", f"--gpu-name={target}", folder / "kernel.ptx", "-o", folder / "kernel.cubin"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    (stores,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(stores)


def saturates(ptx: str) -> bool:
    """Returns whether an int8 product of this code saturates."""
    assert re.search(r"mma[\w.:]*(s8\.s8|i8|f16)", ptx), "the code multiplies with matrix units"
    return "satfinite" in ptx


# ---- sums that wrap, and sums that saturate -------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_one_sum_for_all_planes_is_used_only_where_it_wraps(chip: int) -> None:
    """`planes` is exact either way, so whether it saturates on another chip may change with Triton's version."""
    capability = divmod(chip, 10)
    assert (form_of(capability) == "described") is (capability in WRAPPING)
    assert not (form_of(capability) == "described" and saturates(code_of("described", chip)))


@pytest.mark.parametrize("chip", [80, 89, 103])
def test_one_sum_for_all_planes_would_saturate_on_other_chips(chip: int) -> None:
    """This is the control of the test above."""
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in code_of("horner", chip)


def test_hopper_uses_its_own_matrix_units() -> None:
    assert "wgmma.mma_async.sync.aligned.m64" in code_of("horner", 90)
    code = code_of("described", 90)
    assert "wgmma.mma_async.sync.aligned.m64" in code
    assert "cp.async.bulk.tensor" in code, "the copy engine reads the operands"


def test_blackwell_ultra_multiplies_in_float16() -> None:
    code = code_of("digits", 103)
    assert "kind::f16" in code
    assert not saturates(code)


# ---- spills ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 24])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_chips_form_spills_nothing(chip: int, bits: int, tmp_path: Path) -> None:
    assert spilled_bytes(code_of(form_of(divmod(chip, 10)), chip, bits), tmp_path) == 0


@pytest.mark.parametrize("bits", [32, 24])
def test_small_blocks_spill_nothing_and_wrap(bits: int, tmp_path: Path) -> None:
    code = code_of("described", 90, bits, **SMALL_BLOCKS["described"])
    assert spilled_bytes(code, tmp_path) == 0
    assert not saturates(code)


@pytest.mark.parametrize("height", [4, 16, 64])
@pytest.mark.parametrize("chip", CHIPS)
def test_few_rows_spill_nothing(chip: int, height: int, tmp_path: Path) -> None:
    assert spilled_bytes(code_for_few(chip, height), tmp_path) == 0


def test_blocks_that_are_too_large_spill(tmp_path: Path) -> None:
    """This is the control of the two tests above: four times the columns take more registers than there are."""
    assert spilled_bytes(code_of("planes", 80, BLOCK_N=256), tmp_path) > 0


# ---- what is launched -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_the_first_pass_compiles(chip: int) -> None:
    block = tuple(SPLIT_BLOCKS.items())
    assert "st.global" in compiled("split_limbs", chip, ("*i32", "*i8"), (("NUM_PLANES", 4), *block))
    assert "st.global" in compiled("split_digits", chip, ("*i32", "*fp16"), (("NUM_PLANES", 3), ("BITS", 11), *block))


def test_digits_sums_of_a_block_are_exact_in_float32() -> None:
    for bits in (11, 12):
        largest_block = 64 if bits == 12 else 128
        assert BLOCKS["digits"]["BLOCK_K"] <= largest_block
        assert 2 ** (bits - 1) * 128 * largest_block == 2**24


@pytest.mark.parametrize("chip", CHIPS)
def test_what_encodes_and_decodes_compiles(chip: int, tmp_path: Path) -> None:
    codec = (("HAS_ALPHA", True), *codec_triton.ENCODE_BLOCKS.items())
    encoder = compiled("encode_rows", chip, ("*fp32", "*fp32", "*i32", "*fp32", "*i32"), codec)
    codec = (("HAS_EFFECT", True), ("HAS_ALPHA", True), *codec_triton.DECODE_BLOCKS.items())
    decoder = compiled("decode_rows", chip, ("*i32", "*i32", "*fp32", "*fp32", "*fp32"), codec)
    assert spilled_bytes(encoder, tmp_path) == spilled_bytes(decoder, tmp_path) == 0
    assert not re.search(r"(fma|div\.full|div\.approx|sqrt\.approx)\S*", encoder + decoder), "rounded as on the CPU"


@pytest.mark.parametrize("chip", CHIPS)
def test_what_draws_errors_compiles_without_a_branch_on_what_is_drawn(chip: int, tmp_path: Path) -> None:
    """The only loop is that over rounds, whose bound is a constant."""
    settings = (("BLOCK", device_error.BLOCK_LANES), *device_error.LAUNCH_OPTIONS.items())
    code = compiled("add_centred_binomial", chip, ("*i32", "*i32"), settings)
    assert spilled_bytes(code, tmp_path) == 0
    branches = re.findall(r"^.*\bbra\S*\s.*$", code, re.MULTILINE)
    assert len(branches) <= 1, branches
