"""Fine-tune and run adapters on a base model that a provider holds: `TenantClient` is all a user needs.

Nothing heavy is imported until a name is used, and nothing is fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenant_sdk.client import TenantClient
    from tenant_sdk.finetune import FinetuneResult

__all__ = ["FinetuneResult", "TenantClient"]


def __getattr__(name: str) -> Any:
    """Imports torch and transformers at first use only."""
    if name == "TenantClient":
        from tenant_sdk.client import TenantClient

        return TenantClient
    if name == "FinetuneResult":
        from tenant_sdk.finetune import FinetuneResult

        return FinetuneResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
