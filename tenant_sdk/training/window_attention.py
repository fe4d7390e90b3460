"""This module decides whether a model can be trained in windows of tokens, and prepares its attention for them.

A window is a range of tokens of a batch that goes through the model on its own (tenant_sdk/training/windows.py).

Guarantees: a model or adapter that cannot be trained in windows is refused with one line that says why. Their
configurations decide this. At run time `WindowCache.check` finds layers that do not use their cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from tenant_sdk.training.chunked_loss import has_another_loss
from tenant_sdk.training.soft_prompts import EMBEDDINGS, PREFIX, kind_of
from wire.errors import ConfigurationError

_ATTENTION = "veilbase_windows"
"""The name under which transformers' tables hold the attention function of this module."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""The rotary embeddings of transformers 5.23 (`dynamic_rope_update`) that change with the longest position of a
batch."""
_NOT_BY_TOKEN = frozenset({"ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA"})
"""The kinds of adapters, apart from soft prompts, that do not treat each token by itself. Lily takes a mean over
tokens, and Shadow has a network of its own over all tokens."""
_SOFT_PROMPTS = EMBEDDINGS | {PREFIX}
"""The kinds of soft prompts that windows support. Others need more than token ids (multitask prompt tuning) or have a
loss of their own (CPT)."""


def check_window(window_tokens: int | None, batch_size: int, room: int) -> None:
    """Checks the size of a window against the sizes of the batch and of the context, before anything is sent.

    Args:
        window_tokens: the most tokens of a window, over all rows of the batch; None if training uses no windows.
        batch_size: the number of rows of a batch.
        room: the most tokens of a row.

    Raises:
        ConfigurationError: the window has less than one token for each row, or more tokens than the longest batch.
    """
    if window_tokens is not None and not batch_size <= window_tokens <= batch_size * room:
        raise ConfigurationError(
            f"window_tokens (--window-tokens) counts the tokens of a window over all {batch_size} rows of a batch: "
            f"expected {batch_size} to {batch_size * room}, got {window_tokens}"
        )


def check_adapter(model: Any) -> None:
    """Raises ConfigurationError if an adapter neither treats each token by itself nor is a soft prompt of a known
    kind."""
    config = getattr(model, "active_peft_config", None)
    if config is None:
        return
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind in _NOT_BY_TOKEN or kind_of(model) not in {None, *_SOFT_PROMPTS}:
        raise ConfigurationError(f"window_tokens is not possible with {kind}: take an adapter of layers, such as LoRA")
    if getattr(config, "alora_invocation_tokens", None):
        raise ConfigurationError("window_tokens is not possible with alora_invocation_tokens")


def sliding_windows(model: Any) -> list[int | None]:
    """Returns for each layer the number of tokens that a token attends to; None stands for all earlier tokens.

    Raises:
        ConfigurationError: the model's attention cannot be cut into windows.
    """
    config = model.config.get_text_config(decoder=True)

    def refused(reason: str) -> ConfigurationError:
        return ConfigurationError(f"window_tokens is not possible with {config.model_type}: {reason}")

    taken = inspect.signature(model.forward).parameters
    if getattr(model, "_is_stateful", False) or not {"past_key_values", "logits_to_keep"} <= taken.keys():
        raise refused("its layers keep other than keys and values")
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise refused("its layers keep other than keys and values")
    if has_another_loss(model):
        raise refused("its loss is more than the cross entropy of tokens")
    if getattr(config, "num_kv_shared_layers", None):
        raise refused("its layers share keys and values")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise refused("its attention is cut into chunks already")
    if set(_rope_types(getattr(config, "rope_parameters", None))) & _LENGTH_DEPENDENT_ROPE:
        raise refused("its rotary embedding depends on the longest row")
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yields the kinds of rotary embeddings that a config names, also those for its layer types."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value) if isinstance(value, dict) else ()


def allow_recomputation(model: Any) -> None:
    """Lets transformer blocks use their cache while activations are checkpointed.

    transformers forbids this, because its own caches must not be updated twice. A `WindowCache` may be updated twice.
    GPT-2's code drops the cache if the `gradient_checkpointing` flag of the whole model is set. This function clears
    that flag; each block still has its own flag.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for block in blocks:
        block._can_checkpoint_with_cache = True
    if not blocks:
        return
    for module in model.modules():
        if module not in blocks and getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def share_masks(model: Any) -> None:
    """Saves memory in a model that uses torch's attention: layers share one attention mask, and heads are not copied.

    Otherwise, for every window but the first, transformers would copy the keys and values of all earlier tokens for
    each query head, and torch would make a float mask in each layer. Autograd would keep all of them.
    """
    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    if chosen != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, _float_mask)
    model.set_attn_implementation(_ATTENTION)


def _float_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """Returns transformers' mask for torch's attention as numbers to add to scores: 0, or -inf for hidden tokens.
    Returns None if no mask is needed."""
    mask: torch.Tensor | None = sdpa_mask(*args, **options)
    if mask is None or mask.dtype != torch.bool:
        return mask
    numbers = torch.zeros(mask.shape, dtype=options.get("dtype", torch.float32), device=mask.device)
    return numbers.masked_fill_(~mask, -torch.inf)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Computes torch's attention as transformers does. On a CPU, query heads share the heads of keys and values, so
    these are not copied; elsewhere torch cannot do this together with a mask."""
    is_plain = options.get("position_bias") is None and options.get("softcap") is None
    if attention_mask is None or query.shape[1] == key.shape[1] or not query.is_cpu or not is_plain:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None
