"""Loads the Triton kernels so that Triton's interpreter runs them on tensors of the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import triton.experimental.gluon  # loaded before the patches below, since it refuses interpreted functions
import triton.language
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from noise.polynomial import device_error, triton_chacha
from wire.ring import product_triton, triton_kernels

SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128}
"""Block sizes with which the interpreter takes a tenth of a second for a shape."""


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
