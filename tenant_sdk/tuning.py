"""How a tenant's process waits: for its own threads and for the network.

`tune` sets two environment variables, each of which a library reads once, when it is loaded. So it has to run before
torch and grpc are imported, and importing `tenant_sdk` sets nothing. The figures are in docs/benchmarks_history.md
under "What `tune` sets".
"""

from __future__ import annotations

import os
import sys
import warnings

from wire.transport.event_engine import VARIABLE as EVENT_ENGINE
from wire.transport.event_engine import prefer_waiting_in_place

SPIN_COUNT = "GOMP_SPINCOUNT"
"""The variable of libgomp, torch's OpenMP, that says how many turns an idle thread spins before it sleeps."""
SHORT_SPINNING = "10000"
"""By default OpenMP's threads spin for milliseconds after each operation, on the cores that TLS and a provider on the
same machine need: a fine-tuning step took 2.0 to 2.2 times the local one, and 1.5 times with this value."""

_has_said = False


class NotTunedWarning(UserWarning):
    """A client for a provider over the network was made in a process for which `tune` was not called in time."""


def tune() -> None:
    """Makes this process wait in the way that is fastest beside a provider: call it first in a program.

    It sets GOMP_SPINCOUNT (OpenMP's idle threads soon leave the cores to others) and GRPC_EXPERIMENTS (the thread that
    waits for an answer asks the network itself), where the environment does not say otherwise. Child processes inherit
    both. A library that is loaded already has read its variable: that variable is left alone, and a NotTunedWarning
    says so, once in a process.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(SPIN_COUNT, SHORT_SPINNING)
    prefer_waiting_in_place()
    warn_if_not_tuned(stacklevel=3)


def warn_if_not_tuned(stacklevel: int) -> None:
    """Warns, once in a process, where a variable of `tune` is not set.

    Args:
        stacklevel: as `warnings.warn` counts it from here.
    """
    global _has_said
    missing = [name for name in (SPIN_COUNT, EVENT_ENGINE) if name not in os.environ]
    if not missing or _has_said:
        return
    _has_said = True
    warnings.warn(
        f"expected tenant_sdk.tune() before torch and grpc are imported, got neither that nor {' and '.join(missing)} "
        "in the environment: training and decoding over the network are slower. Call tune() first in your program",
        NotTunedWarning,
        stacklevel=stacklevel,
    )
