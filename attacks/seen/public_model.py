"""Describes the base model as its provider knows it: weights, norms, embedding and where they stand in a block.

The supported models are Llama-style (RMSNorm, rotary positions, gated MLP) and GPT-2-style (LayerNorm, Conv1D with
biases, learned positions). All tensors are float64. Weights are those with which the provider computes; if it serves
int8, they are rounded to int8. Nothing in this module comes from the tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from wire.errors import ConfigurationError
from wire.manifest import Manifest
from wire.ring.quantise import digest, quantise


@dataclass(frozen=True)
class Norm:
    """Computes a norm layer: LayerNorm if there is a bias, otherwise RMSNorm, which is weight · x / rms(x). Both add
    `eps` under the root."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalises rows of shape (num_rows, hidden)."""
        if self.bias is None:
            return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return torch.nn.functional.layer_norm(rows, rows.shape[-1:], self.weight, self.bias, self.eps)

    def visible(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the part of each row that affects the norm's output: the whole row or, for LayerNorm, the row minus
        its mean."""
        return rows if self.bias is None else rows - rows.mean(-1, keepdim=True)

    def direction(self, normed: torch.Tensor) -> torch.Tensor:
        """Recovers the norm's input from its output, up to a positive factor for each row and, for LayerNorm, without
        the row's mean; shape (num_rows, hidden)."""
        return normed / self.weight if self.bias is None else (normed - self.bias) / self.weight

    def to(self, dtype: torch.dtype) -> Norm:
        """Returns the same norm in another dtype."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


@dataclass(frozen=True)
class Layer:
    """Holds a base layer, y = x·weight + bias, with a weight of shape (in_features, out_features). It also holds the id
    of the layer's group, and the layer's columns in the group's output."""

    name: str
    group: int
    columns: slice
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output without any adapter."""
        product = rows @ self.weight
        return product if self.bias is None else product + self.bias

    def to(self, dtype: torch.dtype) -> Layer:
        """Returns the same layer in another dtype."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


@dataclass(frozen=True)
class Block:
    """Holds one transformer block; the layers in `up` are gate and up for a gated MLP, and c_fc alone otherwise."""

    attention_norm: Norm
    mlp_norm: Norm
    q: Layer
    k: Layer
    v: Layer
    o: Layer
    up: tuple[Layer, ...]
    down: Layer

    def to(self, dtype: torch.dtype) -> Block:
        """Returns the same block in another dtype."""
        q, k, v, o, down, *up = (one.to(dtype) for one in (self.q, self.k, self.v, self.o, self.down, *self.up))
        return Block(self.attention_norm.to(dtype), self.mlp_norm.to(dtype), q, k, v, o, tuple(up), down)


@dataclass(frozen=True)
class PublicModel:
    """Holds a base model's public weights and structure.

    Attributes:
        style: the architecture, which decides how norms and layers follow each other.
        embedding: shape (vocab, hidden).
        positions: learned positions, shape (num_positions, hidden); None if there are none.
        head_group: the group of the output head; None if the head is tied to the embedding and stays with the tenant.
        rope_theta: the base of rotary positions; 0 if there are none.
        activation: the MLP's activation, by transformers' name.
        tokenizer: transformers' tokenizer; None if the checkpoint has none.
    """

    style: Literal["llama", "gpt2"]
    embedding: torch.Tensor
    positions: torch.Tensor | None
    blocks: tuple[Block, ...]
    final_norm: Norm
    head_group: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    activation: str
    tokenizer: Any = None

    def residual_start(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the input of the first block: shape (num_tokens, hidden)."""
        start = self.embedding[token_ids]
        return start if self.positions is None else start + self.positions[: token_ids.shape[0]]

    def normed_inputs(self) -> Mapping[int, Norm]:
        """Maps the ids of the groups whose input is a norm layer's output to that norm. The output head is left out."""
        norms = {block.q.group: block.attention_norm for block in self.blocks}
        return norms | {block.up[0].group: block.mlp_norm for block in self.blocks}

    def layers(self) -> Mapping[str, Layer]:
        """Returns every base layer of the blocks, by name. A fused c_attn is one matrix, but its parts q, k and v have
        a name each."""
        parts = [layer for b in self.blocks for layer in (b.q, b.k, b.v, b.o, *b.up, b.down)]
        return {layer.name: layer for layer in parts}


def describe(model: Any, manifest: Manifest, tokenizer: Any = None) -> PublicModel:
    """Reads a checkpoint as its provider serves it.

    Args:
        model: transformers' causal language model, on the CPU.
        manifest: the recording's manifest; its groups name the layers.
        tokenizer: transformers' tokenizer, or None.

    Raises:
        ConfigurationError: the recording is of another model, or no adversary supports the architecture.
    """
    kind = model.config.model_type
    if kind not in ("llama", "gpt2"):
        raise ConfigurationError(f"the adversaries know llama and gpt2 models, not {kind!r}")
    reader = _Reader(model, manifest)
    return _llama(model, reader, tokenizer) if kind == "llama" else _gpt2(model, reader, tokenizer)


class _Reader:
    """Reads weights by name, as the provider uses them in its products."""

    def __init__(self, model: Any, manifest: Manifest) -> None:
        self._modules = dict(model.named_modules())
        self._int8 = manifest.weights == "int8"
        self._places = {}
        for group in manifest.groups:
            start = 0
            for layer in group.layers:
                self._places[layer.name] = (group.id, slice(start, start + layer.out_features), layer)
                start += layer.out_features

    def layer(self, name: str) -> Layer:
        if name not in self._places or name not in self._modules:
            raise ConfigurationError(f"the recording is of another model, or of one that keeps {name} at the tenant")
        group, columns, info = self._places[name]
        module = self._modules[name]
        weight = module.weight.detach() if info.kind == "conv1d" else module.weight.detach().t()
        if tuple(weight.shape) != (info.in_features, info.out_features):
            raise ConfigurationError(f"the recording is of another model: {name} has another shape")
        quantised, alpha = quantise(weight)
        if digest(quantised, alpha) != info.digest:
            raise ConfigurationError(f"the recording is of another model: {name} has other weights")
        if self._int8:
            weight = quantised.to(torch.float64) * alpha.to(torch.float64)
        bias = None if module.bias is None else module.bias.detach().to(torch.float64)
        return Layer(name, group, columns, weight.to(torch.float64), bias)

    def group_of(self, name: str) -> int | None:
        return self._places[name][0] if name in self._places else None


def _norm(module: Any) -> Norm:
    bias = getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return Norm(
        module.weight.detach().to(torch.float64), None if bias is None else bias.detach().to(torch.float64), float(eps)
    )


def _llama(model: Any, reader: _Reader, tokenizer: Any) -> PublicModel:
    config, inner = model.config, model.model
    blocks = []
    for index, block in enumerate(inner.layers):
        at, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        blocks.append(
            Block(
                _norm(block.input_layernorm), _norm(block.post_attention_layernorm),
                reader.layer(f"{at}.q_proj"), reader.layer(f"{at}.k_proj"), reader.layer(f"{at}.v_proj"),
                reader.layer(f"{at}.o_proj"),
                (reader.layer(f"{mlp}.gate_proj"), reader.layer(f"{mlp}.up_proj")), reader.layer(f"{mlp}.down_proj"),
            )
        )  # fmt: skip
    parameters = getattr(config, "rope_parameters", None) or {}
    return PublicModel(
        "llama", inner.embed_tokens.weight.detach().to(torch.float64), None, tuple(blocks), _norm(inner.norm),
        reader.group_of("lm_head"), config.num_attention_heads, config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        float(parameters.get("rope_theta", 10_000.0)), config.hidden_act, tokenizer,
    )  # fmt: skip


def _gpt2(model: Any, reader: _Reader, tokenizer: Any) -> PublicModel:
    config, inner = model.config, model.transformer
    width = config.n_embd
    blocks = []
    for index, block in enumerate(inner.h):
        fused = reader.layer(f"transformer.h.{index}.attn.c_attn")
        q, k, v = (_part(fused, start, start + width) for start in (0, width, 2 * width))
        blocks.append(
            Block(
                _norm(block.ln_1), _norm(block.ln_2), q, k, v, reader.layer(f"transformer.h.{index}.attn.c_proj"),
                (reader.layer(f"transformer.h.{index}.mlp.c_fc"),), reader.layer(f"transformer.h.{index}.mlp.c_proj"),
            )
        )  # fmt: skip
    return PublicModel(
        "gpt2", inner.wte.weight.detach().to(torch.float64), inner.wpe.weight.detach().to(torch.float64),
        tuple(blocks), _norm(inner.ln_f), reader.group_of("lm_head"), config.n_head, config.n_head,
        width // config.n_head, 0.0, config.activation_function, tokenizer,
    )  # fmt: skip


def _part(fused: Layer, start: int, stop: int) -> Layer:
    """Returns q, k or v as a part of the fused layer c_attn. The part's name differs from the layer's, so that claims
    about the two can be told apart."""
    label = "qkv"[start // (stop - start)]
    columns = slice(fused.columns.start + start, fused.columns.start + stop)
    bias = None if fused.bias is None else fused.bias[start:stop]
    return Layer(f"{fused.name}[{label}]", fused.group, columns, fused.weight[:, start:stop], bias)
