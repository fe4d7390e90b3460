"""Fine-tune and run adapters on a base model that a provider holds: `TenantClient` is all a user needs.

Nothing heavy is imported until a name is used, and nothing is fetched.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from wire.transport.event_engine import prefer_waiting_in_place

if "torch" not in sys.modules:
    # OpenMP's workers spin for milliseconds after each operation by default, on the cores that TLS and a provider on
    # the same machine need: with short spinning a step took 1.5 times the local one instead of 2
    # (docs/benchmarks_history.md). libgomp reads this once, when torch is loaded: import tenant_sdk before torch, or
    # set it in the environment.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

prefer_waiting_in_place()

if TYPE_CHECKING:
    from tenant_sdk.client import TenantClient
    from tenant_sdk.training.finetune import FinetuneResult

__all__ = ["FinetuneResult", "TenantClient"]


def __getattr__(name: str) -> Any:
    """Imports torch and transformers at first use only."""
    if name == "TenantClient":
        from tenant_sdk.client import TenantClient

        return TenantClient
    if name == "FinetuneResult":
        from tenant_sdk.training.finetune import FinetuneResult

        return FinetuneResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
