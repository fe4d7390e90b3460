"""This module enters the kinds of this package into PEFT's table of kinds.

PEFT takes the class of a kind from this table (`PEFT_TYPE_TO_TUNER_MAPPING`). Each class entered here is a subclass of
PEFT's own, and differs from that class only over layers at a provider, so that stock PEFT works on a model of
`TenantClient.load_model`.
"""

from __future__ import annotations

from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftType

from tenant_sdk.kinds.deft import RemoteDeftModel
from tenant_sdk.kinds.delora import RemoteDeloraModel
from tenant_sdk.kinds.glora import RemoteGloraModel
from tenant_sdk.kinds.hira import RemoteHiraModel
from tenant_sdk.kinds.hra import RemoteHraModel
from tenant_sdk.kinds.peanut import RemotePeanutModel
from tenant_sdk.kinds.psoft import RemotePsoftModel
from tenant_sdk.kinds.shira import RemoteShiraModel
from tenant_sdk.kinds.started_lora import StartedLoraModel
from tenant_sdk.kinds.supertuning import RemoteSupertuningModel
from tenant_sdk.kinds.tinylora import RemoteTinyLoraModel

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
