"""Tests which layers are served, and which of them share a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from provider.model.trace import base_layers, group_name, layer_kind, trace_groups
from tests.support.tiny_models import make_tiny, tiny_config
from wire.errors import ConfigurationError


def groups_of(model: nn.Module, patterns: str | None = None) -> list[str]:
    return [group_name(names) for names in trace_groups(model, base_layers(model, patterns))]


def test_llama_is_fused_by_input_in_execution_order(tmp_path: Path) -> None:
    layer = [
        "model.layers.{}.self_attn.q_proj+k_proj+v_proj",
        "model.layers.{}.self_attn.o_proj",
        "model.layers.{}.mlp.gate_proj+up_proj",
        "model.layers.{}.mlp.down_proj",
    ]
    expected = [name.format(index) for index in (0, 1) for name in layer]
    assert groups_of(make_tiny("llama", tmp_path)) == [*expected, "lm_head"]


def test_gpt2_is_conv1d_and_its_tied_head_stays_out(tmp_path: Path) -> None:
    model = make_tiny("gpt2", tmp_path)
    layer = ["transformer.h.{}.attn.c_attn", "transformer.h.{}.attn.c_proj"]
    layer += ["transformer.h.{}.mlp.c_fc", "transformer.h.{}.mlp.c_proj"]
    assert groups_of(model) == [name.format(index) for index in (0, 1) for name in layer]
    assert {layer_kind(module) for module in base_layers(model).values()} == {"conv1d"}


def test_gemma_is_fused(tmp_path: Path) -> None:
    names = groups_of(make_tiny("gemma", tmp_path))
    assert names[0] == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    assert len(names) == 8


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_served_unless_it_is_tied(tied: bool) -> None:
    config: LlamaConfig = tiny_config("llama")
    config.tie_word_embeddings = tied
    assert ("lm_head" in base_layers(AutoModelForCausalLM.from_config(config))) is not tied


@pytest.mark.parametrize(
    ("patterns", "count"),
    [(None, 15), ("*.q_proj", 2), ("*_proj,!*.mlp.*", 8), ("!lm_head", 14), ("*.q_proj, lm_head", 3)],
)
def test_patterns(tmp_path: Path, patterns: str | None, count: int) -> None:
    assert len(base_layers(make_tiny("llama", tmp_path), patterns)) == count


def test_a_pattern_without_a_match_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"matches '\*\.nothing'"):
        base_layers(make_tiny("llama", tmp_path), "*.nothing")


class _Odd(nn.Module):
    """Has in-place changes, repeated calls, layers that are not called, and a subclass with its own forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.config = tiny_config("llama")
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.twice, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.own = _OwnForward(4, 4)
        self.one = nn.Linear(4, 4)
        self.same = self.one  # one module under two names

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        x = torch.ones(2, 4)
        y = self.first(x) + self.second(x)
        x.add_(1)
        return self.third(x) + self.twice(y) + self.twice(x) + self.one(x.view(2, 4))


class _OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_versions_repeats_and_special_layers() -> None:
    model = _Odd()
    layers = base_layers(model)
    assert set(layers) == {"first", "second", "third", "twice", "unused", "own"}
    assert trace_groups(model, layers) == [("first", "second"), ("third",), ("twice",)]


class _ByHand(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class _InTraining(_ByHand):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (0.5 if self.training else 1)


class _Clamped(_ByHand):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-8, 8)


class _Rounding(_ByHand):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale = input.abs().amax().clamp_min(1e-6) / 127
        return super().forward((input / scale).round() * scale)


class _WithMore(_ByHand):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(1))


class _Pair(_ByHand):
    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input


@pytest.mark.parametrize("kind", [_ByHand, _OwnForward, _InTraining, _Clamped, _Rounding, _WithMore, _Pair])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_of_its_own_has_to_compute_the_product(kind: Any, dtype: torch.dtype) -> None:
    model = _Called([kind(8, 4), nn.Linear(8, 4)]).to(dtype)
    served = [("layers.0", "layers.1")] if kind is _ByHand else [("layers.1",)]
    assert trace_groups(model, base_layers(model)) == served


@pytest.mark.parametrize("size", [0.0, 1e-3])
def test_an_input_that_says_little_does_not_prove_a_product(size: float) -> None:
    """For inputs that are zero or very small, a layer that clamps its output looks like a plain linear layer. It must
    not be served."""
    model = _Called([_Clamped(8, 4), nn.Linear(8, 4)])
    model.size = size
    assert trace_groups(model, base_layers(model)) == [("layers.1",)]


class _Called(nn.Module):
    """Calls its layers, except for those in `idle`."""

    size = 1.0

    def __init__(self, layers: list[nn.Module], idle: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config, self.layers, self.idle = tiny_config("llama"), nn.ModuleList(layers), idle

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> None:
        x = self.size * torch.linspace(-1, 1, 24).view(3, 8).to(self.layers[0].weight.dtype)
        for index, layer in enumerate(self.layers):
            if index not in self.idle:
                layer(x)
        self.read(self.layers)

    def read(self, layers: nn.ModuleList) -> None:
        """Reads weights outside of the layers' own calls."""


def test_a_layer_that_did_not_run_is_served_where_its_twins_are() -> None:
    """Sometimes the trace does not call a layer, such as an expert to which no token was routed. It is still served
    if layers whose names differ only in a number were called; `spare` has no such layers."""
    model = _Called([nn.Linear(8, 4) for _ in range(3)], idle=(1,))
    model.spare = nn.Linear(8, 4)
    assert trace_groups(model, base_layers(model)) == [("layers.0", "layers.2"), ("layers.1",)]


@pytest.mark.parametrize(
    "read",
    [
        lambda layers: layers[1].weight.sum(),
        lambda layers: layers[1].weight[0].view(2, 4).t() @ torch.ones(2),
        lambda layers: nn.functional.linear(torch.ones(8), layers[1].weight),
        lambda layers: layers[1].weight.mul_(2),
        lambda layers: layers[1].weight.data.zero_(),
    ],
)
def test_a_weight_that_is_read_elsewhere_stays_with_the_tenant(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Called, "read", lambda self, layers: read(layers))
    model = _Called([nn.Linear(8, 4) for _ in range(4)], idle=(3,))
    before = model.layers[1].weight.detach().clone()
    assert trace_groups(model, base_layers(model)) == [("layers.0", "layers.2")]
    assert torch.equal(model.layers[1].weight, before)


def test_a_look_at_shape_dtype_or_bias_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _Called,
        "read",
        lambda self, layers: layers[1].bias.to(layers[0].weight.dtype).sum() * layers[1].weight.shape[0],
    )
    model = _Called([nn.Linear(8, 4), nn.Linear(8, 4)])
    assert trace_groups(model, base_layers(model)) == [("layers.0", "layers.1")]


def test_a_model_that_reads_all_its_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Called, "read", lambda self, layers: layers[0].weight.sum())
    model = _Called([nn.Linear(8, 4)])
    with pytest.raises(ConfigurationError, match="none of the chosen layers can be served"):
        trace_groups(model, base_layers(model))


def test_a_trace_that_fails_fuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.config = tiny_config("llama")
    assert trace_groups(model, base_layers(model)) == [("a",), ("b",)]
    assert len(caplog.records) == 1
    assert "no layers are fused" in caplog.text


def test_group_names() -> None:
    assert group_name(("lm_head",)) == "lm_head"
    assert group_name(("a.b.q", "a.b.k")) == "a.b.q+k"
    assert group_name(("a.b", "a.b.c")) == "a.b+b.c"
    assert len(group_name(tuple(f"layer{index}.{'x' * 100}" for index in range(20)))) == 512
