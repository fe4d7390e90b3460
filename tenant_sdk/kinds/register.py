"""This module enters the kinds of this package into PEFT's table of kinds (`PEFT_TYPE_TO_TUNER_MAPPING`).

PEFT takes the class of a kind from this table. Each class entered here is a subclass of PEFT's own, and differs from
that class only over layers at a provider, so that stock PEFT works on a model of `TenantClient.load_model`.

`features_of_kinds` counts the values that HiRA and GLoRA add to a training step, compared with LoRA, for an estimate of
the step's memory (tenant_sdk/training/activation_checkpointing.py).
"""

from __future__ import annotations

from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftType
from torch import nn

from tenant_sdk.kinds.elementwise import (
    RemoteGlora,
    RemoteGloraModel,
    RemoteHira,
    RemoteHiraModel,
    RemoteShiraModel,
    RemoteSupertuningModel,
)
from tenant_sdk.kinds.low_rank import RemoteDeftModel, RemoteDeloraModel, RemotePeanutModel, RemoteTinyLoraModel
from tenant_sdk.kinds.orthogonal import RemoteHraModel, RemotePsoftModel
from tenant_sdk.kinds.started_lora import StartedLoraModel
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


MODELS = {
    PeftType.DEFT: RemoteDeftModel,
    PeftType.DELORA: RemoteDeloraModel,
    PeftType.GLORA: RemoteGloraModel,
    PeftType.HIRA: RemoteHiraModel,
    PeftType.HRA: RemoteHraModel,
    PeftType.LORA: StartedLoraModel,
    PeftType.PEANUT: RemotePeanutModel,
    PeftType.PSOFT: RemotePsoftModel,
    PeftType.SHIRA: RemoteShiraModel,
    PeftType.SUPERTUNING: RemoteSupertuningModel,
    PeftType.TINYLORA: RemoteTinyLoraModel,
}
"""The classes by the kinds that they implement."""


def register() -> None:
    """Enters the classes into PEFT's table. A second call changes nothing."""
    PEFT_TYPE_TO_TUNER_MAPPING.update(MODELS)
