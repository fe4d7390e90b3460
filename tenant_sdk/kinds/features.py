"""This module counts the values that HiRA and GLoRA add to a training step, compared with LoRA, for an estimate of the
step's memory (tenant_sdk/training/checkpointing.py)."""

from __future__ import annotations

from torch import nn

from tenant_sdk.kinds.glora import RemoteGlora
from tenant_sdk.kinds.hira import RemoteHira
from tenant_sdk.model.base_products import group_of


def features_of_kinds(model: nn.Module) -> tuple[int, int]:
    """Returns what HiRA and GLoRA add to a training step for each of its rows.

    Returns:
        (the number of values that autograd keeps, the number of values that the provider answers in further calls).
    """
    kept = answered = 0
    for module in model.modules():
        if isinstance(module, RemoteHira):
            ranks = list(module.r.values())
        elif isinstance(module, RemoteGlora):
            ranks = [rank for name, rank in module.r.items() if module.has_low_rank(name)]
        else:
            continue
        kept += sum(ranks) * int(module.out_features)
        answered += sum(ranks) * group_of(module.get_base_layer()).spec.out_features
    return kept, answered
