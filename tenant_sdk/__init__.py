"""This package fine-tunes and runs adapters on a base model that a provider holds. It exports every name that a user
needs.

Importing this package does not load torch, fetches nothing and sets no environment variable. An exported name that
needs torch is imported when the name is first used. Call `tune` before the first such use, as in

    import tenant_sdk

    tenant_sdk.tune()
    with tenant_sdk.TenantClient("grpcs://host:8443", identity="acme") as client:
        ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tenant_sdk.plain_values import WrongOption
from tenant_sdk.serving.settings import EngineOptions, RequestOptions, StoreOptions
from tenant_sdk.training.settings import FinetuneOptions, FinetuneResult
from tenant_sdk.tuning import NotTunedWarning, tune
from wire.errors import (
    AccessError,
    ConfigurationError,
    DatasetError,
    DeadlineExceeded,
    ForkedConnection,
    InvalidTensor,
    LimitExceeded,
    MalformedFrame,
    MaskError,
    MaskOverflow,
    MaskReused,
    NotFinite,
    NotPermitted,
    ProtocolError,
    ProviderChanged,
    QuotaExceeded,
    RemoteFault,
    RequestError,
    StorageError,
    TransportError,
    Unauthenticated,
    Unavailable,
    UnknownLayer,
    VeilbaseError,
    VerificationFailed,
    VersionMismatch,
    WeakParameters,
    WrongPeer,
    printable,
)

if TYPE_CHECKING:
    from noise.blocks.slots import SlotsExhausted
    from noise.ledger.ledger import SeedExhausted
    from noise.masks.gaussian_pool import NotPrivateWarning
    from tenant_sdk.client import TenantClient
    from tenant_sdk.endpoint.settings import EndpointLimits, EndpointSettings
    from tenant_sdk.model.dora import for_remote_base
    from tenant_sdk.model.remote_linear import RemoteWeightError
    from tenant_sdk.model.run_state import NotFiniteWarning, check_run
    from tenant_sdk.peft_model import FewLayersWarning, adapted_model
    from tenant_sdk.plan import Trust
    from tenant_sdk.plan_file import Bill
    from tenant_sdk.serving.adapters import AdapterStore
    from tenant_sdk.serving.adapters.peft_settings import NotServed
    from tenant_sdk.serving.engine import Engine
    from tenant_sdk.serving.many import PromptsFailed
    from tenant_sdk.serving.speculation.settings import Speculation
    from tenant_sdk.session import AcceptedChangeWarning, NotVerifiedWarning
    from tenant_sdk.text.rows import CutWarning
    from tenant_sdk.text.source import TokenizerFailed
    from tenant_sdk.text.template import TemplateDoesNotFit, TemplateRefuses
    from tenant_sdk.training.dataset import UnusableRowWarning, load_rows
    from tenant_sdk.training.loss import chunk_loss
    from tenant_sdk.training.token_rows import tokenize
    from tenant_sdk.training.trainers import mean_loss
    from tenant_sdk.training.waiting import ProviderAwayWarning
    from tenant_sdk.usage import UsageNotKeptWarning

__all__ = [
    "AcceptedChangeWarning",
    "AccessError",
    "AdapterStore",
    "Bill",
    "ConfigurationError",
    "CutWarning",
    "DatasetError",
    "DeadlineExceeded",
    "EndpointLimits",
    "EndpointSettings",
    "Engine",
    "EngineOptions",
    "FewLayersWarning",
    "FinetuneOptions",
    "FinetuneResult",
    "ForkedConnection",
    "InvalidTensor",
    "LimitExceeded",
    "MalformedFrame",
    "MaskError",
    "MaskOverflow",
    "MaskReused",
    "NotFinite",
    "NotFiniteWarning",
    "NotPermitted",
    "NotPrivateWarning",
    "NotServed",
    "NotTunedWarning",
    "NotVerifiedWarning",
    "PromptsFailed",
    "ProtocolError",
    "ProviderAwayWarning",
    "ProviderChanged",
    "QuotaExceeded",
    "RemoteFault",
    "RemoteWeightError",
    "RequestError",
    "RequestOptions",
    "SeedExhausted",
    "SlotsExhausted",
    "Speculation",
    "StorageError",
    "StoreOptions",
    "TemplateDoesNotFit",
    "TemplateRefuses",
    "TenantClient",
    "TokenizerFailed",
    "TransportError",
    "Trust",
    "Unauthenticated",
    "Unavailable",
    "UnknownLayer",
    "UnusableRowWarning",
    "UsageNotKeptWarning",
    "VeilbaseError",
    "VerificationFailed",
    "VersionMismatch",
    "WeakParameters",
    "WrongOption",
    "WrongPeer",
    "adapted_model",
    "check_run",
    "chunk_loss",
    "for_remote_base",
    "load_rows",
    "mean_loss",
    "printable",
    "tokenize",
    "tune",
]

_MODULE_OF = {
    "AcceptedChangeWarning": "tenant_sdk.session",
    "AdapterStore": "tenant_sdk.serving.adapters",
    "Bill": "tenant_sdk.plan_file",
    "CutWarning": "tenant_sdk.text.rows",
    "EndpointLimits": "tenant_sdk.endpoint.settings",
    "EndpointSettings": "tenant_sdk.endpoint.settings",
    "Engine": "tenant_sdk.serving.engine",
    "FewLayersWarning": "tenant_sdk.peft_model",
    "NotFiniteWarning": "tenant_sdk.model.run_state",
    "NotPrivateWarning": "noise.masks.gaussian_pool",
    "NotServed": "tenant_sdk.serving.adapters.peft_settings",
    "NotVerifiedWarning": "tenant_sdk.session",
    "PromptsFailed": "tenant_sdk.serving.many",
    "ProviderAwayWarning": "tenant_sdk.training.waiting",
    "RemoteWeightError": "tenant_sdk.model.remote_linear",
    "SeedExhausted": "noise.ledger.ledger",
    "SlotsExhausted": "noise.blocks.slots",
    "Speculation": "tenant_sdk.serving.speculation.settings",
    "TemplateDoesNotFit": "tenant_sdk.text.template",
    "TemplateRefuses": "tenant_sdk.text.template",
    "TenantClient": "tenant_sdk.client",
    "TokenizerFailed": "tenant_sdk.text.source",
    "Trust": "tenant_sdk.plan",
    "UnusableRowWarning": "tenant_sdk.training.dataset",
    "UsageNotKeptWarning": "tenant_sdk.usage",
    "adapted_model": "tenant_sdk.peft_model",
    "check_run": "tenant_sdk.model.run_state",
    "chunk_loss": "tenant_sdk.training.loss",
    "for_remote_base": "tenant_sdk.model.dora",
    "load_rows": "tenant_sdk.training.dataset",
    "mean_loss": "tenant_sdk.training.trainers",
    "tokenize": "tenant_sdk.training.token_rows",
}
"""Maps each exported name that is imported only at its first use to the name's module. These modules load torch, which
takes seconds."""


def __getattr__(name: str) -> Any:
    """Imports and returns an exported name that needs torch, when the name is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """Lists all exported names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
