"""Compiles the Triton kernels for chips that this machine does not have.

Triton's interpreter changes Triton's functions for the whole process, so tests call `compile_kernel` in a process of
its own, in which no kernel was interpreted.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from noise.polynomial import triton_chacha
from wire.ring import triton_kernels

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
