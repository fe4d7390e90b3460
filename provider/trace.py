"""Which layers a provider serves, and which of them share one call.

Guarantees: layers are found by type and grouped by watching one forward pass, never by name; a layer whose weight is
used anywhere else in the model is not served. A group only says that its members met the same input in the trace: the
tenant checks again in every call.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from wire.errors import ConfigurationError

_LOGGER = logging.getLogger(__name__)
_TRACE_SHAPE = (2, 3)
_MAX_NAME = 512
_MAX_MEMBERS = 256
"""Both from wire/manifest.py: longer names and larger groups are refused there."""


def layer_kind(module: nn.Module) -> str | None:
    """`linear` or `conv1d` for a module that a product with its weight replaces exactly; None for any other."""
    from transformers.pytorch_utils import Conv1D

    weight = module._parameters.get("weight")  # a parametrised layer has a property instead
    if weight is None or weight.dim() != 2 or not weight.dtype.is_floating_point or not weight.numel():
        return None
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight without calling it
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, Conv1D) and type(module).forward is Conv1D.forward:
        return "conv1d"
    return None


def base_layers(model: nn.Module, patterns: str | None = None) -> dict[str, nn.Module]:
    """The layers to serve, in module order.

    Args:
        model: any Hugging Face model.
        patterns: comma-separated fnmatch patterns of full module names; `!` in front excludes; None means all.

    Raises:
        ConfigurationError: nothing matches.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = {
        name: module
        for name, module in model.named_modules()
        if layer_kind(module) and uses[id(module.weight)] == 1  # tied heads and shared layers stay with the tenant
    }
    chosen = {name: module for name, module in found.items() if _matches(name, patterns)}
    if not chosen:
        text = "no nn.Linear or Conv1D of its own" if patterns is None else f"no base layer that matches {patterns!r}"
        raise ConfigurationError(f"the model has {text}")
    return chosen


def _matches(name: str, patterns: str | None) -> bool:
    parts = [part.strip() for part in (patterns or "").split(",") if part.strip()]
    wanted = [part for part in parts if not part.startswith("!")] or ["*"]
    refused = [part[1:] for part in parts if part.startswith("!")]
    return any(fnmatch.fnmatchcase(name, part) for part in wanted) and not any(
        fnmatch.fnmatchcase(name, part) for part in refused
    )


def trace_groups(model: nn.Module, layers: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    """Groups of layer names in execution order; layers of one group got the same tensor object and version.

    Args:
        model: the model, with its weights.
        layers: from `base_layers`.

    Returns:
        Every layer exactly once. A layer that ran never or more than once is alone in its group.
    """
    calls: dict[str, list[tuple[torch.Tensor, int]]] = {}
    handles = [
        module.register_forward_pre_hook(_watch(name, calls), with_kwargs=True) for name, module in layers.items()
    ]
    try:
        _dummy_forward(model)
    except Exception as exc:  # noqa: BLE001 - any model, any failure: serving unfused layers is still right
        _LOGGER.warning("tracing the model failed (%s): no layers are fused", type(exc).__name__)
        return [(name,) for name in layers]
    finally:
        for handle in handles:
            handle.remove()
    return _group(layers, calls)


def _watch(name: str, calls: dict[str, list[tuple[torch.Tensor, int]]]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        # The tensor is kept, or its id could come back as another tensor's.
        calls.setdefault(name, []).append((given, given._version))

    return hook


@torch.no_grad()
def _dummy_forward(model: Any) -> None:
    batch, length = _TRACE_SHAPE
    vocab = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 2)
    token_ids = (torch.arange(batch * length) * 7919 % vocab).view(batch, length)
    try:
        model(input_ids=token_ids, use_cache=False)
    except (TypeError, ValueError):
        model(**model.dummy_inputs)


def _group(layers: dict[str, nn.Module], calls: dict[str, list[tuple[torch.Tensor, int]]]) -> list[tuple[str, ...]]:
    groups: dict[Any, list[str]] = {}
    for name in [*calls, *(name for name in layers if name not in calls)]:
        seen = calls.get(name, [])
        key = (id(seen[0][0]), seen[0][1]) if len(seen) == 1 else name
        groups.setdefault(key, []).append(name)
    return [
        tuple(names[at : at + _MAX_MEMBERS]) for names in groups.values() for at in range(0, len(names), _MAX_MEMBERS)
    ]


def group_name(names: tuple[str, ...]) -> str:
    """`model.layers.0.self_attn.q_proj+k_proj+v_proj`: what the names have in common is written once."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    name = ".".join([*parts[0][:shared], "+".join(".".join(part[shared:]) for part in parts)])
    return name[:_MAX_NAME]
