"""Runs the Triton kernels in Triton's interpreter on tensors of the CPU, and compiles them for chips that this machine
does not have.

Triton's interpreter changes Triton's functions for the whole process, so tests call `compile_kernel` in a process of
its own, in which no kernel was interpreted."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import triton
import triton.experimental.gluon  # loaded before the patches below, since it refuses interpreted functions
import triton.language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from noise.polynomial import device_error, triton_chacha
from wire.ring import product_triton, triton_kernels

SMALL = {"BLOCK_M": 8, "BLOCK_N": 64, "BLOCK_K": 128}
"""Block sizes with which the interpreter takes a tenth of a second for a shape."""
FEW_ROWS, STACKED_ROWS = 4, 8
"""What `lower_limits` puts in the place of MOST_FEW_ROWS and MOST_STACKED_ROWS."""


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes wire/ring/product_triton.py run its kernels in the interpreter, in small blocks."""
    module = _interpreted(monkeypatch, triton_kernels.__file__)
    monkeypatch.setattr(product_triton, "kernels", lambda: module)
    for form, blocks in product_triton.BLOCKS.items():
        inner = min(blocks["BLOCK_K"], SMALL["BLOCK_K"])
        monkeypatch.setitem(product_triton.BLOCKS, form, {**blocks, **SMALL, "BLOCK_K": inner})
    monkeypatch.setattr(product_triton, "SMALL_BLOCKS", {})
    stacked = {**product_triton.STACKED_BLOCKS, "BLOCK_N": SMALL["BLOCK_N"], "BLOCK_K": SMALL["BLOCK_K"]}
    monkeypatch.setattr(product_triton, "STACKED_BLOCKS", stacked)
    monkeypatch.setattr(product_triton, "FEW_BLOCKS", {**product_triton.FEW_BLOCKS, "BLOCK_N": SMALL["BLOCK_N"]})


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes few rows be many for wire/ring/product_triton.py. The first pass runs a program for each row, of which the
    interpreter does two hundred a second, so a product of 65 rows would take five times as long as one of 9."""
    monkeypatch.setattr(product_triton, "MOST_FEW_ROWS", FEW_ROWS)
    monkeypatch.setattr(product_triton, "MOST_STACKED_ROWS", STACKED_ROWS)


def interpret_chacha(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes noise/polynomial/device_error.py run its kernels in the interpreter, on tensors of the CPU, in blocks of
    more lanes: each block takes half a second, whatever its size."""
    monkeypatch.setattr(device_error, "BLOCK_LANES", 256)
    module = _interpreted(monkeypatch, triton_chacha.__file__)
    monkeypatch.setattr(device_error, "kernels", lambda: module)


def _interpreted(monkeypatch: pytest.MonkeyPatch, file: str) -> Any:
    """Returns a module of kernels, loaded a second time for the interpreter."""
    # Triton reads the variable when a kernel is decorated.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location("interpreted_triton_kernels", file)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    for library in (triton.language, triton.language.standard):  # Kernels call these functions.
        for name, function in list(vars(library).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(library, name, InterpretedFunction(function.fn))
    return module


OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
POINTERS = {
    "planes",
    "rows",
    "weight",
    "reply",
    "alpha",
    "encoded",
    "scales",
    "is_bad",
    "effect",
    "out",
    "masks",
    "key",
}
FLOATS = {"budget", "smallest"}


def compile_kernel(
    kernel: str, chip: int, types: tuple[str, ...], settings: tuple[tuple[str, int], ...], cache: str
) -> str:
    """Returns the PTX of a kernel for a chip.

    Args:
        kernel: the kernel's name.
        chip: the compute capability, as in sm_90.
        types: the types of the kernel's pointers, in order.
        settings: the kernel's constants and launch options.
        cache: the folder in which Triton keeps what it compiled.
    """
    triton.knobs.cache.dir = cache
    function = getattr(triton_kernels, kernel, None) or getattr(triton_chacha, kernel)
    options = {name: value for name, value in settings if name in OPTIONS}
    constants = {name: value for name, value in settings if name not in OPTIONS}
    kinds = iter(types)
    signature = {
        name: "constexpr"
        if name in constants
        else next(kinds)
        if name in POINTERS
        else "fp32"
        if name in FLOATS
        else "i32"
        for name in function.arg_names
    }
    # All sizes and strides of real layers are multiples of 16, for which Triton makes code of its own.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if name not in constants and name not in {"num_rows", "num_blocks", *FLOATS}
    }
    source = ASTSource(function, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    return str(made.asm["ptx"])
