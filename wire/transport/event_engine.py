"""Chooses which of grpc's two ways of waiting for the network is used. grpc reads the choice once, when it is loaded.

grpc's newer event engine hands every event to a thread of its own, which then wakes the one that waits. The older way
lets the waiting thread ask the network itself: a small call took 344 µs in place of 450, and a decode step a fifth less
(docs/benchmarks_history.md, "Decode"). A grpc without these experiments says so on stderr and goes on.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GRPC_EXPERIMENTS"
"""The environment variable in which grpc looks for experiments to switch on or off."""
_OLDER_WAY = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"


def prefer_waiting_in_place() -> None:
    """Sets the older way, unless grpc is loaded already or the environment (GRPC_EXPERIMENTS) names another."""
    if "grpc" not in sys.modules:
        os.environ.setdefault(VARIABLE, _OLDER_WAY)
