"""Tests products of a tenant's own rows with base weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.model.base_products import group_of, group_products, product, transposed_product
from tenant_sdk.model.remote_linear import RemoteLinear
from tests.support.parity import RELATIVE, local, relative
from tests.support.spies import before_requests
from tests.support.tiny_models import make_tiny
from wire.errors import ConfigurationError


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_products_with_a_weight_and_its_transpose_have_no_bias(kind: str, tmp_path: Path) -> None:
    make_tiny(kind, tmp_path)
    name = {"llama": "model.layers.1.self_attn.k_proj", "gpt2": "transformer.h.1.mlp.c_fc"}[kind]
    with TenantClient(
        f"inproc:{tmp_path}", weights="native", mask="off", arithmetic="float", cache=tmp_path / "cache"
    ) as client:
        layer: Any = client.load_model().get_submodule(name)
        weight: Any = local(tmp_path).get_submodule(name).weight.detach()
        weight = weight.t() if kind == "llama" else weight
        rows = torch.randn(3, weight.shape[0])
        assert relative(product(layer, rows), rows @ weight) < RELATIVE
        rows = torch.randn(2, weight.shape[1])
        assert relative(transposed_product(layer, rows), rows @ weight.t()) < RELATIVE


def test_one_call_serves_a_whole_group_and_leaves_its_shared_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny("llama", tmp_path)
    calls: list[int] = []
    before_requests(monkeypatch, lambda call, payload: calls.append(payload.num_rows))
    with TenantClient(f"inproc:{tmp_path}", mask="off", cache=tmp_path / "cache") as client:
        attention: Any = client.load_model().get_submodule("model.layers.0.self_attn")
        x = torch.randn(5, 32)
        attention.q_proj(x)
        (parts,) = group_products([(group_of(attention.q_proj), torch.randn(4, 32))])
        attention.k_proj(x)
    assert calls == [5, 4]
    assert [tuple(part.shape) for part in parts] == [(4, 32), (4, 16), (4, 16)]


def test_a_layer_without_a_model_has_no_products() -> None:
    with pytest.raises(ConfigurationError, match="load_model"):
        product(RemoteLinear(2, 3, False, torch.float32), torch.zeros(1, 2))
