"""This module chooses which of grpc's two ways of waiting for the network is used. grpc reads the choice once, when it
is loaded.

grpc's newer event engine gives every event to a thread of its own, which then wakes the waiting thread. In the older
way the waiting thread asks the network itself: a small call took 344 µs instead of 450, and a decode step took a fifth
less time (docs/benchmarks_history.md, "Decode"). A grpc release without these experiments prints a line on stderr and
continues.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GRPC_EXPERIMENTS"
"""The environment variable that tells grpc which experiments to switch on or off."""
_OLDER_WAY = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"


def prefer_waiting_in_place() -> None:
    """Selects the older way, unless grpc is already loaded or the environment already sets GRPC_EXPERIMENTS."""
    if "grpc" not in sys.modules:
        os.environ.setdefault(VARIABLE, _OLDER_WAY)
