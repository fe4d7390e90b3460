"""This module tunes how a tenant's process waits for its own threads and for the network.

`tune` sets two environment variables, each of which a library reads once, when the library is loaded. So `tune` must
run before torch and grpc are imported; the import of `tenant_sdk` does not call it. The figures are in
docs/benchmarks_history.md under "What `tune` sets".
"""

from __future__ import annotations

import os
import sys
import warnings

from wire.transport.event_engine import VARIABLE as EVENT_ENGINE
from wire.transport.event_engine import prefer_waiting_in_place

SPIN_COUNT = "GOMP_SPINCOUNT"
"""The variable of libgomp, torch's OpenMP, for the number of turns that an idle thread spins before it sleeps."""
SHORT_SPINNING = "10000"
"""The number of turns that `tune` sets. By default OpenMP's threads spin for milliseconds after each operation, on
cores that TLS and a provider on the same machine need. A fine-tuning step took 2.0 to 2.2 times as long as a local one
by default, and 1.5 times as long with this value."""

_has_said = False


class NotTunedWarning(UserWarning):
    """Warns that the process made a client for a provider over the network, but did not call `tune` before torch and
    grpc were imported."""


def tune() -> None:
    """Sets two environment variables that make calls to a provider faster; call it first in a program.

    With GOMP_SPINCOUNT, OpenMP's idle threads soon leave the cores to others. With GRPC_EXPERIMENTS, the thread that
    waits for a reply polls the network itself. A variable that is already set is not changed. Child processes inherit
    both variables. A library that is already loaded has read its variable: then the variable is not set, and a
    NotTunedWarning says so, once in a process.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(SPIN_COUNT, SHORT_SPINNING)
    prefer_waiting_in_place()
    warn_if_not_tuned(stacklevel=3)


def warn_if_not_tuned(stacklevel: int) -> None:
    """Warns, once in a process, if a variable of `tune` is not set.

    Args:
        stacklevel: the `stacklevel` of the call of `warnings.warn` in this function.
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
