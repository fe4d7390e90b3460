"""Tests the example that shows the mechanism in one file: it trains, forged replies are refused, and masks hide."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_scratch", ROOT / "examples" / "from_scratch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_trains(example: ModuleType) -> None:
    losses = example.main()
    assert losses[-1] < losses[0] / 50


def test_products_are_those_of_the_weight(example: ModuleType) -> None:
    provider = example.Provider()
    tenant = example.Tenant(provider)
    x = torch.randn(5, example.WIDTH)
    for layer, ends in enumerate(tenant.ends):
        weight = provider.weights[layer].float()
        for end, expected in zip(ends, (x @ weight, x @ weight.T), strict=True):
            assert (end(x) - expected).norm() < 1e-3 * expected.norm()


def test_a_forged_reply_is_refused(example: ModuleType) -> None:
    provider = example.Provider()
    tenant = example.Tenant(provider)
    provider.weights[1][3, 4] += 1
    with pytest.raises(ValueError, match="forged"):
        tenant(torch.randn(5, example.WIDTH))


def test_the_provider_sees_uniform_numbers_and_never_the_same_twice(example: ModuleType) -> None:
    provider = example.Provider()
    end = example.Tenant(provider).ends[0][0]
    provider.seen.clear()
    for _ in range(200):
        end(torch.ones(4, example.WIDTH))
    seen = torch.cat(provider.seen)
    assert len(torch.unique(seen, dim=0)) == len(seen)
    counts = torch.histc(seen.double(), 16, -(2.0**31), 2.0**31)
    expected = seen.numel() / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 60  # chi-squared with 15 degrees; 1 in 10^6 exceeds 56
