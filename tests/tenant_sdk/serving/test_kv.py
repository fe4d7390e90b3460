"""Tests the keys and values of a request: exact in float32, bounded by the window, and safe to write twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tenant_sdk.serving.kv import KV_DTYPES, KvLayout, RequestKv, kv_layout
from tests.support.tiny_models import CONFIGS, WINDOW
from wire.errors import ConfigurationError

CPU = torch.device("cpu")
CHUNK = 4


def layout(window: int | None = None, dtype: str = "fp32") -> KvLayout:
    return KvLayout((window,), num_kv_heads=2, head_dim=8, dtype=KV_DTYPES[dtype], step_tokens=CHUNK)


def numbers(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, num_tokens, 8, generator=torch.Generator().manual_seed(seed))


class OneModel:
    def __init__(self, kind: str) -> None:
        self.config = CONFIGS[kind]


@pytest.mark.parametrize("window", [None, 3, 5])
@pytest.mark.parametrize("pieces", [(1,) * 20, (4, 4, 1, 1, 3, 4, 1, 2), (3, 1, 4, 4, 4, 4)])
def test_rows_see_what_their_window_allows(window: int | None, pieces: tuple[int, ...]) -> None:
    keys, values, position = numbers(20), numbers(20, 1), 0
    kv = RequestKv(layout(window), 20, CPU)
    for size in pieces:
        stop = position + size
        first = 0 if window is None else max(position - window + 1, 0)
        for _ in range(2):  # a step that failed is computed again
            seen = kv.update(0, position, keys[:, position:stop], values[:, position:stop])
            assert torch.equal(seen[0], keys[:, first:stop])
            assert torch.equal(seen[1], values[:, first:stop])
        position = stop
    assert position == 20


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 3, 5])
def test_what_is_kept_stays_when_the_memory_grows(window: int | None, dtype: str) -> None:
    keys, values = numbers(20), numbers(20, 1)
    whole, grown = RequestKv(layout(window, dtype), 20, CPU), RequestKv(layout(window, dtype), 2, CPU)
    for position in range(0, 20, 2):
        grown.grow(min(position + 3, 20))
        new = keys[:, position : position + 2], values[:, position : position + 2]
        for got, want in zip(grown.update(0, position, *new), whole.update(0, position, *new), strict=True):
            assert torch.equal(got, want)
        capacity = layout(window).capacity(0, min(position + 3, 20))
        assert grown.describe(position, 2)[0, 4] == capacity, "compiled code is told the size of the new memory"


@pytest.mark.parametrize("window", [None, 3, 5])
def test_tokens_that_are_written_again_further_back(window: int | None) -> None:
    """Keys and values are right after positions were written a second time. As for a draft model whose tokens are
    rejected, each four writes are followed by a step back of up to three positions."""
    keys, position = numbers(40), 0
    kv = RequestKv(replace(layout(window), num_rewound=3), 40, CPU)
    for back in (0, 1, 3, 2, 3, 0, 3, 3):
        for _ in range(4):
            first = 0 if window is None else max(position - window + 1, 0)
            wrong = -keys[:, position : position + 1]
            seen, _ = kv.update(0, position, wrong, wrong)
            assert torch.equal(seen, torch.cat([keys[:, first:position], wrong], dim=1))
            seen, _ = kv.update(0, position, keys[:, position : position + 1], keys[:, position : position + 1])
            assert torch.equal(seen, keys[:, first : position + 1])
            position += 1
        position -= back
    assert position > 2 * (layout(5).capacity(0, 40))


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2.0**-8), ("fp8", 2.0**-4)])
def test_rounding_is_that_of_the_type(dtype: str, bound: float) -> None:
    keys = numbers(12) * torch.logspace(-6, 6, 12)[:, None]
    kv = RequestKv(layout(dtype=dtype), 12, CPU)
    kept, _ = kv.update(0, 0, keys, keys)
    largest = keys.abs().amax(dim=-1, keepdim=True)
    assert kept.dtype == torch.float32
    assert 0.0 < ((kept - keys).abs() / largest).max() <= bound


def test_zeros_and_what_is_not_finite_stay_what_they_are_in_fp8() -> None:
    keys = numbers(3)
    keys[0, 0], keys[0, 1, 0], keys[0, 2, 0] = 0.0, torch.nan, torch.inf
    kept, _ = RequestKv(layout(dtype="fp8"), 3, CPU).update(0, 0, keys, keys)
    assert torch.equal(kept[0, 0], torch.zeros(8))
    assert not torch.isfinite(kept[0, 1]).all()
    assert not torch.isfinite(kept[0, 2]).all()
    assert torch.isfinite(kept[1]).all()


def test_bytes_are_known_before() -> None:
    assert layout().bytes_for(10) == 10 * 2 * 2 * 8 * 4
    assert layout(dtype="bf16").bytes_for(10) == 10 * 2 * 2 * 8 * 2
    assert layout(dtype="fp8").bytes_for(10) == 10 * 2 * 2 * (8 + 4)
    assert layout(window=3).bytes_for(1000) == layout(window=3).bytes_for(2 + CHUNK)
    assert replace(layout(window=3), num_rewound=5).bytes_for(1000) == layout().bytes_for(2 + CHUNK + 5)
    assert replace(layout(), beside=layout(dtype="bf16")).bytes_for(10) == 10 * 2 * 2 * 8 * (4 + 2)


@pytest.mark.parametrize(
    ("kind", "windows", "num_kv_heads", "head_dim"),
    [
        ("llama", (None, None), 2, 8), ("gpt2", (None, None), 4, 8), ("mistral", (WINDOW, WINDOW), 2, 8),
        ("gemma2", (WINDOW, None), 2, 16), ("gemma3", (WINDOW, None, WINDOW), 2, 16), ("qwen3", (None, None), 2, 16),
    ],
)  # fmt: skip
def test_a_models_layout_comes_from_its_config(
    kind: str, windows: tuple[int | None, ...], num_kv_heads: int, head_dim: int
) -> None:
    made = kv_layout(OneModel(kind), "bf16", 16)
    assert made == KvLayout(windows, num_kv_heads, head_dim, torch.bfloat16, 16)


def test_refusals() -> None:
    with pytest.raises(ConfigurationError, match="kv_dtype is one of fp32, bf16, fp8, got 'int4'"):
        kv_layout(OneModel("llama"), "int4", 16)
    kv = RequestKv(layout(), 4, CPU)
    with pytest.raises(ConfigurationError, match="other heads"):
        kv.update(0, 0, torch.zeros(3, 1, 8), torch.zeros(3, 1, 8))


def test_clear_leaves_nothing() -> None:
    kv = RequestKv(layout(), 4, CPU)
    kv.update(0, 0, numbers(3), numbers(3))
    kv.clear()
    kept, _ = kv.update(0, 3, numbers(1), numbers(1))
    assert not kept[:, :3].any()
