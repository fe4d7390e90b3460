"""Marks tests that need compiled kernels, runs the tests of a module with and without these kernels, and makes memory
that kernels must not read past."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from noise.polynomial import kernels as transforms
from wire.ring import kernels as products

needs_products = pytest.mark.skipif(not products.available(), reason="no compiled kernels on this machine")
"""A mark for tests that need the compiled products and codecs of wire/ring/."""
needs_transforms = pytest.mark.skipif(not transforms.available(), reason="no compiled transforms on this machine")
"""A mark for tests that need the compiled transforms of noise/polynomial/."""


def compiled_and_torch(kernels: ModuleType, needs: pytest.MarkDecorator) -> Any:
    """Returns a fixture that runs each test of a module twice: with compiled kernels, if there are any, and with
    torch's kernels."""
    forms = [pytest.param(True, marks=needs, id="compiled"), pytest.param(False, id="torch")]

    @pytest.fixture(scope="module", params=forms)
    def is_compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
        with pytest.MonkeyPatch.context() as patch:
            if not request.param:
                patch.setattr(kernels, "available", lambda: False)
            yield request.param

    return is_compiled


def forget(*modules: ModuleType) -> None:
    """Clears the caches of all functions of these modules, so that their next calls compute new results."""
    for module in modules:
        for each in vars(module).values():
            if hasattr(each, "cache_clear") and each.__module__ == module.__name__:
                each.cache_clear()


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor whose last byte is followed by a page that may not be read or written."""
    page = mmap.PAGESIZE
    size = -(-tensor.numel() * tensor.itemsize // page) * page
    area = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    count, width = tensor.numel(), tensor.itemsize
    copy = torch.frombuffer(area, dtype=tensor.dtype, count=count, offset=size - count * width)
    return copy.view(tensor.shape).copy_(tensor)
