"""Tests that the memory in which kernels are tested ends a process that reads past it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.support.compiled_kernels import guarded
from tests.support.threads import in_child


@pytest.mark.parametrize(("num_bytes", "said"), [(20, "read"), (21, "SIGSEGV")])
def test_one_byte_past_the_end_ends_the_process(num_bytes: int, said: str) -> None:
    def read() -> str:
        tensor = guarded(torch.arange(5, dtype=torch.int32))
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        ctypes.string_at(tensor.data_ptr(), num_bytes)
        return "read"

    assert in_child(read) == said
