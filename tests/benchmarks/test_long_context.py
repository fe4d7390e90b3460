"""Tests the benchmark of long contexts: memory stays near the size of the keys and values, and the sizes are those of
the demo's model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common import local_model
from benchmarks.long_context import (
    BAR,
    PIECE_ROWS,
    attention_s,
    bf16_mb,
    in_fresh_process,
    layout,
    report_fit,
    small_model,
)
from tenant_sdk.serving.kv import kv_layout


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, PIECE_ROWS])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_32k_tokens_take_little_more_than_their_size_in_bf16(kv_dtype: str, num_rows: int) -> None:
    grown = in_fresh_process(kv_dtype, 32768, num_rows)
    assert layout(kv_dtype).bytes_for(32768) / 1e6 * 0.95 < grown <= BAR * bf16_mb(32768)


@pytest.mark.slow
def test_the_sizes_are_those_of_the_demos_model() -> None:
    assert kv_layout(local_model(), "bf16", 256) == layout("bf16")


def test_how_many_fit(capsys: pytest.CaptureFixture[str]) -> None:
    report_fit()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["| fp32 | 46.1 | 22 | 2 | 0 |", "| bf16 | 23.0 | 45 | 5 | 1 |", "| fp8 | 12.2 | 85 | 10 | 2 |"]


@pytest.mark.slow
@torch.no_grad()
def test_attention_alone_is_measured() -> None:
    """The time of attention is a difference of two measured times. In a context this long it is not hidden by other
    work, so it must be positive."""
    assert attention_s(small_model(), "fp8", 32768, 1) > 0
